"""Starts the processes of a stress run, watches them, and adds up what they found."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from ems.testing.child import python_command
from ems.testing.figures import read_server
from ems.testing.jobs import started
from ems.testing.local_pool import LocalPool
from ems.testing.stress import StressJob, StressTally
from ems.testing.tasks import read_count

__all__ = ["Growth", "StressPlan", "StressReport", "run_stress"]

_SAMPLE_S = 0.5
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MEMORY_SLACK = 0.15
_MEMORY_SLACK_BYTES = 8 << 20
_DESCRIPTOR_SLACK = 8
_THREAD_SLACK = 1
_TASK_SLACK = 4

_Sample = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class StressPlan:
    """A run: how many processes of which kind, on how small a pool, for how long."""

    seconds: float = 60.0
    seed: int = 1
    readers: int = 4
    writers: int = 2
    keys: int = 400
    max_bytes: int = 1 << 20
    batch: int = 16
    hurried: float = 0.1
    capacity: int = 64 << 20
    entries: int = 1024

    def jobs(self, pool: LocalPool, tasks_files: Sequence[str]) -> list[StressJob]:
        """One job a process: writers save three times in four, readers once in twenty."""
        shares = [0.75] * self.writers + [0.05] * self.readers
        return [
            StressJob(
                config=pool.config_for(model_id="stress", rank_id=number),
                number=number + 1,
                seed=self.seed,
                seconds=self.seconds,
                keys=self.keys,
                max_bytes=self.max_bytes,
                batch=self.batch,
                writes=share,
                hurried=self.hurried,
                tasks_file=tasks_files[number],
            )
            for number, share in enumerate(shares)
        ]


@dataclasses.dataclass(frozen=True)
class Growth:
    """Medians of the second and of the last quarter of a run, for one process.

    Private memory in bytes (what it shares with others is the pool), open descriptors, threads,
    asyncio tasks.
    """

    name: str
    private_bytes: tuple[float, float]
    descriptors: tuple[float, float]
    threads: tuple[float, float]
    tasks: tuple[float, float]

    @property
    def grew(self) -> bool:
        """Whether more is in use late than chance explains: buffers come and go, ends wait."""
        early, late = self.private_bytes
        return (
            late > early * (1 + _MEMORY_SLACK) + _MEMORY_SLACK_BYTES
            or self.descriptors[1] > self.descriptors[0] + _DESCRIPTOR_SLACK
            or self.threads[1] > self.threads[0] + _THREAD_SLACK
            or self.tasks[1] > self.tasks[0] + _TASK_SLACK
        )


@dataclasses.dataclass(frozen=True)
class StressReport:
    """What a run found. `left_*` is what the pool held after all clients had gone.

    `growth` is empty when the run was too short to say anything about it.
    """

    seconds: float
    processes: int
    tally: StressTally
    evictions: int
    left_reserved_bytes: int
    left_sessions: int
    growth: list[Growth]

    @property
    def grown(self) -> list[str]:
        """The processes whose memory, descriptors, threads or tasks grew."""
        return [growth.name for growth in self.growth if growth.grew]

    @property
    def faults(self) -> int:
        """Everything that must be zero, added up."""
        tally = self.tally
        return (
            tally.mismatches
            + tally.written_late
            + tally.messages_in_loads
            + tally.tasks_left
            + self.left_reserved_bytes
            + self.left_sessions
        )

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {**dataclasses.asdict(self), "faults": self.faults, "grown": self.grown}


def run_stress(
    plan: StressPlan, *, progress: Callable[[float], None] = lambda seconds: None
) -> StressReport:
    """Run a plan on a private pool.

    Raises:
        EmsException: a worker saw an error that no full pool, time-out or cancel explains, or died.
    """
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(tempfile.NamedTemporaryFile(prefix="ems-tasks-")).name
            for _ in range(1 + plan.writers + plan.readers)
        ]
        program = python_command("ems.testing.tasks", files[0])
        pool = stack.enter_context(LocalPool(plan.capacity, plan.entries, program=program))
        jobs = plan.jobs(pool, files[1:])
        children = [
            stack.enter_context(started("ems.testing.stress", job, StressTally)) for job in jobs
        ]
        assert pool.process is not None
        names = ["server", *(f"client {job.number}" for job in jobs)]
        pids = [pool.process.pid, *(child.process.pid for child in children)]
        samples: dict[str, list[_Sample]] = {name: [] for name in names}
        begin = time.monotonic()
        while any(child.running for child in children):
            for name, pid, file in zip(names, pids, files):
                with contextlib.suppress(OSError, ValueError):
                    samples[name].append(_sample(pid, file))
            progress(time.monotonic() - begin)
            for child in children:
                if not child.running:
                    child.answer()  # one that failed ends the run now, not after the others
            time.sleep(_SAMPLE_S)
        total = StressTally()
        for child in children:
            total.add(child.answer())
        reserved, sessions, evictions = _settled(pool)
        return StressReport(
            seconds=time.monotonic() - begin,
            processes=len(children),
            tally=total,
            evictions=evictions,
            left_reserved_bytes=reserved,
            left_sessions=sessions,
            growth=[_growth(name, rows) for name, rows in samples.items() if len(rows) >= 8],
        )


def _sample(pid: int, tasks_file: str) -> _Sample:
    """(private bytes, descriptors, threads, tasks) of a process."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        _, resident, shared = (int(word) for word in file.read().split()[:3])
    return (
        (resident - shared) * _PAGE_BYTES,
        len(os.listdir(f"/proc/{pid}/fd")),
        len(os.listdir(f"/proc/{pid}/task")),
        read_count(tasks_file),
    )


def _growth(name: str, rows: list[_Sample]) -> Growth:
    quarter = len(rows) // 4
    early, late = rows[quarter : 2 * quarter], rows[-quarter:]
    pairs = [
        (statistics.median(row[k] for row in early), statistics.median(row[k] for row in late))
        for k in range(4)
    ]
    return Growth(name, *pairs)


def _settled(pool: LocalPool) -> tuple[int, int, int]:
    """(reserved bytes, sessions, evictions) once they stand still, 5 s at most."""
    give_up = time.monotonic() + 5
    while True:
        server = read_server(pool.root)
        if (server.reserved == 0 and server.sessions == 0) or time.monotonic() > give_up:
            return server.reserved, server.sessions, server.evictions
        time.sleep(0.05)
