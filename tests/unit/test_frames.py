"""Frames of the write channel: what goes in comes out, what is torn is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.rpc import frames
from ems.rpc.frames import ANSWER, HEADER_BYTES, FrameError, Kind


def split(data: bytes) -> tuple[frames.Header, bytes]:
    header = frames.parse_header(data[:HEADER_BYTES])
    payload = data[HEADER_BYTES:]
    assert len(payload) == header.nbytes
    return header, payload


@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.integers(0, 2**64 - 1)), min_size=1),
    st.booleans(),
    st.booleans(),
)
def test_reserve_round_trip(
    request: int, keys: list[tuple[bytes, int]], replace: bool, force: bool
) -> None:
    digests = b"".join(digest for digest, _ in keys)
    lengths = b"".join(length.to_bytes(8, "little") for _, length in keys)
    header, payload = split(frames.reserve(request, digests, lengths, replace, force))
    assert (header.kind, header.request) == (Kind.RESERVE, request)
    assert frames.parse_reserve(payload) == (digests, lengths, replace, force)


@given(st.integers(1, 200), st.booleans(), st.integers(0, 2**64 - 1))
def test_commit_round_trip(count: int, chain: bool, mark_ns: int) -> None:
    positions, checksums = bytes(range(4)) * count, bytes(range(8)) * count
    header, payload = split(frames.commit(9, positions, checksums, chain, mark_ns))
    assert (header.kind, header.request) == (Kind.COMMIT, 9)
    assert frames.parse_commit(payload) == (positions, checksums, chain, mark_ns)


def test_hello_and_suspect_round_trip() -> None:
    _, payload = split(frames.hello(77, b"0123456789abcdef"))
    assert frames.parse_hello(payload) == (77, b"0123456789abcdef")
    _, payload = split(frames.suspect(b"d" * 16, 2**63))
    assert frames.parse_suspect(payload) == (b"d" * 16, 2**63)
    header, payload = split(frames.hello_answer(3))
    assert header.kind == Kind.HELLO | ANSWER


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x80\x04" + bytes(14), "not a frame"),
        (frames.HEADER.pack(frames.MAGIC, 99, 2, 0, 0), "is of ABI 99"),
        (frames.HEADER.pack(frames.MAGIC, frames.ABI_VERSION, 2, 1 << 30, 0), "the limit is"),
    ],
)
def test_a_header_that_is_none_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(FrameError, match=words):
        frames.parse_header(data)


@given(st.binary(max_size=400))
def test_any_payload_parses_or_is_refused(payload: bytes) -> None:
    for parse in (
        frames.parse_hello,
        frames.parse_reserve,
        frames.parse_commit,
        frames.parse_suspect,
    ):
        try:
            parse(payload)
        except FrameError as error:
            assert str(error)


def test_a_count_that_does_not_fit_is_refused() -> None:
    _, payload = split(frames.reserve(1, bytes(32), bytes(16), False, False))
    with pytest.raises(FrameError, match="do not hold 2 keys"):
        frames.parse_reserve(payload[:-1])
    with pytest.raises(FrameError, match="says 0 keys"):
        frames.parse_reserve(bytes(8))
    with pytest.raises(FrameError, match="says 9000 keys"):
        frames.parse_reserve((9000).to_bytes(8, "little"))
