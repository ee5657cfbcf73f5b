"""The V1 calls as engines use them. Client and pool are real, the server is a function."""

from __future__ import annotations

import array
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from v1_bench import BLOCK_SIZE, Cache, V1Bench, filled, right, whole

from ems import CcKvOption, CcResult, ContextCaching, KvBufferWrapper
from ems.cc_v1.token_hash import chain_hashes
from ems.common.metrics import Count
from ems.testing.child import child_environment

CALLS = ["plain", "async"]


def do(cc: ContextCaching, how: str, name: str, **arguments: Any) -> CcResult:
    if how == "plain":
        result: CcResult = getattr(cc, name)(**arguments)
        return result
    return cc.get_result(getattr(cc, f"async_{name}")(**arguments))


# ---- by hash ----


@pytest.mark.parametrize("how", CALLS)
def test_blocks_come_back_into_other_places(
    registered: ContextCaching, cache: Cache, how: str
) -> None:
    hashes = [11, -7, 2**70]
    result = do(registered, how, "save", **filled(cache, [5, 0, 9], hashes))
    assert result == CcResult(3, 3)
    result = do(registered, how, "load", **whole(cache, [1, 2, 3], hashes))
    assert result == CcResult(3, 3)
    assert right(cache, [1, 2, 3], hashes) == [True] * 3
    assert type(result.success) is type(result.total) is int


def test_arguments_by_position(registered: ContextCaching, cache: Cache) -> None:
    given = filled(cache, [0], [1])
    slots, hashes, offsets = given["slot_mapping"], given["hashes"], given["offsets"]
    assert registered.save(slots, hashes, offsets, CcKvOption()) == CcResult(1, 1)
    assert registered.load(slots, hashes, offsets) == CcResult(1, 1)
    assert registered.load(slots, hashes, offsets=offsets, option=None) == CcResult(1, 1)


@pytest.mark.parametrize("kind", ["list", "tuple", "array", "strided", "int32"])
def test_numbers_in_any_container(registered: ContextCaching, cache: Cache, kind: str) -> None:
    make = {
        "list": list,
        "tuple": tuple,
        "array": lambda n: array.array("q", n),
        "strided": lambda n: memoryview(array.array("q", [x for v in n for x in (v, -1)]))[::2],
        "int32": lambda n: array.array("i", n),
    }[kind]
    given = {name: make(value) for name, value in filled(cache, [3, 4], [1, 2]).items()}
    assert registered.save(**given) == CcResult(2, 2)
    assert registered.load(**whole(cache, [0, 1], [1, 2])) == CcResult(2, 2)
    assert right(cache, [0, 1], [1, 2]) == [True, True]


def test_numpy_arrays(registered: ContextCaching, cache: Cache) -> None:
    numpy = pytest.importorskip("numpy")
    given = {name: numpy.asarray(value) for name, value in filled(cache, [3, 4], [1, -2]).items()}
    assert registered.save(**given) == CcResult(2, 2)
    assert registered.load(**given) == CcResult(2, 2)
    assert registered.exists(numpy.asarray([1, -2, 3])) == CcResult(2, 3)
    assert registered.exists([numpy.int64(1), numpy.int32(-2)]) == CcResult(2, 2)


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("hole", [0, 2, 4])
def test_a_hole_ends_the_row(registered: ContextCaching, cache: Cache, how: str, hole: int) -> None:
    hashes = [10, 11, 12, 13, 14]
    kept = [index for index in range(5) if index != hole]
    registered.save(**filled(cache, kept, [hashes[i] for i in kept]))
    assert do(registered, how, "load", **whole(cache, [8, 9, 10, 11, 12], hashes)) == CcResult(
        hole, 5
    )
    assert all(right(cache, range(8, 8 + hole), hashes))
    assert registered.exists(hashes) == CcResult(hole, 5)


@pytest.mark.parametrize("how", CALLS)
def test_a_block_that_is_there_keeps_its_first_copy(
    v1: V1Bench, registered: ContextCaching, cache: Cache, how: str
) -> None:
    registered.save(**filled(cache, [0, 1], [1, 2]))
    copied = v1.bench.counters[Count.SAVE_BYTES]
    cache.write(cache.slots(0, 1, 2), "something else")
    assert do(registered, how, "save", **whole(cache, [0, 2, 1], [1, 3, 2])) == CcResult(3, 3)
    assert v1.bench.counters[Count.SAVE_BYTES] == copied * 3 // 2  # the new block alone
    assert registered.load(**whole(cache, [4, 5], [1, 2])) == CcResult(2, 2)
    assert right(cache, [4, 5], [1, 2]) == [True, True]


def test_a_save_of_what_is_all_there_sends_no_message(
    v1: V1Bench, registered: ContextCaching, cache: Cache
) -> None:
    given = filled(cache, [0, 1, 2], [1, 2, 3])
    registered.save(**given)
    v1.bench.faults.steps.clear()
    assert registered.save(**given) == CcResult(3, 3)
    assert v1.bench.faults.steps == []


def test_negative_and_huge_hashes_are_distinct(registered: ContextCaching, cache: Cache) -> None:
    hashes = [0, 1, -1, 2**63, -(2**63), 2**63 - 1, 2**64 - 1, 2**64 + 1, 10**40, -(10**40)]
    blocks = range(len(hashes))
    assert registered.save(**filled(cache, blocks, hashes)) == CcResult(10, 10)
    for place, name in enumerate(hashes):
        assert registered.load(**whole(cache, [15], [name])) == CcResult(1, 1)
        assert right(cache, [15], [name]) == [True], place
    for absent in (-(2**63) - 1, 2**65, -2, 2**31):
        assert registered.exists([absent]) == CcResult(0, 1)


@pytest.mark.parametrize("how", CALLS)
def test_a_hash_twice_in_a_call(registered: ContextCaching, cache: Cache, how: str) -> None:
    given = filled(cache, [0, 1, 2], [7, 7, 8])
    assert do(registered, how, "save", **given) == CcResult(3, 3)
    assert do(registered, how, "load", **whole(cache, [3, 4, 5], [7, 8, 7])) == CcResult(3, 3)
    assert right(cache, [3, 4, 5], [7, 8, 7]) == [True] * 3


def test_a_part_of_a_block_is_another_block(registered: ContextCaching, cache: Cache) -> None:
    cache.write(range(6), "abc")
    given = {"slot_mapping": [0, 1, 2, 3, 4, 5], "hashes": [1, 2], "offsets": [4, 2]}
    assert registered.save(**given) == CcResult(2, 2)
    there = [40, 41, 42, 43, 44, 45]
    assert registered.load(there, [1, 2], [4, 2]) == CcResult(2, 2)
    assert cache.holds(there, "abc")
    assert registered.load(there[:5], [1, 2], [4, 1]) == CcResult(1, 2)
    assert registered.load([*there, 46], [1, 2], [4, 3]) == CcResult(1, 2)
    # ... and both may be there.
    cache.write([8, 9, 10], "other")
    assert registered.save([8, 9, 10], [2], [3]) == CcResult(1, 1)
    assert registered.load([60, 61], [2], [2]) == CcResult(1, 1)
    assert registered.load([48, 49, 50], [2], [3]) == CcResult(1, 1)
    assert cache.holds([48, 49, 50], "other")


def test_scattered_slots(registered: ContextCaching, cache: Cache) -> None:
    scattered = [3, 2, 60, 17, 18, 19, 0, 33]
    cache.write(scattered, "s")
    assert registered.save(scattered, [1, 2], [4, 4]) == CcResult(2, 2)
    together = cache.slots(12, 13)
    assert registered.load(together, [1, 2], [4, 4]) == CcResult(2, 2)
    assert cache.holds(together, "s")
    others = [20, 22, 24, 26, 21, 23, 25, 27]
    assert registered.load(others, [1, 2], [4, 4]) == CcResult(2, 2)
    assert cache.holds(others, "s")


def test_gaps_unequal_components_and_what_lies_beside_a_block(v1: V1Bench) -> None:
    cache = Cache(head_sizes=((64, 16), (64, 16), (7,), (1, 2, 3)), gap=5)
    cc = v1.cc()
    cc.register_kvcache(cache.tensors)
    assert cc.save(**filled(cache, [3, 8], [1, 2])) == CcResult(2, 2)
    assert cc.load(**whole(cache, [10, 5], [1, 2])) == CcResult(2, 2)
    assert right(cache, [10, 5], [1, 2]) == [True, True]
    beside = [b for b in range(16) if b not in (3, 8, 10, 5)]
    assert cache.untouched(cache.slots(*beside))


# ---- by token ----


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("tokens", [1, 3, 4, 6, 8, 11])
def test_tokens(registered: ContextCaching, cache: Cache, how: str, tokens: int) -> None:
    ids = [1000 + at for at in range(tokens)]
    cache.write(range(tokens), "t")
    given = {"token_ids": ids, "mask": [1] * tokens}
    saved = do(registered, how, "save", slot_mapping=list(range(tokens)), **given)
    assert saved == CcResult(tokens, tokens)
    target = list(range(32, 32 + tokens))
    loaded = do(registered, how, "load", slot_mapping=target, **given)
    assert loaded == CcResult(tokens, tokens)
    assert cache.holds(target, "t")


def test_a_token_that_differs_ends_the_row_in_tokens(
    registered: ContextCaching, cache: Cache
) -> None:
    slots = list(range(12))
    registered.save(slots, token_ids=list(range(12)), mask=[1] * 12)
    for changed, expected in ((11, 8), (5, 4), (0, 0)):
        ids = list(range(12))
        ids[changed] = 99
        assert registered.load(slots, token_ids=ids, mask=[1] * 12) == CcResult(expected, 12)
    # The same block behind another prefix is another block.
    ids = [99, *range(1, 12)]
    assert registered.load(slots, token_ids=ids, mask=[0] * 4 + [1] * 8) == CcResult(0, 8)


def test_the_mask_skips_what_the_engine_has(registered: ContextCaching, cache: Cache) -> None:
    ids, slots = list(range(10)), list(range(10))
    cache.write(slots, "t")
    assert registered.save(slots, token_ids=ids, mask=[True] * 10) == CcResult(10, 10)
    # The example of the contract: two whole blocks are there, a partial one is wanted.
    target = [-1] * 8 + [40, 41]
    mask = [0] * 8 + [1, 1]
    assert registered.load(target, token_ids=ids, mask=mask) == CcResult(2, 2)
    assert bytes(cache.tensors[0][0].token(41)) == bytes(cache.tensors[0][0].token(9))
    # A block that the mask cuts is loaded as a whole, and its wanted tokens are counted.
    target = [-1] * 4 + [44, 45, 46, 47, 48, 49]
    mask = [0] * 6 + [1] * 4
    assert registered.load(target, token_ids=ids, mask=mask) == CcResult(4, 4)
    assert bytes(cache.tensors[1][1].token(44)) == bytes(cache.tensors[1][1].token(4))
    assert registered.load(slots, token_ids=ids, mask=[0] * 10) == CcResult(0, 0)
    assert registered.get_result(
        registered.async_load(slots, token_ids=ids, mask=[0] * 10)
    ) == CcResult(0, 0)


def test_tokens_and_hashes_never_meet(registered: ContextCaching, cache: Cache) -> None:
    ids = array.array("q", range(BLOCK_SIZE))
    registered.save(list(range(4)), token_ids=ids, mask=[1] * 4)
    assert registered.exists(chain_hashes(ids.tobytes(), BLOCK_SIZE)) == CcResult(0, 1)


def test_token_hashes_never_change() -> None:
    tokens = array.array("q", [5, -1, 151643, 0, 7, 8]).tobytes()
    hashes = chain_hashes(tokens, 4)
    assert [f"{one:064x}"[:16] for one in hashes] == ["4f785b7ff7ea4588", "1a95a9d2f7013edb"]
    code = (
        "import array;from ems.cc_v1.token_hash import chain_hashes;"
        "print(chain_hashes(array.array('q', [5, -1, 151643, 0, 7, 8]).tobytes(), 4))"
    )
    for seed in ("0", "77"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**child_environment(), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == str(hashes)


# ---- by chunk, with layer groups ----

GROUPS = [[0, 2], [1]]


@pytest.fixture
def grouped(v1: V1Bench, cache3: Cache) -> ContextCaching:
    cc = v1.cc()
    cc.register_kvcache(cache3.tensors, GROUPS)
    return cc


@pytest.fixture
def cache3() -> Cache:
    return Cache(head_sizes=((8, 8), (4,), (8, 8)), num_blocks=32)


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("shape", ["pairs", "mappings", "objects"])
def test_chunks_of_groups(grouped: ContextCaching, cache3: Cache, how: str, shape: str) -> None:
    make: Any = {
        "pairs": lambda start, length: (start, length),
        "mappings": lambda start, length: {"start_slot": start, "length": length},
        "objects": lambda start, length: SimpleNamespace(start_slot=start, length=length),
    }[shape]
    cache3.write(range(128), "g")
    descs = [[make(0, 8), make(20, 8)], [make(64, 4), make(72, 4)]]
    assert do(grouped, how, "save", hashes=[1, 2], chunk_descs=descs) == CcResult(2, 2)
    expected = [bytes(cache3.tensors[0][0].token(s)) for s in (*range(8), *range(20, 28))]
    other = [bytes(cache3.tensors[1][0].token(s)) for s in (*range(64, 68), *range(72, 76))]
    cache3.write(range(128), "gone")
    descs = [[make(40, 8), make(48, 8)], [make(4, 4), make(0, 4)]]
    assert do(grouped, how, "load", hashes=[1, 2], chunk_descs=descs) == CcResult(2, 2)
    assert [bytes(cache3.tensors[0][0].token(s)) for s in range(40, 56)] == expected
    assert [bytes(cache3.tensors[1][0].token(s)) for s in (4, 5, 6, 7, 0, 1, 2, 3)] == other
    assert grouped.exists([1, 2, 3]) == CcResult(2, 3)


def test_a_prefix_counts_while_every_group_that_keeps_a_chunk_has_it(
    grouped: ContextCaching, cache3: Cache
) -> None:
    cache3.write(range(128), "g")
    both = [[(0, 4), (4, 4), (8, 4)], [(0, 4), (4, 0), (8, 4)]]
    assert grouped.save(hashes=[1, 2, 3], chunk_descs=both) == CcResult(3, 3)
    # The second group never kept chunk 2.
    assert grouped.load(hashes=[1, 2, 3], chunk_descs=both) == CcResult(3, 3)
    assert grouped.exists([1, 2, 3], chunk_descs=both) == CcResult(3, 3)
    everything = [[(0, 4), (4, 4), (8, 4)], [(0, 4), (4, 4), (8, 4)]]
    assert grouped.load(hashes=[1, 2, 3], chunk_descs=everything) == CcResult(1, 3)
    assert grouped.exists([1, 2, 3]) == CcResult(1, 3)
    assert grouped.exists([1, 2, 3], chunk_descs=everything) == CcResult(1, 3)
    # A chunk that nobody keeps is no hole; one that nobody has is.
    nobody = [[(0, 4), (-1, 0), (8, 4)], [(0, 4), (-1, 0), (8, 4)]]
    assert grouped.load(hashes=[1, 99, 3], chunk_descs=nobody) == CcResult(3, 3)
    assert grouped.load(hashes=[98, 99, 3], chunk_descs=nobody) == CcResult(0, 3)
    none = [[(0, 0)] * 2] * 2
    assert grouped.load(hashes=[1, 2], chunk_descs=none) == CcResult(2, 2)


def test_chunks_without_groups_are_the_blocks_of_the_hash_mode(
    registered: ContextCaching, cache: Cache
) -> None:
    registered.save(**filled(cache, [0, 1], [1, 2]))
    descs = [[(5 * BLOCK_SIZE, BLOCK_SIZE), (7 * BLOCK_SIZE, BLOCK_SIZE)]]
    assert registered.load(hashes=[1, 2], chunk_descs=descs) == CcResult(2, 2)
    assert right(cache, [5, 7], [1, 2]) == [True, True]


def test_a_chunk_of_another_length_is_a_miss(registered: ContextCaching, cache: Cache) -> None:
    registered.save(hashes=[1, 2], chunk_descs=[[(0, 8), (8, 3)]])
    assert registered.load(hashes=[1], chunk_descs=[[(0, 4)]]) == CcResult(0, 1)
    assert registered.load(hashes=[1, 2], chunk_descs=[[(0, 8), (8, 4)]]) == CcResult(1, 2)
    assert registered.load(hashes=[1, 2], chunk_descs=[[(0, 8), (8, 3)]]) == CcResult(2, 2)


# ---- exists ----


def test_exists_moves_nothing_and_asks_nobody(
    v1: V1Bench, registered: ContextCaching, cache: Cache
) -> None:
    registered.save(**filled(cache, [0, 1], [1, 2]))
    v1.bench.faults.steps.clear()
    assert registered.exists([1, 2, 3]) == CcResult(2, 3)
    assert registered.exists(hashes=(3, 1), option=CcKvOption(timeout=1)) == CcResult(0, 2)
    assert v1.bench.faults.steps == []
    assert v1.bench.counters[Count.EXISTS_CALLS] == 2
    assert v1.bench.counters[Count.EXISTS_HITS] == 2


def test_exists_without_a_pool_is_zero(
    v1: V1Bench, registered: ContextCaching, cache: Cache
) -> None:
    registered.save(**filled(cache, [0], [1]))
    context, v1.session.context = v1.session.context, None
    assert registered.exists([1, 2]) == CcResult(0, 2)
    assert registered.load(**whole(cache, [0], [1])) == CcResult(0, 1)
    v1.session.context = context
    assert registered.exists([1, 2]) == CcResult(1, 2)


# ---- both generations on one object ----


def test_one_object_has_both_shapes(registered: ContextCaching, cache: Cache) -> None:
    target = bytearray(64)
    values = [[KvBufferWrapper.from_buffer(target)]]
    assert registered.save(CcKvOption(), ["k"], values) == CcResult(1, 1)
    assert registered.save(**filled(cache, [0], [1])) == CcResult(1, 1)
    assert registered.load(key_list=["k"], value_list=values) == CcResult(1, 1)
    assert registered.load(option=CcKvOption(), **whole(cache, [0], [1])) == CcResult(1, 1)
