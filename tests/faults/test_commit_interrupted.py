"""A server that dies inside a commit: the block is there entirely or not at all.

The memory is put into each state that the writer passes through (see `commit_record` and
`publish`), then taken over as the next server would.
"""

from __future__ import annotations

import ctypes
import struct

import pytest

from ems.testing.memory_pool import UNIT, MemoryPool, digest_of, u32s, u64s
from ems_native._index import LAYOUT

BLOCK = 16 * UNIT
RESERVATION_WORDS = 16
STATE, SLOT, CHECKSUM, PREDECESSOR, SEQUENCE = 0, 9, 10, 11, 12
HELD, INTENT = 1, 2
ENTRY_WORDS = (
    "version",
    "digest0",
    "digest1",
    "offset",
    "length",
    "checksum",
    "predecessor",
    "sequence",
)


class Interrupted:
    """A pool with one key committed and another one reserved, whose words can be written."""

    def __init__(self, replace: bool) -> None:
        self.memory = MemoryPool(64 * BLOCK, entries=16)
        self.session = self.memory.session()
        self.memory.save(self.session, 1, {"old": BLOCK})
        self.key = "old" if replace else "new"
        self.memory.reserve(self.session, 2, {self.key: 2 * UNIT}, replace=True)
        geometry = self.memory.geometry
        raw = (ctypes.c_char * geometry.index_bytes).from_address(self.memory.index_address)
        self.words = memoryview(raw).cast("B").cast("Q")
        buckets = geometry.slots // LAYOUT["BUCKET_SLOTS"] * LAYOUT["BUCKET_BYTES"]
        reservations = (
            LAYOUT["BUCKETS_OFFSET"] + buckets + LAYOUT["MAX_SESSIONS"] * LAYOUT["SESSION_BYTES"]
        ) // 8
        self.record = next(
            at
            for at in range(reservations, len(self.words) - RESERVATION_WORDS, RESERVATION_WORDS)
            if self.words[at] == HELD
        )
        found = self.memory.pool.locate(digest_of("old"))
        assert found is not None
        self.slot = found[0] if replace else (found[0] // 8 * 8 + (found[0] + 1) % 8)
        if not replace:
            # Any free slot of a candidate bucket will do: let a real commit choose it.
            twin = MemoryPool(64 * BLOCK, entries=16)
            session = twin.session()
            twin.save(session, 1, {"old": BLOCK})
            twin.save(session, 2, {"new": 2 * UNIT})
            chosen = twin.pool.locate(digest_of("new"))
            assert chosen is not None
            self.slot = chosen[0]

    def entry(self, word: str) -> int:
        at = LAYOUT["BUCKETS_OFFSET"] + self.slot // 8 * LAYOUT["BUCKET_BYTES"]
        return (at + 64 + self.slot % 8 * 64) // 8 + ENTRY_WORDS.index(word)

    def intend(self) -> None:
        for word, value in ((SLOT, self.slot), (CHECKSUM, 99), (PREDECESSOR, 0), (SEQUENCE, 2)):
            self.words[self.record + word] = value
        self.words[self.record + STATE] = INTENT

    def tear(self, fields: int) -> None:
        """Begin to write the entry: odd version and the first `fields` words."""
        self.words[self.entry("version")] |= 1
        digest = struct.unpack("<2Q", digest_of(self.key))
        offset = self.words[self.record + 6]
        for word, value in list(zip(ENTRY_WORDS[1:], (*digest, offset, 2 * UNIT, 99, 0, 2)))[
            :fields
        ]:
            self.words[self.entry(word)] = value

    def check_committed(self) -> None:
        found = self.memory.pool.locate(digest_of(self.key))
        assert found is not None
        assert found[0] == self.slot
        assert found[3:] == (2 * UNIT, 99)
        assert self.memory.pool.stats().reserved == 0
        assert self.memory.present("old")
        self.memory.check()


@pytest.fixture(params=[True, False], ids=["replace", "new"])
def interrupted(request: pytest.FixtureRequest) -> Interrupted:
    return Interrupted(request.param)


def test_before_the_intent_nothing_happened(interrupted: Interrupted) -> None:
    interrupted.memory.recover()
    memory = interrupted.memory
    found = memory.pool.locate(digest_of("old"))
    assert found is not None
    assert found[3] == BLOCK
    assert not memory.present("new")
    assert memory.pool.stats().used == BLOCK
    memory.check()


def test_after_the_intent_the_commit_is_completed(interrupted: Interrupted) -> None:
    interrupted.intend()
    interrupted.memory.recover()
    interrupted.check_committed()


@pytest.mark.parametrize("fields", range(8))
def test_a_torn_entry_is_written_again(interrupted: Interrupted, fields: int) -> None:
    interrupted.intend()
    version = interrupted.words[interrupted.entry("version")]
    interrupted.tear(fields)
    interrupted.memory.recover()
    interrupted.check_committed()
    assert interrupted.words[interrupted.entry("version")] == version + 2


def test_a_published_entry_is_not_written_twice(interrupted: Interrupted) -> None:
    interrupted.intend()
    interrupted.memory.recover()
    version = interrupted.words[interrupted.entry("version")]
    interrupted.words[interrupted.record + STATE] = INTENT
    interrupted.memory.recover()
    interrupted.check_committed()
    assert interrupted.words[interrupted.entry("version")] == version


def test_an_eviction_that_was_cut_leaves_an_empty_slot() -> None:
    memory = MemoryPool(64 * BLOCK, entries=16)
    session = memory.session()
    memory.save(session, 1, {"a": BLOCK, "b": BLOCK})
    found = memory.pool.locate(digest_of("a"))
    assert found is not None
    raw = (ctypes.c_char * memory.geometry.index_bytes).from_address(memory.index_address)
    words = memoryview(raw).cast("B").cast("Q")
    bucket = (LAYOUT["BUCKETS_OFFSET"] + found[0] // 8 * LAYOUT["BUCKET_BYTES"]) // 8
    words[bucket + found[0] % 8] = 0  # the tag goes first
    words[bucket + 8 + found[0] % 8 * 8] |= 1  # then the version is odd
    memory.recover()
    assert not memory.present("a")
    assert memory.present("b")
    assert memory.pool.stats().used == BLOCK
    memory.check()


def test_reservations_of_the_living_survive_in_their_order() -> None:
    memory = MemoryPool(64 * BLOCK)
    session = memory.session()
    memory.reserve(session, 7, dict.fromkeys(range(10), BLOCK))
    memory.reserve(session, 8, {"other": BLOCK})
    memory.recover(held=[session])
    sums = u64s(list(range(10)))
    answer = memory.pool.commit(session, 7, u32s(list(range(10))), sums, True, memory.now_ns)
    assert answer == bytes(10)
    assert memory.pool.abort(session, 8) == 1
    memory.check()
