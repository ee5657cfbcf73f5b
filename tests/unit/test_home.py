from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
import time
from collections.abc import Iterator

import pytest

from ems.common.exception import EmsErrorCode, EmsException
from ems.home import HomeLoop, fork_count, keep_from_child


@pytest.fixture
def home() -> Iterator[HomeLoop]:
    one = HomeLoop("test-home")
    one.start()
    yield one
    one.stop()


async def double(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


def test_a_coroutine_runs_in_the_thread_of_the_loop(home: HomeLoop) -> None:
    async def where() -> str:
        assert home.is_current_thread
        return threading.current_thread().name

    assert home.run(where) == "test-home"
    assert not home.is_current_thread
    assert home.run(double, 4) == 8


def test_an_error_of_the_coroutine_comes_back(home: HomeLoop) -> None:
    async def fail() -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        home.run(fail)
    assert home.run(double, 1) == 2


def test_a_time_out_cancels_the_coroutine(home: HomeLoop) -> None:
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError):
        home.run(wait, timeout_s=0.02)
    assert cancelled.wait(5)


def test_waiting_for_the_loop_in_its_own_thread_is_refused(home: HomeLoop) -> None:
    async def wait_for_myself() -> None:
        home.run(double, 1)

    with pytest.raises(EmsException) as caught:
        home.run(wait_for_myself)
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT


def test_stopping_cancels_and_awaits_background_tasks() -> None:
    home = HomeLoop("test-home")
    home.start()
    cleaned: list[str] = []
    started = threading.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.sleep(60)
        finally:
            cleaned.append("up")

    home.spawn(work)
    assert started.wait(5)
    home.stop()
    home.stop()
    assert cleaned == ["up"]
    assert not home.call_soon(print)
    with pytest.raises(EmsException):
        home.run(double, 1)


def test_whoever_waits_learns_that_the_loop_was_stopped() -> None:
    home = HomeLoop("test-home")
    home.start()
    started = threading.Event()
    errors: list[BaseException] = []

    async def wait() -> None:
        started.set()
        await asyncio.sleep(60)

    def run() -> None:
        try:
            home.run(wait)
        except EmsException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(5)
    home.stop()
    thread.join()
    assert "stopped" in str(errors[0])


def test_an_error_in_a_background_task_is_logged_and_harms_nobody(
    home: HomeLoop, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise LookupError("in the background")

    with caplog.at_level(logging.ERROR, "ems.home"):
        home.spawn(fail)
        assert home.run(double, 1) == 2
    assert "in the background" in caplog.text


def test_a_forked_child_lets_go_and_is_told(home: HomeLoop) -> None:
    forgotten: list[int] = []
    release = keep_from_child(lambda: forgotten.append(os.getpid()))
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = f"{forgotten == [os.getpid()]} {fork_count() > 0} {home.call_soon(print)} "
        try:
            home.run(double, 1)
        except EmsException as error:
            text += str(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    answer = os.read(reader, 4096).decode()
    os.close(reader)
    os.close(writer)
    release()
    assert answer.startswith("True True False [EMS_INTERNAL_ERROR]"), answer
    assert "fork" in answer
    assert forgotten == []
    assert home.run(double, 2) == 4


def test_what_was_released_is_not_called_in_a_child() -> None:
    calls: list[None] = []
    keep_from_child(lambda: calls.append(None))()
    pid = os.fork()
    if pid == 0:
        os._exit(len(calls))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_many_threads_use_the_loop_at_once(home: HomeLoop) -> None:
    results: list[int] = []

    def work() -> None:
        for n in range(20):
            results.append(home.run(double, n))

    threads = [threading.Thread(target=work) for _ in range(8)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 160
    assert time.monotonic() - started < 20


def test_tasks_live_in_the_context_of_the_loop(home: HomeLoop) -> None:
    # anyio keeps there which library it runs on, when `sniffio` is installed.
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("the caller's")

    async def read() -> str:
        return variable.get()

    assert home.run(read) == "unset"
