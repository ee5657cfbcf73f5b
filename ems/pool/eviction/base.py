"""The seam between the pool and its eviction policy."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ems_native._index import Writer


class Evicted(NamedTuple):
    """What one round of eviction gave back: 4 KiB units, and entries withdrawn."""

    units: int
    entries: int


class EvictionPolicy(Protocol):
    """Chooses victims and has the index withdraw them."""

    def evict(self, index: Writer, units: int) -> Evicted:
        """Withdraw entries until `units` came back or nothing is left to evict.

        Args:
            index: the pool's writer; reservations are never touched by it.
            units: how much is wanted, in units of 4 KiB.
        """

    def prepare(self, index: Writer) -> None:
        """Do what the next eviction would have to do first: one bounded step."""
