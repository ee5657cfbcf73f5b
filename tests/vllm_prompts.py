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
    model: Path,
    pool: LocalPool,
    extra: dict[str, Any] | None = None,
    *,
    layered: bool = False,
    **more: Any,
) -> Engine:
    """An engine with EMS that looks often at a server that is away.

    Args:
        model: folder of the model.
        pool: to use.
        extra: settings of the connector.
        layered: whether all loads are made layer by layer; tests/vllm must be on the path.
        more: arguments of the engine.
    """
    settings = {"probe_interval_s": 0.2, **(extra or {})}
    transfer = ems_transfer(pool.root, **settings)
    if layered:
        transfer["kv_connector_module_path"] = "layered_ems"
    return Engine(model, transfer, **more)


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
