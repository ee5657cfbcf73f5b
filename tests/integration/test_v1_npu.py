"""V1 calls on memory of an (emulated) NPU, which the CPU cannot read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from npu_bench import Block, failed, pattern

from ems import CcResult, ContextCaching, EmsErrorCode
from ems.testing import HostTensor

SHAPE = (6, 4, 2, 64)  # of blocks of 1 KiB
BLOCK = 1024


class NpuTensor:
    """A tensor as torch_npu describes one."""

    shape = SHAPE
    dtype = "torch.bfloat16"

    def __init__(self, memory: Block, device: int) -> None:
        self.memory = memory
        self.device = f"npu:{device}"

    def stride(self) -> tuple[int, ...]:
        return (512, 128, 64, 1)

    def data_ptr(self) -> int:
        return self.memory.base

    def element_size(self) -> int:
        return 2

    def block(self, index: int) -> bytes:
        return self.memory.npu.read(self.memory.base + BLOCK * index, BLOCK)


def tensors(blocks: Callable[..., Block], device: int) -> list[list[NpuTensor]]:
    nbytes = BLOCK * SHAPE[0]
    return [
        [
            NpuTensor(blocks(device, nbytes, 1, pattern(f"{layer}{part}", nbytes)), device)
            for part in "kv"
        ]
        for layer in range(3)
    ]


def slots(*indices: int) -> list[int]:
    return [4 * index + at for index in indices for at in range(4)]


@pytest.mark.parametrize("device", [0, 1])
def test_blocks_travel(npu_cc: ContextCaching, blocks: Callable[..., Block], device: int) -> None:
    kvcache = tensors(blocks, device)
    npu_cc.register_kvcache(kvcache)
    assert npu_cc.save(slots(0, 1), [-1, 2], [4, 4]) == CcResult(2, 2)
    before = [[tensor.block(at) for at in (0, 1)] for layer in kvcache for tensor in layer]
    future = npu_cc.async_load(slot_mapping=slots(5, 3), hashes=[-1, 2], offsets=[4, 4])
    assert npu_cc.get_result(future) == CcResult(2, 2)
    after = [[tensor.block(at) for at in (5, 3)] for layer in kvcache for tensor in layer]
    assert after == before
    assert npu_cc.exists([-1, 2, 3]) == CcResult(2, 3)


def test_tensors_on_different_devices(npu_cc: ContextCaching, blocks: Callable[..., Block]) -> None:
    first, second = tensors(blocks, 0), tensors(blocks, 1)
    text = failed(EmsErrorCode.EMS_INVALID_ARGUMENT, npu_cc.register_kvcache, [*first, second[0]])
    assert "kvcache[3][0] is on device npu:1, kvcache[0][0] on npu:0" in text
    host = HostTensor(bytearray(BLOCK * SHAPE[0]), SHAPE)
    text = failed(EmsErrorCode.EMS_INVALID_ARGUMENT, npu_cc.register_kvcache, [[host]])
    assert "kvcache is on device cpu" in text
