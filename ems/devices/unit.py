"""One physical device of a runtime: its copy streams, events and staging memory."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from ems.devices.base import CopyEnd, DeviceError, NoContextError
from ems.devices.staging import Buffer, Staging

if TYPE_CHECKING:
    from ems.devices.limits import Limits
    from ems_native._acl import Runtime

__all__ = ["Lane", "Thread", "Unit"]

REGISTRATIONS = ("not registered", "mapped", "pinned")
"""What `Runtime.register` returns."""

_T = TypeVar("_T")
_log = logging.getLogger("ems.devices")


class Thread:
    """Calls of a runtime in the current thread, in the context of one device.

    A thread of the caller gets the device back that it had. Where the runtime allows it, nothing is
    asked or changed before a call says that it needs to: a batch then costs no call for it.

    Args:
        runtime: to call.
        device: to enter.
        certainly: enter it at once.
    """

    def __init__(self, runtime: Runtime, device: int, certainly: bool = False) -> None:
        self._runtime = runtime
        self._device = device
        self._certainly = certainly or not runtime.context_lazily
        self._previous: int | None = None

    def __enter__(self) -> Thread:
        if self._certainly:
            self._previous = self._runtime.enter(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            self._runtime.leave(self._previous)

    def inside(self, function: Callable[..., _T], *arguments: object) -> _T:
        """Call what makes something of the current device, whichever that is."""
        if self._previous is None:
            self._previous = self._runtime.enter(self._device)
        return function(*arguments)

    def call(self, function: Callable[..., _T], *arguments: object) -> _T:
        """Call with a stream or an event; once more inside the device if that is what it takes."""
        try:
            return function(*arguments)
        except NoContextError:
            if self._previous is not None:
                raise
            self._previous = self._runtime.enter(self._device)
            return function(*arguments)


class Lane:
    """The copy stream of one direction, for one operation at a time.

    A stream that failed, was aborted or hangs is replaced; the next operation knows nothing of it.

    Args:
        runtime: the stream is of.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._stream = 0

    @contextlib.contextmanager
    def held(self, limits: Limits) -> Iterator[CopyEnd]:
        """Hold the lane, or learn why not in time."""
        why = limits.acquire(self._lock)
        try:
            yield why
        finally:
            if not why:
                self._lock.release()

    def stream(self, thread: Thread) -> int:
        """Return the stream; the lane is held."""
        if not self._stream:
            self._stream = thread.inside(self._runtime.create_stream)
        return self._stream

    def end(self, thread: Thread) -> None:
        """Let nothing be under way when this returns, however long that takes."""
        stream, self._stream = self._stream, 0
        if not stream:
            return
        with contextlib.suppress(DeviceError):
            thread.call(self._runtime.abort, stream)
        with contextlib.suppress(DeviceError):  # aborted, or failed: ended
            thread.call(self._runtime.synchronize, stream, -1)
        with contextlib.suppress(DeviceError):
            thread.call(self._runtime.destroy_stream, stream)

    def abandon(self, device: int) -> Callable[[], bool]:
        """Give the stream up; return a function that says whether it is done by now."""
        stream, self._stream = self._stream, 0
        runtime = self._runtime

        def ended() -> bool:
            with Thread(runtime, device) as thread:
                try:
                    if not thread.call(runtime.synchronize, stream, 1):
                        return False
                except DeviceError:
                    pass  # failed: ended
                with contextlib.suppress(DeviceError):
                    thread.call(runtime.destroy_stream, stream)
            return True

        return ended


class Unit:
    """What EMS holds of one device. Thread-safe.

    Args:
        runtime: it belongs to.
        device: its number there.
        segments: mappings of the pool, address and size; shared with the owner, who changes it.
    """

    def __init__(self, runtime: Runtime, device: int, segments: dict[int, int]) -> None:
        self.device = device
        self.to_host = Lane(runtime)
        self.to_device = Lane(runtime)
        self.staging = Staging(runtime)
        self._runtime = runtime
        self._segments = segments
        self._registered: dict[int, int] = {}
        self._events: list[int] = []
        self._lock = threading.Lock()
        with self.entered(certainly=True):
            self._default_stream = runtime.default_stream()

    @property
    def registrations(self) -> dict[int, str]:
        """How each mapping of the pool is known to the device."""
        return {address: REGISTRATIONS[how] for address, how in self._registered.items()}

    def entered(self, certainly: bool = False) -> Thread:
        """Make calls for the device in this thread."""
        return Thread(self._runtime, self.device, certainly)

    def record(self, stream: int | None) -> int:
        """Return an event behind what a stream (None: the default one) has to do until now."""
        if stream is None:
            stream = self._default_stream
        # Without a handle the default stream is that of whatever device the thread is in.
        with self.entered(certainly=stream == 0) as thread:
            try:
                event = self._events.pop()
            except IndexError:
                event = thread.inside(self._runtime.create_event)
            thread.call(self._runtime.record, event, stream)
            return event

    def release_event(self, event: int) -> None:
        """Take an event back that nobody waits for."""
        self._events.append(event)

    def register(self, thread: Thread) -> None:
        """Make the pool known to the device, as far as it is not yet."""
        if self._registered.keys() == self._segments.keys():
            return
        with self._lock:
            for address, nbytes in list(self._segments.items()):
                if address in self._registered:
                    continue
                try:
                    self._registered[address] = thread.inside(
                        self._runtime.register, address, nbytes
                    )
                except DeviceError as error:
                    # Copies work all the same; only that their calls wait for them.
                    self._registered[address] = 0
                    _log.info("the pool is not registered with device %d: %s", self.device, error)

    def unregister(self, address: int) -> None:
        """Forget a mapping of the pool."""
        with self._lock:
            if self._registered.pop(address, 0):
                with contextlib.suppress(DeviceError), self.entered() as thread:
                    thread.inside(self._runtime.unregister, address)

    def abandon(self, buffer: Buffer) -> None:
        """Set a buffer aside that the device may still write to; the lane to the host is held."""
        self.staging.quarantine(buffer, self.to_host.abandon(self.device))

    def close(self) -> None:
        """Give everything back; no copy may be running."""
        for address in list(self._registered):
            self.unregister(address)
        with contextlib.suppress(DeviceError), self.entered(certainly=True) as thread:
            for lane in (self.to_host, self.to_device):
                lane.end(thread)
            events, self._events = self._events, []
            for event in events:
                self._runtime.destroy_event(event)
            self.staging.close()
