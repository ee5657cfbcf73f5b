from __future__ import annotations

from collections.abc import Iterator

import pytest
from fix_pool import wait_until
from hypothesis import given
from hypothesis import strategies as st
from v1_bench import Cache, V1Bench, filled, right, whole

from ems import CcFuture, CcResult, EmsException
from ems.client import saving
from ems.client.stripes import PORTION_BYTES, Share, turns
from ems.common.metrics import Count
from ems.devices.base import DeviceError


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


class Pair:
    """Rank 0 and rank 1 of one instance, with one list of four keys to save."""

    def __init__(self, v1: V1Bench) -> None:
        self.cache, self.hashes = Cache(), [1, 2, 3, 4]
        self.first, self.second = v1, v1.again()
        self.mine, self.other = v1.cc(rank_id=0, **MLA), self.second.cc(rank_id=1, **MLA)
        for cc in (self.mine, self.other):
            cc.register_kvcache(self.cache.tensors)
        self.given = filled(self.cache, range(4), self.hashes)
        self.future: CcFuture | None = None

    def start_the_other(self) -> None:
        """Let rank 1 save, until it has found keys of rank 0 busy."""
        self.future = self.other.async_save(**self.given)
        wait_until(lambda: self.second.bench.counters[Count.SAVE_BUSY])

    def joined(self) -> CcResult:
        assert self.future is not None
        return self.other.get_result(self.future)

    def counts(self, count: Count) -> tuple[int, int]:
        return self.first.bench.counters[count], self.second.bench.counters[count]

    def close(self) -> None:
        target = range(8, 12)
        assert self.other.load(**whole(self.cache, target, self.hashes)) == CcResult(4, 4)
        assert all(right(self.cache, target, self.hashes))
        self.second.close()
        self.second.bench.check_quiet()


@pytest.fixture
def pair(v1: V1Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(saving, "PATIENCE_S", 30.0)  # for machines with more to do than this
    made = Pair(v1)
    yield made
    made.close()


def test_a_rank_leaves_to_its_peer_what_the_peer_writes(pair: Pair) -> None:
    """Rank 1 saves the list while rank 0 is in the middle of its own portion."""
    pair.first.bench.faults.at["copy in"] = pair.start_the_other
    assert pair.mine.save(**pair.given) == CcResult(4, 4)
    assert pair.joined() == CcResult(4, 4)
    assert pair.counts(Count.SAVE_COMMITTED) == (2, 2)
    assert pair.counts(Count.SAVE_KEPT) == (0, 0)


def test_a_rank_takes_over_what_its_peer_could_not_write(pair: Pair) -> None:
    def fail() -> None:
        pair.start_the_other()
        raise DeviceError("lost")

    pair.first.bench.faults.at["copy in"] = fail
    with pytest.raises(EmsException, match="EMS_INTERNAL_ERROR"):
        pair.mine.save(**pair.given)
    assert pair.joined() == CcResult(4, 4)
    assert pair.counts(Count.SAVE_COMMITTED) == (0, 4)


def test_a_peer_that_is_stopped_is_not_waited_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "PATIENCE_S", 0.01)
    results: list[CcResult] = []
    pair.first.bench.faults.at["copy in"] = lambda: results.append(pair.other.save(**pair.given))
    assert pair.mine.save(**pair.given) == CcResult(4, 4)
    assert results == [CcResult(4, 4)]
    # The stopped one's copy came second and was dropped.
    assert pair.counts(Count.SAVE_COMMITTED) == (0, 4)
    assert pair.counts(Count.SAVE_KEPT) == (2, 0)
