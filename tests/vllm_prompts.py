"""What the tests with a real vLLM engine ask it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from ems.testing import LocalPool
from ems.testing.vllm_engine import VOCABULARY, Engine, ems_transfer


def prompt(seed: int, tokens: int = 600) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(VOCABULARY) for _ in range(tokens)]


def engine(
    model: Path, pool: LocalPool, extra: dict[str, Any] | None = None, **more: Any
) -> Engine:
    """An engine with EMS that looks often at a server that is away."""
    settings = {"probe_interval_s": 0.2, **(extra or {})}
    return Engine(model, ems_transfer(pool.root, **settings), **more)


def wait_for_hits(one: Engine, tokens: list[int]) -> None:
    """Generate until the pool has it: the breaker wants three good probes."""
    for _ in range(40):
        one.generate([tokens], max_tokens=4)
        one.forget()
        found = one.generate([tokens], max_tokens=4)[0]
        one.forget()
        assert found.reason == "length"
        if found.cached:
            return
    raise AssertionError("no hit came back:\n" + "".join(one.log)[-3000:])
