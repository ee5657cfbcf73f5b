"""A hundred thousand random operations with faults: pool, index and shared memory agree after each.

Beside the model there are three accounts of the same pool: what the pool says, what its allocator
lists, and what an audit finds in the bytes of the index, which shares no code with the writer.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import random

import pytest

from ems.pool.audit import audit
from ems.rpc.frames import COMMITTED, GRANTED, KEPT, LOST
from ems.testing.memory_pool import UNIT, MemoryPool, digest_of, u32s, u64s
from ems_native._index import LAYOUT

OPERATIONS = int(os.environ.get("POOL_OPERATIONS", "100000"))
KEYS = 60
UNITS = 96


@dataclasses.dataclass
class Held:
    key: int
    length: int


class Model:
    """A pool and what must be true of it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.memory = MemoryPool(UNITS * UNIT, entries=48)
        self.sessions: list[int] = []
        self.requests: dict[tuple[int, int], dict[int, Held]] = {}
        self.committed: dict[int, tuple[int, int]] = {}  # length, checksum
        self.serial = 0
        raw = (ctypes.c_char * self.memory.geometry.index_bytes).from_address(
            self.memory.index_address
        )
        self.index = memoryview(raw)
        self.words = self.index.cast("B").cast("Q")

    def step(self) -> None:
        operations = {
            self.reserve: 40,
            self.commit: 30,
            self.abort: 6,
            self.load: 10,
            self.open: 4,
            self.die: 2,
            self.relieve: 2,
            self.drop: 2,
            self.restart: 2,
            self.crash_in_eviction: 1,
            self.crash_in_commit: 1,
        }
        (operation,) = self.chance.choices(list(operations), list(operations.values()))
        operation()
        self.check()

    def open(self) -> None:
        if len(self.sessions) < 4:
            self.sessions.append(self.memory.session())

    def reserve(self) -> None:
        if not self.sessions:
            return self.open()
        chance, session = self.chance, self.chance.choice(self.sessions)
        self.serial += 1
        keys = chance.choices(range(KEYS), k=chance.randint(1, 6))
        lengths = [chance.randint(1, chance.choice((2, 8, 20)) * UNIT) for _ in keys]
        statuses, _ = self.memory.pool.reserve(
            session, self.serial, b"".join(map(digest_of, keys)), u64s(lengths),
            chance.random() < 0.5, chance.random() < 0.5, self.memory.later(1),
        )  # fmt: skip
        held = {
            position: Held(key, length)
            for position, (key, length, status) in enumerate(zip(keys, lengths, statuses))
            if status == GRANTED
        }
        if held:
            self.requests[session, self.serial] = held

    def commit(self) -> None:
        if not self.requests:
            return
        name = self.chance.choice(list(self.requests))
        held = self.requests[name]
        positions = sorted(self.chance.sample(sorted(held), self.chance.randint(1, len(held))))
        sums = [self.serial << 8 | position for position in positions]
        statuses = self.memory.pool.commit(
            *name, u32s(positions), u64s(sums), True, self.memory.later(1)
        )
        for position, checksum, status in zip(positions, sums, statuses):
            block = held.pop(position)
            assert status in (COMMITTED, KEPT)
            if status == COMMITTED:
                self.committed[block.key] = block.length, checksum
        if not held:
            del self.requests[name]
        again = self.memory.pool.commit(*name, u32s(positions), u64s(sums), True, 1)
        assert list(again) == [LOST] * len(positions)

    def abort(self) -> None:
        if self.requests:
            name = self.chance.choice(list(self.requests))
            assert self.memory.pool.abort(*name) == len(self.requests.pop(name))
            assert self.memory.pool.abort(*name) == 0

    def load(self) -> None:
        self.memory.later()
        self.memory.present(self.chance.randrange(KEYS), mark=True)

    def die(self) -> None:
        if self.sessions:
            session = self.sessions.pop(self.chance.randrange(len(self.sessions)))
            self.memory.pool.close_session(session)
            self.forget_requests()

    def forget_requests(self) -> None:
        for name in [name for name in self.requests if name[0] not in self.sessions]:
            del self.requests[name]

    def relieve(self) -> None:
        self.memory.pool.relieve()

    def drop(self) -> None:
        """As after a wrong checksum."""
        found = self.memory.pool.locate(digest_of(self.chance.randrange(KEYS)))
        if found is not None:
            assert self.memory.pool.drop(found[0], found[1])
            assert not self.memory.pool.drop(found[0], found[1])

    def restart(self) -> None:
        entries = self.memory.pool.stats().entries
        self.recover()
        assert self.memory.pool.stats().entries == entries

    def recover(self) -> None:
        self.sessions = [one for one in self.sessions if self.chance.random() < 0.7]
        self.memory.recover(held=self.sessions)
        self.forget_requests()
        mended = self.memory.pool.mended
        assert mended.overlaps == mended.reservations == 0

    def entry_at(self, slot: int) -> tuple[int, int]:
        """Indices of the tag and of the version of a slot."""
        bucket, i = divmod(slot, LAYOUT["BUCKET_SLOTS"])
        at = (LAYOUT["BUCKETS_OFFSET"] + bucket * LAYOUT["BUCKET_BYTES"]) // 8
        return at + i, at + 8 + 8 * i

    def crash_in_eviction(self) -> None:
        key = self.chance.randrange(KEYS)
        found = self.memory.pool.locate(digest_of(key))
        if found is None:
            return
        tag, version = self.entry_at(found[0])
        self.words[tag] = 0
        if self.chance.random() < 0.5:
            self.words[version] |= 1
        self.recover()
        assert not self.memory.present(key)

    def crash_in_commit(self) -> None:
        """Its intent is written, the entry begun perhaps: the next server finishes it."""
        geometry = self.memory.geometry
        first = (
            LAYOUT["BUCKETS_OFFSET"]
            + geometry.slots // LAYOUT["BUCKET_SLOTS"] * LAYOUT["BUCKET_BYTES"]
            + LAYOUT["MAX_SESSIONS"] * LAYOUT["SESSION_BYTES"]
        ) // 8
        held = [
            at for at in range(first, first + 16 * geometry.reservations, 16) if self.words[at] == 1
        ]
        if not held:
            return
        at = self.chance.choice(held)
        session, request, position = self.words[at + 1 : at + 4].tolist()
        block = self.requests[session, request].pop(position)
        if not self.requests[session, request]:
            del self.requests[session, request]
        found = self.memory.pool.locate(digest_of(block.key))
        if found is None:
            # Where a commit would put it: a commit of the same key in a twin of the memory would
            # have to say. An empty candidate is as good; without one there is nothing to test.
            slot = self.free_candidate(self.words[at + 4], self.words[at + 5])
        else:
            slot = found[0]
        if slot < 0:
            self.memory.pool.abort(session, request)
            self.requests.pop((session, request), None)
            return
        self.serial += 1
        self.words[at + 9] = slot
        self.words[at + 10] = self.serial << 8
        self.words[at + 12] = (1 << 40) + self.serial
        self.words[at] = 2
        if self.chance.random() < 0.5:
            self.words[self.entry_at(slot)[1]] |= 1
            self.words[self.entry_at(slot)[1] + 3] = 12345
        self.committed[block.key] = block.length, self.serial << 8
        self.recover()
        assert self.memory.present(block.key)

    def free_candidate(self, low: int, high: int) -> int:
        nbuckets = self.memory.geometry.slots // LAYOUT["BUCKET_SLOTS"]
        bucket = low * nbuckets >> 64
        for slot in range(8 * bucket, 8 * bucket + 8):
            if self.words[self.entry_at(slot)[0]] == 0:
                return slot
        return -1

    def check(self) -> None:
        self.memory.check()
        stats = self.memory.pool.stats()
        seen = audit(self.index, self.memory.geometry, lambda session: session in self.sessions)
        assert seen.findings == ()
        assert (seen.entries, seen.used, seen.reserved, seen.sessions) == (
            stats.entries, stats.used, stats.reserved, stats.sessions,
        )  # fmt: skip
        assert stats.sessions == len(self.sessions)
        assert stats.used + stats.free == stats.ready == UNITS * UNIT
        assert stats.reserved == UNIT * sum(
            -(-block.length // UNIT) for held in self.requests.values() for block in held.values()
        )
        key = self.chance.randrange(KEYS)
        found = self.memory.pool.locate(digest_of(key))
        assert found is None or found[3:] == self.committed[key]


@pytest.mark.timeout(60 + OPERATIONS // 200)
def test_the_accounts_agree_after_each_of_many_operations() -> None:
    model = Model(seed=1)
    for number in range(OPERATIONS):
        try:
            model.step()
        except AssertionError as error:
            raise AssertionError(f"after operation {number}: {error}") from error
    assert model.memory.pool.stats().evictions > OPERATIONS / 50
