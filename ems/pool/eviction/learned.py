"""Keep what is likely to be used again soon, and never do much worse than least recently used.

The index counts how long keys wait for their next use, by class and age, and so gives each entry a
value (see `ems_native/csrc/history.h`). Whether values beat recency is measured, not believed: an
entry, here or gone, that was used again before it reached the age down to which LRU would have kept
entries is a hit that LRU would have had. When our hits fall behind 99 % of those, recency decides
until that is made good.
"""

from __future__ import annotations

from ems.pool.eviction.listing import Listing
from ems_native._index import Writer

__all__ = ["LearnedValue"]

LESSON_EVERY = 2  # surveys, so about an eighth of the entries
FADE = 0.01  # of what was learned is forgotten at each lesson
REUSES_AT_LEAST = 100
LRU_SHARE = 0.99
# In pool-fulls: hits lost to LRU, and keys that it would hold and we do not, which may follow. What
# LRU is behind counts for one pool-full at most: what once went well is no licence for long.
GIVE_UP = 0.5
TRY_AGAIN = 0.25


class LearnedValue(Listing):
    """Evicts first what promises the fewest uses for its stay, while that proves better than LRU.

        recency --enough learned, little at stake--> value --too much at stake--> recency

    Deterministic. The state per entry is in the index.
    """

    def __init__(self, buckets: int) -> None:
        super().__init__(buckets)
        self._surveys = 0
        self._reuses = 0.0
        self._lost = 0.0
        self._trusted = False

    @property
    def by_value(self) -> bool:
        """Whether values have proved good."""
        return self._trusted

    def surveyed(self, index: Writer) -> None:
        """See how it went, and learn now and then."""
        self._surveys += 1
        if self._surveys % LESSON_EVERY == 0:
            self._reuses = index.learn(FADE)
        hits, lru_hits, missing = index.tally()
        lost = (LRU_SHARE * lru_hits - hits) / max(index.space()[4], 1)
        self._lost = min(max(self._lost + lost, -1.0), 1.0)
        limit = GIVE_UP if self._trusted else TRY_AGAIN
        self._trusted = self._reuses >= REUSES_AT_LEAST and self._lost + missing < limit
