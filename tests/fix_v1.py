"""The V1 calls in this process: a bench, and its object with a registered cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from v1_bench import Cache, V1Bench

from ems import ContextCaching


@pytest.fixture
def v1() -> Iterator[V1Bench]:
    bench = V1Bench()
    yield bench
    bench.close()
    bench.bench.check_quiet()


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def registered(v1: V1Bench, cache: Cache) -> ContextCaching:
    found = v1.cc()
    found.register_kvcache(cache.tensors)
    return found
