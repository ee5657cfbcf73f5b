from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from ems.common.exception import EmsErrorCode, EmsException, io_error
from ems.common.result import CcResult
from ems.future import CcFuture, complete, complete_cancelled, fail, settle
from ems.home import HomeLoop

DONE = CcResult(3, 4)


@pytest.fixture
def home() -> Iterator[HomeLoop]:
    one = HomeLoop("test-home")
    one.start()
    yield one
    one.stop()


class Operation:
    """What stands behind a future: cancelled on demand, ended by the test."""

    def __init__(self, home: HomeLoop) -> None:
        self.home = home
        self.cancelled = threading.Event()
        self.future = CcFuture(home, self.cancelled.set)

    def end(self, how: Any = DONE) -> None:
        if isinstance(how, CcResult):
            complete(self.future, how)
        elif isinstance(how, EmsException):
            fail(self.future, how)
        else:
            complete_cancelled(self.future)
        self.home.call_soon(settle, self.future)

    def end_soon(self, how: Any = DONE, after_s: float = 0.02) -> threading.Timer:
        timer = threading.Timer(after_s, self.end, (how,))
        timer.start()
        return timer


@pytest.fixture
def operation(home: HomeLoop) -> Operation:
    return Operation(home)


def test_a_future_is_always_truthy(operation: Operation) -> None:
    assert bool(operation.future) is True
    operation.end(CcResult(0, 0))
    assert bool(operation.future) is True


def test_result_waits_in_a_thread(operation: Operation) -> None:
    timer = operation.end_soon()
    assert not operation.future.done()
    assert operation.future.result() == DONE
    assert operation.future.result() == DONE
    assert operation.future.done()
    assert operation.future.exception() is None
    timer.join()


def test_the_wrapped_future_of_the_home_loop_ends_the_same_way(home: HomeLoop) -> None:
    for how in (DONE, io_error("gone"), None):
        operation = Operation(home)
        inner = operation.future._future
        assert inner.get_loop() is home.loop
        assert not inner.done()
        operation.end(how)

        async def look(inner: asyncio.Future[CcResult] = inner) -> Any:
            if inner.cancelled():
                return None
            error = inner.exception()
            return str(error) if error is not None else inner.result()

        assert home.run(look) == (str(how) if isinstance(how, EmsException) else how)


def test_a_time_out_of_the_wait_leaves_the_operation_alone(operation: Operation) -> None:
    with pytest.raises(EmsException) as caught:
        operation.future.result(timeout=0.01)
    assert caught.value.status_code() is EmsErrorCode.EMS_IO_TIMEOUT
    assert not operation.cancelled.is_set()
    with pytest.raises(EmsException):
        operation.future.result(0)
    operation.end()
    assert operation.future.result(0) == DONE


@pytest.mark.parametrize("timeout", ["1", -1, float("nan"), True, object(), [], -0.5])
def test_a_bad_time_out_is_an_argument_error(operation: Operation, timeout: Any) -> None:
    with pytest.raises(EmsException) as caught:
        operation.future.result(timeout)
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
    assert "timeout" in caught.value.message()


def test_a_time_out_may_be_endless(operation: Operation) -> None:
    timer = operation.end_soon()
    assert operation.future.result(float("inf")) == DONE
    timer.join()


def test_wrong_arguments_are_argument_errors(operation: Operation) -> None:
    future: Any = operation.future
    for call in (
        lambda: future.result(1, 2),
        lambda: future.result(seconds=1),
        lambda: future.cancel("now"),
        lambda: future.add_done_callback(),
        lambda: future.add_done_callback("print"),
        lambda: future.exception(1, 2),
    ):
        with pytest.raises(EmsException) as caught:
            call()
        assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT


def test_a_failure_is_raised_again_and_again_without_growing(operation: Operation) -> None:
    operation.end(io_error("the server is away"))
    lengths = set()
    for _ in range(5):
        with pytest.raises(EmsException, match="away") as caught:
            operation.future.result()
        assert caught.value.status_code() is EmsErrorCode.EMS_IO_ERROR
        assert caught.value.__context__ is None
        lengths.add(len(caught.traceback))
    assert len(lengths) == 1
    error = operation.future.exception()
    assert isinstance(error, EmsException)
    assert error.__traceback__ is None


def test_nobody_is_told_that_an_exception_was_never_retrieved(
    home: HomeLoop, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        operation = Operation(home)
        operation.end(io_error("lost"))

        async def nothing() -> None:
            pass

        home.run(nothing)
        del operation
        gc.collect()
    assert "never retrieved" not in caplog.text


def test_the_result_in_the_home_loop_is_refused(home: HomeLoop, operation: Operation) -> None:
    async def wait() -> None:
        operation.future.result()

    with pytest.raises(EmsException, match="await") as caught:
        home.run(wait)
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
    operation.end()

    async def take() -> CcResult:
        return operation.future.result()

    assert home.run(take) == DONE


def test_callbacks_run_once_with_the_future(operation: Operation) -> None:
    seen: list[CcFuture] = []
    operation.future.add_done_callback(seen.append)
    assert not seen
    operation.end()
    operation.future.add_done_callback(seen.append)
    assert seen == [operation.future, operation.future]


def test_an_error_of_a_callback_is_logged_and_the_others_run(
    operation: Operation, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[CcFuture] = []
    operation.future.add_done_callback(lambda future: 1 / 0)
    operation.future.add_done_callback(seen.append)
    with caplog.at_level(logging.ERROR, "ems"):
        operation.end()
    assert seen
    assert "ZeroDivisionError" in caplog.text


def test_a_cancelled_future_opens_no_breaker(operation: Operation) -> None:
    assert operation.future.cancel() is True
    assert operation.cancelled.is_set()
    assert not operation.future.done()
    assert not operation.future.cancelled()
    operation.end(None)
    assert operation.future.cancelled()
    assert operation.future.done()
    assert operation.future.cancel() is False
    for _ in range(2):
        with pytest.raises(EmsException) as caught:
            operation.future.result()
        assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
    error = operation.future.exception()
    assert error is not None and error.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT


def test_a_cancellation_that_was_granted_is_delivered(operation: Operation) -> None:
    assert operation.future.cancel()
    operation.end(DONE)  # it had just come to its end
    assert operation.future.cancelled()


def test_a_future_that_is_done_cannot_be_cancelled(operation: Operation) -> None:
    operation.end()
    assert operation.future.cancel() is False
    assert operation.future.result() == DONE


def test_await_in_any_loop_by_several_tasks(operation: Operation) -> None:
    async def main() -> list[CcResult]:
        async def one() -> CcResult:
            return await operation.future

        tasks = [asyncio.create_task(one()) for _ in range(3)]
        await asyncio.sleep(0.01)
        operation.end()
        return await asyncio.gather(*tasks, operation.future)

    assert asyncio.run(main()) == [DONE] * 4
    assert asyncio.run(main()) == [DONE] * 4  # another loop, and done long ago


def test_await_in_the_home_loop(home: HomeLoop, operation: Operation) -> None:
    async def wait() -> CcResult:
        return await operation.future

    timer = operation.end_soon()
    assert home.run(wait) == DONE
    timer.join()


def test_await_raises_what_the_operation_failed_with(operation: Operation) -> None:
    async def main() -> None:
        with pytest.raises(EmsException, match="away"):
            await operation.future

    operation.end(io_error("the server is away"))
    asyncio.run(main())


def test_await_poll_and_thread_on_the_same_future(operation: Operation) -> None:
    got: list[CcResult] = []
    thread = threading.Thread(target=lambda: got.append(operation.future.result()))
    thread.start()

    async def main() -> CcResult:
        polled: list[bool] = []

        async def poll() -> None:
            while not operation.future.done():
                polled.append(False)
                await asyncio.sleep(0.001)

        task = asyncio.create_task(poll())
        await asyncio.sleep(0.01)
        operation.end()
        await task
        assert polled
        return await operation.future

    assert asyncio.run(main()) == DONE
    thread.join()
    assert got == [DONE]


@pytest.mark.parametrize("end", [None, DONE])
def test_a_cancelled_task_waits_until_no_byte_can_be_written(
    operation: Operation, end: Any
) -> None:
    order: list[str] = []

    async def main() -> None:
        task = asyncio.ensure_future(operation.future)
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.01)
        assert operation.cancelled.is_set()
        task.cancel()  # impatience changes nothing
        await asyncio.sleep(0.01)
        assert not task.done()
        order.append("copy ended")
        operation.end(end)
        with pytest.raises(asyncio.CancelledError):
            await task
        order.append("cancelled")

    asyncio.run(main())
    assert order == ["copy ended", "cancelled"]
    assert operation.future.cancelled()


def test_a_cancel_scope_waits_too(operation: Operation) -> None:
    ended_at: list[float] = []

    def end() -> None:
        ended_at.append(time.monotonic())
        operation.end(None)

    async def main() -> float:
        with anyio.move_on_after(0.01) as scope:
            await operation.future
        assert scope.cancelled_caught
        return time.monotonic()

    timer = threading.Timer(0.1, end)
    timer.start()
    left_at = asyncio.run(main())
    assert left_at >= ended_at[0]
    timer.join()


def test_wait_for_cancels_the_operation(operation: Operation) -> None:
    async def main() -> None:
        operation_end = threading.Timer(0.05, operation.end, (None,))
        operation_end.start()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(operation.future, 0.01)
        operation_end.join()

    asyncio.run(main())
    assert operation.future.cancelled()


def test_a_future_that_another_cancelled_cancels_who_awaits_it(operation: Operation) -> None:
    async def main() -> None:
        async def one() -> CcResult:
            return await operation.future

        task = asyncio.create_task(one())
        await asyncio.sleep(0.01)
        operation.future.cancel()
        operation.end(None)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_loop_that_is_gone_harms_nobody(operation: Operation) -> None:
    loop = asyncio.new_event_loop()

    async def wait() -> None:
        await operation.future

    coroutine = wait()
    loop.call_soon(lambda: None)
    task = loop.create_task(coroutine)
    loop.call_later(0.01, loop.stop)
    loop.run_forever()
    loop.close()
    operation.end()
    assert operation.future.result() == DONE
    coroutine.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del task, coroutine
