"""The counters of a session: a page of unsigned 64-bit words in shared memory.

The client that owns the session adds, anybody may read; `ems status` sums the pages of all
sessions. A number is never given to another name: a page written by an older client must stay
readable.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

__all__ = ["PAGE_COUNTERS", "Count", "as_dict", "miss_counter"]

PAGE_COUNTERS = 128


class Count(enum.IntEnum):
    """The index of each counter on a session's page. Bytes are payload, times are nanoseconds."""

    LOAD_CALLS = 0
    LOAD_KEYS = 1  # asked for
    LOAD_HITS = 2  # delivered, in a row from the head
    LOAD_BYTES = 3  # delivered
    LOAD_NS = 4  # inside the operation, sum over calls
    LOAD_RETRIES = 5  # lookups done again because an entry changed
    LOAD_TIMEOUTS = 6  # calls that ended with EMS_IO_TIMEOUT
    LOAD_CANCELLED = 7
    LOAD_ERRORS = 8  # calls that ended with another EmsException
    LOAD_MESSAGES = 9  # messages to the server during loads: 0 for local hits

    # The key that ended the row of hits, by the reason that the index reader gave.
    MISS_ABSENT = 16
    MISS_CHANGING = 17
    MISS_LENGTH = 18
    MISS_RETIRED = 19
    MISS_CHECKSUM = 20
    MISS_BEHIND = 21  # keys behind the first miss of their call, not looked at

    SAVE_CALLS = 32
    SAVE_KEYS = 33  # asked for
    SAVE_COMMITTED = 34  # written and published by this call
    SAVE_PRESENT = 35  # already there, nothing copied
    SAVE_KEPT = 36  # written, but another writer's copy had been published first
    SAVE_NO_ROOM = 37
    SAVE_LOST = 38  # granted, but taken away before the commit
    SAVE_BUSY = 39  # asked for again because somebody else was writing the key
    SAVE_BYTES = 40  # copied into the pool
    SAVE_NS = 41
    SAVE_TIMEOUTS = 42
    SAVE_CANCELLED = 43
    SAVE_ERRORS = 44
    SAVE_MESSAGES = 45

    EXISTS_CALLS = 56
    EXISTS_KEYS = 57
    EXISTS_HITS = 58

    MESSAGES = 64  # frames sent on the write channel, all kinds
    SUSPECTS = 65  # blocks reported because their checksum differed
    ATTACHES = 66  # 1, and one more per reconnection
    CONNECTIONS_LOST = 67


def miss_counter(reason: int) -> Count:
    """Return the counter for the reason of a miss that the index reader gave (1 absent, ...)."""
    return Count(Count.MISS_ABSENT + reason - 1)


def as_dict(values: Sequence[int]) -> dict[str, int]:
    """Return a page as names (lower case) and numbers; a short page is filled up with zeros."""
    return {count.name.lower(): values[count] if count < len(values) else 0 for count in Count}
