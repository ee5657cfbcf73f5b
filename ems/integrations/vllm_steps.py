"""What the two halves of the connector tell each other, step by step."""

from __future__ import annotations

import dataclasses

__all__ = ["Load", "Save", "StepPlan", "StepReport"]


@dataclasses.dataclass(frozen=True)
class Load:
    """Blocks of one request to be loaded before (or, `later`, beside) the forward pass."""

    request_id: str
    block_ids: list[int]
    keys: list[bytes]
    later: bool


@dataclasses.dataclass(frozen=True)
class Save:
    """Blocks of one request to be saved after the forward pass.

    Args:
        request_id: whose.
        block_ids: of the whole prefix, up to the last block to save.
        keys: of the blocks from `begin` on.
        begin: first block to save.
        computed: first block that this step computes; what lies before it was there already.
    """

    request_id: str
    block_ids: list[int]
    keys: list[bytes]
    begin: int
    computed: int


@dataclasses.dataclass
class StepPlan:
    """From the scheduler half to each worker half.

    Args:
        loads: in this step.
        saves: in this step.
        preempted: requests whose blocks are handed back now, with saves that may be under way.
        held: requests that ended and whose blocks are held until their saves are through.
    """

    loads: list[Load] = dataclasses.field(default_factory=list)
    saves: list[Save] = dataclasses.field(default_factory=list)
    preempted: list[str] = dataclasses.field(default_factory=list)
    held: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class StepReport:
    """From the worker halves, added up over ranks, to the scheduler half.

    Args:
        saved: by request, how many of the saves asked for have ended, in whatever way.
        failed: requests of which a load did not bring everything.
        broken: loads that ended with an error, not just a miss.
    """

    saved: dict[str, int] = dataclasses.field(default_factory=dict)
    failed: set[str] = dataclasses.field(default_factory=set)
    broken: int = 0

    def add(self, other: StepReport) -> None:
        """Add what another rank reports."""
        for request_id, count in other.saved.items():
            self.saved[request_id] = self.saved.get(request_id, 0) + count
        self.failed |= other.failed
        self.broken += other.broken

    def __bool__(self) -> bool:
        return bool(self.saved or self.failed or self.broken)
