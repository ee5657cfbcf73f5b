"""What the bytes fields of the control plane hold: packed integers, secrets, proofs."""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence

__all__ = ["NONCE_BYTES", "SECRET_BYTES", "pack_u64", "proof", "proofs_equal", "unpack_u64"]

SECRET_BYTES = 16
"""Length of a session's secret."""

NONCE_BYTES = 32
"""Length of a challenge."""


def pack_u64(values: Sequence[int]) -> bytes:
    """Return unsigned 64-bit integers, little endian, one after the other."""
    return struct.pack(f"<{len(values)}Q", *values)


def unpack_u64(column: bytes) -> tuple[int, ...]:
    """Return the integers of a packed column.

    Raises:
        ValueError: its length is not a multiple of eight.
    """
    if len(column) % 8:
        raise ValueError(f"a column of 64-bit integers has {len(column)} bytes")
    return struct.unpack(f"<{len(column) // 8}Q", column)


def proof(access_key: str, nonce: bytes, access_id: str) -> bytes:
    """Return HMAC-SHA256(access_key, nonce || access_id): shows the key without sending it."""
    from Crypto.Hash import HMAC, SHA256  # only who uses credentials pays for the import

    return bytes(
        HMAC.new(access_key.encode(), nonce + access_id.encode(), digestmod=SHA256).digest()
    )


def proofs_equal(one: bytes, other: bytes) -> bool:
    """Compare in a time that says nothing about where they differ."""
    return hmac.compare_digest(one, other)
