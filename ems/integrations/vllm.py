"""EMS as a KV connector of vLLM, used by configuration alone::

    --kv-transfer-config '{"kv_connector": "EmsConnector",
        "kv_connector_module_path": "ems.integrations.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"root": "..."}}'

vLLM makes two of them: one in the scheduler, one in each worker. This module translates; what they
do is in `vllm_scheduler` and `vllm_worker`, which know nothing of vLLM's classes. Made for and
tested with vLLM 0.32; its interface is declared experimental.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ems.integrations.vllm_facts import attention_facts, check_supported, engine_facts, tensor_rank
from ems.integrations.vllm_layout import layout_text, pages_of
from ems.integrations.vllm_link import Link
from ems.integrations.vllm_metrics import EmsPromMetrics, EmsStats
from ems.integrations.vllm_scheduler import SchedulerHalf
from ems.integrations.vllm_settings import Settings
from ems.integrations.vllm_steps import StepPlan, StepReport
from ems.integrations.vllm_worker import WorkerHalf

__all__ = ["EmsConnector"]

_log = logging.getLogger("vllm.ems")
_F = TypeVar("_F", bound=Callable[..., Any])


def _never_raises(otherwise: Callable[[], Any]) -> Callable[[_F], _F]:
    """Log what a method raises and return `otherwise()`.

    An exception in one rank leaves the other ranks waiting for five minutes and ends the engine.
    """

    def wrap(method: _F) -> _F:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception:
                _log.exception("%s failed; vLLM goes on without it", method.__name__)
                return otherwise()

        return cast(_F, call)

    return wrap


def _nothing() -> None:
    return None


@dataclasses.dataclass
class _Metadata(KVConnectorMetadata):  # type: ignore[misc]
    plan: StepPlan


@dataclasses.dataclass
class _Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    layout: str


@dataclasses.dataclass
class _WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> _WorkerMetadata:
        self.report.add(cast(_WorkerMetadata, other).report)
        return self


class EmsConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads and saves KV blocks of vLLM in the EMS pool of the node.

    Its methods never raise once it is made; making it raises ValueError for a configuration that
    cannot work, with what to do. Each half is used by one thread of vLLM.

    Args:
        vllm_config: of the engine.
        role: which half this is.
        kv_cache_config: of the cache.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._settings = Settings.read(
            transfer.kv_connector_extra_config or {}, transfer.kv_load_failure_policy
        )
        check_supported(vllm_config, kv_cache_config)
        self._link = Link(self._settings)
        self._layout: str | None = None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
            self._scheduler = SchedulerHalf(
                self._settings,
                self._link,
                block_size,
                kv_cache_config.hash_block_size or block_size,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
            )
        else:
            self._worker = WorkerHalf(self._settings, self._link)

    # ---- scheduler ----

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a miss later, no reason to compute anything again now."""
        return False

    @_never_raises(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many more tokens EMS has; microseconds, no message."""
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    @_never_raises(_nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load of a request that got its blocks."""
        assert self._scheduler is not None
        ids = blocks.get_block_ids()[0] if num_external_tokens else []
        self._scheduler.allocated(request, ids, num_external_tokens)

    @_never_raises(lambda: _Metadata(StepPlan()))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return what the workers shall do in this step."""
        assert self._scheduler is not None
        return _Metadata(self._scheduler.plan(scheduler_output))

    @_never_raises(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the workers did."""
        reported = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(reported, _WorkerMetadata):
            self._scheduler.reported(reported.report)

    @_never_raises(lambda: (False, None))
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the blocks must be held until the workers name the request."""
        assert self._scheduler is not None
        return self._scheduler.finished(request, block_ids), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for the one group of KV caches that there is."""
        return self.request_finished(request, block_ids[0])

    @_never_raises(_nothing)
    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn from the workers what a block of each rank is."""
        if self._scheduler is not None:
            layouts = [cast(_Handshake, metadata[rank]).layout for rank in sorted(metadata)]
            self._scheduler.set_layouts(layouts)

    def reset_cache(self) -> bool | None:
        """Nothing of the pool is the engine's alone, so nothing is dropped."""
        return None

    # ---- worker ----

    @_never_raises(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Describe the KV caches to EMS, by their strides."""
        assert self._worker is not None
        config = self._kv_cache_config
        pages, shapes, layers = [], [], {}
        for name, tensor in kv_caches.items():
            found, shape = pages_of(name, tensor, config.num_blocks)
            pages += found
            layers[name] = len(pages) - 1
            shapes.append((name, shape, str(tensor.dtype), len(found)))
        self._layout = layout_text(
            {
                **engine_facts(self._vllm_config, config, self._settings.model_id),
                **attention_facts(self._vllm_config, config),
                "rank": tensor_rank(config),
                "layers": shapes,
                "vllm": vllm.__version__,
            }
        )
        # A device's load comes as one, and its graphs leave out the hooks.
        on_cpu = all(one.device == "cpu" for one in pages)
        self._worker.register(pages, self._layout, layers if on_cpu else None)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what a block of this rank is, for the scheduler."""
        return None if self._layout is None else _Handshake(self._layout)

    @_never_raises(_nothing)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Have saves ended whose blocks this step writes."""
        assert self._worker is not None
        self._worker.preempt(cast(_Metadata, kv_connector_metadata).plan)

    @_never_raises(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what the scheduler promised, or start to."""
        plan = self._plan()
        if plan.loads:
            assert self._worker is not None
            self._worker.load(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for the blocks of a layer, if this step loads some beside its forward pass."""
        if self._worker is not None and self._worker.arriving:
            self._arrive(layer_name)

    @_never_raises(_nothing)
    def _arrive(self, layer_name: str) -> None:
        assert self._worker is not None
        self._worker.arrive(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved whole, all layers at once, behind the forward pass."""

    @_never_raises(_nothing)
    def wait_for_save(self) -> None:
        """Start to save what the forward pass has filled; waits for loads only."""
        plan = self._plan()
        assert self._worker is not None
        if plan.saves or self._worker.arriving:
            self._worker.save(plan)

    @_never_raises(lambda: (set(), set()))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return requests whose held blocks are free, and requests whose loads have ended."""
        assert self._worker is not None
        return self._worker.finished(self._plan())

    @_never_raises(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that loads did not fill."""
        assert self._worker is not None
        return self._worker.take_bad_blocks()

    @_never_raises(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what the scheduler half must know."""
        report = None if self._worker is None else self._worker.take_report()
        return None if report is None else _WorkerMetadata(report)

    # ---- both ----

    @_never_raises(_nothing)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what was counted since the last call."""
        half = self._worker if self._worker is not None else self._scheduler
        assert half is not None
        data = half.take_stats()
        return EmsStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Make stats of what crossed a process border."""
        return EmsStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> KVConnectorPromMetrics | None:
        """Make the Prometheus metrics; takes what `EmsPromMetrics` does."""
        return EmsPromMetrics(*args, **kwargs)

    @_never_raises(_nothing)
    def shutdown(self) -> None:
        """Let what runs end, and let go of the KV caches."""
        if self._worker is not None:
            self._worker.close()
        self._link.close()

    def _plan(self) -> StepPlan:
        metadata = self._connector_metadata
        return metadata.plan if isinstance(metadata, _Metadata) else _EMPTY


_EMPTY = StepPlan()
