"""Random faults on a pool that is in use: whatever dies or stands still, no byte is wrong.

Clients save, overwrite and load values whose bytes prove themselves (see `stress`). Meanwhile
clients and servers are killed, stopped and replaced, and bytes of the pool's memory are flipped. In
the end the pool must hold nothing that belongs to nobody, and its own account must agree with what
an audit of its memory finds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

from ems.common.exception import EmsException
from ems.pool.audit import FindingKind
from ems.server import fsck
from ems.shm import layout
from ems.testing.figures import ServerFigures, read_server
from ems.testing.jobs import ChildJob, started
from ems.testing.local_pool import LocalPool
from ems.testing.stress import StressJob, StressTally
from ems_native._index import LAYOUT

__all__ = ["ChaosPlan", "ChaosReport", "run_chaos"]

_POLL_S = 0.02
_HANG_S = 40.0
"""A client that has not ended so long after its time hangs: its calls take 20 s at most."""
_SETTLE_S = 10.0
_SECOND_SIGNAL_S = 1.0
_FAULTS = {
    "client killed": 5,
    "client frozen": 4,
    "server killed": 4,
    "server restarted": 2,
    "server frozen": 2,
    "bytes flipped": 3,
}


@dataclasses.dataclass(frozen=True)
class ChaosPlan:
    """A run: how long, how many clients, on how small a pool, how far apart the faults come."""

    seconds: float = 60.0
    seed: int = 1
    clients: int = 5
    keys: int = 200
    max_bytes: int = 1 << 20
    batch: int = 12
    hurried: float = 0.1
    capacity: int = 24 << 20
    entries: int = 256
    pause_s: float = 0.4

    def job(self, pool: LocalPool, number: int, seconds: float) -> StressJob:
        """What one client does."""
        return StressJob(
            config=pool.config_for(model_id="chaos"),
            number=number,
            seed=self.seed,
            seconds=seconds,
            keys=self.keys,
            max_bytes=self.max_bytes,
            batch=self.batch,
            writes=0.3,
            hurried=self.hurried,
            chaos=True,
        )


@dataclasses.dataclass(frozen=True)
class ChaosReport:
    """What a run found.

    Args:
        seconds: how long it took.
        tally: of the clients that lived to tell.
        faults: how often each kind was injected.
        evictions: of the pool, over all its servers.
        mismatches: clients that got a wrong byte, or saw one written late.
        hangs: clients that did not end in time.
        failures: clients that failed in another way, and what the server did not get right.
        leaks: what was left in the end, in words.
    """

    seconds: float
    tally: StressTally
    faults: dict[str, int]
    evictions: int
    mismatches: int
    hangs: int
    failures: list[str]
    leaks: list[str]

    @property
    def wrong(self) -> int:
        """Everything that must be zero, added up."""
        return (
            self.mismatches
            + self.tally.mismatches
            + self.tally.written_late
            + self.tally.messages_in_loads
            + self.tally.late
            + self.hangs
            + len(self.failures)
            + len(self.leaks)
        )

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {**dataclasses.asdict(self), "wrong": self.wrong}


def run_chaos(
    plan: ChaosPlan, *, progress: Callable[[float], None] = lambda seconds: None
) -> ChaosReport:
    """Run a plan on a private pool.

    Raises:
        EmsException: the server does not start any more; the text holds its log.
    """
    with LocalPool(plan.capacity, plan.entries) as pool, contextlib.ExitStack() as stack:
        return _Chaos(plan, pool, stack).run(progress)


class _Chaos:
    """One run."""

    def __init__(self, plan: ChaosPlan, pool: LocalPool, stack: contextlib.ExitStack) -> None:
        self._plan = plan
        self._pool = pool
        self._stack = stack
        self._chance = random.Random(plan.seed)
        self._clients: list[ChildJob[StressTally]] = []
        self._number = 0
        self._begin = time.monotonic()
        self._thaw: list[tuple[float, int]] = []  # when, pid
        self._tally = StressTally()
        self._faults = dict.fromkeys(_FAULTS, 0)
        self._mismatches = 0
        self._hangs = 0
        self._failures: list[str] = []

    def run(self, progress: Callable[[float], None]) -> ChaosReport:
        plan = self._plan
        for _ in range(plan.clients):
            self._start_client()
        names, weights = list(_FAULTS), list(_FAULTS.values())
        while (now := self._elapsed()) < plan.seconds:
            progress(now)
            self._pause(self._chance.uniform(0, 2 * plan.pause_s))
            (name,) = self._chance.choices(names, weights)
            self._inject(name)
        self._wait_for_clients()
        evictions, leaks = self._end_of_the_pool()
        return ChaosReport(
            seconds=self._elapsed(),
            tally=self._tally,
            faults=self._faults,
            evictions=evictions,
            mismatches=self._mismatches,
            hangs=self._hangs,
            failures=self._failures,
            leaks=leaks,
        )

    def _elapsed(self) -> float:
        return time.monotonic() - self._begin

    def _start_client(self) -> None:
        left_s = self._plan.seconds - self._elapsed()
        if left_s <= 0:
            return
        self._number += 1
        job = self._plan.job(self._pool, self._number, left_s)
        child = self._stack.enter_context(started("ems.testing.stress", job, StressTally))
        self._clients.append(child)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            self._thaw_due(time.monotonic())
            for child in [child for child in self._clients if not child.running]:
                self._collect(child)
                self._start_client()
            if time.monotonic() >= until:
                return
            time.sleep(_POLL_S)

    def _thaw_due(self, now: float) -> None:
        for when, pid in [one for one in self._thaw if one[0] <= now]:
            self._thaw.remove((when, pid))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _collect(self, child: ChildJob[StressTally]) -> None:
        self._clients.remove(child)
        try:
            self._tally.add(child.answer())
        except EmsException as error:
            wrong = "wrong bytes" in error.message() or "memory was written" in error.message()
            self._mismatches += wrong
            self._failures.append(error.message())

    def _inject(self, name: str) -> None:
        self._faults[name] += 1
        server = self._pool.process
        assert server is not None
        if name == "client killed" and self._clients:
            victim = self._chance.choice(self._clients)
            self._clients.remove(victim)
            _end(victim)
            self._start_client()
        elif name == "client frozen" and self._clients:
            self._freeze(self._chance.choice(self._clients).process.pid, 2.0)
        elif name == "server frozen":
            self._freeze(server.pid, 3.0)
        elif name == "bytes flipped":
            self._flip()
        elif name == "server killed":
            self._pool.kill()
            self._pause(self._chance.choice((0.0, 0.0, 0.3, 1.0)))
            self._pool.start()
        elif name == "server restarted":
            self._thaw_due(float("inf"))
            server.send_signal(signal.SIGCONT)
            server.terminate()
            self._pause(_SECOND_SIGNAL_S if server.poll() is None else 0)
            if server.poll() is None:
                server.terminate()  # it waits for a frozen client: the second signal does not
            server.wait()
            self._pool.start()

    def _freeze(self, pid: int, longest_s: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        self._thaw.append((time.monotonic() + self._chance.uniform(0.05, longest_s), pid))

    def _flip(self) -> None:
        path = os.path.join(self._pool.root, layout.DATA)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for _ in range(4):
                at = LAYOUT["DATA_START"] + self._chance.randrange(self._plan.capacity)
                (byte,) = os.pread(fd, 1, at)
                os.pwrite(fd, bytes([byte ^ 1 << self._chance.randrange(8)]), at)
        finally:
            os.close(fd)

    def _wait_for_clients(self) -> None:
        self._thaw_due(float("inf"))
        give_up = time.monotonic() + _HANG_S
        while self._clients and time.monotonic() < give_up:
            for child in [child for child in self._clients if not child.running]:
                self._collect(child)
            time.sleep(_POLL_S)
        for child in list(self._clients):
            self._hangs += 1
            child.process.send_signal(signal.SIGABRT)  # its stacks are its answer
            self._collect(child)

    def _end_of_the_pool(self) -> tuple[int, list[str]]:
        """(evictions, what is left in words) when nobody uses the pool any more."""
        self._pool.start()
        figures = self._settled()
        report = fsck.check(self._pool.root)
        while (again := read_server(self._pool.root)).used != figures.used:
            # Eviction in the background made some room meanwhile.
            figures, report = again, fsck.check(self._pool.root)
        leaks = []
        if figures.reserved or report.audit.reserved:
            leaks.append(f"{figures.reserved} bytes are reserved by nobody")
        if figures.sessions:
            leaks.append(f"{figures.sessions} sessions without a client")
        if report.audit.used != figures.used:
            leaks.append(f"the server counts {figures.used} bytes, there are {report.audit.used}")
        # Flipped bytes that nobody has read yet are what was asked for.
        leaks += [
            str(finding) for finding in report.damage if finding.kind is not FindingKind.CHECKSUM
        ]
        leaks += report.files
        expected = {*layout.POOL_FILES, layout.SERVER_LOCK, layout.SOCKET, layout.WRITE_SOCKET}
        leaks += [f"a file {name}" for name in os.listdir(self._pool.root) if name not in expected]
        return figures.evictions, leaks

    def _settled(self) -> ServerFigures:
        give_up = time.monotonic() + _SETTLE_S
        while True:
            figures = read_server(self._pool.root)
            if (not figures.reserved and not figures.sessions) or time.monotonic() > give_up:
                return figures
            time.sleep(0.1)


def _end(child: ChildJob[StressTally]) -> None:
    child.process.kill()
    child.process.wait()
