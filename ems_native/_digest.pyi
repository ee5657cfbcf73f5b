from __future__ import annotations

from collections.abc import Callable, Sequence

DIGEST_BYTES: int

class BlockNames:
    def __init__(self, key: bytes, space: bytes) -> None: ...
    def digests(
        self,
        hashes: Sequence[object],
        counts: bytes | None = None,
        whole: int = 0,
        texts: bool = False,
    ) -> bytes: ...
    def of_keys(
        self, key_list: Sequence[object], most: int, encode: Callable[[int, object], bytes]
    ) -> bytes: ...

def has_duplicates(digests: bytes) -> bool: ...
