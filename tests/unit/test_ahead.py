from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from client_bench import Bench, Buffers, digests_of, pattern

from ems.client.ahead import Ahead
from ems.client.operations import load, save
from ems.client.requests import RequestBook
from ems.client.writer import ChannelBroken
from ems.common.deadline import Deadline, DeadlineExpired
from ems.common.exception import EmsException
from ems.common.metrics import Count

POOL = 1 << 30


def soon(ms: float = 5000) -> Deadline:
    return Deadline.after_ms(ms)


@pytest.fixture
def book() -> RequestBook:
    return RequestBook(itertools.count(1).__next__)


@pytest.fixture
def ahead(book: RequestBook) -> Ahead:
    return Ahead(book)


def granted(ahead: Ahead, length: int = 4096, replace: bool = True) -> int:
    assert ahead.ask(length, replace, POOL, soon()) == 0  # the first of its kind
    request = ahead.ask(length, replace, POOL, soon())
    assert request
    ahead.answered(request, bytearray(40), length, replace)
    return request


def test_a_grant_serves_one_value_of_its_kind(ahead: Ahead, book: RequestBook) -> None:
    request = granted(ahead)
    assert book.pause() == [request]  # named when the session is taken up again
    book.resume()
    grant = ahead.take(4096, True)
    assert grant is not None
    assert grant.request == request
    assert ahead.take(4096, True) is None
    assert book.owed() == []


@pytest.mark.parametrize(("length", "replace"), [(4097, True), (4096, False)])
def test_a_grant_of_another_kind_is_given_back(
    ahead: Ahead, book: RequestBook, length: int, replace: bool
) -> None:
    request = granted(ahead)
    assert ahead.take(length, replace) is None
    assert book.owed() == [request]


def test_a_grant_is_not_used_while_there_is_no_server(ahead: Ahead, book: RequestBook) -> None:
    request = granted(ahead)
    book.down()
    assert ahead.take(4096, True) is None
    assert book.owed() == [request]


def test_nothing_is_asked_for_twice_nor_for_large_values(ahead: Ahead) -> None:
    granted(ahead)
    assert ahead.ask(4096, True, POOL, soon()) == 0
    assert ahead.take(4096, True)
    first = ahead.ask(4096, True, POOL, soon())
    assert first
    assert ahead.ask(4096, True, POOL, soon()) == 0  # another thread, before the answer
    ahead.answered(first, None, 4096, True)
    for large, capacity in (((256 << 10) + 1, POOL), (4096, 1 << 19)):
        assert [ahead.ask(large, True, capacity, soon()) for _ in range(3)] == [0, 0, 0]


def test_what_was_not_granted_or_not_answered(ahead: Ahead, book: RequestBook) -> None:
    ahead.answered(granted(ahead) and 0, None, 1, True)
    assert ahead.take(4096, True)
    refused = ahead.ask(4096, True, POOL, soon())
    ahead.answered(refused, None, 4096, True)
    assert refused not in book.pause()
    book.resume()
    lost = ahead.ask(4096, True, POOL, soon())
    ahead.unanswered(lost)
    assert book.owed() == [lost]
    assert ahead.ask(4096, True, POOL, soon())


def test_what_nobody_needs_is_given_back(ahead: Ahead, book: RequestBook) -> None:
    request = granted(ahead)
    ahead.expire()
    assert book.owed() == []
    ahead.expire(kept_ns=0)
    assert book.owed() == [request]
    assert ahead.take(4096, True) is None


def test_a_session_that_goes_down_asks_for_nothing(ahead: Ahead, book: RequestBook) -> None:
    ahead.ask(4096, True, POOL, soon())
    book.down()
    with pytest.raises(OSError, match="no EMS server"):
        ahead.ask(4096, True, POOL, soon())
    book.resume()
    assert ahead.ask(4096, True, POOL, soon())


# ---- with the operations ----


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench()
    yield one
    one.memory.check()


def save_one(bench: Bench, key: object, nbytes: int = 4096) -> int:
    source = Buffers([pattern(key, nbytes)])
    return save(bench.context, digests_of([key]), source.spans, soon(), replace=True)


def test_a_row_of_small_saves_takes_one_message_each(bench: Bench) -> None:
    for key in range(20):
        assert save_one(bench, key) == 1
    # Two for each of the first two: only then is it a row.
    assert bench.counters[Count.SAVE_MESSAGES] == 22
    for key in range(20):
        target = Buffers.empty([4096])
        assert load(bench.context, digests_of([key]), target.spans, soon()) == 1
        assert target.value(0) == pattern(key, 4096)
    assert bench.memory.pool.stats().reserved == 4096
    bench.memory.pool.close_session(bench.session)
    assert bench.memory.pool.stats().reserved == 0


def test_a_grant_that_a_failed_save_held_comes_back(bench: Bench) -> None:
    for key in range(3):
        save_one(bench, key)

    def cut() -> None:
        raise ChannelBroken("cut")

    bench.faults.at["commit"] = cut
    with pytest.raises(EmsException):
        save_one(bench, "unseen")
    assert bench.stored("unseen") is None
    bench.pay()
    assert bench.memory.pool.stats().reserved == 0
    assert save_one(bench, "unseen") == 1


def test_an_answer_that_is_lost_leaves_nothing_reserved(bench: Bench) -> None:
    for key in range(3):
        save_one(bench, key)

    def late() -> None:
        raise DeadlineExpired("late")

    bench.faults.at["commit done"] = late
    with pytest.raises(EmsException):
        save_one(bench, "seen")
    assert bench.stored("seen") == pattern("seen", 4096)
    bench.pay()
    assert bench.memory.pool.stats().reserved == 0


def test_a_server_that_is_another_one_keeps_the_grant(bench: Bench) -> None:
    for key in range(3):
        save_one(bench, key)
    bench.memory.recover(held=[bench.session])
    live = bench.requests.pause()
    bench.memory.pool.keep_requests(bench.session, live)
    bench.requests.resume()
    assert save_one(bench, "after") == 1
    assert bench.stored("after") == pattern("after", 4096)
