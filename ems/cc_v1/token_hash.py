"""Hashes of blocks of tokens, made here when the engine gives tokens instead of hashes.

Each is chained over everything before it, so that equal hashes mean equal prefixes:

    h[0] = H(tokens of block 0)        h[i] = H(h[i - 1], tokens of block i)

The same on every machine, in every process, whatever `PYTHONHASHSEED` says.
"""

from __future__ import annotations

import hashlib
import sys

__all__ = ["chain_hashes"]

_TOKEN_BYTES = 8
_PERSON = b"ems token chain"


def chain_hashes(tokens: bytes, block_size: int) -> list[int]:
    """Return a hash, of 256 bits, for each block; the last block may be a part of one.

    Args:
        tokens: int64 each, of this machine's byte order.
        block_size: tokens of a block.
    """
    if sys.byteorder == "big":
        import array

        swapped = array.array("q", tokens)
        swapped.byteswap()
        tokens = swapped.tobytes()
    hashes: list[int] = []
    last = bytes(32)
    step = block_size * _TOKEN_BYTES
    for first in range(0, len(tokens), step):
        block = tokens[first : first + step]
        last = hashlib.blake2b(last + block, digest_size=32, person=_PERSON).digest()
        hashes.append(int.from_bytes(last, "little"))
    return hashes
