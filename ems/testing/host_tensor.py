"""Plain memory that `register_kvcache` takes for a tensor: tests and benchmarks without torch."""

from __future__ import annotations

import ctypes
import math
from typing import Any

__all__ = ["HostTensor"]


class HostTensor:
    """A tensor of four dimensions as torch describes one, over a writable buffer.

    Args:
        memory: anything writable with the buffer protocol; kept alive.
        shape: `(num_blocks, block_size, heads, head_size)`.
        item_bytes: of an element.
        dtype: its name.
        offset: where in `memory` the tensor begins, in bytes.
        strides: in elements; None for a tensor without gaps.
        device: its name.
    """

    def __init__(
        self,
        memory: Any,
        shape: tuple[int, ...],
        item_bytes: int = 2,
        dtype: str = "torch.bfloat16",
        *,
        offset: int = 0,
        strides: tuple[int, ...] | None = None,
        device: str = "cpu",
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._item_bytes = item_bytes
        self._strides = strides or tuple(
            math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))
        )
        self._offset = offset
        self._memory = memoryview(memory).cast("B")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))

    def stride(self) -> tuple[int, ...]:
        """Return the strides, in elements."""
        return self._strides

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return self._address

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return self._item_bytes

    def token(self, slot: int) -> memoryview:
        """Return the bytes of a slot."""
        block, at = divmod(slot, self.shape[1])
        size = self.shape[2] * self.shape[3] * self._item_bytes
        first = self._offset + block * self._strides[0] * self._item_bytes + at * size
        return self._memory[first : first + size]
