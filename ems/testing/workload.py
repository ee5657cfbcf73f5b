"""Blocks whose bytes prove themselves: every byte follows from the block's hash and its place."""

from __future__ import annotations

import hashlib

__all__ = ["PAGE_BYTES", "BlockPattern"]

PAGE_BYTES = 4096
_STAMP_BYTES = 16  # per page: 8 of the hash, 4 of the page's number, 4 of the salt
_NOISE_BYTES = 1 << 22
_NOISE_SHIFT = 64 - 22
_MASK = (1 << 64) - 1


class BlockPattern:
    """Makes and checks the bytes of blocks of one size, at the speed of memory.

    A block is a window of a long stretch of noise, at a place that its hash decides, and each 4 KiB
    page begins with a stamp of the hash and the page's number. So no page equals another page of
    this or any other block, and bytes of two blocks that are mixed differ in about 255 of 256
    places.

    Args:
        nbytes: size of a block, at least 16.
        salt: tells patterns for the same hash apart (an older and a newer value, say).

    Not thread safe: the expected bytes are made in one scratch buffer.
    """

    def __init__(self, nbytes: int, salt: int = 0) -> None:
        if nbytes < _STAMP_BYTES:
            raise ValueError(f"nbytes is {nbytes}; a block needs at least {_STAMP_BYTES}")
        self.nbytes = nbytes
        self._salt = salt & 0xFFFFFFFF
        noise = hashlib.shake_128(b"ems block pattern").digest(_NOISE_BYTES)
        repeats = -(-nbytes // _NOISE_BYTES) + 1
        self._noise = memoryview(noise * repeats)
        self._scratch = bytearray(nbytes)
        # Pages that have room for a whole stamp; the last one may be cut short.
        self._pages = (nbytes - _STAMP_BYTES) // PAGE_BYTES + 1
        numbers = [number.to_bytes(4, "little") for number in range(self._pages)]
        self._number_columns = [bytes(number[k] for number in numbers) for k in range(4)]
        self._salt_columns = [bytes([b]) * self._pages for b in self._salt.to_bytes(4, "little")]

    def fill(self, block_hash: int, target: memoryview | bytearray) -> None:
        """Write the bytes of a block into `target`, which has exactly its size."""
        name = block_hash & _MASK
        start = ((name ^ self._salt) * 0x9E3779B97F4A7C15 & _MASK) >> _NOISE_SHIFT
        target[:] = self._noise[start : start + self.nbytes]
        end = (self._pages - 1) * PAGE_BYTES + 1
        pages = self._pages
        for k, value in enumerate(name.to_bytes(8, "little")):
            target[k : end + k : PAGE_BYTES] = bytes([value]) * pages
        for k, column in enumerate(self._number_columns):
            target[8 + k : end + 8 + k : PAGE_BYTES] = column
        for k, column in enumerate(self._salt_columns):
            target[12 + k : end + 12 + k : PAGE_BYTES] = column

    def matches(self, block_hash: int, view: memoryview) -> bool:
        """Whether `view` holds exactly the bytes of the block."""
        self.fill(block_hash, self._scratch)
        return self._scratch == view  # in this order: a bytearray compares with memcmp

    def explain(self, block_hash: int, view: memoryview) -> str:
        """Say where a block that does not match goes wrong, and whose bytes are there."""
        if view.nbytes != self.nbytes:
            return f"{view.nbytes} bytes instead of {self.nbytes}"
        self.fill(block_hash, self._scratch)
        actual = bytes(view)
        wrong = [i for i in range(self.nbytes) if actual[i] != self._scratch[i]]
        if not wrong:
            return "all bytes are right"
        page = min(wrong[0] // PAGE_BYTES, self._pages - 1)
        stamp = actual[page * PAGE_BYTES : page * PAGE_BYTES + _STAMP_BYTES]
        hash_there, page_there, salt_there = (
            int.from_bytes(stamp[low:high], "little") for low, high in ((0, 8), (8, 12), (12, 16))
        )
        return (
            f"block {block_hash:#x}: {len(wrong)} of {self.nbytes} bytes differ, first at "
            f"{wrong[0]}, last at {wrong[-1]}; the stamp of page {page} says hash "
            f"{hash_there:#x}, page {page_there}, salt {salt_there}"
        )
