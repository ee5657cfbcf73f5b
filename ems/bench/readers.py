"""Many client processes reading at the same time, beside what all cores copy at best.

Phases take turns: nobody reads, all read, one process a core copies without EMS. Run as children by
`measure_readers`; they begin together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator

from ems import CcKvOption, Ems, EmsConfig
from ems.bench.cursor import Cursor
from ems.bench.figure import Figure, at_least, at_most
from ems.bench.memory import BlockMemory
from ems.common.exception import internal_error
from ems.testing import LocalPool
from ems.testing.figures import wait_until_prepared
from ems.testing.jobs import answer_job, started
from ems_native import _copy

__all__ = ["ReadersJob", "ReadersSettings", "Read", "main", "measure_readers"]

_OPTION = CcKvOption(timeout=60_000)
_PHASES = ("nobody", "readers", "bare")
_NS = 1_000_000_000
_POLL_S = 0.002
_BREATH_S = 0.2


@dataclasses.dataclass(frozen=True)
class ReadersSettings:
    """What is measured.

    Args:
        readers: client processes.
        keys: of a load.
        block_bytes: of a value.
        pool_bytes: values in the pool.
        seconds: of a phase.
        cycles: how often the phases take turns.
    """

    readers: int = 8
    keys: int = 32
    block_bytes: int = 2 << 20
    pool_bytes: int = 512 << 20
    seconds: float = 1.0
    cycles: int = 3

    @property
    def batches(self) -> int:
        """How many batches the pool holds."""
        return self.pool_bytes // (self.keys * self.block_bytes)

    def phases(self, begin: float) -> Iterator[tuple[str, float, float]]:
        """Each phase with its begin and end."""
        for number in range(self.cycles * len(_PHASES)):
            first = begin + number * self.seconds
            yield _PHASES[number % len(_PHASES)], first, first + self.seconds


@dataclasses.dataclass(frozen=True)
class ReadersJob:
    """What one child does, number `reader` of all; the cursor counts who is ready."""

    config: EmsConfig
    settings: ReadersSettings
    reader: int
    cores: int
    cursor_fd: int


@dataclasses.dataclass(frozen=True)
class Read:
    """Bytes a second of one child in the phases of a kind."""

    loaded: float
    copied: float


def measure_readers(settings: ReadersSettings) -> list[Figure]:
    """Measure with a pool of its own; nothing is left behind.

    Raises:
        EmsException: a reader failed.
    """
    cores = len(os.sched_getaffinity(0))
    busy = dict.fromkeys(_PHASES, 0.0)
    with LocalPool(settings.pool_bytes * 3 // 2) as pool, contextlib.ExitStack() as stack:
        wait_until_prepared(pool.root)
        assert pool.process is not None
        _fill(pool.config, settings)
        cursor = stack.enter_context(contextlib.closing(Cursor.create()))
        children = []
        for reader in range(settings.readers):
            job = ReadersJob(pool.config, settings, reader, cores, cursor.fd)
            child = started("ems.bench.readers", job, Read, (cursor.fd,))
            children.append(stack.enter_context(child))

        def one_ended() -> bool:
            return any(not child.running for child in children)

        begin = _common_begin(cursor, settings.readers, one_ended)
        for phase, first, last in settings.phases(begin):
            _sleep_until(first)
            before = _cpu_s(pool.process.pid)
            _sleep_until(last)
            busy[phase] += _cpu_s(pool.process.pid) - before
        reads = [child.answer() for child in children]
    elapsed = settings.cycles * settings.seconds
    return _judge(settings, cores, reads, {phase: s / elapsed for phase, s in busy.items()})


def _common_begin(cursor: Cursor, readers: int, given_up: Callable[[], bool]) -> float:
    """Wait until all are ready; all find out within a poll, so they begin as good as together."""
    while cursor.value < readers and not given_up():
        time.sleep(_POLL_S)
    return time.monotonic() + _BREATH_S


def _sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.monotonic()))


def _judge(
    settings: ReadersSettings, cores: int, reads: list[Read], busy: dict[str, float]
) -> list[Figure]:
    loaded = sum(read.loaded for read in reads) / 1e9
    copied = sum(read.copied for read in reads) / 1e9
    what = f"{settings.readers} processes reading"
    return [
        at_least(
            f"{what}, together",
            loaded,
            "GB/s",
            0.9,
            roof=(f"bare copies by {cores} processes", copied),
            judged=("x", loaded / copied),
        ),
        at_most(
            f"server, {what}",
            1e3 * busy["readers"],
            "ms of CPU a second",
            1.0,
            roof=("nobody reading", 1e3 * busy["nobody"]),
            judged=("ms above", 1e3 * (busy["readers"] - busy["nobody"])),
        ),
    ]


def _fill(config: EmsConfig, settings: ReadersSettings) -> None:
    memory = BlockMemory(settings.keys, settings.block_bytes)
    Ems.init(config)
    try:
        cc = Ems.get_cc()
        assert cc is not None
        for batch in range(settings.batches):
            done = cc.save(_OPTION, _names(settings, batch), memory.buffers)
            if done.success != settings.keys:
                raise internal_error(f"the pool did {done}, which makes no measurement")
    finally:
        Ems.close()


def _names(settings: ReadersSettings, batch: int) -> list[str]:
    return [f"readers@{batch}@{key}" for key in range(settings.keys)]


def _cpu_s(pid: int) -> float:
    """The processor time that all threads of a process have had, in steps of less than a tick."""
    spent = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
            spent += int(file.read().split()[0])
    return spent / _NS


def _work(job: ReadersJob, parent_is_gone: Callable[[], bool]) -> Read:
    settings = job.settings
    memory = BlockMemory(4 * settings.keys, settings.block_bytes)
    groups = [
        slice(first, first + settings.keys) for first in range(0, 4 * settings.keys, settings.keys)
    ]
    names = [_names(settings, batch) for batch in range(settings.batches)]
    Ems.init(job.config)
    try:
        cc = Ems.get_cc()
        assert cc is not None

        def load(number: int) -> None:
            target = memory.buffers[groups[number % len(groups)]]
            if cc.load(_OPTION, names[number % len(names)], target).success != settings.keys:
                raise internal_error("a block is gone, which makes no measurement")

        def copy(number: int) -> None:
            sources = memory.addresses[groups[number % len(groups)]]
            targets = memory.addresses[groups[(number + 2) % len(groups)]]
            for target, source in zip(targets, sources):
                _copy.stream_copy(target, source, settings.block_bytes)

        for number in range(settings.batches):
            load(number)
        with contextlib.closing(Cursor(job.cursor_fd)) as cursor:
            cursor.take()
            begin = _common_begin(cursor, settings.readers, parent_is_gone)
        rates = {"nobody": 0.0, "readers": 0.0, "bare": 0.0}
        calls: dict[str, Callable[[int], None]] = {"readers": load}
        if job.reader < job.cores:
            calls["bare"] = copy
        for phase, first, last in settings.phases(begin):
            if parent_is_gone():
                break
            _sleep_until(first)
            if phase in calls:
                rates[phase] += _rate(calls[phase], job, last)
        return Read(rates["readers"] / settings.cycles, rates["bare"] / settings.cycles)
    finally:
        Ems.close()


def _rate(call: Callable[[int], None], job: ReadersJob, last: float) -> float:
    """Bytes a second until `last`; of a call that is cut by it, the part before counts."""
    nbytes = job.settings.keys * job.settings.block_bytes
    number = 3 * job.reader  # readers begin at different places
    done = 0.0
    begin = before = time.monotonic()
    while before < last:
        call(number)
        now = time.monotonic()
        done += nbytes * min(1.0, (last - before) / (now - before))
        before = now
        number += 1
    return done / (last - begin)


def main() -> None:
    """Do the job on the standard input."""
    answer_job(_work)


if __name__ == "__main__":
    # By its full name, so that what is pickled belongs to a module that the parent knows.
    from ems.bench.readers import main

    main()
