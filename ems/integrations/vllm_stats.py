"""What vLLM shows of EMS: sums by name, and the figures made of them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["added", "summary"]


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
