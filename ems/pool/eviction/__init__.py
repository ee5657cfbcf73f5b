"""Which entries go first. A policy decides, the native index does."""

from __future__ import annotations

from ems.pool.eviction.base import Evicted, EvictionPolicy
from ems.pool.eviction.learned import LearnedValue
from ems.pool.eviction.lru import LeastRecentlyUsed

__all__ = ["Evicted", "EvictionPolicy", "LearnedValue", "LeastRecentlyUsed"]
