"""The scheduler half: which tokens EMS has, what to load, what to save, whose blocks to hold.

Sends no message: hits are looked up in the shared index, which this process maps as well. It knows
of saves only what it asked for and what the workers report, and holds the blocks of a request that
ends before all of its saves have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from ems import ContextCaching, PageCaching
from ems.integrations.vllm_link import Link
from ems.integrations.vllm_settings import Settings
from ems.integrations.vllm_steps import Load, Save, StepPlan, StepReport

__all__ = ["SchedulerHalf"]

_log = logging.getLogger("vllm.ems")

FRESH_S = 0.05
"""How long an answer stands: a request that waits for room is asked about in every step."""


class _Tracked:
    """What is known of a request, from the first question about it to its end."""

    __slots__ = (
        "acked",
        "admitted",
        "answer",
        "answered_s",
        "asked",
        "begin",
        "failed",
        "local",
        "request",
        "saved",
    )

    def __init__(self, request: Any) -> None:
        self.request = request
        self.local = 0  # blocks that vLLM has itself, as of the last question
        self.answer = 0  # blocks behind those that EMS has
        self.answered_s = float("-inf")
        self.admitted = False  # it got blocks, and no step was planned since
        self.saved = 0  # blocks that need no save of ours any more, from the head
        self.begin = 0  # where the next save begins
        self.asked = 0  # saves asked for, on all ranks together
        self.acked = 0  # saves of which the end was reported
        self.failed = False  # a load brought less than promised: ask no more


class SchedulerHalf:
    """Used by the scheduler's thread alone.

    Args:
        settings: of the connector.
        link: to EMS.
        block_size: tokens of a block.
        hash_block_size: tokens of one of vLLM's block hashes; divides `block_size`.
        loads: whether this engine may load.
        saves: whether it may save.
        clock: seconds.
    """

    def __init__(
        self,
        settings: Settings,
        link: Link,
        block_size: int,
        hash_block_size: int,
        loads: bool = True,
        saves: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._block_size = block_size
        self._hashes_a_block = block_size // hash_block_size
        self._later = settings.load == "async"
        least = settings.min_hit_tokens
        self._min_blocks = 1 if least is None else max(1, -(-least // block_size))
        self._loads_on, self._saves_on = loads, saves and settings.save
        self._save_decoded = settings.save_decoded
        self._clock = clock
        self._layouts: Sequence[str] = ()
        self._caching: ContextCaching | None = None
        self._spaces: list[PageCaching] = []
        self._tracked: dict[str, _Tracked] = {}
        self._next = StepPlan()
        self.lookups = 0
        self.hit_tokens = 0

    def set_layouts(self, layouts: Sequence[str]) -> None:
        """Learn the layout of every rank, from the workers; before that nothing hits."""
        self._layouts = layouts
        self._caching = None

    def matched(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens behind `num_computed_tokens` EMS has, and whether they come later.

        Free of side effects that matter: it is asked again in every step while a request waits.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = _Tracked(request)
        local = num_computed_tokens // self._block_size
        now_s = self._clock()
        if local != tracked.local or now_s - tracked.answered_s > FRESH_S:
            tracked.local = local
            tracked.answered_s = now_s
            tracked.answer = 0 if tracked.failed else self._look_up(request, local)
        return tracked.answer * self._block_size, self._later and tracked.answer > 0

    def allocated(self, request: Any, block_ids: list[int], num_external_tokens: int) -> None:
        """Note that vLLM took blocks for a request, and plan its load."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = _Tracked(request)
        tracked.admitted = True
        if not num_external_tokens:
            return
        first = tracked.local
        end = first + num_external_tokens // self._block_size
        try:
            keys = self._keys(request, first, end)
        except Exception:
            _log.exception("a load could not be planned; its blocks are computed")
            keys = []  # the blocks must be named as not loaded, vLLM counts on them
        self._next.loads.append(Load(request.request_id, block_ids[first:end], keys, self._later))
        self.hit_tokens += num_external_tokens

    def plan(self, output: Any) -> StepPlan:
        """Return what the workers shall do in the step of a `SchedulerOutput`.

        Whatever goes wrong here, the loads that were promised are in it.
        """
        plan, self._next = self._next, StepPlan()
        for request_id in output.preempted_req_ids or ():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.answered_s = float("-inf")
                if tracked.asked > tracked.acked:
                    plan.preempted.append(request_id)
        if self._saves_on:
            try:
                self._plan_saves(plan, output)
            except Exception:
                _log.exception("saves of a step could not be planned; it goes on without them")
        return plan

    def reported(self, report: StepReport) -> None:
        """Take in what all ranks together did in a step."""
        if report.broken:
            self._link.failed(self._link.loads, "a worker could not load")
        for request_id, count in report.saved.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.acked += count
        for request_id in report.failed:
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.failed = True

    def finished(self, request: Any, block_ids: Sequence[int]) -> bool:
        """Forget a request; whether its blocks must be held until the workers name it."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        if self._saves_on:
            # With asynchronous scheduling the hash of a block is known a step after its last token.
            known = min(request.num_computed_tokens, request.num_tokens - 1)
            try:
                end = min(self._end(request, known), len(block_ids))
                if end > tracked.saved and not tracked.admitted:
                    self._ask(self._next, tracked, list(block_ids), end, end)
            except Exception:
                _log.exception("the last save of a request could not be planned")
        held = tracked.asked > tracked.acked
        if held:
            self._next.held.append(request.request_id)
        return held

    def take_stats(self) -> dict[str, float]:
        """Return what was counted since the last call, empty if nothing was."""
        if not self.lookups and not self.hit_tokens:
            return {}
        found = {"lookups": self.lookups, "hit_tokens": self.hit_tokens}
        self.lookups = self.hit_tokens = 0
        return {name: float(value) for name, value in found.items()}

    # ---- small things ----

    def _plan_saves(self, plan: StepPlan, output: Any) -> None:
        size = self._block_size
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            computed: int = tracked.request.num_computed_tokens
            if tracked.admitted or computed < tracked.saved * size:
                # Just begun, or cut back because a load failed: computed from here on.
                tracked.admitted = False
                tracked.saved = computed // size
                tracked.begin = min(tracked.begin, tracked.saved)
            if computed + scheduled >= (tracked.saved + 1) * size:
                end = self._end(tracked.request, computed + scheduled)
                if end > tracked.saved:
                    ids = output.kv_connector_block_state.resolve_block_ids(request_id)[0]
                    self._ask(plan, tracked, ids, computed // size, end)

    def _look_up(self, request: Any, local: int) -> int:
        # At least one token is left to compute: the first one out needs a forward pass.
        limit = (request.num_tokens - 1) // self._block_size
        if not self._loads_on or limit - local < self._min_blocks or self._link.loads.is_open:
            return 0
        keys = self._keys(request, local, limit)
        if not keys:
            return 0
        self.lookups += 1
        found = len(keys)
        try:
            for space in self._current_spaces():
                # A hit is a hit only if every rank has it.
                found = min(found, space.exists(keys[:found]).success)
                if found < self._min_blocks:
                    return 0
        except Exception as error:
            self._link.failed(self._link.loads, error)
            return 0
        return found if self._spaces else 0

    def _current_spaces(self) -> list[PageCaching]:
        caching = self._link.caching
        if caching is not self._caching or caching is None:
            self._spaces = (
                [caching.register_pages(None, layout) for layout in self._layouts]
                if caching is not None
                else []
            )
            self._caching = caching
        return self._spaces

    def _keys(self, request: Any, first: int, end: int) -> list[bytes]:
        step = self._hashes_a_block  # hashes are chained: the last one of a block names it all
        hashes = request.block_hashes[first * step + step - 1 : end * step : step]
        return [bytes(one) for one in hashes]

    def _end(self, request: Any, tokens: int) -> int:
        """Return how many blocks are full, have a hash, and are to be saved."""
        if not self._save_decoded:
            tokens = min(tokens, request.num_prompt_tokens)
        hashed = len(request.block_hashes) // self._hashes_a_block
        return int(min(tokens // self._block_size, hashed))

    def _ask(
        self, plan: StepPlan, tracked: _Tracked, ids: list[int], computed: int, end: int
    ) -> None:
        # The first save of a request begins at the head: what is there costs a look at the index,
        # and a hole in the prefix would make everything behind it useless.
        begin = tracked.begin
        request = tracked.request
        keys = self._keys(request, begin, end)
        plan.saves.append(Save(request.request_id, ids[:end], keys, begin, computed))
        tracked.saved = tracked.begin = end
        tracked.asked += max(1, len(self._layouts))
