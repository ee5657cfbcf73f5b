"""Pinned memory of this process, where copies from a device land before the CPU takes them on.

    free ──take──▶ taken ──give──▶ free
                     └──quarantine──▶ quarantined ──(its stream is done)──▶ free

A device may still write when the process that asked for it has given up or died: it writes here,
and never into memory that somebody else may be given. Registered by nobody else, mapped by nobody
else.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ems_native._acl import Runtime

__all__ = ["Buffer", "Staging"]

SMALLEST_BYTES = 1 << 20
MOST_FREE = 4
"""Buffers kept for the next copy; pinned memory is dear."""

_log = logging.getLogger("ems.devices")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A piece of pinned memory."""

    address: int
    nbytes: int


class Staging:
    """The buffers of one device. Thread-safe.

    Args:
        runtime: allocates them.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._free: list[Buffer] = []
        self._quarantined: list[tuple[Buffer, Callable[[], bool]]] = []

    @property
    def quarantined(self) -> int:
        """How many buffers a device may still write to."""
        return len(self._quarantined)

    def take(self, nbytes: int, inside: Callable[[Callable[[int], int], int], int]) -> Buffer:
        """Return a buffer of at least `nbytes`.

        Args:
            nbytes: wanted.
            inside: makes a call for the device.

        Raises:
            DeviceError: there is no pinned memory left.
        """
        self._release()
        with self._lock:
            for at, buffer in enumerate(self._free):
                if buffer.nbytes >= nbytes:
                    return self._free.pop(at)
        size = max(SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
        return Buffer(inside(self._runtime.allocate, size), size)

    def give(self, buffer: Buffer) -> None:
        """Give back a buffer that nobody writes to."""
        with self._lock:
            self._free.append(buffer)
            surplus = self._free.pop(0) if len(self._free) > MOST_FREE else None
        if surplus is not None:
            self._runtime.free(surplus.address)

    def quarantine(self, buffer: Buffer, ended: Callable[[], bool]) -> None:
        """Keep a buffer from everybody until `ended` is true; it is asked now and then."""
        with self._lock:
            self._quarantined.append((buffer, ended))
        _log.warning(
            "%d bytes of staging memory are set aside: a copy failed or hangs", buffer.nbytes
        )

    def close(self) -> None:
        """Free everything that no device can write to any more."""
        self._release()
        with self._lock:
            buffers, self._free = self._free, []
        for buffer in buffers:
            self._runtime.free(buffer.address)

    def _release(self) -> None:
        if not self._quarantined:
            return
        with self._lock:
            waiting, self._quarantined = self._quarantined, []
        for buffer, ended in waiting:
            if ended():
                self.give(buffer)
            else:
                with self._lock:
                    self._quarantined.append((buffer, ended))
