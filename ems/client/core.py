"""When and where operations of the asynchronous calls run: decided on the home loop.

    submit ──▶ queued ──▶ running ──▶ ended
                  └── deadline, cancel, close ──▶ ended

A submission is a note in an inbox and at most one wake-up of the loop; the loop moves what is due
to the copy workers. One asyncio callback per operation, never per block.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from ems.client.batch import OperationCancelled
from ems.client.schedule import Kind, Schedule
from ems.common.deadline import Deadline
from ems.common.exception import EmsErrorCode, EmsException, internal_error, invalid_argument
from ems.common.result import CcResult
from ems.future import CcFuture, complete, complete_cancelled, fail, settle
from ems.home import HomeLoop
from ems.transfer import CopyWorkers, default_parallelism, share_big_copies
from ems_native._copy import CancelFlag

__all__ = ["Core"]

DEFAULT_BYTES_UNDER_WAY = 1 << 30
_log = logging.getLogger("ems.client.core")
_T = TypeVar("_T")


class _Operation:
    """One operation of an asynchronous call. Its state belongs to the home loop."""

    __slots__ = ("deadline", "flag", "future", "kind", "nbytes", "run", "submitted_ns", "timer")

    def __init__(
        self,
        kind: Kind,
        nbytes: int,
        run: Callable[[CancelFlag], CcResult],
        deadline: Deadline,
    ) -> None:
        self.kind = kind
        self.nbytes = nbytes
        self.run: Callable[[CancelFlag], CcResult] | None = run
        self.deadline = deadline
        self.flag = CancelFlag()
        self.timer: asyncio.TimerHandle | None = None
        self.submitted_ns = time.monotonic_ns()
        self.future: CcFuture

    def ended(self) -> None:
        """Let go of what the operation worked on: a future is often kept longer."""
        self.run = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class _Inbox(Generic[_T]):
    """Items for the home loop: many of them, one wake-up."""

    def __init__(self, home: HomeLoop, handle: Callable[[_T], None], after: Callable[[], None]):
        self._home = home
        self._handle = handle
        self._after = after
        self._items: deque[_T] = deque()
        self._awake = False

    def put(self, item: _T) -> bool:
        """Hand an item over, from any thread; False when the home loop does not run any more."""
        self._items.append(item)
        if self._awake:
            return True
        # Set before the loop can run `_drain`, which clears it before it looks: an item is seen
        # either by that run or by one that is asked for here.
        self._awake = True
        return self._home.call_soon(self._drain)

    def _drain(self) -> None:
        self._awake = False
        while self._items:
            self._handle(self._items.popleft())
        self._after()


class Core:
    """Schedules operations of one client. Thread-safe.

    Args:
        home: the loop that decides.
        parallelism: operations of one kind at a time, and threads that copy one of them; None for
            a number that suits the machine.
        bytes_under_way: of one kind; a larger operation runs alone among its kind.
    """

    def __init__(
        self,
        home: HomeLoop,
        parallelism: int | None = None,
        bytes_under_way: int = DEFAULT_BYTES_UNDER_WAY,
    ) -> None:
        each = parallelism or default_parallelism()
        share_big_copies(each)
        self._home = home
        # One more thread than either kind may use: saves that wait for a frozen server leave one
        # for loads, and loads one for saves.
        self._workers = CopyWorkers(each + 1)
        self._schedule: Schedule[_Operation] = Schedule(each, each + 1, bytes_under_way)
        self._inbox: _Inbox[Callable[[], None]] = _Inbox(home, _call, self._start_due)
        self._closed = False
        self._idle: asyncio.Event | None = None

    @property
    def owns_current_thread(self) -> bool:
        """Whether the caller runs in a copy worker, whose end `close` waits for."""
        return self._workers.owns_current_thread

    def submit(
        self,
        kind: Kind,
        nbytes: int,
        run: Callable[[CancelFlag], CcResult],
        deadline: Deadline,
    ) -> CcFuture:
        """Queue an operation and return its future at once.

        Args:
            kind: decides its turn.
            nbytes: that it copies.
            run: the operation; called in a copy worker, once or never.
            deadline: ends it while it waits; `run` must heed it itself.
        """
        operation = _Operation(kind, nbytes, run, deadline)
        operation.future = future = CcFuture(self._home, partial(self._cancel, operation))
        if not self._inbox.put(partial(self._admit, operation)):
            self._end_closed(operation)
        return future

    def close(self) -> None:
        """End what waits (`EMS_INVALID_ARGUMENT`), join what runs; idempotent.

        Not in the home loop's thread.
        """
        self._home.run(self._close)
        self._workers.close()

    # ---- in the home loop's thread ----

    def _admit(self, operation: _Operation) -> None:
        if self._closed:
            self._end_closed(operation)
            return
        if operation.future.done():  # cancelled before it came here
            return
        left_s = operation.deadline.remaining_s()
        self._schedule.add(operation)
        operation.timer = self._home.loop.call_later(left_s, self._expire, operation)

    def _start_due(self) -> None:
        for operation in self._schedule.due():
            assert operation.timer is not None
            operation.timer.cancel()
            self._workers.run(partial(self._work, operation))
        if self._idle is not None and not self._schedule.running:
            self._idle.set()

    def _expire(self, operation: _Operation) -> None:
        if not self._schedule.remove(operation):
            return
        waited_ms = (time.monotonic_ns() - operation.submitted_ns) // 1_000_000
        fail(
            operation.future,
            EmsException(
                EmsErrorCode.EMS_IO_TIMEOUT,
                f"the request's time-out passed while it waited for its turn ({waited_ms} ms); "
                "raise CcKvOption.timeout or have fewer requests outstanding",
            ),
        )
        self._end(operation)
        self._start_due()

    def _withdraw(self, operation: _Operation) -> None:
        if self._schedule.remove(operation):
            complete_cancelled(operation.future)
            self._end(operation)

    def _ended(self, operation: _Operation) -> None:
        self._schedule.finished(operation)
        self._end(operation)

    def _end(self, operation: _Operation) -> None:
        settle(operation.future)
        operation.ended()

    def _end_closed(self, operation: _Operation) -> None:
        fail(
            operation.future,
            invalid_argument("Ems.close() was called before this operation could start"),
        )
        operation.ended()

    async def _close(self) -> None:
        self._closed = True
        self._idle = asyncio.Event()
        for operation in self._schedule.drain():
            self._end_closed(operation)
            settle(operation.future)
        self._start_due()
        await self._idle.wait()

    # ---- in other threads ----

    def _cancel(self, operation: _Operation) -> None:
        operation.flag.set()
        self._inbox.put(partial(self._withdraw, operation))

    def _work(self, operation: _Operation) -> None:
        run = operation.run
        assert run is not None
        try:
            result = run(operation.flag)
        except OperationCancelled:
            complete_cancelled(operation.future)
        except EmsException as error:
            fail(operation.future, error)
        except BaseException as error:
            _log.exception("an operation failed unexpectedly")
            fail(operation.future, internal_error(f"{type(error).__name__}: {error}"))
        else:
            complete(operation.future, result)
        self._inbox.put(partial(self._ended, operation))


def _call(function: Callable[[], None]) -> None:
    function()
