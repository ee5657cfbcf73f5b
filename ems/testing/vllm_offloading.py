"""vLLM's native offloading on a CPU: a peer to compare with.

As shipped it serves GPUs only. Scheduler, index and LRU here are vLLM's own; only the worker that
copies is ours, and it copies a page in one piece, in the step that asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

__all__ = ["HostSpec"]


class HostSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """Named by `spec_name` and `spec_module_path` in the settings of `OffloadingConnector`."""

    _worker: Any

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the one worker of this rank."""
        if self._worker is None:
            self._worker = _HostWorker(kv_caches, self.num_chunks)
        return self._worker


class _HostWorker(OffloadingWorker):  # type: ignore[misc]
    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        self._caches = [one.tensor for one in kv_caches.tensors]
        # Filled, so that no first touch of fresh memory is measured.
        self._host = [t.new_full((chunks, *t.shape[1:]), 1) for t in self._caches]
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy blocks out of the KV cache."""
        assert isinstance(dst_spec, CPULoadStoreSpec)
        pairs = zip(self._caches, self._host)
        self._copy(job_id, ((c, h) for c, h in pairs), src_spec.block_ids, dst_spec.block_ids)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy blocks into the KV cache."""
        assert isinstance(src_spec, CPULoadStoreSpec)
        pairs = zip(self._caches, self._host)
        self._copy(job_id, ((h, c) for c, h in pairs), src_spec.block_ids, dst_spec.block_ids)
        return True

    def _copy(
        self,
        job_id: int,
        pairs: Iterator[tuple[Any, Any]],
        sources: Any,
        targets: Any,
    ) -> None:
        assert len(sources) == len(targets), "a chunk is a block here"
        started = time.perf_counter()
        moved = 0
        for source, target in pairs:
            for one, other in zip(sources.tolist(), targets.tolist()):
                target[other].copy_(source[one])
                moved += source[one].nbytes
        self._done.append(TransferResult(job_id, True, moved, time.perf_counter() - started))

    def get_finished(self) -> list[TransferResult]:
        """Return what has ended since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: nothing is ever under way."""
