from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest

from ems.common.metrics import PAGE_COUNTERS
from ems.server.counters import CounterPages
from ems.server.sessions import SUSPECT_NS, UNLOCKED_GRACE_NS, NoSuchSession, Sessions
from ems.testing.memory_pool import UNIT, MemoryPool, digest_of, u64s
from ems_native._index import LAYOUT
from ems_native._shm import Counters

S = 10**9
PAGES = 8


class World:
    """Sessions over a pool in memory, with a clock and locks that the test moves."""

    def __init__(self) -> None:
        self.memory = MemoryPool(16 * UNIT)
        self.pool = self.memory.pool
        self.map = mmap.mmap(-1, PAGES * LAYOUT["COUNTERS_PAGE"])
        self.anchor = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(self.anchor)
        self.pages = CounterPages(self.address, PAGES)
        self.locked: set[int] = set()
        self.dropped: list[int] = []
        self.now_ns = 100 * S
        self.sessions = self.serve()

    def serve(self) -> Sessions:
        return Sessions(
            self.pool,
            self.locked.__contains__,
            self.pages,
            self.dropped.append,
            lambda: self.now_ns,
        )

    def page(self, session: int) -> Counters:
        return Counters(self.address + session * LAYOUT["COUNTERS_PAGE"], PAGE_COUNTERS)

    def reserve(self, session: int, request: int, key: str) -> bytes:
        statuses, _ = self.pool.reserve(
            session, request, digest_of(key), u64s([UNIT]), False, False, self.now_ns
        )
        return statuses

    def reserved(self) -> int:
        return self.pool.stats().reserved


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    del world.anchor


def test_a_session_lives_as_long_as_its_lock(world: World) -> None:
    session, secret = world.sessions.attach(42)
    world.locked.add(session)
    assert world.sessions.authorize(session, secret)
    world.reserve(session, 1, "a")
    world.sessions.suspect(session)
    assert world.sessions.poll_suspects()
    world.now_ns += 3600 * S
    world.sessions.poll_all()
    assert world.reserved() == UNIT  # an hour proves nothing
    world.locked.remove(session)
    world.sessions.poll_all()
    assert world.reserved() == 0
    assert world.pool.sessions() == []
    assert world.dropped == [session]
    assert not world.sessions.authorize(session, secret)


def test_a_suspect_is_polled_until_its_lock_is_free_or_the_slow_poll_has_it(world: World) -> None:
    session, secret = world.sessions.attach(42)
    world.locked.add(session)
    world.sessions.suspect(session)
    assert world.sessions.poll_suspects()
    world.now_ns += SUSPECT_NS + 1
    assert not world.sessions.poll_suspects()
    assert world.sessions.authorize(session, secret)
    world.sessions.suspect(session)
    world.locked.remove(session)
    assert not world.sessions.poll_suspects()
    assert world.pool.sessions() == []


def test_no_grant_without_the_lock_or_with_a_wrong_secret(world: World) -> None:
    session, secret = world.sessions.attach(42)
    assert not world.sessions.authorize(session, secret)
    world.locked.add(session)
    assert not world.sessions.authorize(session, bytes(16))
    assert not world.sessions.authorize(session + 1, secret)
    assert world.sessions.authorize(session, secret)


def test_who_never_locks_is_given_up(world: World) -> None:
    world.sessions.attach(42)
    world.sessions.poll_all()
    assert len(world.pool.sessions()) == 1
    world.now_ns += UNLOCKED_GRACE_NS
    world.sessions.poll_all()
    assert world.pool.sessions() == []


def test_a_byte_that_is_still_held_is_given_to_nobody(world: World) -> None:
    world.locked.add(1)
    session, _ = world.sessions.attach(42)
    assert session == 2


def test_goodbye_ends_a_session_once_the_lock_is_free(world: World) -> None:
    session, secret = world.sessions.attach(42)
    world.locked.add(session)
    with pytest.raises(NoSuchSession):
        world.sessions.detach(session, bytes(16))
    world.sessions.detach(session, secret)
    assert world.sessions.poll_suspects()
    world.locked.clear()
    assert not world.sessions.poll_suspects()
    assert world.pool.sessions() == []


def test_a_session_that_comes_back_keeps_what_it_names(world: World) -> None:
    session, secret = world.sessions.attach(42)
    world.locked.add(session)
    for request, key in enumerate("abc", start=1):
        world.reserve(session, request, key)
    world.memory.recover(tuple(world.locked))
    world.pool = world.memory.pool
    later = world.serve()
    assert world.reserved() == 3 * UNIT
    with pytest.raises(NoSuchSession):
        later.resume(session, bytes(16), [])
    later.resume(session, secret, [2])
    assert world.pool.reserved_requests(session) == [2]
    assert later.authorize(session, secret)


def test_counters_outlive_their_session(world: World) -> None:
    session, _ = world.sessions.attach(42)
    world.locked.add(session)
    world.page(session).add(3, 5)
    assert world.pages.total([session])[3] == 5
    world.locked.clear()
    world.sessions.suspect(session)
    world.now_ns += UNLOCKED_GRACE_NS
    world.sessions.poll_suspects()
    assert world.pages.total([])[3] == 5
    assert world.page(session).get(3) == 0


def test_counters_of_sessions_that_ended_without_a_server(world: World) -> None:
    world.page(3).add(0, 7)
    world.serve()
    assert world.pages.total([])[0] == 7
    world.serve()
    assert world.pages.total([])[0] == 7
