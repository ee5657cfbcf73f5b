"""Copies: every byte and every checksum, whatever the alignment and however the value is cut."""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ems_native import _copy
from ems_native._copy import Arrivals, CancelFlag, KvBufferWrapper, Spans, copy_in, copy_out

PLACE = struct.Struct("<5Q")
CHUNK = 4096
DONE, DEADLINE, CANCELLED, DIFFERS = range(4)


def available() -> list[str]:
    chosen = _copy.implementation()
    names = []
    for name in ("portable", "avx2", "neon"):
        try:
            _copy._select(name)
        except ValueError:
            continue
        names.append(name)
    _copy._select(chosen)
    return names


IMPLEMENTATIONS = available()


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _copy.implementation()
    _copy._select(request.param)
    yield request.param
    _copy._select(before)


class Memory:
    """A buffer at `shift` bytes behind a multiple of 4 KiB, with guards around it."""

    def __init__(self, nbytes: int, shift: int = 0) -> None:
        self._all = bytearray(b"\xa5") * (nbytes + 3 * CHUNK)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._all))
        self._begin = -start % CHUNK + CHUNK + shift
        self._end = self._begin + nbytes
        self.address = start + self._begin

    @property
    def bytes(self) -> bytes:
        return bytes(self._all[self._begin : self._end])

    @bytes.setter
    def bytes(self, value: bytes) -> None:
        assert len(value) == self._end - self._begin
        self._all[self._begin : self._end] = value

    def wrapper(self) -> KvBufferWrapper:
        return KvBufferWrapper.from_buffer(memoryview(self._all)[self._begin : self._end])

    def check_guards(self) -> None:
        assert not self._all[: self._begin].strip(b"\xa5")
        assert not self._all[self._end :].strip(b"\xa5")


@dataclass
class Value:
    data: bytes
    cuts: list[int]
    shifts: list[int]

    def pieces(self) -> Iterator[tuple[bytes, int]]:
        bounds = [0, *self.cuts, len(self.data)]
        for begin, end in zip(bounds, bounds[1:]):
            yield self.data[begin:end], self.shifts[begin % len(self.shifts)]


@st.composite
def values(draw: st.DrawFn) -> Value:
    nbytes = draw(
        st.one_of(
            st.integers(1, 300),
            st.integers(1, 40).map(lambda chunks: chunks * CHUNK),
            st.integers(1, 200_000),
            st.sampled_from([CHUNK - 1, CHUNK + 1, 65_536 - 1, 65_536 + 8]),
        )
    )
    step = draw(st.sampled_from([1, 8, 64, CHUNK]))
    cuts = draw(st.lists(st.integers(0, nbytes).map(lambda n: n - n % step), max_size=12))
    shifts = draw(st.lists(st.sampled_from([0, 1, 8, 16, 32, 63]), min_size=1, max_size=4))
    data = Random(draw(st.integers(0, 2**32))).randbytes(nbytes)
    return Value(data, sorted({cut for cut in cuts if 0 < cut < nbytes}), shifts)


def spans_of(batch: list[list[Memory]]) -> Spans:
    return Spans.from_buffers([[memory.wrapper() for memory in pieces] for pieces in batch])


def places_of(sizes: list[int]) -> tuple[bytearray, int]:
    """Places one behind the other on pages; and what they take."""
    places, offset = bytearray(), 0
    for size in sizes:
        places += PLACE.pack(7, 8, offset, size, 0)
        offset += -(-size // CHUNK) * CHUNK
    return places, offset


def checksums(places: bytearray) -> list[int]:
    return [place[4] for place in PLACE.iter_unpack(places)]


@given(st.lists(values(), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_what_goes_in_comes_out(batch: list[Value]) -> None:
    found = set()
    before = _copy.implementation()
    try:
        for name in IMPLEMENTATIONS:
            _copy._select(name)
            found.add(tuple(round_trip(batch)))
    finally:
        _copy._select(before)
    assert len(found) == 1, f"{IMPLEMENTATIONS} disagree about the checksums"


def round_trip(batch: list[Value]) -> list[int]:
    sources, targets = [], []
    for value in batch:
        pieces = [(data, shift, Memory(len(data), shift)) for data, shift in value.pieces()]
        for data, _, memory in pieces:
            memory.bytes = data
        sources.append([memory for _, _, memory in pieces])
        targets.append([Memory(len(data), shift) for data, shift, _ in pieces])
    nkeys = len(batch)
    places, room = places_of([len(value.data) for value in batch])
    pool = Memory(room)

    assert copy_in(spans_of(sources), 0, nkeys, pool.address, places, None, 0) == (nkeys, DONE)
    pool.check_guards()
    for value, place in zip(batch, PLACE.iter_unpack(places)):
        assert pool.bytes[place[2] : place[2] + len(value.data)] == value.data
        assert place[:2] == (7, 8)
        assert place[4] == _copy.checksum(pool.address + place[2], len(value.data))

    for verify in (False, True):
        for memory in itertools.chain.from_iterable(targets):
            memory.bytes = bytes(len(memory.bytes))
        done = copy_out(spans_of(targets), 0, nkeys, pool.address, places, None, 0, verify)
        assert done == (nkeys, DONE)
        for value, pieces in zip(batch, targets):
            assert b"".join(memory.bytes for memory in pieces) == value.data
            for memory in pieces:
                memory.check_guards()
    return checksums(places)


def checksum_by_definition(data: bytes) -> int:
    """The formula of csrc/checksum.h, word by word."""
    mask = 2**64 - 1
    keys, state = [], 0x454D535F76310001
    for _ in range(CHUNK // 8):
        state = (state + 0x9E3779B97F4A7C15) & mask
        x = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
        keys.append(x ^ x >> 31)
    total = 0
    for index in range(-(-len(data) // CHUNK)):
        chunk = data[index * CHUNK : (index + 1) * CHUNK]
        words = struct.iter_unpack("<Q", chunk + bytes(-len(chunk) % 8))
        x = sum(
            ((word + key) & 0xFFFFFFFF) * (((word >> 32) + (key >> 32)) & 0xFFFFFFFF)
            for (word,), key in zip(words, keys)
        )
        x += (index + 1) * 0x9E3779B97F4A7C15 + len(chunk) * 0xC2B2AE3D27D4EB4F
        x &= mask
        x = ((x ^ x >> 33) * 0xFF51AFD7ED558CCD) & mask
        x = ((x ^ x >> 33) * 0xC4CEB9FE1A85EC53) & mask
        total += x ^ x >> 33
    return total & mask


@given(st.binary(min_size=1, max_size=200), st.integers(0, 3 * CHUNK), st.integers(0, 64))
@settings(deadline=None)
@example(b"x", CHUNK - 1, 0)
@example(b"x", CHUNK, 1)
def test_the_checksum_is_what_the_header_says(data: bytes, zeros: int, shift: int) -> None:
    # It is stored in pools that outlive the program: another value for the same bytes would make
    # every stored block look damaged.
    memory = Memory(zeros + len(data), shift)
    memory.bytes = bytes(zeros) + data
    assert _copy.checksum(memory.address, zeros + len(data)) == checksum_by_definition(memory.bytes)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_damage_changes_the_checksum(data: st.DataObject) -> None:
    value = Random(data.draw(st.integers(0, 99))).randbytes(5 * CHUNK + 100)
    memory = Memory(len(value))
    memory.bytes = value
    whole = _copy.checksum(memory.address, len(value))
    kind = data.draw(st.sampled_from(["byte", "swap", "zero", "rotate", "cut"]))
    at = data.draw(st.integers(0, len(value) - 1))
    chunk = CHUNK * data.draw(st.integers(0, 3))
    damaged = bytearray(value)
    if kind == "byte":
        damaged[at] ^= data.draw(st.integers(1, 255))
    elif kind == "swap":
        damaged[chunk : chunk + 2 * CHUNK] = (
            value[chunk + CHUNK : chunk + 2 * CHUNK] + value[chunk : chunk + CHUNK]
        )
    elif kind == "zero":
        damaged[chunk : chunk + 64] = bytes(64)
    elif kind == "rotate":
        damaged = bytearray(value[64:] + value[:64])
    memory.bytes = bytes(damaged)
    nbytes = at or 1 if kind == "cut" else len(value)
    assert _copy.checksum(memory.address, nbytes) != whole


SIZES = st.sampled_from([CHUNK, 2 * CHUNK, 64_000, 65_536, 100, 5_000])


@given(st.integers(1, 5), st.lists(SIZES, min_size=1, max_size=6), st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_by_piece_the_same_bytes_come(
    implementation: str, nkeys: int, sizes: list[int], data: st.DataObject
) -> None:
    places, room = places_of([sum(sizes)] * nkeys)
    pool = Memory(room)
    sources = [[Memory(size, shift=at % 3) for at, size in enumerate(sizes)] for _ in range(nkeys)]
    for number, memory in enumerate(itertools.chain(*sources)):
        memory.bytes = Random(number).randbytes(len(memory.bytes))
    assert copy_in(spans_of(sources), 0, nkeys, pool.address, places, None, 0) == (nkeys, DONE)
    targets = [[Memory(size, shift=at % 5) for at, size in enumerate(sizes)] for _ in range(nkeys)]
    first = data.draw(st.integers(0, nkeys - 1))
    given = spans_of(targets), first, nkeys - first, pool.address, places
    assert copy_out(*given, None, 0, True, Arrivals()) == (nkeys, DONE)
    for key in range(first, nkeys):
        for source, target in zip(sources[key], targets[key]):
            assert target.bytes == source.bytes
            target.check_guards()
    bad = data.draw(st.integers(first, nkeys - 1))
    damaged = bytearray(pool.bytes)
    damaged[PLACE.unpack_from(places, 40 * bad)[2] + data.draw(st.integers(0, sum(sizes) - 1))] ^= 1
    pool.bytes = bytes(damaged)
    assert copy_out(*given, None, 0, True, Arrivals()) == (bad, DIFFERS)
    assert copy_out(*given, None, 0, False, Arrivals()) == (nkeys, DONE)
    assert copy_out(*given, None, 1, True, Arrivals()) == (first, DEADLINE)


def test_each_piece_is_there_when_it_was_waited_for() -> None:
    nkeys, sizes = 4, [1 << 20] * 6
    places, room = places_of([sum(sizes)] * nkeys)
    pool = Memory(room)
    sources = [[Memory(size) for size in sizes] for _ in range(nkeys)]
    for number, memory in enumerate(itertools.chain(*sources)):
        memory.bytes = bytes([number + 1]) * len(memory.bytes)
    assert copy_in(spans_of(sources), 0, nkeys, pool.address, places, None, 0) == (nkeys, DONE)
    targets = [[Memory(size) for size in sizes] for _ in range(nkeys)]
    spans, arrivals = spans_of(targets), Arrivals()
    ends: list[tuple[int, int]] = []
    copy = threading.Thread(
        target=lambda: ends.append(
            copy_out(spans, 0, nkeys, pool.address, places, None, 0, True, arrivals)
        )
    )
    copy.start()
    for piece in range(len(sizes)):
        arrivals.wait(piece)
        for key in range(nkeys):
            assert targets[key][piece].bytes == sources[key][piece].bytes
    copy.join()
    assert ends == [(nkeys, DONE)]
    waiting = threading.Thread(target=arrivals.wait, args=[len(sizes)])
    waiting.start()
    waiting.join(0.02)
    assert waiting.is_alive()
    arrivals.end()
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_wrong_byte_is_found_where_it_is(implementation: str) -> None:
    sizes = [70_000, 5_000, 100]
    places, room = places_of(sizes)
    pool = Memory(room)
    sources = [[Memory(size)] for size in sizes]
    assert copy_in(spans_of(sources), 0, 3, pool.address, places, None, 0) == (3, DONE)
    targets = spans_of([[Memory(size)] for size in sizes])
    second = PLACE.unpack_from(places, 40)[2]
    damaged = bytearray(pool.bytes)
    damaged[second + 4_999] ^= 1
    pool.bytes = bytes(damaged)
    assert copy_out(targets, 0, 3, pool.address, places, None, 0, True) == (1, DIFFERS)
    assert copy_out(targets, 2, 1, pool.address, places, None, 0, True) == (3, DONE)
    assert copy_out(targets, 0, 3, pool.address, places, None, 0, False) == (3, DONE)


def test_only_the_keys_that_are_named_move(implementation: str) -> None:
    sizes = [20_000] * 5
    places, room = places_of(sizes)
    pool = Memory(room)
    pool.bytes = bytes(room)
    spans = spans_of([[Memory(size)] for size in sizes])
    mask = bytes([1, 1, 0, 1, 1])
    # The place of a masked key need not exist.
    places[2 * 40 : 3 * 40] = PLACE.pack(0, 0, 0, 0, 0)
    assert copy_in(spans, 1, 3, pool.address, places, None, 0, mask) == (4, DONE)
    assert [bool(checksum) for checksum in checksums(places)] == [False, True, False, True, False]
    step = room // 5
    moved = [bool(pool.bytes[k * step : k * step + 20_000].strip(b"\0")) for k in range(5)]
    assert moved == [False, True, False, True, False]


def test_a_copy_stops_at_the_deadline_or_when_cancelled(implementation: str) -> None:
    places, room = places_of([3 << 20])
    pool = Memory(room)
    spans = spans_of([[Memory(3 << 20)]])
    cancel = CancelFlag()
    assert not cancel.is_set
    assert copy_in(spans, 0, 1, pool.address, places, cancel, 1) == (0, DEADLINE)
    assert copy_out(spans, 0, 1, pool.address, places, cancel, 1, True) == (0, DEADLINE)
    assert copy_in(spans, 0, 1, pool.address, places, cancel, 2**63) == (1, DONE)
    cancel.set()
    assert cancel.is_set
    assert copy_in(spans, 0, 1, pool.address, places, cancel, 0) == (0, CANCELLED)
    assert copy_out(spans, 0, 1, pool.address, places, cancel, 0, False) == (0, CANCELLED)


def test_the_places_must_fit_the_keys() -> None:
    places, room = places_of([100, 200])
    pool = Memory(room)
    spans = spans_of([[Memory(100)], [Memory(200)]])
    with pytest.raises(ValueError, match="keys 1 to 3 of 2"):
        copy_in(spans, 1, 2, pool.address, places, None, 0)
    with pytest.raises(ValueError, match="places has 40 bytes, 2 keys need 80"):
        copy_out(spans, 0, 2, pool.address, places[:40], None, 0, False)
    with pytest.raises(ValueError, match="key 0 has 100 bytes, its place 200"):
        copy_in(spans, 0, 1, pool.address, places[40:], None, 0)
    with pytest.raises(ValueError, match="mask has 1 bytes for 2 keys"):
        copy_in(spans, 0, 2, pool.address, places, None, 0, b"\1")


def test_a_read_only_buffer_is_never_written() -> None:
    places, room = places_of([4])
    pool = Memory(room)
    spans = Spans.from_buffers([[KvBufferWrapper.from_buffer(b"abcd")]])
    assert copy_in(spans, 0, 1, pool.address, places, None, 0) == (1, DONE)
    assert pool.bytes[:4] == b"abcd"
    with pytest.raises(ValueError, match=r"\(0, 0\) of the batch is read-only"):
        copy_out(spans, 0, 1, pool.address, places, None, 0, False)


@given(st.integers(1, 300_000), st.integers(0, 64), st.integers(0, 64))
@settings(max_examples=40, deadline=None)
def test_stream_copy_is_a_copy(nbytes: int, source_shift: int, target_shift: int) -> None:
    source, target = Memory(nbytes, source_shift), Memory(nbytes, target_shift)
    source.bytes = Random(nbytes).randbytes(nbytes)
    _copy.stream_copy(target.address, source.address, nbytes)
    assert target.bytes == source.bytes
    target.check_guards()


def test_memcpy_many_copies_pairs() -> None:
    sources, targets = [Memory(5_000) for _ in range(3)], [Memory(5_000) for _ in range(3)]
    for k, source in enumerate(sources):
        source.bytes = bytes([k]) * 5_000
    _copy.memcpy_many([t.address for t in targets], [s.address for s in sources], 5_000)
    assert [t.bytes for t in targets] == [s.bytes for s in sources]
    _copy.memcpy(targets[0].address, sources[2].address, 5_000)
    assert targets[0].bytes == sources[2].bytes
    with pytest.raises(ValueError, match="1 targets and 0 sources"):
        _copy.memcpy_many([1], [], 1)
