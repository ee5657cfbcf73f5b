"""How many keys a second a server reserves and commits for several writers that copy nothing.

Run as a child by `measure_writers`, once for each writer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable

from ems.bench.bare_writer import BareWriter
from ems.bench.figure import Figure, at_least
from ems.testing import LocalPool
from ems.testing.figures import wait_until_prepared
from ems.testing.jobs import answer_job, started
from ems.testing.memory_pool import MemoryPool, u32s, u64s

__all__ = ["WriterJob", "WriterTally", "WritersSettings", "main", "measure_writers"]

_START_S = 2.0  # the slowest import of four on a small machine
_VALUE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class WritersSettings:
    """Processes, keys of a call, keys that each process goes round in, and for how long."""

    writers: int = 4
    batch: int = 128
    keys: int = 8192
    seconds: float = 3.0


@dataclasses.dataclass(frozen=True)
class WriterJob:
    """What one process does from `begin_s` on (CLOCK_MONOTONIC, the same in all processes)."""

    root: str
    settings: WritersSettings
    begin_s: float


@dataclasses.dataclass(frozen=True)
class WriterTally:
    """Keys reserved and committed, and the seconds that took."""

    keys: int
    seconds: float


def measure_writers(settings: WritersSettings) -> Figure:
    """The figure; its roof is the pool's state machine alone, without a message."""
    capacity = 2 * settings.writers * settings.keys * _VALUE_BYTES
    with LocalPool(capacity, 4 * settings.writers * settings.keys) as pool:
        wait_until_prepared(pool.root)
        job = WriterJob(pool.root, settings, time.monotonic() + _START_S)
        with contextlib.ExitStack() as stack:
            children = [
                stack.enter_context(started("ems.bench.writers", job, WriterTally))
                for _ in range(settings.writers)
            ]
            tallies = [child.answer() for child in children]
    rate = sum(tally.keys / tally.seconds for tally in tallies)
    return at_least(
        f"keys reserved and committed by {settings.writers} writers, {settings.batch} a call",
        rate,
        "keys/s",
        200_000,
        roof=("pool alone", _pool_alone(settings)),
    )


def _batches(settings: WritersSettings) -> list[bytes]:
    return [os.urandom(16 * settings.batch) for _ in range(settings.keys // settings.batch)]


def _pool_alone(settings: WritersSettings) -> float:
    memory = MemoryPool(4 * settings.keys * _VALUE_BYTES, 8 * settings.keys)
    session = memory.session()
    lengths = u64s([_VALUE_BYTES] * settings.batch)
    everyone, sums = u32s(range(settings.batch)), u64s([0] * settings.batch)
    batches = _batches(settings)
    start = time.perf_counter()
    for request, digests in enumerate(batches, 1):
        now_ns = time.monotonic_ns()
        memory.pool.reserve(session, request, digests, lengths, True, False, now_ns)
        memory.pool.commit(session, request, everyone, sums, False, now_ns)
    return len(batches) * settings.batch / (time.perf_counter() - start)


def _work(job: WriterJob, parent_is_gone: Callable[[], bool]) -> WriterTally:
    settings = job.settings
    batches = _batches(settings)
    lengths = u64s([_VALUE_BYTES] * settings.batch)
    with BareWriter(job.root) as writer:
        writer.echo(b"")
        time.sleep(max(0.0, job.begin_s - time.monotonic()))
        start = time.monotonic()
        keys = turn = 0
        while time.monotonic() - start < settings.seconds:
            keys += writer.save(batches[turn % len(batches)], lengths)
            turn += 1
        return WriterTally(keys, time.monotonic() - start)


def main() -> None:
    """Do the job on the standard input."""
    answer_job(_work)


if __name__ == "__main__":
    # By its full name, so that what is pickled belongs to a module that the parent knows.
    from ems.bench.writers import main

    main()
