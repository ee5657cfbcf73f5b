"""Who is attached, and the proof that somebody is gone.

    attach ──▶ OPEN ──(its lock was seen)──▶ LIVING ──(its lock is free)──▶ closed
                 └──(not locked within 5 s: it was never granted anything)───┘

A session that is closed gives its reservations back, and its counters go to the totals.

The end of a connection proves nothing: it only makes the server look at the lock soon and often. A
timer never decides that memory may be reused; the kernel does, when it gives up the lock.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ems.pool.pool import MAX_SESSIONS
from ems.rpc.codec import SECRET_BYTES

if TYPE_CHECKING:
    from ems.pool import Pool
    from ems.server.counters import CounterPages

__all__ = ["NoSuchSession", "Sessions"]

_log = logging.getLogger("ems.server.sessions")

UNLOCKED_GRACE_NS = 5 * 10**9
"""How long an attached client may take to lock its byte. Without the lock it is granted nothing."""

SUSPECT_NS = 2 * 10**9
"""How long a lock is looked at often after a connection ended; then the slow poll has it."""


class NoSuchSession(Exception):
    """The session is not open in this pool, or the secret is not its secret."""


def secret_hash(secret: bytes) -> bytes:
    """Return what the pool's session table keeps of a secret."""
    return hashlib.blake2b(secret, digest_size=16).digest()


class Sessions:
    """The sessions of one pool. All calls belong to the server's loop.

    Args:
        pool: keeps the session table.
        held: asks the kernel whether a living process holds a session's lock.
        pages: the counters that clients write.
        drop: called before a session is closed; ends its write-channel connections, so that frames
            that a dead client left in its socket never act for the next owner of the number.
        now_ns: the clock.
    """

    def __init__(
        self,
        pool: Pool,
        held: Callable[[int], bool],
        pages: CounterPages,
        drop: Callable[[int], None],
        now_ns: Callable[[], int],
    ) -> None:
        self._pool = pool
        self._held = held
        self._pages = pages
        self._drop = drop
        self._now_ns = now_ns
        # The sessions of a former server were living when the pool was recovered.
        self._living = {record.id for record in pool.sessions()}
        self._opened_ns: dict[int, int] = {}
        self._suspects: dict[int, int] = {}  # session -> until when it is looked at often
        pages.fold_all_but(self._living)

    def attach(self, pid: int) -> tuple[int, bytes]:
        """Open a session; returns its number and its secret.

        Raises:
            PoolFull: there is none left (of `ems.pool`).
        """
        secret = secrets.token_bytes(SECRET_BYTES)
        now_ns = self._now_ns()
        # A byte that a straggler of an ended session still holds would hide the death of its next
        # owner.
        session_id = self._pool.open_session(
            pid, secret_hash(secret), now_ns, lambda byte: not self._held(byte)
        )
        self._opened_ns[session_id] = now_ns
        self._pages.clear(session_id)
        _log.info("session %d opened for process %d", session_id, pid)
        return session_id, secret

    def resume(self, session_id: int, secret: bytes, live_requests: Sequence[int]) -> None:
        """Take a session up again, and give back what it does not write any more.

        Raises:
            NoSuchSession: see there.
        """
        self._check(session_id, secret)
        self._pool.keep_requests(session_id, live_requests)
        _log.info("session %d is back, %d requests under way", session_id, len(live_requests))

    def authorize(self, session_id: int, secret: bytes) -> bool:
        """Whether it may write: the secret is right, and a living process holds the lock."""
        try:
            self._check(session_id, secret)
        except NoSuchSession:
            return False
        if not self._held(session_id):
            return False
        self._living.add(session_id)
        return True

    def detach(self, session_id: int, secret: bytes) -> None:
        """The client says goodbye: its session ends as soon as its lock is free.

        Raises:
            NoSuchSession: see there.
        """
        self._check(session_id, secret)
        self._living.add(session_id)  # seen or not, the lock will not be taken any more
        self.suspect(session_id)

    def suspect(self, session_id: int) -> None:
        """The last connection of a session ended: look at its lock soon."""
        self._suspects[session_id] = self._now_ns() + SUSPECT_NS

    def poll_suspects(self) -> bool:
        """Look at those whose connection ended; True while there are any left to look at."""
        now_ns = self._now_ns()
        for session_id, until_ns in list(self._suspects.items()):
            if self._close_if_gone(session_id) or now_ns > until_ns:
                self._suspects.pop(session_id, None)
        return bool(self._suspects)

    def poll_all(self) -> None:
        """Look at every session; the slow poll."""
        for record in self._pool.sessions():
            self._close_if_gone(record.id)

    def _close_if_gone(self, session_id: int) -> bool:
        if self._pool.session_secret_hash(session_id) is None:
            return True
        if self._held(session_id):
            self._living.add(session_id)
            return False
        if session_id not in self._living:
            age_ns = self._now_ns() - self._opened_ns.get(session_id, 0)
            if age_ns < UNLOCKED_GRACE_NS:
                return False
        self._drop(session_id)
        self._pool.close_session(session_id)
        self._pages.fold(session_id)
        self._living.discard(session_id)
        self._opened_ns.pop(session_id, None)
        _log.info("session %d ended", session_id)
        return True

    def _check(self, session_id: int, secret: bytes) -> None:
        # The number comes from outside, and a decoder of 32-bit fields lets longer ones pass.
        known = None
        if 0 < session_id <= MAX_SESSIONS:
            known = self._pool.session_secret_hash(session_id)
        if known is None or not hmac.compare_digest(known, secret_hash(secret)):
            raise NoSuchSession(session_id)
