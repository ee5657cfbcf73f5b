"""Whatever comes in on the write channel: an answer or a refusal, and the pool stays whole."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz import bounded
from hypothesis import given
from hypothesis import strategies as st
from served_pool import BLOCK, SECRET, ServedPool

from ems.common.deadline import Deadline
from ems.rpc import frames
from ems.rpc.frames import Kind
from ems.testing.memory_pool import digest_of, u32s, u64s

U32, U64 = (1 << 32) - 1, (1 << 64) - 1
digests = st.integers(0, 7).map(digest_of)
lengths = st.one_of(st.just(BLOCK), st.sampled_from([0, 1, 1 << 20, 1 << 40, 1 << 63, U64]))
requests = st.one_of(st.integers(1, 4), st.sampled_from([0, U64]))
positions = st.one_of(st.integers(0, 5), st.sampled_from([8191, 1 << 31, U32]))


@st.composite
def reserves(draw: st.DrawFn) -> bytes:
    names = draw(st.lists(digests, min_size=1, max_size=6))
    sizes = u64s([draw(lengths) for _ in names])
    return frames.reserve(
        draw(requests), b"".join(names), sizes, draw(st.booleans()), draw(st.booleans())
    )


@st.composite
def commits(draw: st.DrawFn) -> bytes:
    where = draw(st.lists(positions, min_size=1, max_size=6))
    if draw(st.booleans()):
        where = sorted(set(where))
    return frames.commit(draw(requests), u32s(where), u64s([7] * len(where)), True)


kinds = st.one_of(st.sampled_from(list(Kind)), st.integers(0, 255))
others = st.one_of(
    st.builds(frames.frame, st.just(Kind.ABORT), requests),
    st.builds(frames.suspect, digests, st.integers(0, U64)),
    st.builds(frames.frame, st.just(Kind.ECHO), requests, st.binary(max_size=40)),
    st.builds(frames.hello, st.sampled_from([0, 1, 2, 1023, 1024, U32]), st.just(SECRET)),
    st.builds(frames.frame, kinds, requests, st.binary(max_size=80)),
    # A count that its payload contradicts.
    st.builds(
        lambda kind, count, rest: frames.frame(kind, 1, struct.pack("<II", count, 0) + rest),
        st.sampled_from([Kind.RESERVE, Kind.COMMIT]),
        st.sampled_from([0, 1, 2, 8192, 8193, U32]),
        st.binary(max_size=80),
    ),
)


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """A good frame with a few bytes that are not."""
    data = bytearray(draw(st.one_of(reserves(), commits(), others)))
    for _ in range(draw(st.integers(1, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


conversations = st.lists(st.one_of(reserves(), commits(), others, spoiled()), max_size=8)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    with contextlib.closing(ServedPool(str(folder / "write.sock"))) as pool:
        yield pool


@bounded(150)
@given(conversations, st.binary(max_size=40), st.booleans())
def test_frames(served: ServedPool, said: list[bytes], tail: bytes, cut: bool) -> None:
    data = frames.hello(served.session, SECRET) + b"".join(said) + tail
    if cut:
        data = data[: -1 - len(tail) // 2]
    _check_answers(_talk(served.path, data))

    async def check() -> None:
        served.memory.check()
        for request in served.memory.pool.reserved_requests(served.session):
            served.memory.pool.abort(served.session, request)
        served.memory.check()

    served.on_loop(check())
    with contextlib.closing(served.channel()) as channel:
        assert channel.echo(b"still here", Deadline.after_ms(5000)) == b"still here"


@bounded(60)
@given(st.one_of(st.binary(max_size=200), spoiled(), reserves()))
def test_before_a_hello(served: ServedPool, data: bytes) -> None:
    answers = _talk(served.path, data)
    assert _check_answers(answers) <= 1
    assert not answers or answers[3] == Kind.REFUSED | frames.ANSWER or data[3] == Kind.HELLO


def _talk(path: str, data: bytes) -> bytes:
    """Say it all, hang up, and return what the server said."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        sock.connect(path)
        received = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while more := sock.recv(1 << 16):
                received += more
        return received


def _check_answers(data: bytes) -> int:
    """Whole frames, each an answer, a refusal only at the end; how many."""
    count = at = 0
    while at < len(data):
        header = frames.parse_header(data[at : at + frames.HEADER_BYTES])
        assert header.kind & frames.ANSWER
        at += frames.HEADER_BYTES + header.nbytes
        count += 1
        assert at == len(data) or header.kind != Kind.REFUSED | frames.ANSWER
    assert at == len(data)
    return count
