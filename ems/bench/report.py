"""What a workload run found, for people and for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ems.bench.machine import Machine
from ems.bench.worker import Tally

__all__ = ["Direction", "Latency", "Report", "make_report"]


@dataclasses.dataclass(frozen=True)
class Latency:
    """Percentiles over calls, in milliseconds."""

    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


@dataclasses.dataclass(frozen=True)
class Direction:
    """Loads or saves, all processes together; the rate is that of one process inside the calls."""

    calls: int
    blocks_asked: int
    blocks_done: int
    nbytes: int
    seconds: float
    gb_per_s: float
    to_memcpy: float | None
    latency: Latency | None


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of one run."""

    workload: str
    requests: int
    processes: int
    block_bytes: int
    capacity_bytes: int
    page_kind: str
    prompt_tokens: int
    hit_tokens: int
    hit_ratio: float
    prefill_tokens_avoided: int
    load: Direction
    save: Direction
    memcpy_gb_per_s: float | None
    evictions: int
    mismatches: int
    mismatch_examples: tuple[str, ...]
    seconds: float
    machine: Machine

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain data, ready for JSON."""
        return dataclasses.asdict(self)


def make_report(
    tallies: Sequence[Tally],
    *,
    workload: str,
    block_bytes: int,
    capacity_bytes: int,
    page_kind: str,
    evictions: int,
    seconds: float,
    machine: Machine,
) -> Report:
    """Add up what the processes did."""
    roof_bytes = sum(tally.roof_bytes for tally in tallies)
    roof_s = sum(tally.roof_s for tally in tallies)
    roof = roof_bytes / roof_s / 1e9 if roof_s else None
    prompt_tokens = sum(tally.prompt_tokens for tally in tallies)
    hit_tokens = sum(tally.hit_tokens for tally in tallies)
    return Report(
        workload=workload,
        requests=sum(tally.requests for tally in tallies),
        processes=len(tallies),
        block_bytes=block_bytes,
        capacity_bytes=capacity_bytes,
        page_kind=page_kind,
        prompt_tokens=prompt_tokens,
        hit_tokens=hit_tokens,
        hit_ratio=hit_tokens / prompt_tokens if prompt_tokens else 0.0,
        prefill_tokens_avoided=hit_tokens,
        load=_direction(
            [second for tally in tallies for second in tally.load_s],
            sum(tally.load_blocks for tally in tallies),
            sum(tally.loaded_blocks for tally in tallies),
            block_bytes,
            roof,
        ),
        save=_direction(
            [second for tally in tallies for second in tally.save_s],
            sum(tally.save_blocks for tally in tallies),
            sum(tally.saved_blocks for tally in tallies),
            block_bytes,
            roof,
        ),
        memcpy_gb_per_s=roof,
        evictions=evictions,
        mismatches=sum(tally.mismatches for tally in tallies),
        mismatch_examples=tuple(text for tally in tallies for text in tally.explanations),
        seconds=seconds,
        machine=machine,
    )


def _direction(
    call_s: Sequence[float], asked: int, done: int, block_bytes: int, roof: float | None
) -> Direction:
    seconds = sum(call_s)
    rate = done * block_bytes / seconds / 1e9 if seconds else 0.0
    return Direction(
        calls=len(call_s),
        blocks_asked=asked,
        blocks_done=done,
        nbytes=done * block_bytes,
        seconds=seconds,
        gb_per_s=rate,
        to_memcpy=rate / roof if roof else None,
        latency=_latency(call_s),
    )


def _latency(call_s: Sequence[float]) -> Latency | None:
    if not call_s:
        return None
    ordered = sorted(call_s)

    def at(part: float) -> float:
        return 1e3 * ordered[min(len(ordered) - 1, int(part * len(ordered)))]

    return Latency(at(0.50), at(0.90), at(0.99), 1e3 * ordered[-1])
