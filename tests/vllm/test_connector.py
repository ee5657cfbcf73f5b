"""The connector in a real vLLM engine, the short form: three engines in a row on one pool.

Same tokens after a restart, decoded blocks, a killed server, figures, and a control with noise.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm_prompts import engine, prompt, wait_for_hits

from ems.testing import LocalPool
from ems.testing.vllm_engine import Engine, Generated

pytestmark = pytest.mark.timeout(600)  # a minute where nothing else runs

# Of other lengths, together in a step.
PROMPTS = [prompt(1), prompt(2, 728), prompt(3, 127)]
CACHED = [512, 640, 0]


def test_three_engines_in_a_row(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One test: each engine takes ten seconds to start."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    model = models["float32"]
    fixed: dict[str, Any] = {"dtype": "float32", "disable_log_stats": False}
    with LocalPool("256MiB") as pool:
        with engine(model, pool, **fixed) as first:
            cold = save_all(first)
        with engine(model, pool, layered=True, **fixed) as second:
            load_all(second, cold)
            live_without_a_server(second, pool, cold)
        overwrite_with_noise(pool)
        # Checksums off: with them noise is computed instead.
        with engine(model, pool, {"verify": False}, layered=True, dtype="float32") as noisy:
            wrong = noisy.generate(PROMPTS, max_tokens=60)
    assert [one.cached for one in wrong] == CACHED
    assert [one == other for one, other in zip(tokens(wrong), cold)] == [False, False, True]


def save_all(first: Engine) -> list[list[int]]:
    """The first engine finds nothing; returns the tokens that are right."""
    cold = first.generate(PROMPTS, max_tokens=60)
    local = first.generate(PROMPTS, max_tokens=60)
    figures = first.metrics()
    assert [one.cached for one in cold] == [0, 0, 0]
    assert [one.cached for one in local] == CACHED
    assert tokens(local) == tokens(cold)
    # Each of the prompts is decoded over the end of a block.
    assert figures["saved_blocks"] == 5 + 6 + 1 and figures["lookups"] >= 2
    assert figures["save_bytes"] > 0 and figures["hit_tokens"] == 0
    return tokens(cold)


def load_all(second: Engine, cold: list[list[int]]) -> None:
    """A restarted engine has what the first one computed and decoded."""
    restored = second.generate(PROMPTS, max_tokens=60)
    assert [one.cached for one in restored] == CACHED
    assert tokens(restored) == cold
    second.forget()
    # The next turn of the third: its prompt of 127 tokens, and what was decoded.
    turn = [*PROMPTS[2], *cold[2], *prompt(4, 30)]
    assert second.generate([turn], max_tokens=4)[0].cached == 128
    second.forget()
    figures = second.metrics()
    assert figures["hit_tokens"] == sum(CACHED) + 128
    assert figures["loaded_blocks"] == 10 and figures["load_bytes"] > 0


def live_without_a_server(second: Engine, pool: LocalPool, cold: list[list[int]]) -> None:
    """The pool outlives its server: hits go on, saves are off; all is well when it is back."""
    pool.kill()
    dead = second.generate(PROMPTS, max_tokens=60)
    assert [one.cached for one in dead] == CACHED
    assert tokens(dead) == cold
    lost = second.generate([prompt(5)], max_tokens=4)[0]
    assert lost.cached == 0 and lost.reason == "length"
    pool.start()
    wait_for_hits(second, prompt(6))


def tokens(found: list[Generated]) -> list[list[int]]:
    return [one.tokens for one in found]


def overwrite_with_noise(pool: LocalPool) -> None:
    """Change every byte that the pool holds, and no word of its index."""
    path = Path(pool.root) / "data.0"
    noise = random.Random(0).randbytes(1 << 20)
    with path.open("r+b") as data:
        data.seek(2 << 20)  # the prologue
        while data.tell() < path.stat().st_size:
            data.write(noise)
