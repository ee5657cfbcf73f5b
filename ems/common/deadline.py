"""A point in time that one request must not outlive, made once and passed down."""

from __future__ import annotations

import dataclasses
import time

__all__ = ["Deadline", "DeadlineExpired"]


class DeadlineExpired(Exception):
    """The deadline of a request passed. Internal: the public calls report `EMS_IO_TIMEOUT`."""


@dataclasses.dataclass(frozen=True)
class Deadline:
    """A point on CLOCK_MONOTONIC (the same clock in every process of the node)."""

    at_ns: int

    @classmethod
    def after_ms(cls, timeout_ms: float) -> Deadline:
        """Make the deadline that lies `timeout_ms` milliseconds ahead of now."""
        return cls(time.monotonic_ns() + int(timeout_ms * 1_000_000))

    @property
    def expired(self) -> bool:
        """Whether the point has passed."""
        return time.monotonic_ns() >= self.at_ns

    def remaining_s(self) -> float:
        """Return the seconds that are left, 0.0 when none are."""
        return max(0, self.at_ns - time.monotonic_ns()) / 1e9

    def remaining_ms(self) -> float:
        """Return the milliseconds that are left, 0.0 when none are."""
        return max(0, self.at_ns - time.monotonic_ns()) / 1e6

    def check(self) -> None:
        """Raise `DeadlineExpired` when the point has passed."""
        if self.expired:
            raise DeadlineExpired("the deadline of the request passed")
