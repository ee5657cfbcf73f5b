"""What vLLM shows of EMS: a line in its log, and its Prometheus metrics."""

from __future__ import annotations

from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ems.integrations.vllm_stats import EXPORTED, added, summary

__all__ = ["EmsPromMetrics", "EmsStats"]


class EmsStats(KVConnectorStats):  # type: ignore[misc]
    """What vLLM logs and exports of EMS: sums since the last look."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> EmsStats:
        """Add what another rank, or a later step, counted."""
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures that the log shows."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class EmsPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters of vLLM's own registry, `vllm:ems_...`; per engine, over all of its ranks.

    Args:
        vllm_config: of the engine.
        metric_types: what vLLM uses for each of prometheus_client's types.
        labelnames: that every metric of vLLM has.
        per_engine_labelvalues: of these, by engine.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        made: dict[str, Any] = {}
        self._counters: dict[tuple[int, str], Any] = {}
        for name, one in EXPORTED.items():
            if one.metric not in made:
                made[one.metric] = self._counter_cls(
                    name=one.metric,
                    documentation=one.meaning,
                    labelnames=[*labelnames, "reason"] if one.reason else labelnames,
                )
            for engine, values in per_engine_labelvalues.items():
                labels = [*values, one.reason] if one.reason else values
                self._counters[engine, name] = made[one.metric].labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted since the last call."""
        for name, value in cast("dict[str, float]", transfer_stats_data).items():
            if name in EXPORTED:
                self._counters[engine_idx, name].inc(value * EXPORTED[name].scale)
