"""Spoiled bytes of an index: readers miss or say why, a server that takes it over mends it."""

from __future__ import annotations

import ctypes
import struct

from fuzz import bounded
from hypothesis import example, given
from hypothesis import strategies as st

from ems.pool.audit import audit
from ems.shm import layout
from ems.testing.memory_pool import UNIT, MemoryPool, digest_of, u64s
from ems_native._index import LAYOUT, Reader

KEYS = 24
CAPACITY = 64 * UNIT
NAMES = b"".join(digest_of(number) for number in range(KEYS))
PLACE = struct.Struct("<5Q")

# Where it hurts: the prologue and the header, or anywhere; bytes, or whole words.
places = st.one_of(st.integers(0, LAYOUT["BUCKETS_OFFSET"] - 8), st.integers(0, 1 << 30))
words = st.one_of(
    st.sampled_from([0, 1, (1 << 64) - 1, 1 << 63, 1 << 31, 1 << 32, UNIT, CAPACITY]),
    st.integers(0, (1 << 64) - 1),
)
spoils = st.lists(st.tuples(places, st.sampled_from([1, 8]), words), min_size=1, max_size=6)


def filled() -> MemoryPool:
    memory = MemoryPool(CAPACITY, 64)
    session = memory.session()
    memory.save(session, 1, dict.fromkeys(range(KEYS), UNIT))
    memory.reserve(session, 2, {"being written": UNIT})
    return memory


def spoil(memory: MemoryPool, changes: list[tuple[int, int, int]]) -> None:
    index = (ctypes.c_char * memory.geometry.index_bytes).from_address(memory.index_address)
    for place, width, word in changes:
        at = place % (memory.geometry.index_bytes - 8)
        at -= at % width
        index[at : at + width] = (word & (1 << 8 * width) - 1).to_bytes(width, "little")


@bounded(150)
@given(spoils)
def test_readers(changes: list[tuple[int, int, int]]) -> None:
    memory = filled()
    spoil(memory, changes)
    found = bytearray(PLACE.size * KEYS)
    readers = [memory.reader]
    try:
        readers.append(
            Reader(memory.index_address, memory.geometry.index_bytes, memory.recency_address)
        )
    except ValueError as error:
        assert str(error)
    for reader in readers:
        reader.header()
        reader.pulse()
        reader.sessions()
        assert 0 <= reader.present(NAMES, KEYS, 0) <= KEYS
        for first in range(KEYS):
            hits, why = reader.lookup(NAMES, u64s([UNIT] * KEYS), first, 1, found, 1 << 40)
            assert hits in (0, 1)
            assert hits or 1 <= why <= 4
            if hits:
                _, _, offset, length, _ = PLACE.unpack_from(found, PLACE.size * first)
                # Whatever the entry says, nobody copies from beyond the data.
                assert length == UNIT
                assert LAYOUT["DATA_START"] <= offset <= memory.geometry.data_bytes - length
                assert reader.validate(found, first, 1) in (0, 1)


@bounded(150)
@given(spoils)
@example([(160, 8, 0)])
@example([(136, 8, 0)])  # no reservations: nothing could ever be saved
def test_recovery(changes: list[tuple[int, int, int]]) -> None:
    memory = filled()
    spoil(memory, changes)
    try:
        memory.recover()
    except ValueError as error:
        assert str(error)
        return
    memory.check()
    # A server prepares the rest of the data, however little of it the header says is ready.
    memory.pool.extend_ready(CAPACITY)
    # It serves again: what it says it has is there, what it has not can be saved.
    session = memory.session()
    sizes: dict[object, int] = dict.fromkeys(range(KEYS), UNIT)
    assert memory.save(session, 77, sizes) == KEYS
    memory.check()


bucket_bytes = st.integers(
    LAYOUT["BUCKETS_OFFSET"], LAYOUT["BUCKETS_OFFSET"] + 8 * LAYOUT["BUCKET_BYTES"] - 8
)


@bounded(150)
@given(st.lists(st.tuples(bucket_bytes, st.sampled_from([1, 8]), words), min_size=1, max_size=6))
@example([(LAYOUT["BUCKETS_OFFSET"] + 64 * (1 + slot) + 32, 8, UNIT) for slot in range(8)])
def test_nothing_is_left_for_fsck_to_find(changes: list[tuple[int, int, int]]) -> None:
    """Also where nobody ever saved: the example writes the lengths of the slots of one bucket."""
    memory = filled()
    spoil(memory, changes)
    memory.recover()
    memory.check()
    index = (ctypes.c_char * memory.geometry.index_bytes).from_address(memory.index_address)
    assert audit(memoryview(index), memory.geometry, lambda session: False).findings == ()


@given(st.one_of(st.binary(max_size=80), st.binary(min_size=64, max_size=64)))
def test_prologues(head: bytes) -> None:
    assert layout.parse_prologue(head) is None or head[:4] == _head()[:4]


@given(st.integers(0, 63), st.integers(0, 255))
def test_spoiled_prologues(at: int, value: int) -> None:
    head = bytearray(_head())
    head[at] = value
    layout.parse_prologue(bytes(head))


def _head() -> bytes:
    memory = filled()
    return ctypes.string_at(memory.index_address, 64)
