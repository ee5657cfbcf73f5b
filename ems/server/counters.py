"""The counters that clients keep in shared memory: a page a session, page 0 for ended ones.

Any process that has the pool mapped can write there, so every sum is modulo 2**64, as the counters
are themselves: figures may be nonsense then, the server goes on.
"""

from __future__ import annotations

from collections.abc import Collection

from ems.common.metrics import PAGE_COUNTERS
from ems_native._index import LAYOUT
from ems_native._shm import Counters

__all__ = ["CounterPages"]

_PAGE_BYTES = LAYOUT["COUNTERS_PAGE"]
_TOTALS_OFFSET = 512
"""Page 0 is no session's. It begins with the file's prologue; the totals lie behind."""
_MODULUS = 1 << 64


class CounterPages:
    """The counters file of a pool. Its mapping must outlive the object.

    Args:
        address: of the mapping.
        count: number of pages.
    """

    def __init__(self, address: int, count: int) -> None:
        self._totals = Counters(address + _TOTALS_OFFSET, PAGE_COUNTERS)
        self._pages = [
            Counters(address + page * _PAGE_BYTES, PAGE_COUNTERS) for page in range(1, count)
        ]

    def clear(self, session_id: int) -> None:
        """Start a new session at zero."""
        self._pages[session_id - 1].clear()

    def fold(self, session_id: int) -> None:
        """Add what an ended session counted to the totals, and clear its page."""
        page = self._pages[session_id - 1]
        for index, value in enumerate(page.snapshot()):
            if value:
                self._totals.add(index, value - (value >> 63 << 64))  # takes a signed number
        page.clear()

    def fold_all_but(self, living: Collection[int]) -> None:
        """Fold the pages of sessions that are not open: they ended while no server ran."""
        for session_id in range(1, len(self._pages) + 1):
            if session_id not in living:
                self.fold(session_id)

    def total(self, living: Collection[int]) -> list[int]:
        """Return each counter, summed over ended and open sessions."""
        sums = self._totals.snapshot()
        for session_id in living:
            for index, value in enumerate(self._pages[session_id - 1].snapshot()):
                sums[index] = (sums[index] + value) % _MODULUS
        return sums
