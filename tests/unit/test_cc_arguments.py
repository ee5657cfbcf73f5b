"""What the key/value calls make of their arguments; the pool is real, the server is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
from client_bench import Bench
from hypothesis import strategies as st
from strange import ANYTHING, SCALARS, WRAPPERS

from ems import CcKvOption, CcResult, EmsErrorCode, EmsException, KvBufferWrapper, PrimaryKey
from ems.cc.context_caching import ContextCaching
from ems.client.operations import load, save
from ems.common.config import CcConfig
from ems.common.deadline import Deadline
from ems.future import CcFuture, complete, settle
from ems.home import HomeLoop
from ems_native._copy import Spans


class BenchClient:
    """The client's part, in the caller's thread."""

    def __init__(self, home: HomeLoop) -> None:
        self.bench = Bench()
        self.home = home
        self.deadlines: list[Deadline] = []

    def check_usable(self) -> None:
        pass

    def load(self, digests: bytes, spans: Spans, deadline: Deadline) -> CcResult:
        self.deadlines.append(deadline)
        return CcResult(load(self.bench.context, digests, spans, deadline), spans.nkeys)

    def save(self, digests: bytes, spans: Spans, deadline: Deadline, *, replace: bool) -> CcResult:
        self.deadlines.append(deadline)
        there = save(self.bench.context, digests, spans, deadline, replace=replace)
        return CcResult(there, spans.nkeys)

    def load_later(self, digests: bytes, spans: Spans, deadline: Deadline) -> CcFuture:
        return self._done(self.load(digests, spans, deadline))

    def save_later(
        self, digests: bytes, spans: Spans, deadline: Deadline, *, replace: bool
    ) -> CcFuture:
        return self._done(self.save(digests, spans, deadline, replace=replace))

    def _done(self, result: CcResult) -> CcFuture:
        future = CcFuture(self.home, lambda: None)
        complete(future, result)
        self.home.call_soon(settle, future)
        return future


@pytest.fixture
def client() -> Iterator[BenchClient]:
    home = HomeLoop("test-home")
    home.start()
    yield BenchClient(home)
    home.stop()


@pytest.fixture
def cc(client: BenchClient) -> ContextCaching:
    instance = CcConfig(rank_id=0, device_id=0, model_id="m")
    return ContextCaching(client, None, instance)  # type: ignore[arg-type]


def buffer(nbytes: int = 64) -> KvBufferWrapper:
    return KvBufferWrapper.from_buffer(bytearray(nbytes))


CALLS = ["save", "load", "async_save", "async_load"]


def result_of(outcome: Any) -> CcResult:
    result: CcResult = outcome.result() if isinstance(outcome, CcFuture) else outcome
    return result


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(EmsException) as caught:
        call()
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT, caught.value
    return caught.value.message()


@pytest.mark.parametrize("name", CALLS)
def test_arguments_by_position_and_by_keyword(cc: ContextCaching, name: str) -> None:
    call = getattr(cc, name)
    keys, values = ["k"], [[buffer()]]
    cc.save(None, keys, values)
    assert result_of(call(CcKvOption(), keys, values)) == CcResult(1, 1)
    assert result_of(call(option=CcKvOption(), key_list=keys, value_list=values)).success == 1
    assert result_of(call(None, key_list=keys, value_list=values)).success == 1
    assert result_of(call(value_list=tuple(map(tuple, values)), key_list=tuple(keys))).total == 1


def test_a_string_is_the_primary_key_without_an_attribute(cc: ContextCaching) -> None:
    source = KvBufferWrapper.from_buffer(bytearray(b"x" * 64))
    cc.save(None, ["k", PrimaryKey("k", "a")], [[source], [source]])
    target = bytearray(64)
    result = cc.load(None, [PrimaryKey("k", "")], [[KvBufferWrapper.from_buffer(target)]])
    assert result == CcResult(1, 1)
    assert target == b"x" * 64
    assert cc.load(None, [PrimaryKey("a", "k")], [[buffer()]]) == CcResult(0, 1)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, [], []), ("key_list", "empty")),
        ((None, ["a"], []), ("value_list", "0", "1")),
        ((None, ["a"], [[buffer()], [buffer()]]), ("value_list", "2", "1")),
        ((None, ["a"], [[]]), ("value_list[0]", "empty")),
        ((None, ["a"], [buffer()]), ("value_list[0]", "list")),
        ((None, ["a"], [[1]]), ("value_list[0][0]", "KvBufferWrapper")),
        ((None, ["a"], [[buffer(), None]]), ("value_list[0][1]", "None")),
        ((None, ["a"], None), ("value_list", "None")),
        ((None, None, [[buffer()]]), ("key_list", "None")),
        ((None, "a", [[buffer()]]), ("key_list", "list")),
        ((None, ["a", "b", "a"], [[buffer()]] * 3), ("key_list[2]", "'a'", "key_list[0]")),
        ((None, ["k" * 128], [[buffer()]]), ("key_list[0]", "128", "127")),
        ((None, ["a", ""], [[buffer()]] * 2), ("key_list[1]", "empty")),
        ((None, [b"a"], [[buffer()]]), ("key_list[0]", "bytes")),
        ((None, [PrimaryKey("k" * 128, "")], [[buffer()]]), ("distribute_key", "128", "127")),
        ((None, [PrimaryKey("k", "a" * 200)], [[buffer()]]), ("attribute_key", "200", "127")),
        (("fast", ["a"], [[buffer()]]), ("option", "'fast'", "CcKvOption")),
        ((CcKvOption(timeout=-1), ["a"], [[buffer()]]), ("option.timeout", "-1")),
        ((CcKvOption(timeout=1.5), ["a"], [[buffer()]]), ("option.timeout", "1.5")),  # type: ignore[arg-type]
        ((CcKvOption(timeout=True), ["a"], [[buffer()]]), ("option.timeout", "bool")),
        ((CcKvOption(write_rcache=1), ["a"], [[buffer()]]), ("option.write_rcache", "1")),  # type: ignore[arg-type]
        ((CcKvOption(read_local_only=None), ["a"], [[buffer()]]), ("option.read_local_only",)),  # type: ignore[arg-type]
        ((), ("key_list",)),
        ((1, 2, 3, 4, 5), ("argument",)),
    ],
)
def test_what_is_wrong_is_named(
    cc: ContextCaching, client: BenchClient, name: str, arguments: Any, words: tuple[str, ...]
) -> None:
    text = refusal(lambda: getattr(cc, name)(*arguments))
    for word in words:
        assert word in text
    assert not client.deadlines  # before anything was copied


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_keyword_is_an_argument_error(cc: ContextCaching, name: str) -> None:
    assert "colour" in refusal(lambda: getattr(cc, name)(None, ["a"], [[buffer()]], colour=1))


def test_limits_that_just_hold(cc: ContextCaching) -> None:
    keys = ["k" * 127, "é" * 127, "\N{PILE OF POO}" * 127, "a\0b", "\ud800"]
    assert cc.save(None, keys, [[buffer()]] * 5) == CcResult(5, 5)
    assert cc.load(None, keys, [[buffer()] for _ in keys]) == CcResult(5, 5)


def test_a_read_only_buffer_can_be_saved_and_not_loaded_into(cc: ContextCaching) -> None:
    values = [[buffer()], [buffer(), KvBufferWrapper.from_buffer(b"constant")]]
    assert cc.save(None, ["a", "b"], values) == CcResult(2, 2)
    for name in ("load", "async_load"):
        text = refusal(lambda name=name: getattr(cc, name)(None, ["a", "b"], values))  # type: ignore[misc]
        assert "value_list[1][1]" in text
        assert "read-only" in text


@pytest.mark.parametrize(("timeout", "expected_s"), [(0, 5.0), (250, 0.25), (60_000, 60.0)])
def test_the_time_out_counts_from_the_call(
    cc: ContextCaching, client: BenchClient, timeout: int, expected_s: float
) -> None:
    cc.load(CcKvOption(timeout=timeout), ["a"], [[buffer()]])
    left = client.deadlines[-1].remaining_s()
    assert expected_s - 1 < left <= expected_s or left <= expected_s < 1


def test_an_option_may_be_changed_and_used_again(cc: ContextCaching, client: BenchClient) -> None:
    option = CcKvOption(timeout=100_000)
    cc.load(option, ["a"], [[buffer()]])
    option.timeout = 200_000
    cc.load(option, ["a"], [[buffer()]])
    assert client.deadlines[1].remaining_s() > 150
    assert option == CcKvOption(timeout=200_000)


def test_futures_have_their_own_calls(cc: ContextCaching) -> None:
    future = cc.async_save(None, ["a"], [[buffer()]])
    assert cc.is_ready(future) is True
    assert cc.is_ready(ccfuture=future)
    assert cc.get_result(future) == CcResult(1, 1)
    assert cc.get_result(ccfuture=future) == CcResult(1, 1)
    for wrong in (None, 1, True, CcResult(1, 1), "future"):
        assert "CcFuture" in refusal(lambda: cc.is_ready(wrong))  # noqa: B023
        assert "CcFuture" in refusal(lambda: cc.get_result(wrong))  # noqa: B023
    refusal(lambda: cc.is_ready())
    refusal(lambda: cc.get_result(future, future))  # type: ignore[call-arg]


def test_what_leaves_carries_no_inner_traceback(cc: ContextCaching) -> None:
    with pytest.raises(EmsException) as caught:
        cc.load(None, ["k" * 500], [[buffer()]])
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


# ---- whatever is passed, only EmsException leaves ----

KEY = st.one_of(
    st.text(max_size=140),
    st.builds(PrimaryKey, st.text(max_size=140), st.one_of(st.text(max_size=140), ANYTHING)),
    ANYTHING,
)
OPTION = st.one_of(
    st.none(),
    st.builds(
        CcKvOption,
        write_rcache=st.one_of(st.booleans(), SCALARS),
        read_local_only=st.one_of(st.booleans(), SCALARS),
        timeout=st.one_of(st.integers(-5, 5000), SCALARS),
    ),
    ANYTHING,
)
KEY_LIST = st.one_of(st.lists(KEY, max_size=5), ANYTHING)
VALUE_LIST = st.one_of(
    st.lists(st.lists(WRAPPERS, min_size=1, max_size=3), max_size=5),
    st.lists(st.lists(st.one_of(WRAPPERS, ANYTHING), max_size=3), max_size=5),
    ANYTHING,
)


@hypothesis.settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    name=st.sampled_from(CALLS), option=OPTION, key_list=KEY_LIST, value_list=VALUE_LIST
)
def test_only_ems_exceptions_leave(
    cc: ContextCaching, name: str, option: Any, key_list: Any, value_list: Any
) -> None:
    try:
        outcome = result_of(getattr(cc, name)(option, key_list, value_list))
    except EmsException as error:
        assert isinstance(error.status_code(), EmsErrorCode)
        assert str(error)
    else:
        assert 0 <= outcome.success <= outcome.total == len(key_list)


@hypothesis.settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    name=st.sampled_from([*CALLS, "is_ready", "get_result"]),
    arguments=st.lists(ANYTHING, max_size=5),
    keywords=st.dictionaries(
        st.sampled_from(["option", "key_list", "value_list", "ccfuture", "hashes", "x"]),
        ANYTHING,
        max_size=4,
    ),
)
def test_only_ems_exceptions_leave_any_signature(
    cc: ContextCaching, name: str, arguments: list[Any], keywords: dict[str, Any]
) -> None:
    with pytest.raises(EmsException):
        result_of(getattr(cc, name)(*arguments, **keywords))
        raise EmsException(EmsErrorCode.EMS_INVALID_ARGUMENT, "it was all right")


@hypothesis.given(data_ptr=ANYTHING, length=ANYTHING)
@hypothesis.settings(max_examples=100, deadline=None)
def test_only_ems_exceptions_leave_the_buffer_wrapper(data_ptr: Any, length: Any) -> None:
    try:
        KvBufferWrapper(data_ptr, length)  # never copied from or to
    except EmsException as error:
        assert error.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
    try:
        KvBufferWrapper.from_buffer(data_ptr)
    except EmsException as error:
        assert error.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
