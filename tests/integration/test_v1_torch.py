"""Real tensors, as engines lay them out, through a real server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ems import CcConfig_v1, CcResult, ContextCaching, Ems, EmsConfig, EmsErrorCode, EmsException
from ems.testing import LocalPool

torch = pytest.importorskip("torch")
BLOCKS, SIZE = 12, 16


def separate() -> list[list[Any]]:
    return [[torch.zeros(BLOCKS, SIZE, 2, 32, dtype=torch.bfloat16) for _ in "kv"] for _ in "abc"]


def stacked() -> list[list[Any]]:
    """One tensor a layer, K and V as views of it: the second has a storage offset."""
    return [list(torch.zeros(2, BLOCKS, SIZE, 2, 32, dtype=torch.float16).unbind(0)) for _ in "abc"]


def interleaved() -> list[list[Any]]:
    """K and V of a block beside each other: strides that are not those of a whole tensor."""
    return [list(torch.zeros(BLOCKS, 2, SIZE, 2, 32).unbind(1)) for _ in "abc"]


def mla() -> list[list[Any]]:
    return [
        [torch.zeros(BLOCKS, SIZE, 1, size, dtype=torch.bfloat16) for size in (512, 64)]
        for _ in "abc"
    ]


def sliced() -> list[list[Any]]:
    """Blocks of a larger tensor, from the third on, every other one."""
    return [[torch.zeros(2 * BLOCKS + 4, SIZE, 2, 32)[3 : 3 + 2 * BLOCKS : 2]] for _ in "abc"]


def one_layer_int8() -> list[list[Any]]:
    return [[torch.zeros(BLOCKS, SIZE, 4, 16, dtype=torch.int8)]]


LAYOUTS = [separate, stacked, interleaved, mla, sliced, one_layer_int8]


@pytest.fixture
def torch_cc(local_pool: LocalPool) -> Any:
    v1 = CcConfig_v1(rank_id=0, device_id=0, model_id="m")
    Ems.init(EmsConfig(cc_config_v1=v1, root=local_pool.root))
    yield Ems.get_cc()
    Ems.close()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_layouts_of_engines(
    torch_cc: ContextCaching, layout: Callable[[], list[list[Any]]]
) -> None:
    kvcache = layout()
    torch_cc.register_kvcache(kvcache)
    for layer in kvcache:
        for tensor in layer:
            for block in range(4):
                tensor[block] = torch.randint(-9, 9, tensor[block].shape).to(tensor.dtype)
    before = [[tensor.clone() for tensor in layer] for layer in kvcache]
    slots = torch.arange(4 * SIZE)
    hashes = [hash((0, 1, 2)), -5, 2**63, 7]
    assert torch_cc.save(slots, hashes, [SIZE] * 4) == CcResult(4, 4)
    # Into other blocks, in another order; tensors of numbers are as good as lists.
    places = torch.tensor([9, 4, 11, 6])
    target = (places[:, None] * SIZE + torch.arange(SIZE)[None]).flatten()
    future = torch_cc.async_load(
        slot_mapping=target, hashes=hashes, offsets=torch.full((4,), SIZE), option=None
    )
    assert torch_cc.get_result(future) == CcResult(4, 4)
    for layer, old_layer in zip(kvcache, before):
        for tensor, old in zip(layer, old_layer):
            expected = old.clone()
            expected[places] = old[:4]
            assert torch.equal(tensor, expected)


def test_token_mode_takes_tensors(torch_cc: ContextCaching) -> None:
    kvcache = separate()
    torch_cc.register_kvcache(kvcache)
    kvcache[1][1][:3] = torch.rand(3, SIZE, 2, 32).to(torch.bfloat16)
    count = 2 * SIZE + 5
    ids, mask = torch.arange(count, dtype=torch.int32) + 1000, torch.ones(count, dtype=torch.bool)
    given = {"token_ids": ids, "mask": mask}
    assert torch_cc.save(torch.arange(count), **given) == CcResult(count, count)
    there = torch.arange(count) + 5 * SIZE
    assert torch_cc.load(there, **given) == CcResult(count, count)
    assert torch.equal(kvcache[1][1][5:7], kvcache[1][1][:2])
    assert torch.equal(kvcache[1][1][7][:5], kvcache[1][1][2][:5])
    assert not kvcache[1][1][7][5:].any()


def test_what_is_no_block_memory_is_named(torch_cc: ContextCaching) -> None:
    good = torch.zeros(4, 4, 2, 8)
    for wrong, words in (
        (good.transpose(1, 2), "contiguous"),
        (good[..., ::2], "contiguous"),
        (good[0].expand(4, 4, 2, 8), "overlap"),
        (good[:0], "no memory"),
        (good.view(4, 4, 16), "[num_blocks, block_size, heads, head_size]"),
        (torch.zeros(4, 4, 2, 8, device="meta"), "memory"),
        (good.to_sparse(), "dense"),
    ):
        with pytest.raises(EmsException) as caught:
            torch_cc.register_kvcache([[good], [good, wrong]])
        assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
        assert "kvcache[1][1]" in caught.value.message(), wrong
        assert words in caught.value.message()
