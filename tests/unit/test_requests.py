from __future__ import annotations

import itertools
import threading

import pytest

from ems.client.requests import ChannelDown, RequestBook
from ems.common.deadline import Deadline, DeadlineExpired


def soon(ms: float = 5000) -> Deadline:
    return Deadline.after_ms(ms)


@pytest.fixture
def book() -> RequestBook:
    return RequestBook(itertools.count(1).__next__)


def test_a_live_request_is_named_until_it_ends(book: RequestBook) -> None:
    first, second = book.begin(soon()), book.begin(soon())
    assert sorted(book.pause()) == [first, second]
    book.resume()
    book.end(first)
    assert book.pause() == [second]


def test_a_request_that_is_owed_is_not_live(book: RequestBook) -> None:
    notices: list[None] = []
    book = RequestBook(itertools.count(1).__next__, lambda: notices.append(None))
    request = book.begin(soon())
    book.owe(request)
    assert book.pause() == []
    assert book.owed() == [request]
    assert notices == [None]
    book.paid(request)
    assert book.owed() == []


def test_what_is_owed_is_forgiven_by_a_re_attach(book: RequestBook) -> None:
    book.owe(book.begin(soon()))
    book.forgive()
    assert book.owed() == []


def test_debts_are_bounded(book: RequestBook) -> None:
    for _ in range(5000):
        book.owe(book.begin(soon()))
    assert len(book.owed()) == 4096
    assert 5000 in book.owed()


def test_no_request_begins_during_a_re_attach(book: RequestBook) -> None:
    book.pause()
    begun: list[int] = []
    thread = threading.Thread(target=lambda: begun.append(book.begin(soon())))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert not begun
    book.resume()
    thread.join()
    assert book.pause() == begun


def test_a_request_fails_at_once_when_there_is_no_server(book: RequestBook) -> None:
    book.down()
    with pytest.raises(ChannelDown):
        book.begin(soon())
    assert book.pause() == []
    assert not book.open


def test_a_request_that_waits_fails_when_the_re_attach_does(book: RequestBook) -> None:
    book.pause()
    failed = threading.Event()

    def begin() -> None:
        with pytest.raises(ChannelDown):
            book.begin(soon())
        failed.set()

    thread = threading.Thread(target=begin)
    thread.start()
    book.down()
    assert failed.wait(5)
    thread.join()


def test_a_deadline_ends_the_wait_for_a_re_attach(book: RequestBook) -> None:
    book.pause()
    with pytest.raises(DeadlineExpired):
        book.begin(soon(20))
    assert book.pause() == []
