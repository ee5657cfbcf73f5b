"""A client of a pool, as the facade uses it.

Operations now or later, health, counters, the end.

    OPEN ──close──▶ CLOSING ──(what runs has ended)──▶ CLOSED
      └──fork──▶ (in the child) refuses everything
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ems.client import operations
from ems.client.core import Core
from ems.client.schedule import Kind
from ems.client.session import Session
from ems.common.config import ClientSettings
from ems.common.deadline import Deadline
from ems.common.exception import EmsErrorCode, EmsException, invalid_argument
from ems.common.result import CcResult
from ems.devices.base import Device
from ems.devices.registry import open_device
from ems.future import CcFuture
from ems.home import HomeLoop, forked_error, keep_from_child
from ems.rpc.channel import Credentials

if TYPE_CHECKING:
    from ems_native._copy import CancelFlag, Spans

__all__ = ["Client"]


def closed_error() -> EmsException:
    """Make the exception for the use of a client after its end."""
    return invalid_argument("EMS was closed; call Ems.init, then take the new object of Ems.get_cc")


class Client:
    """Thread-safe. Made by `Client.open`.

    Args:
        home: runs already; the client stops it at its end.
        session: opened already.
        core: of the same loop.
    """

    def __init__(self, home: HomeLoop, session: Session, core: Core) -> None:
        self._home = home
        self._session = session
        self._core = core
        self._refusal: Callable[[], EmsException] | None = None
        # Operations in callers' threads, with the thread of each.
        self._running: dict[object, int] = {}
        self._left = threading.Condition()
        self._closing = threading.Lock()
        self._release = keep_from_child(self._forget)

    @classmethod
    def open(cls, settings: ClientSettings, version: str) -> Client:
        """Attach to the server of a root.

        Args:
            settings: where, and as whom.
            version: of this client.

        Raises:
            EmsException: as `Session.open`; nothing is left behind.
        """
        credentials = None
        if settings.access_id is not None and settings.access_key is not None:
            credentials = Credentials(settings.access_id, settings.access_key)
        device: Device = open_device("cpu")
        deadline = Deadline.after_ms(settings.init_timeout_ms)
        home = HomeLoop()
        home.start()
        try:
            session = Session(home, settings.root, credentials, device, version)
            try:
                home.run(session.open, deadline, timeout_s=deadline.remaining_s() + 0.2)
            except TimeoutError as error:
                raise EmsException(
                    EmsErrorCode.EMS_RECOVERD_ERROR,
                    f"no attachment within {settings.init_timeout_ms} ms; "
                    "wait until the EMS server is healthy, then call Ems.init again",
                ) from error
            home.spawn(session.watch)
            return cls(home, session, Core(home))
        except BaseException:
            home.stop()
            raise

    # ---- operations ----

    def load(self, digests: bytes, spans: Spans, deadline: Deadline) -> CcResult:
        """Load in the caller's thread; see `operations.load`."""
        token = object()
        self._running[token] = threading.get_ident()
        try:
            if self._refusal is not None:
                raise self._refusal()
            return self._load(digests, spans, deadline, None)
        finally:
            self._running.pop(token, None)
            if self._refusal is not None:
                self._tell_left()

    def save(self, digests: bytes, spans: Spans, deadline: Deadline, *, replace: bool) -> CcResult:
        """Save in the caller's thread; see `operations.save`."""
        with self._entered():
            return self._save(digests, spans, deadline, replace, None)

    def load_later(self, digests: bytes, spans: Spans, deadline: Deadline) -> CcFuture:
        """Load in a copy worker."""
        with self._entered():
            return self._core.submit(
                Kind.LOAD,
                spans.nbytes,
                lambda cancel: self._load(digests, spans, deadline, cancel),
                deadline,
            )

    def save_later(
        self, digests: bytes, spans: Spans, deadline: Deadline, *, replace: bool
    ) -> CcFuture:
        """Save in a copy worker."""
        with self._entered():
            return self._core.submit(
                Kind.SAVE,
                spans.nbytes,
                lambda cancel: self._save(digests, spans, deadline, replace, cancel),
                deadline,
            )

    # ---- the rest ----

    def check_usable(self) -> None:
        """Raise when the client was closed, or belongs to the parent of this process."""
        if self._refusal is not None:
            raise self._refusal()

    def healthy(self) -> bool:
        """Whether data calls work; see `Session.healthy`."""
        return self._refusal is None and self._session.healthy()

    def counters(self) -> list[int]:
        """Return what was counted, by `Count`."""
        return self._session.counters()

    def close(self) -> None:
        """Join what runs, end what waits, end the session; idempotent.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT` in a thread that the client itself waits for.
        """
        self._check_may_wait()
        with self._closing:
            if self._refusal is not None:
                return
            self._refusal = closed_error
            with self._left:
                self._left.wait_for(lambda: not self._running)
            self._core.close()
            self._home.run(self._session.close)
            self._home.stop()
            self._release()

    def _check_may_wait(self) -> None:
        mine = threading.get_ident()
        if (
            self._home.is_current_thread
            or self._core.owns_current_thread
            or mine in list(self._running.values())
        ):
            raise invalid_argument(
                "Ems.close() waits for operations, so it cannot be called inside one "
                "(in a callback of a CcFuture, for example)"
            )

    def _load(
        self, digests: bytes, spans: Spans, deadline: Deadline, cancel: CancelFlag | None
    ) -> CcResult:
        context = self._session.context
        nkeys = spans.nkeys
        if context is None:  # between two pools: everything is a miss
            return CcResult(0, nkeys)
        return CcResult(operations.load(context, digests, spans, deadline, cancel), nkeys)

    def _save(
        self,
        digests: bytes,
        spans: Spans,
        deadline: Deadline,
        replace: bool,
        cancel: CancelFlag | None,
    ) -> CcResult:
        context = self._session.writable(deadline)
        there = operations.save(context, digests, spans, deadline, cancel, replace=replace)
        return CcResult(there, spans.nkeys)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        # Entered first, looked second; close() does it the other way round, so that one of the
        # two sees the other.
        token = object()
        self._running[token] = threading.get_ident()
        try:
            if self._refusal is not None:
                raise self._refusal()
            yield
        finally:
            self._running.pop(token, None)
            if self._refusal is not None:
                self._tell_left()

    def _tell_left(self) -> None:
        if self._refusal is forked_error:
            return  # the lock may be held for ever by a thread that the child does not have
        with self._left:
            self._left.notify_all()

    def _forget(self) -> None:
        self._refusal = forked_error
        self._running.clear()
        self._session.forget()
