"""The requests of a session's write channel: which are under way, and which must still be aborted.

    (none) ──begin──▶ live ──end──▶ (none)
                       └──owe──▶ owed ──paid──▶ (none)

A server that restarted keeps the reservations of the requests a client names, and gives the others
back. So between the moment the list is taken and the server's answer no new request may begin:

    OPEN ──pause──▶ PAUSED ──resume──▶ OPEN       begin() waits in PAUSED, and fails in DOWN
      └──down──▶ DOWN ──pause──▶ PAUSED
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from ems.common.deadline import Deadline, DeadlineExpired

__all__ = ["ChannelDown", "RequestBook"]

# A re-attach takes milliseconds; who waits longer for it would rather know that the pool is away.
_LONGEST_PAUSE_S = 1.0
_MOST_OWED = 4096


class ChannelDown(OSError):
    """There is no server to write through now."""


class _State(enum.Enum):
    OPEN = 0
    PAUSED = 1
    DOWN = 2


class RequestBook:
    """Thread-safe, no I/O.

    Args:
        next_request: gives numbers that were never used in the session.
        notice: called when there is something new for whoever pays what is owed.
    """

    def __init__(
        self, next_request: Callable[[], int], notice: Callable[[], object] = lambda: None
    ) -> None:
        self._next_request = next_request
        self._notice = notice
        self._live: set[int] = set()
        self._owed: dict[int, None] = {}
        self._state = _State.OPEN
        self._changed = threading.Condition()

    def begin(self, deadline: Deadline) -> int:
        """Note a new request as live and return its number.

        Raises:
            ChannelDown: no server to write through.
            DeadlineExpired: it came while a re-attach was under way.
        """
        request = self._next_request()
        # First noted, then looked at the state: whoever pauses does it the other way round, so one
        # of the two sees the other.
        self._live.add(request)
        while self._state is not _State.OPEN:
            self._live.discard(request)
            self._wait_until_open(deadline)
            self._live.add(request)
        return request

    def end(self, request: int) -> None:
        """Note that the server knows the end of a request: it was committed or aborted."""
        self._live.discard(request)

    def owe(self, request: int) -> None:
        """Note that a request ended here, but that the server may not know it."""
        self._live.discard(request)
        self._owed[request] = None
        while len(self._owed) > _MOST_OWED:
            # Lost only to a server that does not answer for very long; its next re-attach or the
            # end of this session gives the reservation back.
            self._owed.pop(next(iter(self._owed)), None)
        self._notice()

    def owed(self) -> list[int]:
        """Return the requests that must still be aborted."""
        return list(self._owed)

    def paid(self, request: int) -> None:
        """Note that the server knows the end of a request that was owed."""
        self._owed.pop(request, None)

    def pause(self) -> list[int]:
        """Let no new request begin, and return those that are live."""
        with self._changed:
            self._state = _State.PAUSED
        return list(self._live)

    def resume(self) -> None:
        """Let requests begin again."""
        self._turn(_State.OPEN)

    def down(self) -> None:
        """Let requests fail at once, until a re-attach is tried."""
        self._turn(_State.DOWN)

    def forgive(self) -> None:
        """Forget what was owed: the server gave back all but the live ones."""
        self._owed.clear()

    @property
    def open(self) -> bool:
        """Whether requests may begin."""
        return self._state is _State.OPEN

    def _turn(self, state: _State) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def _wait_until_open(self, deadline: Deadline) -> None:
        with self._changed:
            left = deadline.remaining_s()
            done = self._changed.wait_for(
                lambda: self._state is not _State.PAUSED, min(left, _LONGEST_PAUSE_S)
            )
            if not done and left <= _LONGEST_PAUSE_S:
                raise DeadlineExpired("the session was being taken up again")
            if not done or self._state is _State.DOWN:
                raise ChannelDown("no EMS server answers at the moment")
