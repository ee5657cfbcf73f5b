"""Memory that the server granted ahead: a small value is then saved by one message instead of two.

    nothing ──ask, granted──▶ one grant ──take──▶ a save's own
                                  └──idle, or of another kind──▶ owed, so that it is aborted

A client that saves one small value after another gets the room of the next one with the answer to
the last. It is a request like any other: named when the session is taken up again, given back when
it is not used, and by the server when this process ends.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from ems.client.requests import RequestBook
from ems.common.deadline import Deadline
from ems_native._shm import monotonic_ns

__all__ = ["Ahead", "Grant"]

_MOST_BYTES = 256 << 10
_LEAST_PARTS = 256  # of the pool: who asks for more of it gets it when it is needed
_SOON_NS = 20_000_000
_KEPT_NS = 500_000_000


class Grant(NamedTuple):
    """Room for one value.

    Args:
        request: under which the server knows it.
        place: as `WriteChannel.reserve` gives it.
        length: of the value, bytes.
        replace: whether a value that is there will be replaced.
        since_ns: CLOCK_MONOTONIC.
    """

    request: int
    place: bytearray
    length: int
    replace: bool
    since_ns: int


class Ahead:
    """At most one grant, of the kind that was needed last. Thread-safe, no I/O.

    Args:
        requests: of the session.
    """

    def __init__(self, requests: RequestBook) -> None:
        self._requests = requests
        self._lock = threading.Lock()
        self._grant: Grant | None = None
        self._asked = False
        self._last = (0, False)
        self._last_ns = 0

    def take(self, length: int, replace: bool) -> Grant | None:
        """The grant, if there is one for such a value and a server to commit it."""
        with self._lock:
            grant, self._grant = self._grant, None
        if grant is None:
            return None
        if (grant.length, grant.replace) == (length, replace) and self._requests.open:
            return grant
        self._requests.owe(grant.request)
        return None

    def ask(self, length: int, replace: bool, capacity: int, deadline: Deadline) -> int:
        """A new request for another value like this one; 0 when it is not likely to come soon.

        Raises:
            ChannelDown, DeadlineExpired: as `RequestBook.begin`.
        """
        now = monotonic_ns()
        with self._lock:
            again = self._last == (length, replace) and now - self._last_ns < _SOON_NS
            self._last, self._last_ns = (length, replace), now
            small = length <= min(_MOST_BYTES, capacity // _LEAST_PARTS)
            if not (again and small) or self._grant is not None or self._asked:
                return 0
            self._asked = True
        try:
            return self._requests.begin(deadline)
        except BaseException:
            self._asked = False
            raise

    def answered(self, request: int, place: bytearray | None, length: int, replace: bool) -> None:
        """Keep what was asked for; None: the server had no room."""
        with self._lock:
            self._asked = False
            if place is not None:
                self._grant = Grant(request, place, length, replace, monotonic_ns())
        if place is None:
            self._requests.end(request)

    def unanswered(self, request: int) -> None:
        """Whether the server granted it is not known."""
        self._asked = False
        self._requests.owe(request)

    def expire(self, kept_ns: int = _KEPT_NS) -> None:
        """Give back what nobody has needed for so long."""
        with self._lock:
            grant = self._grant
            if grant is None or monotonic_ns() - grant.since_ns < kept_ns:
                return
            self._grant = None
        self._requests.owe(grant.request)
