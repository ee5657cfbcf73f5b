"""A trace through a real pool, every byte compared, beside what the simulation says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ems.bench.conversations import make_conversations
from ems.bench.figure import Figure, at_least, at_most, figured
from ems.bench.report import Report
from ems.bench.runner import run_workload
from ems.bench.simulation import SLOTS_PER_BLOCK, distinct_blocks, simulate
from ems.bench.workload import Workload, read_mooncake_trace
from ems.testing import LocalPool
from ems.testing.figures import wait_until_prepared

__all__ = ["ReplayReport", "ReplaySettings", "measure_replay"]


@dataclasses.dataclass(frozen=True)
class ReplaySettings:
    """What is replayed.

    Args:
        trace: a file in Mooncake's format; None for made-up conversations.
        requests: of the trace from its start, None for all; 2,000 conversations' turns by default.
        block_bytes: of a block.
        share: of the distinct blocks that the pool holds.
        processes: that serve requests; more than one make hits depend on who is faster.
    """

    trace: str | None = None
    requests: int | None = None
    block_bytes: int = 64 << 10
    share: float = 0.10
    processes: int = 1

    def workload(self) -> Workload:
        """The requests."""
        if self.trace is None:
            return make_conversations(self.requests or 2000)
        return read_mooncake_trace(self.trace, self.requests)


@dataclasses.dataclass(frozen=True)
class ReplayReport:
    """What was found in both."""

    settings: ReplaySettings
    report: Report
    simulated: float  # hit ratio by tokens

    @property
    def mismatches(self) -> int:
        """Blocks that came back wrong."""
        return self.report.mismatches

    @property
    def figures(self) -> list[Figure]:
        """The figures for which something is wanted."""
        report = self.report
        what = f"replay of {report.requests:,} requests"
        found = [
            at_most(f"{what}: wrong blocks", self.mismatches, "blocks", 0),
            at_least(
                f"{what}, pool of {100 * self.settings.share:.3g} %: hit ratio",
                report.hit_ratio,
                "of the tokens",
                0.995,
                roof=("simulated", self.simulated),
                judged=("x simulated", report.hit_ratio / self.simulated if self.simulated else 1),
            ),
        ]
        if report.memcpy_gb_per_s and report.load.to_memcpy:
            found.append(
                at_least(
                    f"{what}: loads",
                    report.load.gb_per_s,
                    "GB/s",
                    1.0,
                    roof=("memcpy", report.memcpy_gb_per_s),
                    judged=("x memcpy", report.load.to_memcpy),
                )
            )
        return found

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain data, ready for JSON."""
        return figured(self)


def measure_replay(
    settings: ReplaySettings, progress: Callable[[str], object] = lambda text: None
) -> ReplayReport:
    """Replay with a pool of its own, then simulate; nothing is left behind.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` for a trace that cannot be read; whatever the pool
            says.
    """
    workload = settings.workload()
    blocks = max(1, int(settings.share * distinct_blocks(workload)))
    progress(f"{workload.name}: replaying {len(workload.requests):,} requests")
    with LocalPool(blocks * settings.block_bytes, SLOTS_PER_BLOCK * blocks) as pool:
        wait_until_prepared(pool.root)
        report = run_workload(
            workload,
            pool.config,
            processes=settings.processes,
            block_bytes=settings.block_bytes,
        )
    progress(f"{workload.name}: simulating them")
    # Of a pool of whole huge pages, which may be a few blocks more.
    outcome = simulate(workload, "pool", report.capacity_bytes // settings.block_bytes, whole=False)
    return ReplayReport(settings, report, outcome.token_ratio)
