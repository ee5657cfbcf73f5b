"""What a finished call returns."""

from __future__ import annotations

import dataclasses

__all__ = ["CcResult"]


@dataclasses.dataclass(frozen=True)
class CcResult:
    """How far a call got: `success` keys in a row from the head of the list, of `total` asked for.

    A miss, a partial save and a full pool are results, not exceptions. Always truthy, also with
    `success` 0. Public contract: pages 0019 and 1805a. Immutable, so it can be shared by threads.
    """

    success: int
    total: int

    def __str__(self) -> str:
        return f"{self.success} of {self.total} keys"
