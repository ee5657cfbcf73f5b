"""The home loop: a private thread with an asyncio loop, for all that is asynchronous in a client.

    NEW ──start──▶ RUNNING ──stop──▶ STOPPED
                      └──fork──▶ (in the child) LOST: every use raises

Serving engines call EMS from threads without a loop, and from loops that come and go. So the SDK
brings its own. It also keeps the list of what a forked child must let go of, since the same objects
need it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import itertools
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import anyio
import anyio.abc

from ems.common.exception import EmsException, internal_error, invalid_argument

__all__ = ["HomeLoop", "fork_count", "forked_error", "keep_from_child"]

_T = TypeVar("_T")
_log = logging.getLogger("ems.home")

_forks = 0
_tickets = itertools.count()
_kept: dict[int, Callable[[], None]] = {}
# What a child inherited must never be collected there: finalizers would unmap addresses and close
# descriptors that belong to something else by then.
_left_over: list[Callable[[], None]] = []


def fork_count() -> int:
    """Return how many forks lie between the first process of this program and this one."""
    return _forks


def forked_error() -> EmsException:
    """Make the exception for the use of a parent's object in a forked child."""
    return internal_error(
        "this process is a fork of the one that called Ems.init, and owns nothing of its parent's; "
        "call Ems.init in the child"
    )


def keep_from_child(forget: Callable[[], None]) -> Callable[[], None]:
    """Have `forget` called in every forked child; return the call that ends this.

    Args:
        forget: must not block, take a lock or send anything: the thread that held the lock is gone
            in the child, and connections are shared with the parent.
    """
    ticket = next(_tickets)
    _kept[ticket] = forget

    def release() -> None:
        _kept.pop(ticket, None)

    return release


def _after_fork_in_child() -> None:
    global _forks
    _forks += 1
    inherited = list(_kept.values())
    _kept.clear()
    _left_over.extend(inherited)
    for forget in inherited:
        try:
            forget()
        except Exception:
            _log.exception("a forked child could not let go of something of its parent's")


os.register_at_fork(after_in_child=_after_fork_in_child)


class HomeLoop:
    """A daemon thread that runs an asyncio loop with one root task group.

    Every task belongs to that group; `stop()` cancels and awaits them all. Thread-safe.
    """

    def __init__(self, name: str = "ems-home") -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._ident: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._context: contextvars.Context | None = None
        self._stopping: asyncio.Event | None = None
        self._born = fork_count()
        self._release: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Start the thread and wait until its loop runs."""
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name=self._name, daemon=True
        )
        self._release = keep_from_child(self._forget)
        self._thread.start()
        ready.result()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs in the loop's own thread: to wait for it there is a dead-lock."""
        return threading.get_ident() == self._ident

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; for code that runs in its thread."""
        if self._loop is None:
            raise internal_error("the home loop does not run")
        return self._loop

    def call_soon(self, function: Callable[..., object], *args: object) -> bool:
        """Have the loop's thread call `function`; False when the loop does not run any more."""
        if self._loop is None or self._born != _forks:
            return False
        try:
            # In the loop's context, not the caller's: with `sniffio` installed anyio finds there
            # which loop it runs on.
            self._loop.call_soon_threadsafe(function, *args, context=self._context)
        except RuntimeError:  # closed
            return False
        return True

    def run(
        self,
        function: Callable[..., Coroutine[Any, Any, _T]],
        *args: Any,
        timeout_s: float | None = None,
    ) -> _T:
        """Run a coroutine function as a task of the home loop and return what it returns.

        Args:
            function: the coroutine function.
            args: its positional arguments.
            timeout_s: when this much time passed, the task is cancelled and `TimeoutError` raised.

        Raises:
            EmsException: called in the home loop's thread (`EMS_INVALID_ARGUMENT`: it would be a
                dead-lock), in a forked child, or the loop does not run (`EMS_INTERNAL_ERROR`).
        """
        if self._born != _forks:
            raise forked_error()
        if self.is_current_thread:
            raise invalid_argument("this call would block the thread of the EMS home loop for ever")
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()
        if not self.call_soon(self._spawn, self._answer, answer, function, args):
            raise internal_error("the home loop does not run any more")
        try:
            return answer.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if answer.done():  # the task itself raised it
                raise
            answer.cancel()
            raise TimeoutError(f"not done after {timeout_s} s") from None
        except concurrent.futures.CancelledError:
            raise internal_error("the home loop was stopped meanwhile") from None

    def spawn(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Start a background task; it ends by itself or with `stop()`. Its error is logged."""
        self.call_soon(self._spawn, self._guard, function, args)

    def stop(self) -> None:
        """Cancel and await every task, end the thread; idempotent. In another thread only."""
        self._release()
        thread = self._thread
        if thread is None or self._born != _forks:
            return
        self.call_soon(self._begin_stop)
        thread.join()
        self._thread = None

    def _run(self, ready: concurrent.futures.Future[None]) -> None:
        self._ident = threading.get_ident()
        try:
            anyio.run(self._main, ready, backend="asyncio")
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            else:
                _log.exception("the home loop ended with an error")
        finally:
            self._ident = None

    async def _main(self, ready: concurrent.futures.Future[None]) -> None:
        self._stopping = asyncio.Event()
        async with anyio.create_task_group() as group:
            self._group = group
            self._context = contextvars.copy_context()
            self._loop = asyncio.get_running_loop()
            ready.set_result(None)
            await self._stopping.wait()
            self._group = None
            group.cancel_scope.cancel()

    def _begin_stop(self) -> None:
        if self._stopping is not None:
            self._stopping.set()

    def _spawn(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        if self._group is not None:
            self._group.start_soon(function, *args)
        elif args and isinstance(args[0], concurrent.futures.Future):
            args[0].cancel()

    async def _answer(
        self,
        answer: concurrent.futures.Future[_T],
        function: Callable[..., Coroutine[Any, Any, _T]],
        args: tuple[Any, ...],
    ) -> None:
        with anyio.CancelScope() as scope:
            # The caller's time-out cancels `answer`, from the caller's thread.
            answer.add_done_callback(
                lambda done: self.call_soon(scope.cancel) if done.cancelled() else None
            )
            try:
                result = await function(*args)
            except asyncio.CancelledError:
                answer.cancel()
                raise
            except Exception as error:
                _settle(answer, None, error)
            else:
                _settle(answer, result, None)

    async def _guard(
        self, function: Callable[..., Coroutine[Any, Any, None]], args: tuple[Any, ...]
    ) -> None:
        try:
            await function(*args)
        except Exception:
            _log.exception("a background task failed")

    def _forget(self) -> None:
        self._loop = None
        self._thread = None
        self._ident = None


def _settle(
    answer: concurrent.futures.Future[Any], result: object, error: Exception | None
) -> None:
    # The caller may give up at the same moment.
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)
