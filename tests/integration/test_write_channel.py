"""Both ends of the write channel over a real socket, the server's loop in a thread."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served_pool import BLOCK, SECRET, ServedPool

from ems.client.writer import ChannelBroken, WriteChannel
from ems.common.deadline import Deadline, DeadlineExpired
from ems.rpc import frames
from ems.rpc.frames import BUSY, COMMITTED, GRANTED, LOST, NO_ROOM, PRESENT
from ems.testing.memory_pool import digest_of, u64s


def soon(ms: float = 5000) -> Deadline:
    return Deadline.after_ms(ms)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedPool]:
    pool = ServedPool(str(tmp_path / "write.sock"))
    yield pool
    pool.close()


@pytest.fixture
def channel(served: ServedPool) -> Iterator[WriteChannel]:
    with contextlib.closing(served.channel()) as channel:
        yield channel


def keys(*names: object) -> bytes:
    return b"".join(map(digest_of, names))


def reserve(
    channel: WriteChannel, names: str, request: int = 0, replace: bool = False, force: bool = False
) -> tuple[int, bytes, bytearray]:
    request = request or channel.next_request()
    statuses, places = channel.reserve(
        request, keys(*names), u64s([BLOCK] * len(names)), replace, force, soon()
    )
    return request, statuses, places


def put(
    channel: WriteChannel, request: int, name: str, following: int = 0
) -> tuple[int, bytearray | None]:
    what = frames.Put(keys(name), 7, True, 0, following, BLOCK, True)
    return channel.put(request, what, soon())


def test_one_message_publishes_and_makes_room_for_the_next(
    served: ServedPool, channel: WriteChannel
) -> None:
    request, _, _ = reserve(channel, "a")
    for name in "bcd":
        following = channel.next_request()
        status, place = put(channel, request, name, following)
        assert status == COMMITTED
        assert place is not None
        request = following
    before = channel.messages
    assert put(channel, request, "e") == (COMMITTED, None)
    assert channel.messages == before + 1
    assert [served.memory.present(name) for name in "abcde"] == [False, True, True, True, True]
    assert served.memory.pool.stats().reserved == 0
    served.memory.check()


def test_a_place_ahead_is_not_granted_after_its_abort(
    served: ServedPool, channel: WriteChannel
) -> None:
    request, _, _ = reserve(channel, "a")
    following = channel.next_request()
    channel.abort(following, soon())  # overtook the frame that asked for it
    assert put(channel, request, "a", following) == (COMMITTED, None)
    channel.abort(request, soon())
    assert put(channel, request, "b") == (LOST, None)
    assert served.memory.pool.stats().reserved == 0


def test_a_save_is_two_messages(served: ServedPool, channel: WriteChannel) -> None:
    channel.echo(b"", soon())
    before = channel.messages
    request, statuses, places = reserve(channel, "abc")
    words = memoryview(places).cast("Q")
    assert list(statuses) == [GRANTED] * 3
    assert len(set(words[2::5])) == 3
    assert list(words[3::5]) == [BLOCK] * 3
    words[4::5] = memoryview(u64s([7, 8, 9])).cast("Q")
    assert list(channel.commit(request, None, places, True, soon())) == [COMMITTED] * 3
    assert channel.messages - before == 2
    found = served.memory.pool.locate(digest_of("b"))
    assert found is not None
    assert found[2:] == (words[7], BLOCK, 8)


def test_some_positions_can_be_committed(served: ServedPool, channel: WriteChannel) -> None:
    request, _, places = reserve(channel, "abc")
    assert list(channel.commit(request, [0, 2], places, False, soon())) == [COMMITTED] * 2
    assert list(channel.commit(request, [0, 1], places, False, soon())) == [LOST, COMMITTED]
    assert served.memory.pool.stats().reserved == 0


def test_keys_of_others_are_present_or_busy(served: ServedPool, channel: WriteChannel) -> None:
    request, _, places = reserve(channel, "a")
    with contextlib.closing(served.channel()) as other:
        assert list(reserve(other, "ab")[1]) == [BUSY, GRANTED]
        channel.commit(request, None, places, False, soon())
        assert list(reserve(other, "ab", force=True)[1]) == [PRESENT, GRANTED]


def test_an_abort_that_overtakes_its_reserve_wins(
    served: ServedPool, channel: WriteChannel
) -> None:
    request = channel.next_request()
    channel.abort(request, soon())
    assert list(reserve(channel, "ab", request)[1]) == [NO_ROOM, NO_ROOM]
    assert served.memory.pool.stats().reserved == 0


def test_a_session_that_is_not_known_is_refused(served: ServedPool) -> None:
    channel = WriteChannel(served.path, served.session, b"x" * 16)
    with contextlib.closing(channel), pytest.raises(ChannelBroken, match="not known here"):
        channel.echo(b"", soon())


def test_no_server_is_a_broken_channel(tmp_path: Path) -> None:
    channel = WriteChannel(str(tmp_path / "none"), 1, SECRET)
    with contextlib.closing(channel), pytest.raises(ChannelBroken, match="no server answers"):
        channel.echo(b"", soon())


def test_a_frozen_server_costs_the_deadline_and_not_more(
    served: ServedPool, channel: WriteChannel
) -> None:
    channel.echo(b"warm", soon())
    served.freeze(0.5)
    began = time.monotonic()
    with pytest.raises(DeadlineExpired):
        channel.echo(b"late", soon(100))
    assert 0.09 < time.monotonic() - began < 0.4
    # The late answer went with its connection: the next one gets its own.
    assert channel.echo(b"next", soon()) == b"next"


def test_an_expired_deadline_sends_nothing(channel: WriteChannel) -> None:
    with pytest.raises(DeadlineExpired):
        channel.echo(b"", soon(-1))
    assert channel.messages == 0


def test_close_ends_exchanges_under_way(served: ServedPool, channel: WriteChannel) -> None:
    channel.echo(b"", soon())
    served.freeze(0.5)
    threading.Timer(0.05, channel.close).start()
    began = time.monotonic()
    with pytest.raises(ChannelBroken):
        channel.echo(b"", soon(10_000))
    assert time.monotonic() - began < 0.4
    with pytest.raises(ChannelBroken, match="closed"):
        channel.echo(b"", soon())


def test_dropped_sessions_reconnect_or_fail(served: ServedPool, channel: WriteChannel) -> None:
    channel.echo(b"", soon())

    async def drop() -> None:
        served.server.drop_session(served.session)

    served.on_loop(drop())
    with pytest.raises(ChannelBroken):
        channel.echo(b"", soon())
    assert channel.echo(b"again", soon()) == b"again"


def test_the_last_connection_of_a_session_is_reported(served: ServedPool) -> None:
    channel = served.channel()
    channel.echo(b"", soon())
    channel.close()
    deadline = soon()
    while not served.gone and not deadline.expired:
        time.sleep(0.005)
    assert served.gone == [served.session]


def test_many_threads_share_a_channel(served: ServedPool, channel: WriteChannel) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        for turn in range(50):
            payload = f"{number} {turn}".encode()
            if channel.echo(payload, soon()) != payload:
                wrong.append(payload)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- hostile peers ---------------------------------------------------------------------------


def connect(served: ServedPool) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(5)
    sock.connect(served.path)
    return sock


def read_all(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while True:
            more = sock.recv(65536)
            if not more:
                break
            data += more
    return data


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        pickle.dumps({"a": [1, 2, 3]}),
        os.urandom(4096),
        frames.HEADER.pack(frames.MAGIC, frames.ABI_VERSION, 2, 2**32 - 1, 0),
        frames.frame(frames.Kind.ECHO, 1, b"before hello"),
        frames.frame(200, 1, b""),
        frames.hello(1, SECRET) + frames.frame(99, 1, b""),
        frames.hello(1, SECRET) + frames.frame(frames.Kind.RESERVE, 1, b"\xff" * 64),
        frames.hello(1, SECRET) + frames.frame(frames.Kind.COMMIT, 1, b"\x01\x00\x00"),
        frames.hello(1, SECRET) + frames.frame(frames.Kind.SUSPECT, 1, b"short"),
    ],
)
def test_nonsense_ends_its_connection_and_nothing_else(
    served: ServedPool, channel: WriteChannel, garbage: bytes
) -> None:
    with connect(served) as sock:
        sock.sendall(garbage)
        answer = read_all(sock)
    assert frames.parse_header(answer[-1024:][: frames.HEADER_BYTES]).kind & frames.ANSWER
    assert channel.echo(b"still here", soon()) == b"still here"


def test_frames_arrive_in_any_pieces(served: ServedPool) -> None:
    chatter = random.Random(5)
    sent = [frames.hello(served.session, SECRET)]
    sent += [frames.frame(frames.Kind.ECHO, n, os.urandom(n * 7 % 900)) for n in range(1, 200)]
    want = [frames.hello_answer(served.memory.pool.epoch)]
    want += [frames.frame(frames.Kind.ECHO | frames.ANSWER, n, sent[n][16:]) for n in range(1, 200)]
    data, at = b"".join(sent), 0
    with connect(served) as sock:
        while at < len(data):
            size = chatter.choice([1, 3, 15, 16, 17, 500, 5000])
            sock.sendall(data[at : at + size])
            at += size
        sock.shutdown(socket.SHUT_WR)
        assert read_all(sock) == b"".join(want)


def test_a_peer_that_never_reads_is_not_read_either(
    served: ServedPool, channel: WriteChannel
) -> None:
    echo = frames.frame(frames.Kind.ECHO, 1, bytes(100_000))
    with connect(served) as sock:
        sock.sendall(frames.hello(served.session, SECRET))
        sock.settimeout(0.3)
        sent = 0
        with contextlib.suppress(TimeoutError, socket.timeout):
            for _ in range(1000):
                sock.sendall(echo)
                sent += 1
        assert sent < 100
        assert channel.echo(b"others go on", soon()) == b"others go on"
