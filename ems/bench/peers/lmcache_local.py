"""LMCache's local CPU back end, in the process that uses it; no other process sees its blocks."""

from __future__ import annotations

import os
from typing import Any

from ems.bench.peers.child import Peer, serve

__all__ = ["LmcachePeer"]

_GIB = 1 << 30


class LmcachePeer(Peer):
    """Allocate, copy and put, as its cache engine does for each chunk; get and copy."""

    def open(self) -> str:
        """Make a back end of a gigabyte at least."""
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
        from importlib.metadata import version

        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        size = max(1.0, self.pool_bytes / _GIB)
        config = LMCacheEngineConfig.from_defaults(local_cpu=True, max_local_cpu_size=size)
        kv_shape = (1, 2, 256, 1, 128)
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.uint8, kv_shape)
        self._backend = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._torch, self._key, self._format = torch, CacheEngineKey, MemoryFormat.KV_2LTD
        return f"lmcache {version('lmcache')}, torch {torch.__version__}"

    def names(self, keys: list[str]) -> list[Any]:
        """Its keys hold a number."""
        kind = self._torch.uint8
        return [self._key("bench", 1, 0, hash(key), kind) for key in keys]

    def places(self, views: list[memoryview], addresses: list[int]) -> list[Any]:
        """Tensors of bytes over the caller's memory."""
        return [self._torch.frombuffer(view, dtype=self._torch.uint8) for view in views]

    def save(self, names: list[Any], places: list[Any]) -> None:
        """Take memory of the back end, copy, put."""
        objects = self._backend.batched_allocate(
            places[0].shape, places[0].dtype, len(places), self._format
        )
        for held, tensor in zip(objects, places):
            held.tensor.copy_(tensor)
        self._backend.batched_submit_put_task(names, objects)
        for held in objects:
            held.ref_count_down()

    def load(self, names: list[Any], places: list[Any]) -> None:
        """Get and copy."""
        for name, tensor in zip(names, places):
            held = self._backend.get_blocking(name)
            tensor.copy_(held.tensor)
            held.ref_count_down()

    def drop(self, names: list[Any]) -> None:
        """Remove."""
        for name in names:
            self._backend.remove(name)


if __name__ == "__main__":
    serve(LmcachePeer)
