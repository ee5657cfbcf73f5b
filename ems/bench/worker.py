"""One process of a workload: takes requests from the shared cursor, loads, saves, compares.

Run by `ems.bench.runner` as a child, see `ems.testing.jobs`.
"""

from __future__ import annotations

import array
import dataclasses
import time
from collections.abc import Callable

from ems import CcKvOption, CcResult, Ems, EmsConfig
from ems.bench.cursor import Cursor
from ems.bench.memory import BlockMemory
from ems.bench.workload import Request, Workload
from ems.testing.jobs import answer_job
from ems.testing.workload import BlockPattern
from ems_native import _copy

__all__ = ["Job", "Tally", "main", "run"]

_ROOF_BYTES = 128 << 20
_ROOF_EVERY = 8
_EXPLAINED = 5


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker is to do."""

    config: EmsConfig
    workload: Workload
    block_bytes: int
    cursor_fd: int
    timeout_ms: int


@dataclasses.dataclass
class Tally:
    """What a worker did. Times are seconds inside the calls, one latency per call."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    load_blocks: int = 0
    loaded_blocks: int = 0
    load_s: array.array[float] = dataclasses.field(default_factory=lambda: array.array("d"))
    save_blocks: int = 0
    saved_blocks: int = 0
    save_s: array.array[float] = dataclasses.field(default_factory=lambda: array.array("d"))
    roof_bytes: int = 0
    roof_s: float = 0.0
    mismatches: int = 0
    explanations: list[str] = dataclasses.field(default_factory=list)


class _Worker:
    def __init__(self, job: Job) -> None:
        self._job = job
        cc = Ems.get_cc()
        assert cc is not None
        self._cc = cc
        self._option = CcKvOption(timeout=job.timeout_ms)
        self._pattern = BlockPattern(job.block_bytes)
        self._memory = BlockMemory(job.workload.longest, job.block_bytes)
        self._roof = BlockMemory(max(1, _ROOF_BYTES // job.block_bytes), job.block_bytes)
        self._roof_next = 0
        self.tally = Tally()

    def serve(self, request: Request) -> None:
        """Do what an engine does with a prompt: load its prefix, compute the rest, save that."""
        tally, memory = self.tally, self._memory
        count = len(request.hashes)
        if tally.requests % _ROOF_EVERY == 0:
            self._measure_roof(count)
        memory.scrub(0, count)
        keys = [f"block@{block}" for block in request.hashes]
        found = self._call(self._cc.load, keys, 0, tally.load_s)
        for i in range(found):
            self._compare(request.hashes[i], i)
        for i in range(found, count):  # the prefill
            self._pattern.fill(request.hashes[i], memory.views[i])
        if found < count:
            tally.save_blocks += count - found
            tally.saved_blocks += self._call(self._cc.save, keys, found, tally.save_s)
        tally.requests += 1
        tally.prompt_tokens += request.input_tokens
        tally.hit_tokens += min(found * self._job.workload.block_tokens, request.input_tokens)
        tally.load_blocks += count
        tally.loaded_blocks += found

    def _call(
        self,
        call: Callable[..., CcResult],
        keys: list[str],
        first: int,
        seconds: array.array[float],
    ) -> int:
        buffers = self._memory.buffers[first : len(keys)]
        start = time.perf_counter()
        result = call(self._option, keys[first:], buffers)
        seconds.append(time.perf_counter() - start)
        return result.success

    def _compare(self, block: int, place: int) -> None:
        view = self._memory.views[place]
        if not self._pattern.matches(block, view):
            self.tally.mismatches += 1
            if len(self.tally.explanations) < _EXPLAINED:
                self.tally.explanations.append(self._pattern.explain(block, view))

    def _measure_roof(self, count: int) -> None:
        # The same amount as the load that follows, from memory that no cache holds any more.
        roof = self._roof
        count = min(count, roof.blocks)
        if self._roof_next + count > roof.blocks:
            self._roof_next = 0
        sources = roof.addresses[self._roof_next : self._roof_next + count]
        self._roof_next += count
        self._memory.scrub(0, count)
        start = time.perf_counter()
        _copy.memcpy_many(self._memory.addresses[:count], sources, self._job.block_bytes)
        self.tally.roof_s += time.perf_counter() - start
        self.tally.roof_bytes += count * self._job.block_bytes


def run(job: Job, parent_is_gone: Callable[[], bool]) -> Tally:
    """Serve requests of the job's workload until the shared cursor has passed the last one."""
    Ems.init(job.config)
    cursor = Cursor(job.cursor_fd)
    try:
        worker = _Worker(job)
        requests = job.workload.requests
        while not parent_is_gone():
            number = cursor.take()
            if number >= len(requests):
                break
            worker.serve(requests[number])
        return worker.tally
    finally:
        cursor.close()
        Ems.close()


def main() -> None:
    """Do the job on the standard input."""
    answer_job(run)


if __name__ == "__main__":
    # By its full name, so that what is pickled belongs to a module that the parent knows.
    from ems.bench.worker import main

    main()
