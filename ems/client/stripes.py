"""How ranks that hold the same bytes share the work of saving them: who begins where.

The list is cut into as many stripes as there are ranks. Each rank begins with its own and goes
round, in portions small enough that whoever is quicker takes over the rest of a slow one's stripe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

__all__ = ["Share", "turns"]

PORTION_BYTES = 8 << 20
"""Reserved at a time: long beside two messages, short beside a batch."""


@dataclasses.dataclass(frozen=True)
class Share:
    """One of several ranks that save the same list.

    Args:
        stripe: the rank's number among them.
        ranks: how many they are.
    """

    stripe: int
    ranks: int


def turns(nkeys: int, nbytes: int, share: Share) -> Iterator[range]:
    """Yield ranges of keys that cover the list once, in the order in which the rank takes them.

    Args:
        nkeys: in the list.
        nbytes: of all keys.
        share: which rank asks.
    """
    portion = max(1, PORTION_BYTES * nkeys // max(1, nbytes))
    for at in range(share.ranks):
        stripe = (share.stripe + at) % share.ranks
        first = stripe * nkeys // share.ranks
        end = (stripe + 1) * nkeys // share.ranks
        for begin in range(first, end, portion):
            yield range(begin, min(end, begin + portion))
