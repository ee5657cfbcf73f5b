"""The real pool against a dictionary: random saves, aborts, deaths, restarts and evictions.

The pool may forget a committed key (eviction), but it must never show a key that was not
committed, never another value's place, and its allocator, index and figures must agree after every
step.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ems.rpc.frames import BUSY, COMMITTED, GRANTED, KEPT, LOST, NO_ROOM, PRESENT
from ems.testing.memory_pool import UNIT, MemoryPool, digest_of, u32s, u64s

KEYS = st.integers(0, 40)
SIZES = st.one_of(st.integers(1, 5 * UNIT), st.integers(1, 40 * UNIT))


@dataclass
class Held:
    """One reserved key as the model remembers it."""

    key: int
    offset: int
    length: int


class PoolMachine(RuleBasedStateMachine):
    """Rules change the pool and the model alike; invariants compare them."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryPool(64 * UNIT, entries=32)
        self.names = itertools.count(1)
        self.sums = itertools.count(1)
        self.sessions: list[int] = []
        self.requests: dict[tuple[int, int], dict[int, Held]] = {}
        self.replacing: dict[tuple[int, int], bool] = {}
        # key -> (offset, length, checksum) of its last commit
        self.committed: dict[int, tuple[int, int, int]] = {}

    @rule()
    def open_session(self) -> None:
        if len(self.sessions) < 4:
            self.sessions.append(self.memory.session())

    @precondition(lambda self: self.sessions)
    @rule(
        data=st.data(),
        keys=st.lists(KEYS, min_size=1, max_size=8),
        size=SIZES,
        replace=st.booleans(),
        force=st.booleans(),
    )
    def reserve(
        self, data: st.DataObject, keys: list[int], size: int, replace: bool, force: bool
    ) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        request = next(self.names)
        digests = b"".join(digest_of(key) for key in keys)
        lengths = [size + key for key in keys]
        statuses, offsets = self.memory.pool.reserve(
            session, request, digests, u64s(lengths), replace, force, self.memory.later(1)
        )
        held: dict[int, Held] = {}
        places = memoryview(offsets).cast("Q")
        for position, (key, status) in enumerate(zip(keys, statuses)):
            if status == GRANTED:
                held[position] = Held(key, places[position], lengths[position])
            elif status == PRESENT:
                assert not replace
                assert key in self.committed
            elif status == BUSY:
                assert not force
            else:
                assert status == NO_ROOM
        if held:
            self.requests[session, request] = held
            self.replacing[session, request] = replace

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        held = self.requests[name]
        positions = sorted(data.draw(st.sets(st.sampled_from(sorted(held)), min_size=1)))
        sums = [next(self.sums) for _ in positions]
        statuses = self.memory.pool.commit(
            *name, u32s(positions), u64s(sums), True, self.memory.later(1)
        )
        for position, checksum, status in zip(positions, sums, statuses):
            block = held.pop(position)
            if status == COMMITTED:
                self.committed[block.key] = (block.offset, block.length, checksum)
            else:
                assert status == KEPT
                assert not self.replacing[name]
        if not held:
            del self.requests[name]

    @precondition(lambda self: any(len(held) == 1 for held in self.requests.values()))
    @rule(data=st.data(), key=KEYS)
    def put(self, data: st.DataObject, key: int) -> None:
        """The only key of a request is published under the name of another one."""
        single = sorted(name for name, held in self.requests.items() if len(held) == 1)
        name = data.draw(st.sampled_from(single))
        (position, block), checksum = *self.requests[name].items(), next(self.sums)
        status = self.memory.pool.put(*name, digest_of(key), checksum, True, self.memory.later(1))
        if position:
            # Of a request whose first keys were published before.
            assert status == LOST
            block.key = key
            return
        if status == COMMITTED:
            self.committed[key] = (block.offset, block.length, checksum)
        else:
            assert status == KEPT
            assert not self.replacing[name]
        del self.requests[name]

    @rule(session=st.integers(0, 5), request=st.integers(0, 50), position=st.integers(0, 8))
    def commit_nothing(self, session: int, request: int, position: int) -> None:
        if session and position not in self.requests.get((session, request), {}):
            answer = self.memory.pool.commit(
                session, request, u32s([position]), u64s([1]), False, 1
            )
            assert list(answer) == [LOST]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        assert self.memory.pool.abort(*name) == len(self.requests.pop(name))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        self.sessions.remove(session)
        lost = [name for name in self.requests if name[0] == session]
        assert self.memory.pool.close_session(session) == sum(
            len(self.requests.pop(name)) for name in lost
        )

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        entries = self.memory.pool.stats().entries
        alive = [session for session in self.sessions if data.draw(st.booleans())]
        self.memory.recover(held=alive)
        self.requests = {name: held for name, held in self.requests.items() if name[0] in alive}
        self.sessions = alive
        assert self.memory.pool.stats().entries == entries

    @rule(key=KEYS)
    def use(self, key: int) -> None:
        self.memory.later()
        self.memory.present(key, mark=True)

    @rule()
    def relieve(self) -> None:
        self.memory.pool.relieve()

    @invariant()
    def index_and_allocator_agree(self) -> None:
        self.memory.check()

    @invariant()
    def only_committed_values_are_seen(self) -> None:
        seen = 0
        for key in range(41):
            found = self.memory.pool.locate(digest_of(key))
            if found is not None:
                seen += 1
                assert found[2:] == self.committed[key]
        assert seen == self.memory.pool.stats().entries

    @invariant()
    def reserved_bytes_are_those_of_the_model(self) -> None:
        units = sum(
            -(-block.length // UNIT) for held in self.requests.values() for block in held.values()
        )
        assert self.memory.pool.stats().reserved == units * UNIT


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
