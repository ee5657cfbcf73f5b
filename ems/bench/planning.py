"""What a key costs before any byte moves, in a call of very many keys."""

from __future__ import annotations

import dataclasses
import mmap

from ems import KvBufferWrapper
from ems.bench.figure import Figure, at_most, median_us, take_turns
from ems.bench.v1 import MODELS, Model
from ems.common.key import KeySpace
from ems_native import _copy, _plan

__all__ = ["PlanningSettings", "measure_planning"]

_VALUE_BYTES = 4096
_CACHE_ADDRESS = 1 << 40  # planning touches no memory of the cache


@dataclasses.dataclass(frozen=True)
class PlanningSettings:
    """Keys of a call, and how often it is planned."""

    keys: int = 4096
    rounds: int = 30


def measure_planning(settings: PlanningSettings) -> list[Figure]:
    """Plan calls of keys with a buffer each, and of blocks of the two models of `ems bench v1`."""
    memory = mmap.mmap(-1, _VALUE_BYTES)
    buffers = [[KvBufferWrapper.from_buffer(memory)] for _ in range(settings.keys)]
    names = [f"plan@{key}" for key in range(settings.keys)]
    space = KeySpace.v0(None, "bench")

    def keys(_: int) -> None:
        space.digests(names)
        _copy.Spans.from_buffers(buffers)

    times = take_turns({"keys": keys}, settings.rounds)["keys"]
    figures = [_judge(settings, "keys", times)]
    for model in MODELS.values():
        what = f"blocks of {model.pieces} pieces and {model.block_size} tokens"
        times = _plan_blocks(model, settings)
        figures.append(_judge(settings, what, times))
    return figures


def _judge(settings: PlanningSettings, what: str, times: list[float]) -> Figure:
    us = median_us(times) / settings.keys
    return at_most(f"plan {settings.keys:,} {what}", us, "us a key", 1.0)


def _plan_blocks(model: Model, settings: PlanningSettings) -> list[float]:
    components = []
    at = _CACHE_ADDRESS
    for _ in range(model.layers):
        for head_size in model.head_sizes:
            token_bytes = model.heads * head_size * 2
            components.append((at, model.block_size * token_bytes, token_bytes))
            at += settings.keys * model.block_size * token_bytes
    pages = _plan.Pages(settings.keys, model.block_size, components)
    slots = list(range(settings.keys * model.block_size))
    counts = [model.block_size] * settings.keys

    def plan(_: int) -> None:
        _plan.plan_slots(
            pages, _plan.int64s(slots, "slots"), _plan.int64s(counts, "counts"), 0, "slots"
        )

    return take_turns({"plan": plan}, settings.rounds)["plan"]
