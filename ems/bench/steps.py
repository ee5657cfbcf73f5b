"""How long the server's loop can be busy with one step: the worst frames, and its own work.

The real write server, fed without a socket, so that nothing but the step is timed: by the CPU time
of the thread, in which a busy neighbour does not count.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from typing import cast

from ems.bench.figure import Figure, at_most
from ems.client.saving import MAX_FRAME_KEYS
from ems.rpc import frames
from ems.rpc.frames import MIN_FRAME_BYTES
from ems.server.write_channel import WriteServer
from ems.testing.memory_pool import UNIT, MemoryPool, u32s, u64s

__all__ = ["StepsSettings", "measure_steps"]

_SECRET = b"a session secret"


@dataclasses.dataclass(frozen=True)
class StepsSettings:
    """Entries that the pool holds, keys of a frame, and how often each step is made."""

    entries: int = 1_000_000
    keys: int = MAX_FRAME_KEYS
    rounds: int = 5


class _Transport(asyncio.Transport):
    """Keeps what was answered last."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = b""

    def write(self, data: object) -> None:
        self.answer = bytes(cast(bytes, data))

    def close(self) -> None:
        raise AssertionError(f"the server ended the connection: {self.answer!r}")


class _Fed:
    """A full pool, and one connection to its write server."""

    def __init__(self, entries: int) -> None:
        self.memory = MemoryPool(entries * UNIT, int(entries / 0.6))
        self.session = self.memory.session()
        self._requests = iter(range(1, 1 << 60))
        server = WriteServer(
            self.memory.pool, 0, lambda session, secret: True, lambda session: None
        )
        self._connection = server.connection()
        self._transport = _Transport()
        self._connection.connection_made(self._transport)
        self.feed(frames.hello(self.session, _SECRET))

    def feed(self, frame: bytes) -> float:
        """Seconds of the longest step that a frame causes."""
        at, seconds = 0, 0.0
        while at < len(frame):
            room = memoryview(self._connection.get_buffer(-1))
            part = frame[at : at + room.nbytes]
            room[: len(part)] = part
            start = time.thread_time()
            self._connection.buffer_updated(len(part))
            seconds = max(seconds, time.thread_time() - start)
            at += len(part)
        return seconds

    def reserve(self, count: int, units: int) -> tuple[int, list[int], float]:
        """Reserve new keys: the request, the granted positions, the seconds."""
        request = next(self._requests)
        lengths = u64s([units * UNIT] * count)
        seconds = self.feed(frames.reserve(request, os.urandom(16 * count), lengths, False, False))
        statuses = self._transport.answer[-count:]
        return request, [at for at, status in enumerate(statuses) if status == 0], seconds

    def commit(self, request: int, granted: list[int]) -> float:
        sums = u64s([0] * len(granted))
        return self.feed(frames.commit(request, u32s(granted), sums, True))

    def abort(self, request: int) -> float:
        return self.feed(frames.frame(frames.Kind.ABORT, request))

    def save(self, count: int, units: int) -> None:
        request, granted, _ = self.reserve(count, units)
        if granted:
            self.commit(request, granted)


def measure_steps(settings: StepsSettings) -> list[Figure]:
    """The longest step of each kind."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(_measure(settings))
    finally:
        loop.close()


async def _measure(settings: StepsSettings) -> list[Figure]:
    fed = _Fed(settings.entries)
    for _ in range(0, settings.entries, settings.keys):
        fed.save(settings.keys, 1)
    longest: dict[str, float] = {}
    for _ in range(settings.rounds):
        for kind, seconds in _steps(fed, settings.keys):
            longest[kind] = max(longest.get(kind, 0.0), seconds)
    return [
        at_most(f"server step: {kind}, {settings.entries:,} entries", 1e3 * seconds, "ms", 10)
        for kind, seconds in longest.items()
    ]


def _steps(fed: _Fed, keys: int) -> Iterator[tuple[str, float]]:
    pool = fed.memory.pool
    for evicted in (1, 16):
        count = min(keys, MIN_FRAME_BYTES // (evicted * UNIT))  # what our client asks for at a time
        request, granted, seconds = fed.reserve(count, evicted)
        yield f"reserve {count:,} keys that evict {evicted} each", seconds
        yield f"commit {count:,} keys", fed.commit(request, granted)
    request, _, _ = fed.reserve(keys, 1)
    yield f"abort {keys:,} keys", fed.abort(request)
    for _ in range(4):
        yield "background eviction", _timed(pool.relieve)
    yield "all figures", _timed(pool.stats)
    yield "all sessions", _timed(pool.sessions)
    for _ in range(3):  # what the large ones displaced
        fed.save(keys, 1)


def _timed(step: Callable[[], object]) -> float:
    start = time.thread_time()
    step()
    return time.thread_time() - start
