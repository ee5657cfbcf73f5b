"""The worker half: loads and saves in whole batches, and what must not happen to a block.

A load that a step needs runs beside its forward pass, layer by layer; what it brought is judged
when the forward pass has ended, and vLLM computes again what was made of blocks that did not come.

- No block is read after it was handed back: blocks of a request that ended are held, a preempted
  one's saves are waited for before its blocks are written.
- No block is written after its request ended: a load is reported when its future is done, and then
  it touches nothing any more.
- Nothing computed from a block whose load failed is saved: its hash would name other bytes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from ems import CcFuture, CcKvOption, ContextCaching, Ems, KvPages, PageCaching, PageLoad
from ems.integrations.vllm_link import Link
from ems.integrations.vllm_settings import Settings
from ems.integrations.vllm_steps import Load, StepPlan, StepReport

__all__ = ["WorkerHalf"]

PATIENCE_S = 0.05
"""How long a preempted request's saves may go on before they are cancelled."""
LAYERED_BYTES = 8 << 20
"""Smaller loads are made before the forward pass: to hand one to another thread costs more.

Measured, what a load adds to a forward pass of 12 layers of 0.5 ms (beside it; before it), us:
1 MiB 579; 138, 4 MiB 571; 335, 8 MiB 641; 583, 16 MiB 843; 1,138, 64 MiB 1,211; 3,596.
"""
_COUNTED = (
    "load_calls", "load_keys", "load_hits", "load_bytes", "load_ns", "load_timeouts", "load_errors",
    "miss_absent", "miss_changing", "miss_length", "miss_retired", "miss_checksum",
    "save_keys", "save_committed", "save_no_room", "save_bytes", "save_ns", "save_timeouts",
    "save_errors",
)  # fmt: skip

_log = logging.getLogger("vllm.ems")


class WorkerHalf:
    """Used by the model runner's thread alone.

    Args:
        settings: of the connector.
        link: to EMS.
        counters: what the client of this process counted so far.
    """

    def __init__(
        self,
        settings: Settings,
        link: Link,
        counters: Callable[[], dict[str, int]] = Ems.stats,
    ) -> None:
        self._link = link
        self._load_option = CcKvOption(timeout=settings.load_timeout_ms)
        self._save_option = CcKvOption(timeout=settings.save_timeout_ms)
        self._counters = counters
        self._described: tuple[Sequence[KvPages], str] | None = None
        self._caching: ContextCaching | None = None
        self._pages: PageCaching | None = None
        self._saving: dict[str, list[CcFuture]] = {}
        self._loading: dict[str, tuple[CcFuture, Load]] = {}
        self.arriving: list[tuple[PageLoad, Load]] = []
        self._layers: Mapping[str, int] = {}  # the last page of each
        self._passed: set[str] = set()  # layers whose blocks were waited for in this step
        self._block_bytes = 0
        self._held: set[str] = set()
        self._received: set[str] = set()
        self._bad: set[int] = set()  # to be reported
        self._poisoned: set[int] = set()  # filled with nothing good yet
        self._report = StepReport()
        self._before: dict[str, int] = {}
        self._worked = False

    def register(
        self, pages: Sequence[KvPages], layout: str, layers: Mapping[str, int] | None = None
    ) -> None:
        """Take the KV cache.

        Args:
            pages: one entry for each piece of memory that a block has a page in.
            layout: of a block.
            layers: the last entry of each layer, in their order; None to load whole blocks before
                the forward pass.
        """
        self._described = (pages, layout)
        self._layers = layers or {}
        self._block_bytes = sum(one.page_bytes for one in pages)
        self._caching = self._pages = None
        self._worked = True
        self.take_stats()  # what another engine of this process did is not ours

    def preempt(self, plan: StepPlan) -> None:
        """Have the saves of preempted requests ended: their blocks are written in this step."""
        for request_id in plan.preempted:
            for future in self._saving.get(request_id, ()):
                if not _waited(future, PATIENCE_S):
                    _cancelled(future)

    def load(self, plan: StepPlan) -> None:
        """Load what the step needs, or start to, and start what later steps need."""
        self._judge()
        self._passed.clear()
        for load in plan.loads:
            self._worked = True
            try:
                pages = None if self._link.loads.is_open else self._current_pages()
                if pages is None or not load.keys:
                    self._load_failed(load)
                elif load.later:
                    future = pages.async_load(load.block_ids, load.keys, self._load_option)
                    self._loading[load.request_id] = (future, load)
                elif self._layers and len(load.keys) * self._block_bytes >= LAYERED_BYTES:
                    started = pages.load_by_page(load.block_ids, load.keys, self._load_option)
                    self.arriving.append((started, load))
                else:
                    result = pages.load(load.block_ids, load.keys, self._load_option)
                    self._loaded(load, result.success)
            except Exception as error:
                self._link.failed(self._link.loads, error)
                self._load_failed(load)

    def arrive(self, layer: str) -> None:
        """Wait for what the forward pass reads in a layer."""
        page = self._layers.get(layer)
        if page is not None:
            for started, _ in self.arriving:
                started.wait(page)
            self._passed.add(layer)

    def save(self, plan: StepPlan) -> None:
        """Start to save what the forward pass has filled."""
        self._judge()
        for save in plan.saves:
            self._poisoned.difference_update(save.block_ids[save.computed :])
        for save in plan.saves:
            self._worked = True
            future = None
            try:
                pages = None if self._link.saves.is_open else self._current_pages()
                if pages is not None and self._poisoned.isdisjoint(save.block_ids[: save.computed]):
                    ids = save.block_ids[save.begin :]
                    future = pages.async_save(ids, save.keys, self._save_option)
            except Exception as error:
                self._link.failed(self._link.saves, error)
            if future is None:
                self._acknowledge(save.request_id)
            else:
                self._saving.setdefault(save.request_id, []).append(future)

    def finished(self, plan: StepPlan) -> tuple[set[str], set[str]]:
        """Return the requests whose held blocks are free now, and those whose loads have ended."""
        self._judge()
        self._held.update(plan.held)
        for request_id in list(self._saving):
            self._sweep(request_id)
        for request_id, (future, load) in list(self._loading.items()):
            if future.done():
                del self._loading[request_id]
                self._worked = True
                try:
                    self._loaded(load, future.result().success)
                except Exception as error:
                    self._link.failed(self._link.loads, error)
                    self._load_failed(load)
        sent = {one for one in self._held if one not in self._saving}
        self._held -= sent
        received, self._received = self._received, set()
        return sent, received

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks that loads of this step did not fill."""
        bad, self._bad = self._bad, set()
        return bad

    def take_report(self) -> StepReport | None:
        """Return what the scheduler half must know, None if nothing."""
        if not self._report:
            return None
        report, self._report = self._report, StepReport()
        return report

    def take_stats(self) -> dict[str, float]:
        """Return what the client counted since the last call; empty when nothing was done."""
        if not self._worked:
            return {}
        self._worked = bool(self._saving or self._loading)
        try:
            now = self._counters()
        except Exception:
            return {}  # counted the next time
        before, self._before = self._before, {name: now[name] for name in _COUNTED}
        changed = {name: now[name] - before.get(name, 0) for name in _COUNTED}
        return {name: float(value) for name, value in changed.items() if value > 0}

    def close(self) -> None:
        """Wait for what runs, as long as it may take, and let go of the memory."""
        for futures in self._saving.values():
            for future in futures:
                _waited(future, None)
        for future, _ in self._loading.values():
            _cancelled(future)
        self._judge()
        self._saving.clear()
        self._loading.clear()
        self._described = self._caching = self._pages = None

    # ---- small things ----

    def _current_pages(self) -> PageCaching | None:
        caching = self._link.caching
        if caching is not self._caching and self._described is not None:
            self._pages = None
            try:
                if caching is not None:
                    self._pages = caching.register_pages(*self._described)
            except Exception as error:  # tried again when the breakers have closed
                self._link.failed(self._link.loads, error)
                self._link.failed(self._link.saves, error)
            else:
                self._caching = caching
        return self._pages

    def _judge(self) -> None:
        """Take in what loads beside the forward pass have brought."""
        arriving, self.arriving = self.arriving, []
        for started, load in arriving:
            try:
                blocks = started.future.result().success
            except Exception as error:
                if not started.future.done():
                    _cancelled(started.future)  # before its blocks are computed
                self._link.failed(self._link.loads, error)
                self._load_failed(load)
                continue
            if not self._passed.issuperset(self._layers):
                _log.warning("a layer did not wait for its blocks: from now on loads come before")
                self._layers = {}
                blocks = 0
            self._loaded(load, blocks)

    def _loaded(self, load: Load, blocks: int) -> None:
        self._poisoned.difference_update(load.block_ids[:blocks])
        missing = load.block_ids[blocks:]
        if missing:
            self._bad.update(missing)
            self._poisoned.update(missing)
            self._report.failed.add(load.request_id)
        if load.later:
            self._received.add(load.request_id)

    def _load_failed(self, load: Load) -> None:
        self._report.broken += 1
        self._loaded(load, 0)

    def _sweep(self, request_id: str) -> None:
        futures = self._saving[request_id]
        left = [future for future in futures if not future.done()]
        if len(left) == len(futures):
            return
        for future in futures:
            if future.done():
                self._worked = True
                self._acknowledge(request_id)
                try:
                    if not future.cancelled():
                        future.result()
                except Exception as error:
                    self._link.failed(self._link.saves, error)
        if left:
            self._saving[request_id] = left
        else:
            del self._saving[request_id]

    def _acknowledge(self, request_id: str) -> None:
        self._report.saved[request_id] = self._report.saved.get(request_id, 0) + 1


def _waited(future: CcFuture, timeout_s: float | None) -> bool:
    """Wait for the end of an operation, whatever it is; False when the time was over before."""
    try:
        future.exception(timeout_s)
    except Exception:
        return future.done()
    return True


def _cancelled(future: CcFuture) -> None:
    """End an operation, which may take as long as a slice of its copy."""
    with contextlib.suppress(Exception):
        future.cancel()
    while not _waited(future, PATIENCE_S):  # it ends: it has a deadline
        time.sleep(0.001)
