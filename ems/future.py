"""`CcFuture`: the result of an asynchronous call, for threads, for any loop, and for polling.

            ┌─ cancel() ─▶ cancelling ─┐
    pending ┤                          ├─▶ cancelled | done (result) | done (exception)
            └──────────────────────────┘

It wraps an `asyncio.Future` of the home loop, which only that loop may touch. So the outcome is
noted twice: by the thread that ends the operation, which wakes waiting threads and foreign loops
without a detour, and right behind it, by the home loop, in the future. Whatever way it ends, not
one byte of the caller's memory is touched afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import threading
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import anyio

from ems.common.argument import wrong_type
from ems.common.boundary import public
from ems.common.exception import EmsErrorCode, EmsException, invalid_argument
from ems.common.result import CcResult
from ems.home import HomeLoop, fork_count, forked_error

__all__ = [
    "CcFuture",
    "cancelled_error",
    "check_may_wait",
    "complete",
    "complete_cancelled",
    "fail",
    "settle",
]

_log = logging.getLogger("ems.future")


class _State(enum.Enum):
    PENDING = 0
    CANCELLING = 1
    CANCELLED = 2
    RESULT = 3
    FAILED = 4


_PENDING, _CANCELLING = _State.PENDING, _State.CANCELLING
_CANCELLED, _RESULT, _FAILED = _State.CANCELLED, _State.RESULT, _State.FAILED
_OPEN = (_PENDING, _CANCELLING)


def cancelled_error() -> EmsException:
    """Make what `.result()` of a cancelled future raises; its code opens no circuit breaker."""
    return invalid_argument("the operation was cancelled, it has no result")


class CcFuture:
    """The future of an `async_save` or `async_load` (pages 0016, 0017, 0018, 0019).

    `await` it in any asyncio loop (several tasks may), call `result()` in a thread, or poll with
    `done()` or `ContextCaching.is_ready`; all of them also together. Always truthy. Thread-safe.

    Cancelling it, or a task that awaits it, cancels the operation; the cancellation is delivered
    only when no further byte of the caller's memory can be written.
    """

    __slots__ = (
        "__weakref__",
        "_born",
        "_callbacks",
        "_cancel_operation",
        "_future",
        "_home",
        "_lock",
        "_state",
        "_value",
    )

    def __init__(self, home: HomeLoop, cancel_operation: Callable[[], None]) -> None:
        self._home = home
        self._cancel_operation = cancel_operation
        self._future: asyncio.Future[CcResult] = home.loop.create_future()
        self._lock = threading.Lock()
        self._state = _PENDING
        self._value: Any = None
        self._callbacks: list[Callable[[], None]] = []
        self._born = fork_count()

    def done(self) -> bool:
        """Return whether the operation ended, in whatever way. Never blocks, never raises."""
        return self._state not in _OPEN

    def cancelled(self) -> bool:
        """Return whether the operation ended by cancellation. Never blocks, never raises."""
        return self._state is _CANCELLED

    @public
    def cancel(self) -> bool:
        """Ask for the end of the operation, without waiting for it.

        Returns:
            False when it had ended already. True otherwise: it will end as cancelled, at once if
            its copy has not started, else as soon as no further byte can be written.
        """
        self._check_process()
        with self._lock:
            if self._state not in _OPEN:
                return False
            self._state = _CANCELLING
        self._cancel_operation()
        return True

    @public
    def result(self, timeout: float | None = None) -> CcResult:
        """Wait for the end and return the result; from any thread but the home loop's.

        Args:
            timeout: seconds to wait at most; None waits as long as the operation's own deadline
                lets it run.

        Raises:
            EmsException: what the operation failed with; `EMS_INVALID_ARGUMENT` when it was
                cancelled, or when the call would block the home loop; `EMS_IO_TIMEOUT` when
                `timeout` passed (the operation goes on).
        """
        if self._state in _OPEN:
            self._wait(timeout)
        return self._outcome()

    @public
    def exception(self, timeout: float | None = None) -> EmsException | None:
        """Wait for the end and return the exception it brought, None when it brought a result.

        Args:
            timeout: as for `result`.

        Raises:
            EmsException: only for the waiting itself, as for `result`.
        """
        if self._state in _OPEN:
            self._wait(timeout)
        if self._state is _RESULT:
            return None
        return cancelled_error() if self._state is _CANCELLED else _fresh(self._value)

    @public
    def add_done_callback(self, callback: Callable[[CcFuture], object]) -> None:
        """Have `callback(self)` called when the operation ends, or now if it has.

        It runs in a thread of the SDK (or in the caller's, if the operation had ended) and should
        be short. What it raises is logged.
        """
        if not callable(callback):
            raise wrong_type("callback", callback, "a function of one argument")

        def call() -> None:
            try:
                callback(self)
            except Exception:
                _log.exception("a callback of a CcFuture failed")

        self._when_done(call)

    def __await__(self) -> Generator[Any, None, CcResult]:
        return self._await().__await__()

    def __repr__(self) -> str:
        state = self._state
        shown = f" {self._value!r}" if state in (_RESULT, _FAILED) else ""
        return f"<CcFuture {state.name.lower()}{shown}>"

    async def _await(self) -> CcResult:
        if self._state in _OPEN:
            self._check_process()
            try:
                await self._waiter()
            except asyncio.CancelledError:
                self.cancel()
                # Shielded, and asked again after each cancellation that comes through all the same:
                # the task owns the memory, and must not run on while a copy still writes there.
                with anyio.CancelScope(shield=True):
                    while self._state in _OPEN:
                        try:
                            await self._waiter()
                        except asyncio.CancelledError:
                            continue
                raise
        if self._state is _CANCELLED:
            raise asyncio.CancelledError
        return self._outcome()

    def _waiter(self) -> Awaitable[object]:
        loop = asyncio.get_running_loop()
        if loop is self._future.get_loop():
            return asyncio.wait((self._future,))  # which a cancelled task leaves alone
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            # A loop that was closed: nobody waits there any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, waiter)

        self._when_done(wake)
        return waiter

    def _when_done(self, call: Callable[[], None]) -> None:
        with self._lock:
            if self._state in _OPEN:
                self._callbacks.append(call)
                return
        call()

    def _check_process(self) -> None:
        # Before any lock: the thread that held it may be gone in the child.
        if self._born != fork_count():
            raise forked_error()

    def _check_may_wait(self) -> None:
        self._check_process()
        if self._home.is_current_thread:
            raise invalid_argument(
                "result() in the thread of the EMS home loop would wait for ever; "
                "await the future instead"
            )

    def _wait(self, timeout: float | None) -> None:
        seconds = _seconds(timeout)
        self._check_may_wait()
        signal = threading.Lock()
        signal.acquire()
        self._when_done(signal.release)
        if not signal.acquire(timeout=seconds):
            raise EmsException(
                EmsErrorCode.EMS_IO_TIMEOUT,
                f"the operation has not ended after timeout={timeout} s; it goes on",
            )

    def _outcome(self) -> CcResult:
        if self._state is _RESULT:
            result: CcResult = self._value
            return result
        if self._state is _CANCELLED:
            raise cancelled_error()
        raise _fresh(self._value)

    def _finish(self, state: _State, value: object) -> None:
        with self._lock:
            if self._state not in _OPEN:
                return
            if self._state is _CANCELLING:
                # cancel() said so. A task that asked for its own cancellation must get it, even if
                # the operation was just done.
                state, value = _CANCELLED, None
            self._value = value
            self._state = state
            callbacks, self._callbacks = self._callbacks, []
        for call in callbacks:
            call()

    def _settle(self) -> None:
        if self._future.done():
            return
        if self._state is _CANCELLED:
            self._future.cancel()
        elif self._state is _FAILED:
            self._future.set_exception(_fresh(self._value))
            self._future.exception()  # retrieved: nobody is told that it never was
        elif self._state is _RESULT:
            self._future.set_result(self._value)


def complete(future: CcFuture, result: CcResult) -> None:
    """End a future with its result. For the client core; thread-safe."""
    future._finish(_RESULT, result)


def fail(future: CcFuture, error: EmsException) -> None:
    """End a future with an exception. For the client core; thread-safe."""
    future._finish(_FAILED, _fresh(error))


def complete_cancelled(future: CcFuture) -> None:
    """End a future as cancelled. For the client core; thread-safe."""
    future._finish(_CANCELLED, None)


def check_may_wait(future: CcFuture) -> None:
    """Raise what `result()` raises where it would wait for ever: the home loop, a forked child."""
    future._check_may_wait()


def settle(future: CcFuture) -> None:
    """Note the outcome of an ended operation in the wrapped future. In the home loop's thread."""
    future._settle()


def _fresh(error: EmsException) -> EmsException:
    # An exception that is raised again and again would collect a traceback at each raise, from
    # several threads; and a traceback keeps the frames of the operation alive.
    return EmsException(error.status_code(), error.message())


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _seconds(timeout: float | None) -> float:
    if timeout is None:
        return -1
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise wrong_type("timeout", timeout, "seconds >= 0, or None to wait for the end")
    return min(timeout, threading.TIMEOUT_MAX)
