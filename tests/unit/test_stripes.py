from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from v1_bench import Cache, V1Bench, filled, right, whole

from ems import CcResult
from ems.client import operations
from ems.client.stripes import PORTION_BYTES, Share, turns
from ems.common.metrics import Count


@given(st.integers(0, 200), st.integers(1, 10), st.integers(0, 1 << 24), st.data())
def test_each_rank_takes_every_key_once(
    nkeys: int, ranks: int, key_bytes: int, data: st.DataObject
) -> None:
    stripe = data.draw(st.integers(0, ranks - 1))
    parts = list(turns(nkeys, nkeys * key_bytes, Share(stripe, ranks)))
    keys = [key for part in parts for key in part]
    assert sorted(keys) == list(range(nkeys))
    start = stripe * nkeys // ranks
    if nkeys and (stripe + 1) * nkeys // ranks > start:
        assert keys[0] == start
    for part in parts:
        assert part and (len(part) == 1 or len(part) * key_bytes <= PORTION_BYTES)


def test_ranks_begin_apart() -> None:
    first = [next(iter(turns(8, 8, Share(rank, 4)))) for rank in range(4)]
    assert first == [range(2), range(2, 4), range(4, 6), range(6, 8)]


MLA = {"tp_world_size": 2, "kvcache_type": "MLA"}


def test_a_rank_leaves_to_its_peer_what_the_peer_writes(v1: V1Bench) -> None:
    """Rank 1 saves the list while rank 0 is in the middle of its own portion."""
    cache, hashes = Cache(), [1, 2, 3, 4]
    peer = v1.again()
    mine, other = v1.cc(rank_id=0, **MLA), peer.cc(rank_id=1, **MLA)
    mine.register_kvcache(cache.tensors)
    other.register_kvcache(cache.tensors)
    given = filled(cache, range(4), hashes)
    later: list[CcResult] = []
    future = None

    def start_the_peer() -> None:
        nonlocal future
        future = other.async_save(**given)
        # It must have found my keys busy before I go on.
        while peer.bench.counters[Count.SAVE_BUSY] == 0:
            pass

    v1.bench.faults.at["copy in"] = start_the_peer
    assert mine.save(**given) == CcResult(4, 4)
    assert future is not None
    later.append(other.get_result(future))
    assert later == [CcResult(4, 4)]
    copied = v1.bench.counters[Count.SAVE_COMMITTED], peer.bench.counters[Count.SAVE_COMMITTED]
    assert copied == (2, 2)
    assert v1.bench.counters[Count.SAVE_KEPT] == peer.bench.counters[Count.SAVE_KEPT] == 0
    assert other.load(**whole(cache, range(8, 12), hashes)) == CcResult(4, 4)
    assert all(right(cache, range(8, 12), hashes))
    peer.close()
    peer.bench.check_quiet()


def test_a_peer_that_is_stopped_is_not_waited_for(
    v1: V1Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "PATIENCE_S", 0.01)
    cache, hashes = Cache(), [1, 2, 3, 4]
    peer = v1.again()
    mine, other = v1.cc(rank_id=0, **MLA), peer.cc(rank_id=1, **MLA)
    mine.register_kvcache(cache.tensors)
    other.register_kvcache(cache.tensors)
    given = filled(cache, range(4), hashes)
    results = []
    v1.bench.faults.at["copy in"] = lambda: results.append(other.save(**given))
    assert mine.save(**given) == CcResult(4, 4)
    assert results == [CcResult(4, 4)]
    # The stopped one's copy came second and was dropped.
    assert peer.bench.counters[Count.SAVE_COMMITTED] == 4
    assert v1.bench.counters[Count.SAVE_KEPT] == 2
    peer.close()
    peer.bench.check_quiet()
