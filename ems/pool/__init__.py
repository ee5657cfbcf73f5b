"""The pool: who may write where and what is evicted. Synchronous, no I/O, no clock."""

from __future__ import annotations

from ems.pool.geometry import Geometry, geometry
from ems.pool.pool import Pool, PoolFull, PoolStats, ServerState, SessionRecord

__all__ = [
    "Geometry",
    "Pool",
    "PoolFull",
    "PoolStats",
    "ServerState",
    "SessionRecord",
    "geometry",
]
