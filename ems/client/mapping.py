"""A pool as one client sees it: the files it mapped, and the lock that says it lives.

It is closed when the last operation that uses it has ended: nobody counts, the reference that each
of them has does it.
"""

from __future__ import annotations

import contextlib
import os

from ems.common.metrics import PAGE_COUNTERS
from ems.devices.base import Device
from ems.shm import layout
from ems.shm.liveness import LivenessLock
from ems.shm.segment import Segment
from ems_native import _shm
from ems_native._index import LAYOUT, Reader

__all__ = ["Mapping", "PoolChanged"]

# Page tables cost 2 MiB per GiB of small pages, and touching them takes a quarter of a second.
SMALL_PAGE_WINDOW_BYTES = 256 << 20
QUICK_BYTES = 2 << 30
"""Of huge pages, entered in a millisecond or two: worth waiting for before the first copy."""
_HUGE = (LAYOUT["PAGE_HUGE"], LAYOUT["PAGE_HUGETLB"])


class PoolChanged(Exception):
    """The files in the root are not those of the pool that was attached to."""


class Mapping:
    """Index (read-only), recency marks, counters and data of a pool, mapped; its session's lock.

    Args:
        root: directory of the server.
        pool_id: as the attach named it, hexadecimal.
        session_id: the byte to lock, the page of counters to use.
        device: the data is registered with it.

    Raises:
        PoolChanged: see there; attach again.
        OSError: a file cannot be opened or mapped.
        ValueError: the index is none that this version reads.
    """

    def __init__(self, root: str, pool_id: str, session_id: int, device: Device) -> None:
        self.pool_id = pool_id
        self.session_id = session_id
        self._device = device
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            # The lock goes last, so it is given up when nothing is mapped any more.
            self._lock = stack.enter_context(
                contextlib.closing(
                    LivenessLock(os.path.join(root, layout.SESSIONS_LOCK), session_id)
                )
            )
            index = stack.enter_context(_opened(root, layout.INDEX, writable=False))
            recency = stack.enter_context(_opened(root, layout.RECENCY, writable=True))
            counters = stack.enter_context(_opened(root, layout.COUNTERS, writable=True))
            self._data = stack.enter_context(_opened(root, layout.DATA, writable=True))
            self.reader = Reader(index.address, index.nbytes, recency.address)
            if self.reader.header()["pool_id"] != pool_id:
                raise PoolChanged(f"pool {pool_id} was replaced")
            page = counters.address + session_id * LAYOUT["COUNTERS_PAGE"]
            self.counters = _shm.Counters(page, PAGE_COUNTERS)
            self.data = self._data.address
            device.register(self.data, self._data.nbytes)
            stack.callback(device.unregister, self.data, self._data.nbytes)
            self._closing = stack.pop_all()

    def close(self) -> None:
        """Unmap everything, then give up the lock; idempotent. Nobody may use the mapping now."""
        self._closing.close()

    def __del__(self) -> None:
        self.close()

    def populate(self, *, quick: bool = False) -> None:
        """Enter what is ready into the page tables, so that the first copies need not; may block.

        All of it if its pages are huge, else a window; `quick`: only what takes a moment.
        """
        header = self.reader.header()
        most = self._data.nbytes
        if header["page_kind"] not in _HUGE:
            most = min(most, 0 if quick else SMALL_PAGE_WINDOW_BYTES)
        elif quick:
            most = min(most, QUICK_BYTES)
        if most:
            ready = LAYOUT["DATA_START"] + header["ready_bytes"]
            _shm.populate(self.data, min(most, ready), True)


def _opened(root: str, name: str, *, writable: bool) -> contextlib.closing[Segment]:
    return contextlib.closing(Segment.open(os.path.join(root, name), writable))
