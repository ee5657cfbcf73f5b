"""Both halves of the vLLM connector against a real client and pool, without vLLM."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from v1_bench import V1Bench
from vllm_bench import BLOCKS, LAYER, PAGE, PROMPT, Engine, FakeRequest, run

from ems import CcFuture, EmsErrorCode, EmsException, KvPages
from ems.integrations import vllm_worker
from ems.integrations.vllm_steps import StepPlan


@pytest.fixture
def layered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of any size run beside the forward pass."""
    monkeypatch.setattr(vllm_worker, "LAYERED_BYTES", 1)


@pytest.fixture(params=[(1, False), (1, True), (2, False), (2, True)], ids=str)
def engine(v1: V1Bench, request: pytest.FixtureRequest) -> Iterator[Engine]:
    ranks, layered = request.param
    if layered:
        request.getfixturevalue("layered")
    yield Engine(v1, ranks)


def test_what_one_request_computed_another_loads(engine: Engine) -> None:
    assert run(engine, FakeRequest("a", PROMPT), [1, 2, 3, 4, 5]) == 0
    again = FakeRequest("b", [*PROMPT[:16], 99, 98])
    assert run(engine, again, [11, 12, 13, 14, 15]) == 16
    assert engine.holds(again, range(4))


def test_a_full_hit_leaves_a_token_to_compute(engine: Engine) -> None:
    run(engine, FakeRequest("a", PROMPT[:16]), [1, 2, 3, 4])
    assert engine.admit(FakeRequest("b", PROMPT[:16]), [5, 6, 7, 8]) == 12


def test_a_hit_is_one_only_if_every_rank_has_it(v1: V1Bench) -> None:
    engine = Engine(v1, 2)
    keys = FakeRequest("a", PROMPT).block_hashes
    cc = engine.link.caching
    assert cc is not None
    for rank, blocks in zip(engine.ranks, (4, 2)):
        pages = KvPages(ctypes.addressof(rank.memory), BLOCKS, PAGE, PAGE, owner=rank.memory)
        cc.register_pages([pages], rank.layout).save(range(blocks), keys[:blocks])
    assert engine.admit(FakeRequest("b", PROMPT), [1, 2, 3, 4, 5]) == 8


def test_later_chunks_are_saved(engine: Engine) -> None:
    request = FakeRequest("a", PROMPT)
    engine.admit(request, [1, 2, 3, 4, 5])
    for count in (6, 6, 6):
        engine.step({"a": count}, [request])
    engine.settle()
    assert engine.admit(FakeRequest("b", PROMPT), [11, 12, 13, 14, 15]) == 16


@pytest.mark.parametrize("decoded", [True, False])
def test_decoded_blocks(v1: V1Bench, decoded: bool) -> None:
    engine = Engine(v1, save_decoded=decoded)
    request = FakeRequest("a", PROMPT[:6])
    blocks = [1, 2, 3, 4, 5]
    engine.admit(request, blocks)
    engine.step({"a": 6}, [request])
    for token in PROMPT[6:]:
        request.tokens = [*request.tokens, token]
        engine.step({"a": 1}, [request])
    engine.settle()
    expected = 16 if decoded else 4
    assert engine.admit(FakeRequest("b", PROMPT), [11, 12, 13, 14, 15]) == expected


def test_blocks_are_held_until_their_saves_have_ended(engine: Engine) -> None:
    request = FakeRequest("a", PROMPT)
    engine.admit(request, [1, 2, 3, 4, 5])
    engine.scheduler.reported = lambda report: None  # type: ignore[method-assign]
    engine.step({"a": 18}, [request])
    assert engine.scheduler.finished(request, [1, 2, 3, 4, 5])
    engine.settle()
    engine.step({}, [])
    assert engine.sent == {"a"}
    engine.step({}, [])
    assert all(not rank.half._held for rank in engine.ranks)


def test_a_request_that_saved_nothing_is_not_held(engine: Engine) -> None:
    request = FakeRequest("a", PROMPT[:3])
    engine.admit(request, [1])
    engine.step({"a": 3}, [request])
    assert not engine.scheduler.finished(request, [1])


def test_the_saves_of_a_preempted_request_end_before_its_blocks_are_written(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = FakeRequest("a", PROMPT)
    engine.admit(request, [1, 2, 3, 4, 5])
    engine.scheduler.reported = lambda report: None  # type: ignore[method-assign]
    engine.step({"a": 18}, [request])
    futures = [f for rank in engine.ranks for f in rank.half._saving.get("a", [])]
    engine.preempted = {"a"}
    request.num_computed_tokens = 0
    engine.step({}, [])
    assert all(future.done() for future in futures)


def test_a_save_that_does_not_end_is_cancelled_for_a_preemption(v1: V1Bench) -> None:
    engine = Engine(v1)

    class Stuck:
        cancels = 0

        def exception(self, timeout: float | None = None) -> None:
            if not self.cancels:
                raise EmsException(EmsErrorCode.EMS_IO_TIMEOUT, "not yet")

        def cancel(self) -> bool:
            self.cancels += 1
            return True

        def done(self) -> bool:
            return bool(self.cancels)

    stuck: Any = Stuck()
    assert isinstance(stuck, Stuck) and not isinstance(stuck, CcFuture)
    engine.ranks[0].half._saving["a"] = [stuck]
    engine.ranks[0].half.preempt(StepPlan(preempted=["a"]))
    assert stuck.cancels == 1


def test_what_misses_at_the_load_is_reported_and_nothing_built_on_it_is_saved(
    engine: Engine, v1: V1Bench
) -> None:
    run(engine, FakeRequest("a", PROMPT), [1, 2, 3, 4, 5])
    request = FakeRequest("b", PROMPT)
    assert engine.admit(request, [11, 12, 13, 14, 15]) == 16
    # Evicted between lookup and load: as if it had never been there.
    load = engine.scheduler._next.loads[0]
    load.keys[2] = b"another key of 32 bytes, as long"
    request.tokens = [*request.tokens, 50, 51]
    engine.step({"b": 4}, [request])
    assert engine.bad == {13, 14}
    tail = FakeRequest("c", [*request.tokens, 1])
    assert engine.scheduler.matched(tail, 0)[0] == 16  # block 4 was computed from garbage
    # vLLM cuts the request back; then everything is computed and saved.
    request.num_computed_tokens = 8
    engine.step({"b": 12}, [request])
    engine.settle()
    engine.now_s += 1
    assert engine.scheduler.matched(tail, 0)[0] == 20
    assert engine.holds(request, range(5))
    # Nobody is offered again what did not come.
    assert engine.scheduler.matched(request, 0)[0] == 0


@pytest.mark.usefixtures("layered")
def test_a_layer_that_did_not_wait_was_computed_from_nobody_knows_what(v1: V1Bench) -> None:
    engine = Engine(v1)
    run(engine, FakeRequest("a", PROMPT), [1, 2, 3, 4, 5])
    engine.hooks = False
    request = FakeRequest("b", PROMPT)
    engine.admit(request, [11, 12, 13, 14, 15])
    engine.step({"b": 2}, [request])
    assert engine.bad == {11, 12, 13, 14}
    assert not engine.link.loads.is_open
    # From now on nothing runs beside a forward pass that does not wait for it.
    again = FakeRequest("c", PROMPT)
    assert run(engine, again, [21, 22, 23, 24, 25]) == 16
    assert engine.holds(again, range(4)) and not engine.bad


@pytest.mark.usefixtures("layered")
def test_a_layer_waits_for_its_blocks(v1: V1Bench) -> None:
    engine = Engine(v1)
    run(engine, FakeRequest("a", PROMPT), [1, 2, 3, 4, 5])
    started, go = threading.Event(), threading.Event()

    def wait_for_go() -> None:
        started.set()
        assert go.wait(10)

    v1.bench.faults.at["copy out"] = wait_for_go
    request = FakeRequest("b", PROMPT)
    engine.admit(request, [11, 12, 13, 14, 15])
    half = engine.ranks[0].half
    half.load(engine.scheduler._next)
    assert started.wait(10) and len(half.arriving) == 1
    layer = threading.Thread(target=half.arrive, args=[LAYER])
    layer.start()
    layer.join(0.05)
    assert layer.is_alive()
    go.set()
    layer.join(10)
    assert not layer.is_alive()
    assert engine.holds(request, range(4))
    half.save(StepPlan())
    assert not half.arriving and not half.take_bad_blocks()


def test_others_that_share_a_block_that_did_not_come_save_nothing_either(engine: Engine) -> None:
    run(engine, FakeRequest("a", PROMPT), [1, 2, 3, 4, 5])
    one, two = FakeRequest("b", PROMPT), FakeRequest("c", [*PROMPT[:16], 70, 71, 72, 73, 74])
    engine.admit(one, [11, 12, 13, 14, 15])
    engine.scheduler._next.loads[0].keys[0] = b"another key of 32 bytes, as long"
    engine.now_s += 1
    engine.blocks["c"] = [11, 12, 13, 14, 16, 17]
    engine.scheduler.matched(two, 16)
    engine.scheduler.allocated(two, engine.blocks["c"], 0)
    two.num_computed_tokens = 16
    engine.step({"b": 2, "c": 5}, [one, two])
    assert engine.bad == {11, 12, 13, 14}
    engine.settle()
    engine.now_s += 1
    assert engine.scheduler.matched(FakeRequest("d", [*two.tokens, 1]), 0)[0] == 16


def test_later_loads_are_named_when_they_have_ended(v1: V1Bench) -> None:
    engine = Engine(v1, load="async")
    run(engine, FakeRequest("a", PROMPT), [1, 2, 3, 4, 5])
    request = FakeRequest("b", PROMPT)
    assert engine.scheduler.matched(request, 0) == (16, True)
    engine.admit(request, [11, 12, 13, 14])
    for _ in range(200):
        engine.step({}, [])
        if engine.received:
            break
        loading = engine.ranks[0].half._loading.get("b")
        if loading is not None:
            loading[0].exception()
    assert engine.received == {"b"} and not engine.bad
    assert engine.holds(request, range(4))


@pytest.mark.parametrize("load", ["sync", "async"])
def test_without_ems_every_block_is_reported_and_every_save_acknowledged(
    v1: V1Bench, load: str
) -> None:
    engine = Engine(v1, load=load)
    run(engine, FakeRequest("a", PROMPT), [1, 2, 3, 4, 5])
    request = FakeRequest("b", PROMPT)
    engine.admit(request, [11, 12, 13, 14, 15])
    engine.link.loads.fail(0.0)
    engine.link.saves.fail(0.0)
    engine.step({"b": 2} if load == "sync" else {}, [request])
    assert engine.bad == {11, 12, 13, 14}
    assert engine.received == ({"b"} if load == "async" else set())
    request.num_computed_tokens = 0
    engine.step({"b": 18}, [request])
    assert not engine.scheduler.finished(request, engine.blocks["b"])
    assert engine.scheduler.matched(FakeRequest("c", PROMPT), 0) == (0, False)


def test_no_client_yet(v1: V1Bench) -> None:
    engine = Engine(v1)
    caching, engine.link.caching = engine.link.caching, None
    assert run(engine, FakeRequest("a", PROMPT), [1, 2, 3, 4, 5]) == 0
    engine.link.caching = caching
    assert run(engine, FakeRequest("b", PROMPT), [1, 2, 3, 4, 5]) == 0
    assert run(engine, FakeRequest("c", PROMPT), [6, 7, 8, 9, 10]) == 16


def test_a_question_repeated_within_a_step_costs_no_lookup(engine: Engine) -> None:
    request = FakeRequest("a", PROMPT)
    for _ in range(5):
        engine.scheduler.matched(request, 0)
    assert engine.scheduler.take_stats() == {"lookups": 1.0, "hit_tokens": 0.0}
    assert engine.scheduler.take_stats() == {}


def test_a_hole_in_the_prefix_is_filled(engine: Engine) -> None:
    # The engine has the first blocks itself, the pool lost them: the next save brings them back.
    run(engine, FakeRequest("a", PROMPT[:9]), [1, 2, 3])
    request = FakeRequest("b", [*range(50, 58), *PROMPT])
    engine.blocks["b"] = [21, 22, 23, 24, 25, 26, 27]
    for rank in engine.ranks:
        for block in range(2):
            rank.fill(engine.blocks["b"][block], engine.content(rank, request, block))
    engine.admit(request, engine.blocks["b"], local=8)
    engine.step({"b": 18}, [request])
    engine.settle()
    engine.now_s += 1
    assert engine.scheduler.matched(FakeRequest("c", request.tokens), 0)[0] == 24


def test_stats_name_what_moved_and_why_something_missed(v1: V1Bench) -> None:
    engine = Engine(v1)
    run(engine, FakeRequest("a", PROMPT), [1, 2, 3, 4, 5])
    found = engine.ranks[0].half.take_stats()
    assert found["save_committed"] == 4 and found["save_bytes"] == 4 * PAGE
    engine.admit(FakeRequest("b", PROMPT), [11, 12, 13, 14, 15])
    engine.scheduler._next.loads[0].keys[3] = b"another key of 32 bytes, as long"
    engine.step({}, [])
    found = engine.ranks[0].half.take_stats()
    assert found["load_bytes"] == 3 * PAGE and found["miss_absent"] == 1
    assert engine.ranks[0].half.take_stats() == {}
