"""What vLLM shows of EMS: sums by name, and the figures made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

__all__ = ["EXPORTED", "Exported", "added", "summary"]


@dataclasses.dataclass(frozen=True)
class Exported:
    """A sum as a Prometheus counter (to whose name `_total` is added).

    Args:
        metric: its name; several sums that differ by `reason` share one.
        meaning: for people.
        scale: from the sum to the metric's unit.
        reason: value of the label of that name; empty for a metric without it.
    """

    metric: str
    meaning: str
    scale: float = 1.0
    reason: str = ""


_MISSES = "Blocks that the scheduler had found and a load did not: the first one of each load."
_FAILURES = "Loads and saves that ended with an error."

EXPORTED: dict[str, Exported] = {
    "lookups": Exported("vllm:ems_lookups", "Prompts looked up in the pool."),
    "hit_tokens": Exported("vllm:ems_hit_tokens", "Prompt tokens that the pool had."),
    "load_bytes": Exported("vllm:ems_load_bytes", "Bytes loaded, over all ranks."),
    "load_ns": Exported("vllm:ems_load_seconds", "Time inside loads, over all ranks.", 1e-9),
    "load_hits": Exported("vllm:ems_loaded_blocks", "Blocks loaded, over all ranks."),
    "save_bytes": Exported("vllm:ems_save_bytes", "Bytes saved, over all ranks."),
    "save_ns": Exported("vllm:ems_save_seconds", "Time inside saves, over all ranks.", 1e-9),
    "save_committed": Exported("vllm:ems_saved_blocks", "Blocks saved, over all ranks."),
    "save_no_room": Exported("vllm:ems_no_room_blocks", "Blocks for which the pool had no room."),
    **{
        f"miss_{reason}": Exported("vllm:ems_misses", _MISSES, 1.0, reason)
        for reason in ("absent", "changing", "length", "retired", "checksum")
    },
    **{
        f"{what}_{kind}": Exported("vllm:ems_failures", _FAILURES, 1.0, f"{what} {kind}"[:-1])
        for what in ("load", "save")
        for kind in ("timeouts", "errors")
    },
}


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the sums by name."""
    total = dict(one)
    for name, value in other.items():
        total[name] = total.get(name, 0.0) + value
    return total


def summary(data: Mapping[str, float]) -> dict[str, int | float]:
    """Return figures for people: what hit, what moved how fast, and why something missed."""
    get = data.get
    figures: dict[str, int | float] = {
        "EMS hit tokens": int(get("hit_tokens", 0)),
        "lookups": int(get("lookups", 0)),
        "loaded MB": round(get("load_bytes", 0) / 1e6, 1),
        "load ms": round(get("load_ns", 0) / 1e6, 1),
        "saved MB": round(get("save_bytes", 0) / 1e6, 1),
        "save ms": round(get("save_ns", 0) / 1e6, 1),
    }
    for name in sorted(data):
        if name.startswith("miss_") or name.endswith(("_timeouts", "_errors", "_no_room")):
            figures[name.replace("_", " ")] = int(data[name])
    return figures
