"""Which operation runs next: a state machine without I/O and without a clock.

    add ──▶ queued ──due──▶ running ──finished──▶ gone
                └──remove──▶ gone

Loads go first, because an engine waits for them; saves always get a quarter of the bytes that are
copied while both wait (stride scheduling: each kind has a pass that advances by bytes divided by
weight, the lower pass is served). The number of operations and of bytes under way is bounded per
kind, so that saves that wait for a frozen server never hold up loads, which need none. An operation
larger than the bound runs alone among its kind.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Generic, Protocol, TypeVar

__all__ = ["Job", "Kind", "Schedule"]

# What an operation costs beside its bytes; keeps the share of tiny operations honest.
_FIXED_COST_BYTES = 64 << 10


class Kind(enum.Enum):
    """What an operation is; the value is its weight in the choice."""

    LOAD = 3
    SAVE = 1


class Job(Protocol):
    """What the schedule needs to know of an operation."""

    @property
    def kind(self) -> Kind:
        """Its kind."""

    @property
    def nbytes(self) -> int:
        """The bytes that it copies."""


_J = TypeVar("_J", bound=Job)


@dataclasses.dataclass
class _Class(Generic[_J]):
    """The operations of one kind."""

    kind: Kind
    # An ordered set: the oldest first, and any of them can be taken out in constant time.
    queued: dict[_J, None] = dataclasses.field(default_factory=dict)
    running: int = 0
    running_bytes: int = 0
    served: float = 0.0


class Schedule(Generic[_J]):
    """Not thread-safe: it belongs to the home loop.

    Args:
        per_kind: operations of one kind that may run at a time.
        total: operations that may run at a time; more than `per_kind`, so that each kind gets on.
        bytes_per_kind: bytes of one kind that may be under way.
    """

    def __init__(self, per_kind: int, total: int, bytes_per_kind: int) -> None:
        self._per_kind = per_kind
        self._total = total
        self._bytes_per_kind = bytes_per_kind
        self._classes: dict[Kind, _Class[_J]] = {kind: _Class(kind) for kind in Kind}
        self._served = 0.0

    def add(self, job: _J) -> None:
        """Queue an operation behind those of its kind."""
        mine = self._classes[job.kind]
        if not mine.queued:
            # A kind that was idle must not claim what it did not use.
            mine.served = max(mine.served, self._served)
        mine.queued[job] = None

    def remove(self, job: _J) -> bool:
        """Take an operation out of the queue; False when it does not wait there (any more)."""
        return self._classes[job.kind].queued.pop(job, False) is None

    def finished(self, job: _J) -> None:
        """Note that a running operation ended."""
        mine = self._classes[job.kind]
        mine.running -= 1
        mine.running_bytes -= job.nbytes

    def due(self) -> list[_J]:
        """Return the operations to start now; they count as running from here on."""
        started: list[_J] = []
        while (mine := self._next()) is not None:
            job = next(iter(mine.queued))
            del mine.queued[job]
            mine.running += 1
            mine.running_bytes += job.nbytes
            self._served = mine.served
            mine.served += (job.nbytes + _FIXED_COST_BYTES) / mine.kind.value
            started.append(job)
        return started

    def drain(self) -> list[_J]:
        """Empty the queues and return what waited, in no particular order."""
        waiting = [job for one in self._classes.values() for job in one.queued]
        for one in self._classes.values():
            one.queued.clear()
        return waiting

    @property
    def running(self) -> int:
        """Operations that run."""
        return sum(one.running for one in self._classes.values())

    @property
    def queued(self) -> int:
        """Operations that wait."""
        return sum(len(one.queued) for one in self._classes.values())

    def _next(self) -> _Class[_J] | None:
        if self.running >= self._total:
            return None
        best: _Class[_J] | None = None
        for one in self._classes.values():  # loads first: they win a tie
            if self._may_start(one) and (best is None or one.served < best.served):
                best = one
        return best

    def _may_start(self, one: _Class[_J]) -> bool:
        if not one.queued or one.running >= self._per_kind:
            return False
        nbytes = next(iter(one.queued)).nbytes
        return one.running == 0 or one.running_bytes + nbytes <= self._bytes_per_kind
