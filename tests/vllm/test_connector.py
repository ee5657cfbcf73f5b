"""The connector in a real vLLM engine: same tokens, restarts, dead servers, and a control.

The short form; EMS_VLLM_LONG=1 adds the combinations.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ems.testing import LocalPool
from ems.testing.vllm_engine import VOCABULARY, Engine, ems_transfer

pytestmark = [
    pytest.mark.timeout(300),
    # torch's and transformers' own, in this process only to make a model
    pytest.mark.filterwarnings("ignore"),
]
LONG = pytest.mark.skipif(not os.environ.get("EMS_VLLM_LONG"), reason="set EMS_VLLM_LONG=1")


def prompt(seed: int, tokens: int = 600) -> list[int]:
    return [random.Random(seed).randrange(VOCABULARY) for _ in range(tokens)]


def engine(
    model: Path, pool: LocalPool, extra: dict[str, Any] | None = None, **more: Any
) -> Engine:
    return Engine(
        model, ems_transfer(pool.root, **{"probe_interval_s": 0.2, **(extra or {})}), **more
    )


@pytest.fixture
def pool() -> Iterator[LocalPool]:
    with LocalPool("256MiB") as pool:
        yield pool


CASES = [
    pytest.param({}, {}, id="plain"),
    pytest.param({"load": "async"}, {}, id="async"),
    pytest.param({}, {"separate": True}, id="own processes", marks=LONG),
    pytest.param({}, {"separate": True, "tensor_parallel_size": 2}, id="two ranks", marks=LONG),
    pytest.param({}, {"block_size": 32}, id="blocks of 32", marks=LONG),
    pytest.param({}, {"dtype": "float32"}, id="float32", marks=LONG),
    pytest.param({}, {"kv_cache_dtype": "fp8"}, id="fp8", marks=LONG),
    pytest.param(
        {}, {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}, id="chunks", marks=LONG
    ),
]


@pytest.mark.parametrize(("extra", "more"), CASES)
def test_a_restarted_engine_goes_on_with_the_tokens_of_a_local_hit(
    models: dict[str, Path], pool: LocalPool, extra: dict[str, Any], more: dict[str, Any]
) -> None:
    model = models[more.get("dtype", "bfloat16")]
    block = more.get("block_size", 128)
    # Prompts of other lengths, together in a step.
    prompts = [prompt(1), prompt(2, 600 + block), prompt(3, block - 1)]
    expected = [(len(one) - 1) // block * block for one in prompts]
    with engine(model, pool, extra, **more) as first:
        cold = first.generate(prompts)
        local = first.generate(prompts)
    assert [one.cached for one in cold] == [0, 0, 0]
    assert [one.cached for one in local] == expected
    with engine(model, pool, extra, **more) as second:
        restored = second.generate(prompts)
        second.forget()
        again = second.generate(prompts)
    assert [one.cached for one in restored] == [one.cached for one in again] == expected
    assert [one.tokens for one in restored] == [one.tokens for one in local]
    assert [one.tokens for one in again] == [one.tokens for one in local]
    if more.get("dtype") == "float32":
        assert [one.tokens for one in restored] == [one.tokens for one in cold]


def test_the_next_turn_finds_what_was_decoded_and_noise_changes_the_tokens(
    models: dict[str, Path], pool: LocalPool
) -> None:
    first_turn = prompt(4, 300)
    with engine(models["float32"], pool, dtype="float32") as one:
        answer = one.generate([first_turn], max_tokens=100)[0].tokens
        second_turn = [*first_turn, *answer, *prompt(5, 50)]
        one.forget()
        hit = one.generate([second_turn])[0]
        one.forget()
        assert hit.cached == 384  # 300 of the prompt, 84 decoded
    with Engine(models["float32"], dtype="float32") as without:
        cold = without.generate([second_turn])[0]
    assert hit.tokens == cold.tokens
    overwrite_with_noise(pool)
    with engine(models["float32"], pool, {"verify": False}, dtype="float32") as noisy:
        wrong = noisy.generate([second_turn])[0]
    assert wrong.cached == 384 and wrong.tokens != cold.tokens
    with engine(models["float32"], pool, {"verify": True}, dtype="float32") as careful:
        assert careful.generate([second_turn])[0].tokens == cold.tokens


def overwrite_with_noise(pool: LocalPool) -> None:
    """Change every byte that the pool holds, and no word of its index."""
    path = Path(pool.root) / "data.0"
    noise = random.Random(0).randbytes(1 << 20)
    with path.open("r+b") as data:
        data.seek(2 << 20)  # the prologue
        while data.tell() < path.stat().st_size:
            data.write(noise)


def test_the_server_dies_comes_back_and_nobody_notices(
    models: dict[str, Path], pool: LocalPool
) -> None:
    prompts = [prompt(seed) for seed in range(10, 14)]
    with Engine(models["bfloat16"]) as without:
        cold = [without.generate([one])[0].tokens for one in prompts]
    pool.kill()
    with engine(models["bfloat16"], pool) as one:
        absent = one.generate([prompts[0]])[0]
        assert (absent.tokens, absent.cached, absent.reason) == (cold[0], 0, "length")
        pool.start()
        wait_for_hits(one, prompts[1])
        pool.kill()
        one.forget()
        # The pool outlives its server: hits go on, saves are off.
        dead = one.generate([prompts[1]])[0]
        assert dead.cached == 512 and dead.reason == "length"
        assert one.generate([prompts[2]])[0].tokens == cold[2]
        pool.start()
        wait_for_hits(one, prompts[3])


def wait_for_hits(one: Engine, tokens: list[int]) -> None:
    """Generate until the pool has it: the breaker wants three good probes."""
    for _ in range(40):
        one.generate([tokens])
        one.forget()
        found = one.generate([tokens])[0]
        one.forget()
        assert found.reason == "length"
        if found.cached:
            return
    raise AssertionError("no hit came back:\n" + "".join(one.log)[-3000:])


def test_a_policy_that_ends_requests_is_refused_at_the_start(
    models: dict[str, Path], pool: LocalPool
) -> None:
    with pytest.raises(RuntimeError, match='Set "kv_load_failure_policy": "recompute"'):
        Engine(models["bfloat16"], ems_transfer(pool.root, policy="fail"))


@LONG
def test_preemption_and_eviction_and_two_engines(models: dict[str, Path]) -> None:
    """Conversations of several turns on a pool that is too small, from two engines in turn."""
    chosen = random.Random(7)
    system = prompt(100, 150)
    turns = [[*system, *prompt(200 + n, chosen.randrange(50, 300))] for n in range(100)]
    few = {"dtype": "float32", "num_gpu_blocks_override": 48, "block_size": 32}
    with LocalPool("4MiB", entries=512) as small:
        with Engine(models["float32"], dtype="float32", block_size=32) as without:
            expected: list[list[int]] = []
            for turn in range(2):
                answers = without.generate(turns, max_tokens=40)
                expected += [one.tokens for one in answers]
                turns = [[*a, *b.tokens, turn] for a, b in zip(turns, answers)]
        found: list[list[int]] = []
        turns = [one[: len(one) - 82] for one in turns]
        with (
            engine(models["float32"], small, **few) as one,
            engine(models["float32"], small, **few) as two,
        ):
            for turn in range(2):
                answers = []
                for first in range(0, 100, 4):
                    which = one if first % 8 else two
                    answers += which.generate(turns[first : first + 4], max_tokens=40)
                found += [answer.tokens for answer in answers]
                turns = [[*a, *b.tokens, turn] for a, b in zip(turns, answers)]
        assert found == expected
