"""The V1 call shape: registered KV tensors and integer block hashes."""

from __future__ import annotations

from ems.cc_v1.cc_config import CcConfig_v1, KVCacheType

__all__ = ["CcConfig_v1", "KVCacheType"]
