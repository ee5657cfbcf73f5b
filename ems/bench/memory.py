"""Memory that stands for an accelerator's KV cache: blocks with a buffer each."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

from ems import KvBufferWrapper

__all__ = ["BlockMemory"]

_SCRUB = 0xA5


class BlockMemory:
    """Private memory cut into blocks of one size, on huge pages where the system gives them."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.blocks = blocks
        self.block_bytes = block_bytes
        self._map = mmap.mmap(-1, blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(self._map)
        self.views = [view[i * block_bytes : (i + 1) * block_bytes] for i in range(blocks)]
        self.buffers = [[KvBufferWrapper.from_buffer(part)] for part in self.views]
        self.addresses = [buffers[0].data_ptr for buffers in self.buffers]
        self.scrub(0, blocks)  # the first touch is not what anybody wants to measure

    def scrub(self, first: int, count: int) -> None:
        """Overwrite blocks, so that what a load leaves there can only have come from the pool."""
        if count:
            ctypes.memset(self.addresses[first], _SCRUB, count * self.block_bytes)
