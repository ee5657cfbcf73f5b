"""What loads and saves of a batch share: how an operation ends early, and where keys lie."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from ems.common.deadline import DeadlineExpired
from ems.devices.base import CopyEnd

if TYPE_CHECKING:
    from ems_native._copy import Spans

__all__ = [
    "CANCELLED",
    "CHECKSUM",
    "DEADLINE",
    "CopyDeadline",
    "OperationCancelled",
    "key_ends",
    "keys_within",
]

# Plain ints: an enum member costs a look-up at each use, and a small load counts five times.
DEADLINE, CANCELLED, CHECKSUM = (
    int(CopyEnd.DEADLINE),
    int(CopyEnd.CANCELLED),
    int(CopyEnd.CHECKSUM),
)


class OperationCancelled(Exception):
    """The operation was asked to end, and did."""


class CopyDeadline(DeadlineExpired):
    """The deadline passed during the copy, so the server is not to blame and can be told."""


def key_ends(spans: Spans) -> list[int]:
    """Return the offset behind each key in the batch."""
    return list(accumulate(memoryview(spans.lengths).cast("Q")))


def keys_within(ends: list[int], first: int, nbytes: int) -> int:
    """Return how many keys from `first` make at most `nbytes`, at least one."""
    start = ends[first - 1] if first else 0
    return max(1, bisect_right(ends, start + nbytes, first) - first)
