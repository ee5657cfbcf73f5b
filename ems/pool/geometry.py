"""How large the files of a pool are, from its capacity and its number of slots."""

from __future__ import annotations

from dataclasses import dataclass

from ems_native._index import LAYOUT

_PAGE = 4096
_HUGE_PAGE = 2 << 20
MIN_SLOTS = 16
MAX_SLOTS = (1 << 31) - 64
MAX_CAPACITY = (1 << 31) * LAYOUT["UNIT"] - _HUGE_PAGE
MIN_RESERVATIONS = 4096
MAX_RESERVATIONS = 65536


@dataclass(frozen=True)
class Geometry:
    """Sizes in bytes of the files of one pool; `slots` counts entries, eight to a bucket."""

    capacity: int
    data_bytes: int
    slots: int
    reservations: int
    index_bytes: int
    recency_bytes: int
    counters_bytes: int

    @property
    def total_bytes(self) -> int:
        """Shared memory that the pool takes altogether."""
        return self.data_bytes + self.index_bytes + self.recency_bytes + self.counters_bytes


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def geometry(capacity: int, entries: int) -> Geometry:
    """The geometry of a pool of `capacity` bytes with at least `entries` slots.

    The data file begins with one huge page for its prologue, so that extents are aligned to huge
    pages. `geometry(g.capacity, g.slots) == g`.

    Raises:
        ValueError: a size is outside what the format can hold.
    """
    capacity -= capacity % LAYOUT["UNIT"]
    if not LAYOUT["UNIT"] <= capacity <= MAX_CAPACITY:
        raise ValueError(
            f"capacity is {capacity} bytes, it must be {LAYOUT['UNIT']} to {MAX_CAPACITY}"
        )
    if not 1 <= entries <= MAX_SLOTS:
        raise ValueError(f"entries is {entries}, it must be 1 to {MAX_SLOTS}")
    buckets = _round_up(max(entries, MIN_SLOTS), LAYOUT["BUCKET_SLOTS"]) // LAYOUT["BUCKET_SLOTS"]
    slots = buckets * LAYOUT["BUCKET_SLOTS"]
    reservations = min(max(slots // 4, MIN_RESERVATIONS), MAX_RESERVATIONS)
    index_bytes = (
        LAYOUT["BUCKETS_OFFSET"]
        + buckets * LAYOUT["BUCKET_BYTES"]
        + LAYOUT["MAX_SESSIONS"] * LAYOUT["SESSION_BYTES"]
        + reservations * LAYOUT["RESERVATION_BYTES"]
    )
    return Geometry(
        capacity=capacity,
        data_bytes=LAYOUT["DATA_START"] + _round_up(capacity, _HUGE_PAGE),
        slots=slots,
        reservations=reservations,
        index_bytes=_round_up(index_bytes, _PAGE),
        recency_bytes=_round_up(LAYOUT["RECENCY_OFFSET"] + 8 * slots, _PAGE),
        counters_bytes=LAYOUT["MAX_SESSIONS"] * LAYOUT["COUNTERS_PAGE"],
    )
