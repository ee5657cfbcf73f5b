"""What may be registered, and that the identity of a block holds all that changes its meaning."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from v1_bench import Cache, V1Bench, filled, right, whole

from ems import CcConfig, CcResult, ContextCaching, EmsErrorCode, EmsException, KVCacheType
from ems.cc_v1.layer_groups import parse_layer_groups
from ems.common.key import BlockIdentity, BlockSpace, ComponentShape
from ems.testing.host_tensor import HostTensor

SHAPE = (4, 4, 2, 8)
ROOM = bytearray(1 << 16)


def tensor(shape: tuple[int, ...] = SHAPE, **how: Any) -> HostTensor:
    return HostTensor(ROOM, shape, **how)


def refusal(call: Any, *args: Any) -> str:
    with pytest.raises(EmsException) as caught:
        call(*args)
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT, caught.value
    return caught.value.message()


@pytest.mark.parametrize(
    ("kvcache", "text"),
    [
        (None, "kvcache is None"),
        ([], "kvcache is empty"),
        (5, "kvcache is 5"),
        ([[]], "kvcache[0] is empty"),
        ([tensor()], "kvcache[0] is of type HostTensor; give the list of its component tensors"),
        ([[tensor()], [tensor(), 5]], "kvcache[1][1] is of type int"),
        ([[tensor((4, 4, 8))]], "kvcache[0][0], of shape [4, 4, 8], must be [num_blocks"),
        ([[tensor((2, 4, 4, 2, 8))]], "kvcache[0][0], of shape [2, 4, 4, 2, 8], must be"),
        ([[tensor((0, 4, 2, 8))]], "kvcache[0][0], of shape [0, 4, 2, 8], has no memory"),
        (
            [[tensor()], [tensor(), tensor(strides=(128, 32, 8, 1))]],
            "kvcache[1][1], of shape [4, 4, 2, 8], has strides (128, 32, 8, 1); the elements of a",
        ),
        ([[tensor(strides=(64, 16, 1, 2))]], "the elements of a block must be contiguous"),
        ([[tensor(strides=(64, 8, 32, 1))]], "the elements of a block must be contiguous"),
        ([[tensor(strides=(32, 16, 8, 1))]], "kvcache[0][0], of shape [4, 4, 2, 8], has strides"),
        ([[tensor(strides=(0, 16, 8, 1))]], "its blocks overlap"),
        (
            [[tensor(), tensor()], [tensor(), tensor(device="npu:1")]],
            "kvcache[1][1] is on device npu:1, kvcache[0][0] on cpu; all tensors must be on one",
        ),
        ([[tensor(device="npu:0")]], "kvcache is on device npu:0"),
        (
            [[tensor()], [tensor((8, 2, 2, 8))]],
            "kvcache[1][0] has num_blocks 8, kvcache[0][0] 4; both must agree in a layer group",
        ),
        ([[tensor(), tensor((4, 2, 2, 8))]], "kvcache[0][1] has block_size 2, kvcache[0][0] 4"),
    ],
)
def test_what_cannot_be_registered_is_named(v1: V1Bench, kvcache: Any, text: str) -> None:
    assert text in refusal(v1.cc().register_kvcache, kvcache)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (4, 4, 2, 8), (1, 4, 2, 8), (4, 1, 1, 8), (4, 4, 8, 1)]
)
def test_strides_of_dimensions_of_size_one_mean_nothing(
    v1: V1Bench, shape: tuple[int, ...]
) -> None:
    odd = tuple(stride if size > 1 else 999 for size, stride in zip(shape, tensor(shape).stride()))
    v1.cc().register_kvcache([[tensor(shape, strides=odd)]])


@pytest.mark.parametrize(
    "description",
    [
        [[0, 2], [1]],
        ((0, 2), (1,)),
        [range(0, 3, 2), [1]],
        [{"layers": [0, 2]}, {"layer_ids": (1,)}],
        [SimpleNamespace(layer_indices=[0, 2]), SimpleNamespace(layers=[1])],
        SimpleNamespace(tolist=lambda: [[0, 2], [1]]),
    ],
)
def test_layer_groups_in_any_shape(description: Any) -> None:
    assert parse_layer_groups(description, 3) == ((0, 2), (1,))


def test_no_description_is_one_group() -> None:
    assert parse_layer_groups(None, 3) == ((0, 1, 2),)


@pytest.mark.parametrize(
    ("description", "text"),
    [
        ([], "store_layer_group_desc is empty"),
        (5, "store_layer_group_desc is 5"),
        ("01", "store_layer_group_desc is '01'"),
        ({"layers": [0]}, "store_layer_group_desc is {"),
        ([0, 1, 2], "store_layer_group_desc[0] is 0"),
        ([[0, 1, 2], []], "store_layer_group_desc[1] is empty"),
        ([[0, 1]], "has layer 2 in no group"),
        ([[0, 1, 2], [1]], "store_layer_group_desc[1] has layer 1, which is in group 0"),
        ([[0, 1, 2, 2]], "store_layer_group_desc[0] has layer 2, which is in group 0"),
        ([[0, 1, 3]], "store_layer_group_desc[0][2] is 3; it must be from 0 to 2"),
        ([[0, 1, -1]], "store_layer_group_desc[0][2] is -1"),
        ([[0, True]], "store_layer_group_desc[0][1] is True, a bool"),
        ([{"layers": [0, "x"]}], "store_layer_group_desc[0].layers[1] is 'x'"),
        ([{"names": [0]}], "store_layer_group_desc[0] is {"),
    ],
)
def test_layer_groups_that_mean_nothing(description: Any, text: str) -> None:
    assert text in refusal(parse_layer_groups, description, 3)


def test_groups_may_have_blocks_of_their_own(v1: V1Bench) -> None:
    cc = v1.cc()
    cc.register_kvcache([[tensor()], [tensor((8, 2, 1, 16))]], [[0], [1]])
    descs = [[(0, 8)], [(2, 3)]]
    assert cc.save(hashes=[1], chunk_descs=descs) == CcResult(1, 1)
    assert cc.load(hashes=[1], chunk_descs=descs) == CcResult(1, 1)
    assert "chunk_descs[1][0] is slots 10 to 16" in refusal(
        lambda: cc.load(hashes=[1], chunk_descs=[[(0, 8)], [(10, 7)]])
    )


def test_another_thread_may_register_late(v1: V1Bench, cache: Cache) -> None:
    cc = v1.cc()
    thread = threading.Thread(target=cc.register_kvcache, args=(cache.tensors,))
    thread.start()
    thread.join()
    assert cc.save(**filled(cache, [0], [1])) == CcResult(1, 1)


def test_a_v0_configuration_registers_too(v1: V1Bench, cache: Cache) -> None:
    config = CcConfig(rank_id=3, device_id=0, model_id="m", tp_world_size=2)
    cc = ContextCaching(v1.client, None, config)
    cc.register_kvcache(cache.tensors)
    assert cc.save(**filled(cache, [0], [1])) == CcResult(1, 1)
    same = v1.cc(rank_id=1, tp_world_size=2)
    same.register_kvcache(cache.tensors)
    assert same.exists([1]) == CcResult(1, 1)


# ---- identity ----

SHAPES = ((ComponentShape(4, 2, 8, "bf16"), ComponentShape(4, 2, 8, "bf16")),)
IDENTITY = BlockIdentity("t", "m", "vllm", "MHA", 2, 1, 0, 0, SHAPES * 2, (0, 1))
CHANGES: dict[str, list[Any]] = {
    "tenant": [None, "", "u"],
    "model_id": ["n", "mv"],
    "llm_engine": ["vllm@svc", "llm"],
    "kvcache_type": ["GQA", "MLA", "MQA"],
    "tp_world_size": [1, 4],
    "pp_world_size": [2],
    "rank_in_tp_group": [None, 1],
    "rank_in_pp_group": [1],
    "layers": [
        SHAPES * 3,
        ((*SHAPES[0], SHAPES[0][0]), SHAPES[0]),
        (SHAPES[0], (*SHAPES[0], SHAPES[0][0])),
        *(
            ((SHAPES[0][0], dataclasses.replace(SHAPES[0][0], **change)), SHAPES[0])
            for change in (
                {"block_size": 8},
                {"heads": 1},
                {"head_size": 4},
                {"heads": 8, "head_size": 2},
                {"dtype": "fp16"},
            )
        ),
    ],
    "group": [(0,), (1,), (1, 0)],
    "naming": ["token"],
}


def test_every_field_of_the_identity_is_tried() -> None:
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(BlockIdentity)}


@pytest.mark.parametrize("field", CHANGES)
def test_a_block_that_differs_in_one_field_is_another_one(field: str) -> None:
    digests = {BlockSpace(IDENTITY).digests([1])}
    for value in CHANGES[field]:
        digests.add(BlockSpace(dataclasses.replace(IDENTITY, **{field: value})).digests([1]))
    assert len(digests) == 1 + len(CHANGES[field])


def test_an_identity_never_changes() -> None:
    # Every node and every later version must name a block the same way.
    expected = "14782ef37d85ab35b050d7585f985865", "9f6d638aa8d60691220ce560af8e1019"
    assert BlockSpace(IDENTITY).digests([1, -1]).hex() == "".join(expected)


BASE: dict[str, Any] = {"tenant": "t", "rank_id": 0, "tp_world_size": 4, "pp_world_size": 2}


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": None},
        {"model_id": "other"},
        {"llm_engine": "vllm@other"},
        {"kvcache_type": "MLA"},
        {"tp_world_size": 2},
        {"pp_world_size": 1},
        {"rank_id": 1},
        {"rank_in_tp_group": 1},
        {"rank_in_pp_group": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_configuration_never_hits(v1: V1Bench, cache: Cache, change: Any) -> None:
    first, other = v1.cc(**BASE), v1.cc(**{**BASE, **change})
    same = v1.cc(**{**BASE, "rank_id": 8, "device_id": 3})  # the next replica
    for cc in (first, other, same):
        cc.register_kvcache(cache.tensors)
    first.save(**filled(cache, [0], [1]))
    cache.write(cache.slots(1), "mine")
    assert other.load(**whole(cache, [1], [1])) == CcResult(0, 1)
    assert other.exists([1]) == CcResult(0, 1)
    assert cache.holds(cache.slots(1), "mine")
    assert same.load(**whole(cache, [1], [1])) == CcResult(1, 1)
    assert right(cache, [1], [1]) == [True]


@pytest.mark.parametrize(
    "geometry",
    [
        {"head_sizes": ((8, 8), (8, 8)), "block_size": 2, "heads": 2},
        {"head_sizes": ((4, 4), (4, 4)), "heads": 2},
        {"head_sizes": ((8, 8), (8, 8)), "dtype": "torch.float16"},
        {"head_sizes": ((8, 8, 8, 8),)},
        {"head_sizes": ((8,), (8, 8, 8))},
        {"head_sizes": ((16, 4), (8, 4))},
    ],
    ids=str,
)
def test_another_geometry_never_returns_the_old_bytes(
    registered: ContextCaching, cache: Cache, geometry: Any
) -> None:
    # All of them have as many bytes in a block, so that nothing but the identity tells them apart.
    registered.save(**filled(cache, [0], [1]))
    other = Cache(**geometry)
    registered.register_kvcache(other.tensors)
    assert registered.load(**whole(other, [2], [1])) == CcResult(0, 1)
    assert registered.exists([1]) == CcResult(0, 1)
    assert other.untouched(other.slots(2))
    registered.register_kvcache(cache.tensors)
    assert registered.load(**whole(cache, [2], [1])) == CcResult(1, 1)


def test_what_only_says_where_the_memory_is_does_not_count(
    registered: ContextCaching, cache: Cache
) -> None:
    registered.save(**filled(cache, [0], [1]))
    moved = Cache(num_blocks=7, gap=3)
    registered.register_kvcache(moved.tensors)
    assert registered.load(**whole(moved, [6], [1])) == CcResult(1, 1)
    assert right(moved, [6], [1]) == [True]


def test_mla_ranks_have_one_space(v1: V1Bench, cache: Cache) -> None:
    ranks = [
        v1.cc(rank_id=rank, tp_world_size=4, kvcache_type=KVCacheType.MLA) for rank in range(4)
    ]
    stage = v1.cc(rank_id=4, tp_world_size=4, pp_world_size=2, kvcache_type="MLA")
    for cc in (*ranks, stage):
        cc.register_kvcache(cache.tensors)
    ranks[2].save(**filled(cache, [0, 1], [1, 2]))
    for cc in ranks:
        assert cc.exists([1, 2]) == CcResult(2, 2)
    assert stage.exists([1]) == CcResult(0, 1)
