"""The first load and the first save of a process that has just attached, beside later ones.

Run as a child by `measure_fresh`: who has touched the pool once is not fresh any more.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

from ems import CcKvOption, CcResult, Ems, EmsConfig, KvBufferWrapper
from ems.bench.figure import Figure, at_most
from ems.bench.memory import BlockMemory
from ems.common.exception import internal_error
from ems.testing.jobs import answer_job, started

__all__ = ["FreshJob", "FreshTimes", "judge_fresh", "main", "measure_fresh"]

_OPTION = CcKvOption(timeout=60_000)
_Call = Callable[[CcKvOption, list[str], list[list[KvBufferWrapper]]], CcResult]


@dataclasses.dataclass(frozen=True)
class FreshJob:
    """Calls of `blocks` keys on a pool that holds `batches` of them.

    Args:
        config: reaches the pool.
        keys: of all batches, one after the other.
        blocks: keys of one call.
        block_bytes: size of a value.
        saves: whether it saves, or loads.
        turn: the batch of the first call.
    """

    config: EmsConfig
    keys: list[str]
    blocks: int
    block_bytes: int
    saves: bool
    turn: int


@dataclasses.dataclass(frozen=True)
class FreshTimes:
    """Seconds of the first call of a process, and of the calls when all was touched before."""

    first: float
    warm: tuple[float, ...]


def measure_fresh(jobs: list[FreshJob]) -> list[FreshTimes]:
    """Do each job in a process of its own, one after the other."""
    times = []
    for job in jobs:
        with started("ems.bench.fresh", job, FreshTimes) as child:
            times.append(child.answer())
    return times


def judge_fresh(what: str, times: list[FreshTimes]) -> Figure:
    """The figure of one direction."""
    first = 1e3 * statistics.median(one.first for one in times)
    warm = 1e3 * statistics.median(statistics.median(one.warm) for one in times)
    return at_most(
        f"{what} of a fresh client",
        first,
        "ms",
        1.5,
        roof=("warm", warm),
        judged=("x warm", first / warm),
    )


def _work(job: FreshJob, parent_is_gone: Callable[[], bool]) -> FreshTimes:
    # The caller's own memory is warm: it is the pool that is new to the process.
    memory = BlockMemory(len(job.keys), job.block_bytes)
    batches = [
        (job.keys[first : first + job.blocks], memory.buffers[first : first + job.blocks])
        for first in range(0, len(job.keys), job.blocks)
    ]
    batches = batches[job.turn :] + batches[: job.turn]
    Ems.init(job.config)
    try:
        cc = Ems.get_cc()
        assert cc is not None
        call: _Call = cc.save if job.saves else cc.load
        first = _timed(call, *batches[0])
        for keys, buffers in batches[1:]:
            _timed(call, keys, buffers)
        warm = [_timed(call, keys, buffers) for keys, buffers in batches]
        return FreshTimes(first, tuple(warm))
    finally:
        Ems.close()


def _timed(call: _Call, keys: list[str], buffers: list[list[KvBufferWrapper]]) -> float:
    start = time.perf_counter()
    result = call(_OPTION, keys, buffers)
    seconds = time.perf_counter() - start
    if result.success != len(keys):
        raise internal_error(f"the pool did {result}, which makes no measurement")
    return seconds


def main() -> None:
    """Do the job on the standard input."""
    answer_job(_work)


if __name__ == "__main__":
    # By its full name, so that what is pickled belongs to a module that the parent knows.
    from ems.bench.fresh import main

    main()
