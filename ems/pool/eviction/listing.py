"""Victims are listed in batches, so that many evictions share the cost of a look at the index.

Before an entry is evicted its recency word is compared with the listed one: what was used since is
skipped. Up to `SEGMENT_BUCKETS` the order is exact. A larger index is looked at a segment at a
time: keys are spread by a uniform digest, so that a segment is a fair sample, and its worst
thirty-second are among the worst of all. Of a very large index an eighth is listed: the order is
coarser (worth .005 of the hits on a trace of conversations), and a batch of thousands of small
values finds its victims within a step of the server's loop.
"""

from __future__ import annotations

from ems.pool.eviction.base import Evicted
from ems_native._index import LAYOUT, Writer

SEGMENT_BUCKETS = LAYOUT["SEGMENT_BUCKETS"]  # 32,768 slots, a millisecond to look at
LISTED_SHARE = 32
LISTED_SHARE_OF_MANY = 8
MANY_SEGMENTS = 8
LISTED_AT_LEAST = 16
SURVEY_EVERY = 2  # lists, so about a sixteenth of the entries


class Listing:
    """Evicts from a list of the worst entries, and makes the next list when it is used up.

    Subclasses say what is worst. Deterministic; no state per entry.
    """

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._hand = 0
        self._round = 0
        self._slots = b""
        self._marks = b""
        self._next = 0

    @property
    def by_value(self) -> bool:
        """Whether the learned value of an entry counts before its recency."""
        raise NotImplementedError

    def surveyed(self, index: Writer) -> None:
        """All buckets have been surveyed since the last call."""

    def evict(self, index: Writer, units: int) -> Evicted:
        """See `EvictionPolicy.evict`."""
        got_units = got_entries = 0
        lists_left = 2 + 2 * (self._buckets // SEGMENT_BUCKETS)
        while got_units < units:
            if self._used_up:
                if lists_left == 0:
                    break
                lists_left -= 1
                self._list_worst(index)
                continue
            self._next, freed, evicted = index.evict(
                self._slots, self._marks, self._next, units - got_units
            )
            got_units += freed
            got_entries += evicted
        return Evicted(got_units, got_entries)

    def prepare(self, index: Writer) -> None:
        """See `EvictionPolicy.prepare`."""
        if self._used_up:
            self._list_worst(index)

    @property
    def _used_up(self) -> bool:
        return 8 * self._next >= len(self._slots)

    def _list_worst(self, index: Writer) -> None:
        segment = min(SEGMENT_BUCKETS, self._buckets - self._hand)
        surveyed = self._round % SURVEY_EVERY == 0
        index.lift(self._hand, segment)
        if surveyed:
            index.survey(self._hand, segment)
        many = self._buckets >= MANY_SEGMENTS * SEGMENT_BUCKETS
        listed = LISTED_SHARE_OF_MANY if many else LISTED_SHARE
        share = index.space()[4] * segment // self._buckets // listed
        self._slots, self._marks = index.worst(
            self._hand, segment, max(share, LISTED_AT_LEAST), self.by_value
        )
        self._next = 0
        self._hand += segment
        if self._hand >= self._buckets:
            self._hand = 0
            self._round += 1
            if surveyed:
                self.surveyed(index)
