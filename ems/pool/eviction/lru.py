"""Least recently used, by the recency words that readers leave behind.

The oldest entries are listed in batches, so that the cost of a scan is shared by many evictions;
before one is evicted its word is compared with the listed one: whoever was used since is skipped.
Up to `SEGMENT_BUCKETS` the order is exact. A larger index is scanned a segment at a time: keys are
spread by a uniform digest, so that a segment is a fair sample and its oldest thirty-second are
among the oldest of all. A later key of a batch carries an older mark, so that a chain loses its
tail first.
"""

from __future__ import annotations

from ems.pool.eviction.base import Evicted
from ems_native._index import Writer

SEGMENT_BUCKETS = 32768  # 262,144 slots, about 4 ms to scan
LISTED_SHARE = 32
LISTED_AT_LEAST = 16


class LeastRecentlyUsed:
    """Evicts the least recently used entries first. Deterministic; no state per entry."""

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._hand = 0
        self._slots = b""
        self._marks = b""
        self._next = 0

    def evict(self, index: Writer, units: int, largest: int = 0) -> Evicted:
        """See `EvictionPolicy.evict`."""
        got_units = got_entries = 0
        lists_left = 2 + 2 * (self._buckets // SEGMENT_BUCKETS)
        while got_units < units:
            if 8 * self._next >= len(self._slots):
                if lists_left == 0:
                    break
                lists_left -= 1
                self._list_oldest(index)
                continue
            self._next, freed, evicted = index.evict(
                self._slots, self._marks, self._next, units - got_units, largest
            )
            got_units += freed
            got_entries += evicted
        return Evicted(got_units, got_entries)

    def _list_oldest(self, index: Writer) -> None:
        segment = min(SEGMENT_BUCKETS, self._buckets)
        if self._hand >= self._buckets:
            self._hand = 0
        share = index.space()[4] * segment // self._buckets // LISTED_SHARE
        self._slots, self._marks = index.oldest(self._hand, segment, max(share, LISTED_AT_LEAST))
        self._hand += segment
        self._next = 0
