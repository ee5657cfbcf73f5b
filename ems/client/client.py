"""A client of a pool, as the facade uses it.

Operations now or later, health, counters, the end.

    OPEN ──close──▶ CLOSING ──(what runs has ended)──▶ CLOSED
      └──fork──▶ (in the child) refuses everything
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ems.client import operations
from ems.client.core import Core
from ems.client.profile import Profiler, Record
from ems.client.schedule import Kind
from ems.client.session import Session
from ems.client.stripes import Share
from ems.common.config import ClientSettings
from ems.common.deadline import Deadline
from ems.common.exception import EmsErrorCode, EmsException, invalid_argument
from ems.common.result import CcResult
from ems.devices.base import Copier, Device
from ems.devices.registry import chosen_device
from ems.future import CcFuture
from ems.home import HomeLoop, forked_error, keep_from_child
from ems.rpc.channel import Credentials

if TYPE_CHECKING:
    from ems_native._copy import Arrivals, CancelFlag, Spans

__all__ = ["Client", "Counted"]

Counted = Callable[[int], CcResult]
"""Makes of a number of keys what the caller is told."""


def closed_error() -> EmsException:
    """Make the exception for the use of a client after its end."""
    return invalid_argument("EMS was closed; call Ems.init, then take the new object of Ems.get_cc")


class Client:
    """Thread-safe. Made by `Client.open`.

    Args:
        home: runs already; the client stops it at its end.
        session: opened already.
        core: of the same loop.
        device: that the session's mappings are registered with.
        profiler: writes a line per call; None for no profile.
    """

    def __init__(
        self,
        home: HomeLoop,
        session: Session,
        core: Core,
        device: Device,
        profiler: Profiler | None = None,
    ) -> None:
        self._home = home
        self._device = device
        self._profiler = profiler
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
        device = chosen_device()
        if settings.verify:
            device.verify_too()
        deadline = Deadline.after_ms(settings.init_timeout_ms)
        home = HomeLoop()
        home.start()
        try:
            session = Session(home, settings.root, credentials, device, version, settings.verify)
            try:
                home.run(session.open, deadline, timeout_s=deadline.remaining_s() + 0.2)
            except TimeoutError as error:
                raise EmsException(
                    EmsErrorCode.EMS_RECOVERD_ERROR,
                    f"no attachment within {settings.init_timeout_ms} ms; "
                    "wait until the EMS server is healthy, then call Ems.init again",
                ) from error
            home.spawn(session.watch)
            profiler = Profiler.from_environment(os.environ)
            return cls(home, session, Core(home), device, profiler)
        except BaseException:
            home.stop()
            device.close()
            raise

    # ---- operations ----

    def load(
        self, digests: bytes, spans: Spans, deadline: Deadline, counted: Counted | None = None
    ) -> CcResult:
        """Load in the caller's thread; see `operations.load`.

        Args:
            digests: 16 bytes a key.
            spans: where the values go.
            deadline: of the call.
            counted: makes the result of the number of keys; None for keys of keys.
        """
        token = object()
        self._running[token] = threading.get_ident()
        try:
            if self._refusal is not None:
                raise self._refusal()
            copier = self._device.admit(spans)
            if self._profiler is not None:
                record = self._profiler.record("load", spans.nkeys, spans.nbytes)
                return _noted(
                    record,
                    lambda: self._load(copier, digests, spans, deadline, None, counted, record),
                )
            return self._load(copier, digests, spans, deadline, None, counted)
        finally:
            self._running.pop(token, None)
            if self._refusal is not None:
                self._tell_left()

    def save(
        self,
        digests: bytes,
        spans: Spans,
        deadline: Deadline,
        *,
        replace: bool,
        share: Share | None = None,
        counted: Counted | None = None,
    ) -> CcResult:
        """Save in the caller's thread; see `operations.save`, and `load` for `counted`."""
        token = object()
        self._running[token] = threading.get_ident()
        try:
            if self._refusal is not None:
                raise self._refusal()
            copier = self._device.admit(spans)
            if self._profiler is not None:
                record = self._profiler.record("save", spans.nkeys, spans.nbytes)
                return _noted(
                    record,
                    lambda: self._save(
                        copier, digests, spans, deadline, replace, None, share, counted, record
                    ),
                )
            return self._save(copier, digests, spans, deadline, replace, None, share, counted, None)
        finally:
            self._running.pop(token, None)
            if self._refusal is not None:
                self._tell_left()

    def load_later(
        self,
        digests: bytes,
        spans: Spans,
        deadline: Deadline,
        counted: Counted | None = None,
        arrivals: Arrivals | None = None,
    ) -> CcFuture:
        """Load in a copy worker; see `operations.load` for `arrivals`."""
        with self._entered():
            copier = self._device.admit(spans)
            record = self._record("load", spans)
            future = self._core.submit(
                Kind.LOAD,
                spans.nbytes,
                lambda cancel: self._load(
                    copier, digests, spans, deadline, cancel, counted, record, arrivals
                ),
                deadline,
            )
            return _noted_later(record, future)

    def save_later(
        self,
        digests: bytes,
        spans: Spans,
        deadline: Deadline,
        *,
        replace: bool,
        share: Share | None = None,
        counted: Counted | None = None,
    ) -> CcFuture:
        """Save in a copy worker."""
        with self._entered():
            copier = self._device.admit(spans)
            record = self._record("save", spans)
            future = self._core.submit(
                Kind.SAVE,
                spans.nbytes,
                lambda cancel: self._save(
                    copier, digests, spans, deadline, replace, cancel, share, counted, record
                ),
                deadline,
            )
            return _noted_later(record, future)

    def exists(self, digests: bytes) -> int:
        """Return how many keys in a row are in the pool; see `operations.exists`."""
        with self._entered():
            context = self._session.context
            if context is None:  # between two pools
                return 0
            if self._profiler is None:
                return operations.exists(context, digests)
            record = self._profiler.record("exists", len(digests) // 16, 0)
            record.started(context)
            found = operations.exists(context, digests)
            record.finished(CcResult(found, len(digests) // 16))
            return found

    def adopt_device(self, device: str) -> None:
        """Prepare for memory of a device, named as tensors name it: "cpu", "npu:0", ...

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT` when this client cannot copy from and to it.
        """
        kinds = self._device.kinds
        if device.partition(":")[0] not in kinds:
            raise invalid_argument(
                f"kvcache is on device {device}; this client copies memory of {' and '.join(kinds)}"
                " (see `ems doctor` and EMS_DEVICE)"
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
            try:
                self._core.close()
                self._home.run(self._session.close)
            finally:
                self._home.stop()
                self._device.close()
                self._release()
                if self._profiler is not None:
                    self._profiler.close()

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
        self,
        copier: Copier,
        digests: bytes,
        spans: Spans,
        deadline: Deadline,
        cancel: CancelFlag | None,
        counted: Counted | None,
        record: Record | None = None,
        arrivals: Arrivals | None = None,
    ) -> CcResult:
        context = self._session.context
        nkeys = hits = spans.nkeys
        if context is None:  # between two pools: everything is a miss
            hits = 0
        else:
            if copier is not context.device:
                context = dataclasses.replace(context, device=copier)
            if record is not None:
                context = record.started(context)
            hits = operations.load(context, digests, spans, deadline, cancel, arrivals)
        return CcResult(hits, nkeys) if counted is None else counted(hits)

    def _save(
        self,
        copier: Copier,
        digests: bytes,
        spans: Spans,
        deadline: Deadline,
        replace: bool,
        cancel: CancelFlag | None,
        share: Share | None,
        counted: Counted | None,
        record: Record | None,
    ) -> CcResult:
        context = self._session.writable(deadline)
        if copier is not context.device:
            context = dataclasses.replace(context, device=copier)
        if record is not None:
            context = record.started(context)
        there = operations.save(
            context, digests, spans, deadline, cancel, replace=replace, share=share
        )
        return CcResult(there, spans.nkeys) if counted is None else counted(there)

    def _record(self, operation: str, spans: Spans) -> Record | None:
        if self._profiler is None:
            return None
        return self._profiler.record(operation, spans.nkeys, spans.nbytes)

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
        self._device.forget()


def _noted(record: Record | None, call: Callable[[], CcResult]) -> CcResult:
    """Call, and finish the record with what came of it."""
    if record is None:
        return call()
    try:
        result = call()
    except BaseException as error:
        record.finished(error)
        raise
    record.finished(result)
    return result


def _noted_later(record: Record | None, future: CcFuture) -> CcFuture:
    """Have the record finished when the future is."""
    if record is not None:
        note = record

        def finish(done: CcFuture) -> None:
            try:
                note.finished(done.result())
            except EmsException as error:
                cancelled = done.cancelled()
                note.finished(asyncio.CancelledError() if cancelled else error)

        future.add_done_callback(finish)
    return future
