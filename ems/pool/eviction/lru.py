"""Least recently used, by the recency words that readers leave behind."""

from __future__ import annotations

from ems.pool.eviction.listing import Listing

__all__ = ["LeastRecentlyUsed"]


class LeastRecentlyUsed(Listing):
    """Evicts the least recently used entries first.

    A later key of a batch carries an older mark, so that a chain loses its tail first.
    """

    @property
    def by_value(self) -> bool:
        """Recency alone counts."""
        return False
