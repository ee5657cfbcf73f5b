"""The long form: EMS_VLLM_LONG=1 tests/vllm/run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from vllm_prompts import engine, prompt, wait_for_hits

from ems.testing import LocalPool
from ems.testing.figures import read_server
from ems.testing.vllm_engine import Engine, Generated, ems_transfer

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("EMS_VLLM_LONG"), reason="set EMS_VLLM_LONG=1"),
]


@pytest.fixture
def pool() -> Iterator[LocalPool]:
    with LocalPool("256MiB") as pool:
        yield pool


# ---- restarts ----

TWO_RANKS = {"separate": True, "tensor_parallel_size": 2}
FP8 = {"kv_cache_dtype": "fp8"}
# Types, sizes of blocks and ranks are in all combinations below, without a restart.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp8, blocks of 32, two ranks": ({}, {**FP8, "block_size": 32, **TWO_RANKS}),
    "later loads": ({"load": "async"}, {}),
    "later loads, two ranks": ({"load": "async"}, TWO_RANKS),
    "own processes, float32": ({}, {"separate": True, "dtype": "float32"}),
    "chunks": ({}, {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}),
    "compiled": ({}, {"enforce_eager": False}),
}


@pytest.mark.parametrize(("extra", "more"), CASES.values(), ids=CASES)
def test_a_restarted_engine_goes_on_with_the_tokens_of_a_local_hit(
    models: dict[str, Path],
    pool: LocalPool,
    extra: dict[str, Any],
    more: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    dtype = more.get("dtype", "bfloat16")
    block = more.get("block_size", 128)
    prompts = [prompt(1), prompt(2, 600 + block), prompt(3, block - 1)]
    expected = [(len(one) - 1) // block * block for one in prompts]
    with engine(models[dtype], pool, extra, **more) as first:
        cold = first.generate(prompts)
        local = first.generate(prompts)
    assert [one.cached for one in cold] == [0, 0, 0]
    assert [one.cached for one in local] == expected
    with engine(models[dtype], pool, extra, layered=True, **more) as second:
        restored = second.generate(prompts)
        second.forget()
        again = second.generate(prompts)
    assert [one.cached for one in restored] == [one.cached for one in again] == expected
    assert [one.tokens for one in restored] == [one.tokens for one in local]
    assert [one.tokens for one in again] == [one.tokens for one in local]
    if dtype == "float32":
        assert [one.tokens for one in restored] == [one.tokens for one in cold]


# ---- conversations ----

CONVERSATIONS, TURNS, TOGETHER, ANSWER = 200, 3, 4, 12
WAVE = 12  # conversations that go on at a time: a small pool has room for about so many


def first_turns() -> list[list[int]]:
    chosen = random.Random(7)
    systems = [prompt(100, 150), prompt(101, 70)]
    return [
        [*chosen.choice(systems), *prompt(200 + n, chosen.randrange(20, 300))]
        for n in range(CONVERSATIONS)
    ]


def converse(engines: Sequence[Engine], forget: bool = False) -> list[Generated]:
    """All turns of all conversations, a few together, by the engines in turn."""
    chosen = random.Random(8)
    said = []
    for first in range(0, CONVERSATIONS, WAVE):
        turns = first_turns()[first : first + WAVE]
        for number in range(TURNS):
            answers = []
            for at in range(0, len(turns), TOGETHER):
                which = engines[chosen.randrange(len(engines))]
                if forget:
                    which.forget()
                answers += which.generate(turns[at : at + TOGETHER], max_tokens=ANSWER)
            said += answers
            turns = [
                [*turn, *answer.tokens, *prompt(1000 * number + first + n, 40)]
                for n, (turn, answer) in enumerate(zip(turns, answers))
            ]
    return said


@pytest.fixture(scope="module")
def said_alone(models: dict[str, Path]) -> list[list[int]]:
    """What is said in float32 without EMS."""
    with Engine(models["float32"], dtype="float32", max_model_len=1024) as without:
        return [one.tokens for one in converse([without])]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("ranks", [{}, TWO_RANKS], ids=["one rank", "two ranks"])
def test_conversations_on_a_pool_that_is_too_small(
    models: dict[str, Path],
    said_alone: list[list[int]],
    dtype: str,
    block: int,
    ranks: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two engines share a pool for a tenth of it all, each with room for few requests itself.

    What a block is loaded with is what it was saved with, bit for bit. In float32 the tokens are
    those of an engine without EMS; below that they depend on what was computed together.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    kind = "bfloat16" if dtype == "fp8" else dtype
    mebibytes = {"float32": 24, "bfloat16": 12, "fp8": 6}[dtype]
    arguments = {
        **({"kv_cache_dtype": "fp8"} if dtype == "fp8" else {"dtype": dtype}),
        "block_size": block,
        "max_model_len": 1024,
        "num_gpu_blocks_override": 1536 // block,
        "environment": {"CHECKED_EMS": str(tmp_path)},
        **ranks,
    }
    with LocalPool(f"{mebibytes}MiB", entries=1024) as small, ExitStack() as stack:
        transfer = {
            **ems_transfer(small.root, probe_interval_s=0.2),
            "kv_connector_module_path": "checked_ems",
        }
        both = [stack.enter_context(Engine(models[kind], transfer, **arguments)) for _ in range(2)]
        restore(*both, block)
        found = converse(both)
        evictions = read_server(small.root).evictions
    assert {one.reason for one in found} == {"length"}
    if dtype == "float32":
        assert [one.tokens for one in found] == said_alone
    hits = [one.cached for one in found]
    assert evictions > 30_000 // block and sum(hits) > 10_000, (evictions, sum(hits))
    saved, loaded = (
        [note for path in tmp_path.glob(f"{what}-*") for note in path.read_text().split()]
        for what in ("saved", "loaded")
    )
    assert len(loaded) > 10_000 // block and set(loaded) <= set(saved), len(loaded)


def restore(first: Engine, second: Engine, block: int) -> None:
    """A hit of the second in what the first has computed has the tokens of one in the first."""
    for asked in (prompt(1), prompt(2, 600 + block)):
        cold, local = (first.generate([asked])[0] for _ in range(2))
        restored = second.generate([asked])[0]
        assert [cold.cached, local.cached] == [0, (len(asked) - 1) // block * block]
        assert restored == local


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_conversations_that_never_hit_the_engine_itself(
    models: dict[str, Path], pool: LocalPool, dtype: str
) -> None:
    """Where rounding depends on what is computed together: the hits must be as long."""
    fixed = {"max_model_len": 1024, "block_size": 32}
    if dtype == "fp8":
        fixed["kv_cache_dtype"] = "fp8"
    with Engine(models["bfloat16"], **fixed) as without:
        expected = converse([without])
    with ExitStack() as stack:
        both = [stack.enter_context(engine(models["bfloat16"], pool, **fixed)) for _ in range(2)]
        found = converse(both, forget=True)
    assert [one.cached for one in found] == [one.cached for one in expected]
    assert [one.tokens for one in found] == [one.tokens for one in expected]


# ---- what goes wrong ----


@pytest.fixture(scope="module")
def cold(models: dict[str, Path]) -> dict[int, list[int]]:
    """Tokens of prompts by their seed, without EMS."""
    with Engine(models["float32"], dtype="float32") as without:
        return {seed: without.generate([prompt(seed)])[0].tokens for seed in range(10, 22)}


def check(one: Engine, cold: dict[int, list[int]], seeds: Sequence[int]) -> list[int]:
    """Generate in one batch; return how much was cached."""
    found = one.generate([prompt(seed) for seed in seeds])
    assert [answer.tokens for answer in found] == [cold[seed] for seed in seeds]
    assert {answer.reason for answer in found} == {"length"}
    return [answer.cached for answer in found]


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("separate", [False, True], ids=["one process", "own processes"])
def test_a_server_that_is_absent_killed_frozen_and_back(
    models: dict[str, Path],
    pool: LocalPool,
    cold: dict[int, list[int]],
    load: str,
    separate: bool,
) -> None:
    pool.kill()
    fixed = {"dtype": "float32", "separate": separate}
    with engine(models["float32"], pool, {"load": load, "init_timeout_ms": 300}, **fixed) as one:
        assert check(one, cold, [10, 11]) == [0, 0]  # absent from the start
        pool.start()
        wait_for_hits(one, prompt(12))
        assert check(one, cold, [13, 14]) == [0, 0]
        one.forget()
        assert check(one, cold, [13, 14]) == [512, 512]
        pool.kill()
        one.forget()
        assert check(one, cold, [13, 14, 15]) == [512, 512, 0]  # hits go on, saves are off
        pool.start()
        wait_for_hits(one, prompt(16))
        assert pool.process is not None
        os.kill(pool.process.pid, signal.SIGSTOP)
        one.forget()
        started = time.monotonic()
        assert check(one, cold, [13, 14, 17]) == [512, 512, 0]
        assert check(one, cold, [18, 19]) == [0, 0]
        assert time.monotonic() - started < 10
        os.kill(pool.process.pid, signal.SIGCONT)
        wait_for_hits(one, prompt(20))
        pool.restart()
        wait_for_hits(one, prompt(21))
        check(one, cold, list(range(10, 22)))


def test_a_pool_that_is_full_of_what_is_being_saved(
    models: dict[str, Path], cold: dict[int, list[int]]
) -> None:
    """Twelve prompts of 4 blocks of 512 KiB at once, and room for two blocks."""
    with (
        LocalPool("1MiB", entries=64) as tiny,
        engine(models["float32"], tiny, dtype="float32", disable_log_stats=False) as one,
    ):
        for _ in range(3):
            check(one, cold, list(range(10, 22)))
            one.forget()
        figures = one.metrics()
        assert read_server(tiny.root).evictions > 20
    assert figures["no_room_blocks"] > 20


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("separate", [False, True], ids=["one process", "own processes"])
def test_an_sdk_that_raises_now_and_then(
    models: dict[str, Path],
    pool: LocalPool,
    cold: dict[int, list[int]],
    load: str,
    separate: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    transfer = {
        **ems_transfer(pool.root, load=load, probe_interval_s=0.02),
        "kv_connector_module_path": "faulty_ems",
    }
    few = {"num_gpu_blocks_override": 24, "max_model_len": 1024}
    with Engine(models["float32"], transfer, dtype="float32", separate=separate, **few) as one:
        hits = 0
        for _ in range(12):
            hits += sum(check(one, cold, list(range(10, 22))))
            one.forget()
        told = "".join(one.log)
    assert "fault " in told, "nothing was ever raised"
    assert hits > 0


@pytest.mark.parametrize(
    ("prompts", "generated"),
    [([prompt(1, 127)], 260), ([prompt(seed, 1024) for seed in range(6)], 1)],
    ids=["decoding", "prefill"],
)
def test_the_connector_takes_less_than_a_hundredth_of_a_step(
    tmp_path: Path,
    pool: LocalPool,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
    generated: int,
) -> None:
    """On the model of 144 M parameters, clocks and saves included, with nothing but misses.

    The difference of two engines says less: two processes differ by more than a hundredth.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    make = "import sys; from pathlib import Path; from ems.testing.vllm_engine import *;"
    make += "make_model(Path(sys.argv[1]), MODELS['medium'])"
    subprocess.run([sys.executable, "-c", make, str(tmp_path / "model")], check=True, cwd="/")
    transfer = {**ems_transfer(pool.root), "kv_connector_module_path": "timed_ems"}
    seconds = 0.0
    with Engine(tmp_path / "model", transfer) as one:
        for asked in prompts:
            [answer] = one.generate([asked], max_tokens=generated)
            assert answer.cached == 0
            seconds += one.seconds
    inside = [line for line in one.log if line.startswith("inside the connector")]
    steps = generated * len(prompts)
    spent = float(inside[0].split()[3])
    print(f"{1e6 * spent / steps:.0f} us of {1e3 * seconds / steps:.1f} ms a step")
    assert spent < 0.01 * seconds


def test_with_checksums_noise_is_computed(
    models: dict[str, Path], pool: LocalPool, cold: dict[int, list[int]]
) -> None:
    with engine(models["float32"], pool, dtype="float32") as one:
        check(one, cold, [10, 11])
    with (Path(pool.root) / "data.0").open("r+b") as data:
        data.seek(2 << 20)  # the prologue
        data.write(random.Random(0).randbytes(64 << 20))
    with engine(models["float32"], pool, {"verify": True}, dtype="float32") as careful:
        check(careful, cold, [10, 11])


def test_a_policy_that_ends_requests_is_refused_at_the_start(
    models: dict[str, Path], pool: LocalPool
) -> None:
    with pytest.raises(RuntimeError, match='Set "kv_load_failure_policy": "recompute"'):
        Engine(models["bfloat16"], ems_transfer(pool.root, policy="fail"))
