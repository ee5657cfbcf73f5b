from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ems_native._link import Link

AWAKE_NS = 200_000


def within(seconds: float) -> int:
    return time.monotonic_ns() + int(1e9 * seconds)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture(params=[0, AWAKE_NS])
def link(request: pytest.FixtureRequest, pair: tuple[socket.socket, socket.socket]) -> Link:
    return Link(pair[0].fileno(), request.param)


def test_bytes_go_both_ways(link: Link, pair: tuple[socket.socket, socket.socket]) -> None:
    link.send(b"question", within(1))
    assert pair[1].recv(100) == b"question"
    pair[1].sendall(b"answer")
    assert link.receive(within(1)) == b"answer"
    link.send(b"", within(1))


def test_an_answer_that_takes_its_time(
    link: Link, pair: tuple[socket.socket, socket.socket]
) -> None:
    for pause in (0.0, 0.0001, 0.001, 0.05):
        timer = threading.Timer(pause, pair[1].sendall, [b"answer"])
        timer.start()
        assert link.receive(within(5)) == b"answer"
        timer.join()


def test_a_deadline_holds(link: Link) -> None:
    for seconds in (-1, 0, 0.02):
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            link.receive(within(seconds))
        assert max(0, seconds) <= time.monotonic() - start < 2


def test_a_peer_that_reads_nothing_holds_nobody(
    link: Link, pair: tuple[socket.socket, socket.socket]
) -> None:
    with pytest.raises(TimeoutError):
        link.send(bytes(8 << 20), within(0.05))


def test_more_than_the_socket_takes_is_sent_in_parts(
    link: Link, pair: tuple[socket.socket, socket.socket]
) -> None:
    data = os.urandom(4 << 20)
    found = bytearray()

    def read() -> None:
        while len(found) < len(data):
            found.extend(pair[1].recv(1 << 16))

    thread = threading.Thread(target=read)
    thread.start()
    link.send(data, within(5))
    thread.join()
    assert found == data


def test_the_end_and_a_broken_connection(
    link: Link, pair: tuple[socket.socket, socket.socket]
) -> None:
    pair[1].close()
    assert link.receive(within(1)) == b""
    with pytest.raises(BrokenPipeError):
        link.send(b"x", within(1))


def test_another_thread_ends_a_wait(link: Link, pair: tuple[socket.socket, socket.socket]) -> None:
    timer = threading.Timer(0.02, pair[0].shutdown, [socket.SHUT_RDWR])
    timer.start()
    assert link.receive(within(5)) == b""
    timer.join()


def test_a_signal_handler_ends_a_wait(link: Link) -> None:
    class Interrupted(Exception):
        pass

    def handle(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(Interrupted):
            link.receive(within(5))
    finally:
        with contextlib.suppress(Interrupted):
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="nobody waits awake on one processor")
def test_vain_waits_awake_become_rare(pair: tuple[socket.socket, socket.socket]) -> None:
    link = Link(pair[0].fileno(), within(1))

    def slept() -> int:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

    before = slept()
    for _ in range(200):
        with pytest.raises(TimeoutError):
            link.receive(within(0.001))
    # Awake at the 1st, 4th, 9th, 18th, 35th, 68th wait, and then at every 65th.
    assert 150 < slept() - before <= 200
