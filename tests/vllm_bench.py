"""The two halves of the vLLM connector on a real client and pool, one step after the other."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import hashlib
import threading
from types import SimpleNamespace
from typing import Any

from v1_bench import V1Bench

from ems import ContextCaching, KvPages
from ems.common.metrics import as_dict
from ems.integrations.breaker import Breaker
from ems.integrations.vllm_scheduler import SchedulerHalf
from ems.integrations.vllm_settings import Settings
from ems.integrations.vllm_steps import StepPlan
from ems.integrations.vllm_worker import WorkerHalf

SIZE = 4
PAGE = 64
BLOCKS = 32
PROMPT = list(range(18))
LAYER = "layer"


class FakeLink:
    def __init__(self, caching: ContextCaching | None) -> None:
        self.caching = caching
        self.loads, self.saves = Breaker(1.0), Breaker(1.0)

    def failed(self, breaker: Breaker, why: object) -> None:
        breaker.fail(0.0)


class FakeRequest:
    """A request as vLLM's scheduler has it."""

    def __init__(self, name: str, tokens: list[int], prompt: int | None = None) -> None:
        self.request_id = name
        self.tokens = tokens
        self.num_prompt_tokens = prompt or len(tokens)
        self.num_computed_tokens = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        ends = range(SIZE, len(self.tokens) + 1, SIZE)
        return [hashlib.sha256(bytes(self.tokens[:end])).digest() for end in ends]


class Rank:
    """The KV cache of a worker, and its half of the connector."""

    def __init__(self, link: FakeLink, settings: Settings, rank: int, v1: V1Bench) -> None:
        self.memory = ctypes.create_string_buffer(BLOCKS * PAGE)
        base = ctypes.addressof(self.memory)
        self.layout = f"rank {rank}"
        self.half = WorkerHalf(settings, link, lambda: as_dict(v1.client.counters()))  # type: ignore[arg-type]
        pages = [KvPages(base, BLOCKS, PAGE, PAGE, owner=self.memory)]
        self.half.register(pages, self.layout, {LAYER: 0})

    def fill(self, block: int, text: bytes) -> None:
        self.memory[block * PAGE : (block + 1) * PAGE] = (text * PAGE)[:PAGE]

    def read(self, block: int) -> bytes:
        return bytes(self.memory[block * PAGE : (block + 1) * PAGE])


class Engine:
    """One step after the other, as vLLM does it."""

    def __init__(self, v1: V1Bench, ranks: int = 1, **settings: Any) -> None:
        self.link = FakeLink(v1.cc())
        self.settings = Settings.read(settings, "recompute")
        self.now_s = 0.0
        self.scheduler = SchedulerHalf(
            self.settings,
            self.link,
            SIZE,
            SIZE,
            clock=lambda: self.now_s,  # type: ignore[arg-type]
        )
        self.ranks = [Rank(self.link, self.settings, rank, v1) for rank in range(ranks)]
        self.scheduler.set_layouts([rank.layout for rank in self.ranks])
        self.blocks: dict[str, list[int]] = {}
        self.preempted: set[str] = set()
        self.hooks = True  # whether layers wait for their blocks
        self.bad: set[int] = set()
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self._named: collections.Counter[tuple[str, str]] = collections.Counter()

    def admit(self, request: FakeRequest, blocks: list[int], local: int = 0) -> int:
        self.now_s += 1
        external, later = self.scheduler.matched(request, local)
        self.blocks[request.request_id] = blocks
        self.scheduler.allocated(request, blocks, external)
        if not later:
            request.num_computed_tokens = local + external
        return external

    def step(self, scheduled: dict[str, int], requests: list[FakeRequest]) -> StepPlan:
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            preempted_req_ids=self.preempted,
            kv_connector_block_state=SimpleNamespace(
                resolve_block_ids=lambda name: (self.blocks[name],)
            ),
        )
        self.preempted = set()
        plan = self.scheduler.plan(output)
        self.bad = set()
        for rank in self.ranks:
            rank.half.preempt(plan)
            rank.half.load(plan)
            if rank.half.arriving and self.hooks:
                with contextlib.suppress(Exception):  # as the connector does
                    rank.half.arrive(LAYER)
            for request in requests:
                self._compute(rank, request, scheduled.get(request.request_id, 0))
            rank.half.save(plan)
            sent, received = rank.half.finished(plan)
            self.sent |= self._by_all("sent", sent)
            self.received |= self._by_all("received", received)
            self.bad |= rank.half.take_bad_blocks()
        for request in requests:
            request.num_computed_tokens += scheduled.get(request.request_id, 0)
        for rank in self.ranks:
            report = rank.half.take_report()
            if report is not None:
                self.scheduler.reported(report)
        return plan

    def _by_all(self, what: str, names: set[str]) -> set[str]:
        """Note what a rank named; the names that all ranks have named now."""
        self._named.update((what, name) for name in names)
        named = {name for name in names if self._named[what, name] == len(self.ranks)}
        for name in named:
            del self._named[what, name]
        return named

    def _compute(self, rank: Rank, request: FakeRequest, count: int) -> None:
        first = request.num_computed_tokens
        for block in range(first // SIZE, -(-(first + count) // SIZE)):
            rank.fill(self.blocks[request.request_id][block], self.content(rank, request, block))

    def content(self, rank: Rank, request: FakeRequest, block: int) -> bytes:
        tokens = bytes(request.tokens[: (block + 1) * SIZE])
        return hashlib.sha256(rank.layout.encode() + tokens).digest()

    def holds(self, request: FakeRequest, blocks: range) -> bool:
        ids = self.blocks[request.request_id]
        return all(
            rank.read(ids[block]) == (self.content(rank, request, block) * PAGE)[:PAGE]
            for rank in self.ranks
            for block in blocks
        )

    def settle(self) -> None:
        """Wait for every operation under way."""
        for rank in self.ranks:
            saves = [one for futures in rank.half._saving.values() for one in futures]
            for future in [*saves, *(future for future, _ in rank.half._loading.values())]:
                ended = threading.Event()
                future.add_done_callback(lambda _, ended=ended: ended.set())
                assert ended.wait(10)


def run(engine: Engine, request: FakeRequest, blocks: list[int]) -> int:
    """A request from its prompt to its end, in one step."""
    hit = engine.admit(request, blocks)
    engine.step({request.request_id: request.num_tokens - hit}, [request])
    engine.settle()
    engine.step({}, [])
    assert not engine.scheduler.finished(request, blocks)
    return hit


def serve(engine: Engine, request: FakeRequest, blocks: list[int]) -> int:
    """A request from its prompt to its end, whatever fails; returns the tokens that hit.

    As vLLM does it: loads that come later are waited for, and a request with blocks that did not
    come is cut back to what did.
    """
    name = request.request_id
    hit = engine.admit(request, blocks)
    if hit > request.num_computed_tokens:  # comes later
        bad: set[int] = set()
        for _ in range(4):
            engine.step({}, [])
            bad |= engine.bad
            engine.settle()
        engine.bad = bad
        assert name in engine.received, "the load of a request was never reported"
        engine.received.discard(name)
        request.num_computed_tokens = good_tokens(engine, blocks, hit)
        engine.scheduler.allocated(request, blocks, 0)
    while request.num_computed_tokens < request.num_tokens:
        before = request.num_computed_tokens
        engine.step({name: request.num_tokens - before}, [request])
        request.num_computed_tokens = good_tokens(engine, blocks, request.num_computed_tokens)
    engine.settle()
    engine.step({}, [])
    if engine.scheduler.finished(request, blocks):
        for _ in range(4):
            engine.step({}, [])
            engine.settle()
        assert name in engine.sent, "the blocks of a request were held for good"
    return hit


def good_tokens(engine: Engine, blocks: list[int], computed: int) -> int:
    """The tokens before the first block that was reported as not loaded."""
    places = [at for at, block in enumerate(blocks) if block in engine.bad]
    return min([computed, *(place * SIZE for place in places)])
