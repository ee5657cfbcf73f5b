"""Whatever the SDK raises, a request ends with the right bytes, and nothing is held for good."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from v1_bench import V1Bench
from vllm_bench import BLOCKS, PROMPT, Engine, FakeRequest, serve

from ems import CcFuture, ContextCaching, EmsErrorCode, EmsException, PageCaching, PageLoad
from ems.integrations import vllm_worker

# What the connector calls, but `CcFuture.done`, which never raises.
CALLS: dict[str, tuple[type, str]] = {
    "exists": (PageCaching, "exists"),
    "load": (PageCaching, "load"),
    "async_load": (PageCaching, "async_load"),
    "load_by_page": (PageCaching, "load_by_page"),
    "wait": (PageLoad, "wait"),
    "async_save": (PageCaching, "async_save"),
    "register_pages": (ContextCaching, "register_pages"),
    "result": (CcFuture, "result"),
    "exception": (CcFuture, "exception"),
    "cancel": (CcFuture, "cancel"),
    "cancelled": (CcFuture, "cancelled"),
}
ERRORS = [
    EmsException(EmsErrorCode.EMS_IO_TIMEOUT, "too late"),
    EmsException(EmsErrorCode.EMS_IO_ERROR, "the server is away"),
    RuntimeError("nobody thought of it"),
]


class Faults:
    """Makes calls of the SDK raise while `fails` says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails: Callable[[str], bool] = lambda name: False
        self.error: Exception = ERRORS[0]
        self.raised = 0
        for name, (owner, method) in CALLS.items():
            monkeypatch.setattr(owner, method, self._wrapped(name, getattr(owner, method)))

    def _wrapped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.fails(name):
                self.raised += 1
                raise self.error
            return method(*args, **kwargs)

        return call


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


@pytest.fixture(params=["sync", "layered", "async"])
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How blocks are loaded: before the forward pass, beside it, or for a later step."""
    if request.param == "layered":
        monkeypatch.setattr(vllm_worker, "LAYERED_BYTES", 1)
    return "async" if request.param == "async" else "sync"


def heal(engine: Engine) -> None:
    engine.now_s += 10
    for breaker in (engine.link.loads, engine.link.saves):
        for _ in range(3):
            breaker.probed(True, engine.now_s)


def served(engine: Engine, name: str, tokens: list[int], blocks: list[int]) -> int:
    request = FakeRequest(name, tokens)
    hit = serve(engine, request, blocks)
    assert engine.holds(request, range(len(tokens) // 4))
    for rank in engine.ranks:
        assert not rank.half._saving and not rank.half._loading and not rank.half._held
        assert not rank.half.arriving
    return hit


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_always_raises(
    v1: V1Bench, faults: Faults, name: str, error: Exception, load: str, ranks: int
) -> None:
    engine = Engine(v1, ranks, load=load)
    served(engine, "a", PROMPT, [1, 2, 3, 4, 5])
    faults.error, faults.fails = error, lambda called: called == name
    for one in (engine.scheduler, *(rank.half for rank in engine.ranks)):
        one._caching = None  # so that spaces are registered again
    served(engine, "b", PROMPT, [6, 7, 8, 9, 10])
    served(engine, "c", [*PROMPT[:8], *range(30, 40)], [11, 12, 13, 14, 15])
    # A preempted request, of which saves may be under way.
    request = FakeRequest("d", [*range(50, 68)])
    engine.admit(request, [16, 17, 18, 19, 20])
    engine.step({"d": 18}, [request])
    engine.preempted = {"d"}
    request.num_computed_tokens = 0
    engine.scheduler.matched(request, 0)
    served(engine, "d", [*range(50, 68)], [16, 17, 18, 19, 20])
    faults.fails = lambda called: False
    heal(engine)
    served(engine, "e", PROMPT, [21, 22, 23, 24, 25])
    heal(engine)
    assert served(engine, "f", PROMPT, [1, 2, 3, 4, 5]) == 16


def test_calls_that_raise_now_and_then(v1: V1Bench, faults: Faults, load: str) -> None:
    chosen = random.Random(3)
    engine = Engine(v1, 2, load=load)
    hits = 0
    for number in range(150):
        if number % 3 == 0:
            heal(engine)
        faults.fails = lambda name: chosen.random() < 0.15
        faults.error = chosen.choice(ERRORS)
        length = chosen.randrange(3, 33)
        tokens = [chosen.randrange(2) for _ in range(6)] + [7] * (length - 6)
        blocks = chosen.sample(range(BLOCKS), -(-len(tokens) // 4))
        hits += served(engine, f"r{number}", tokens, blocks)
    assert faults.raised > 30 and hits > 100
