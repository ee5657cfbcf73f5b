"""What ends a copy early, and how long to wait until one looks again."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ems.devices.base import CopyEnd

if TYPE_CHECKING:
    from ems_native._copy import CancelFlag

__all__ = ["Limits"]

LOOK_MS = 50
"""Between two looks at a cancel flag."""
_LONGEST_MS = 1 << 30


class Limits:
    """The deadline and the cancel flag of one operation.

    Args:
        cancel: None for an operation that nobody can cancel.
        deadline_ns: on CLOCK_MONOTONIC, 0 for none.
    """

    __slots__ = ("_cancel", "_deadline_ns")

    def __init__(self, cancel: CancelFlag | None, deadline_ns: int) -> None:
        self._cancel = cancel
        self._deadline_ns = deadline_ns

    def passed(self) -> CopyEnd:
        """Return why the operation is to end now, `CopyEnd.DONE` if it is not."""
        if self._cancel is not None and self._cancel.is_set:
            return CopyEnd.CANCELLED
        if self._deadline_ns and time.monotonic_ns() >= self._deadline_ns:
            return CopyEnd.DEADLINE
        return CopyEnd.DONE

    def wait_ms(self) -> int:
        """Return how long to wait before the next look at `passed`; negative: for ever."""
        longest = LOOK_MS if self._cancel is not None else _LONGEST_MS
        if self._deadline_ns:
            left_ms = -((time.monotonic_ns() - self._deadline_ns) // 1_000_000)
            return max(1, min(left_ms, longest))
        return longest if self._cancel is not None else -1

    def acquire(self, lock: threading.Lock) -> CopyEnd:
        """Take a lock; return why that did not come about, `CopyEnd.DONE` if it did."""
        while True:
            wait_ms = self.wait_ms()
            if lock.acquire(timeout=wait_ms / 1000 if wait_ms >= 0 else -1):
                return CopyEnd.DONE
            why = self.passed()
            if why:
                return why
