"""A circuit breaker: one failure opens it, several good probes in a row close it."""

from __future__ import annotations

__all__ = ["Breaker"]

GOOD_PROBES = 3
FLAP_S = 60.0
LONGEST_S = 30.0


class Breaker:
    """Whether to use something that may be broken.

        closed --fail--> open --GOOD_PROBES good ones in a row--> closed

    One that opens again within a minute of its closing waits twice as long between probes as the
    last time, up to half a minute. Knows no clock and no thread; callers serialise.

    Args:
        interval_s: between two probes at first.
    """

    def __init__(self, interval_s: float) -> None:
        self.is_open = False
        self.interval_s = interval_s
        self._first_interval_s = interval_s
        self._good = 0
        self._closed_at_s = float("-inf")

    def fail(self, now_s: float) -> bool:
        """Note a failure; whether it opened the breaker."""
        self._good = 0
        if self.is_open:
            return False
        self.is_open = True
        if now_s - self._closed_at_s < FLAP_S:
            self.interval_s = min(2 * self.interval_s, LONGEST_S)
        else:
            self.interval_s = self._first_interval_s
        return True

    def probed(self, good: bool, now_s: float) -> bool:
        """Note the outcome of a probe; whether it closed the breaker."""
        if not self.is_open:
            return False
        self._good = self._good + 1 if good else 0
        if self._good < GOOD_PROBES:
            return False
        self.is_open = False
        self._closed_at_s = now_s
        return True
