"""What a tensor says about its memory, read without importing the library that made it."""

from __future__ import annotations

import dataclasses
from typing import Any

from ems.common.exception import EmsException, invalid_argument

__all__ = ["TensorMemory", "describe_tensor"]

_LIMIT = 1 << 62


@dataclasses.dataclass(frozen=True)
class TensorMemory:
    """The memory of a tensor `[num_blocks, block_size, heads, head_size]`, sizes in bytes.

    The tokens of a block follow each other; blocks are `block_stride` apart.
    """

    device: str  # "cpu", "cuda:0", "npu:3"
    address: int
    num_blocks: int
    block_size: int
    heads: int
    head_size: int
    dtype: str
    token_bytes: int
    block_stride: int


def describe_tensor(name: str, tensor: Any) -> TensorMemory:
    """Return where a tensor lies and what it holds.

    Args:
        name: what error texts call it.
        tensor: anything with `shape`, `stride()`, `data_ptr()`, `element_size()`, `dtype` and
            `device` as torch gives them. Views, offsets and gaps between blocks are all right.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` when it is no tensor, has other than four dimensions,
            no memory, or blocks that are not contiguous.
    """
    try:
        shape = tuple(map(int, tensor.shape))
        strides = tuple(map(int, tensor.stride()))
        address = int(tensor.data_ptr())
        item = int(tensor.element_size())
        device, dtype = str(tensor.device), str(tensor.dtype)
    except Exception as error:
        raise invalid_argument(
            f"{name} is of type {type(tensor).__name__} and does not say where its memory is "
            f"({type(error).__name__}); give a dense torch tensor"
        ) from None
    if len(shape) != 4 or len(strides) != 4:
        raise _bad(name, shape, "must be [num_blocks, block_size, heads, head_size]")
    num_blocks, block_size, heads, head_size = shape
    if min(shape) < 1 or item < 1 or address < 1:
        raise _bad(name, shape, "has no memory; every dimension must be 1 or more")
    token, block = heads * head_size, block_size * heads * head_size
    for size, stride, wanted in zip(shape[1:], strides[1:], (token, head_size, 1)):
        if size > 1 and stride != wanted:
            raise _bad(
                name, shape, f"has strides {strides}; the elements of a block must be contiguous"
            )
    if num_blocks > 1 and strides[0] < block:
        raise _bad(name, shape, f"has strides {strides}; its blocks overlap")
    block_stride = strides[0] if num_blocks > 1 else block
    if address + num_blocks * block_stride * item >= _LIMIT:
        raise _bad(name, shape, f"with strides {strides} ends beyond 2**62")
    return TensorMemory(
        device=device,
        address=address,
        num_blocks=num_blocks,
        block_size=block_size,
        heads=heads,
        head_size=head_size,
        dtype=dtype,
        token_bytes=token * item,
        block_stride=block_stride * item,
    )


def _bad(name: str, shape: tuple[int, ...], what: str) -> EmsException:
    return invalid_argument(f"{name}, of shape {list(shape)[:8]}, {what}")
