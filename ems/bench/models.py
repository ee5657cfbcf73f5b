"""Caches as the literature describes them, exact and in plain Python, to compare the pool with.

Each serves requests whose blocks form a chain and counts as found what lies in a row from the head.
All blocks are of one size. A block that is in the cache behind a hole counts as used as well.
"""

from __future__ import annotations

import functools
import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from ems.bench.workload import Workload

__all__ = ["MODELS", "Model"]

_NEVER = 1 << 31
_PLACES = (1 << 32) - 1  # more than a chain has blocks


class Model(Protocol):
    """A cache of `capacity` blocks."""

    def __init__(self, capacity: int, workload: Workload) -> None: ...

    def serve(self, number: int, chain: Sequence[int]) -> int:
        """Serve request `number`; return how many of its blocks were found, and hold the rest."""


def _found(held: object, chain: Sequence[int]) -> int:
    for found, block in enumerate(chain):
        if block not in held:  # type: ignore[operator]
            return found
    return len(chain)


class _Queue:
    """Blocks in one queue, the next to go first."""

    renewed = True
    tail_first = False

    def __init__(self, capacity: int, workload: Workload) -> None:
        self._capacity = capacity
        self._queue: OrderedDict[int, None] = OrderedDict()

    def serve(self, number: int, chain: Sequence[int]) -> int:
        queue = self._queue
        found = _found(queue, chain)
        for block in reversed(chain) if self.tail_first else chain:
            if block in queue:
                if self.renewed:
                    queue.move_to_end(block)
            else:
                queue[block] = None
        while len(queue) > self._capacity:
            queue.popitem(last=False)
        return found


class _Fifo(_Queue):
    renewed = False


class _Lru(_Queue):
    pass


class _LruTailFirst(_Queue):
    tail_first = True


class _Sieve:
    """SIEVE (NSDI'24): a queue by arrival; a hand spares whoever was used since it passed."""

    def __init__(self, capacity: int, workload: Workload) -> None:
        self._capacity = capacity
        self._newer: dict[int, int | None] = {}
        self._used: dict[int, bool] = {}
        self._oldest: int | None = None
        self._newest: int | None = None
        self._older: dict[int, int | None] = {}
        self._hand: int | None = None

    def serve(self, number: int, chain: Sequence[int]) -> int:
        found = _found(self._used, chain)
        for block in chain:
            if block in self._used:
                self._used[block] = True
                continue
            if len(self._used) >= self._capacity:
                self._evict()
            self._used[block] = False
            self._older[block], self._newer[block] = self._newest, None
            if self._newest is None:
                self._oldest = block
            else:
                self._newer[self._newest] = block
            self._newest = block
        return found

    def _evict(self) -> None:
        hand = self._oldest if self._hand is None else self._hand
        assert hand is not None
        while self._used[hand]:
            self._used[hand] = False
            following = self._newer[hand]
            hand = self._oldest if following is None else following
            assert hand is not None
        older, newer = self._older.pop(hand), self._newer.pop(hand)
        del self._used[hand]
        if older is None:
            self._oldest = newer
        else:
            self._newer[older] = newer
        if newer is None:
            self._newest = older
        else:
            self._older[newer] = older
        self._hand = newer


class _Ranked:
    """Blocks by a rank that changes only when they are used; the lowest goes first."""

    def __init__(self, capacity: int, workload: Workload) -> None:
        self._capacity = capacity
        self._rank: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def serve(self, number: int, chain: Sequence[int]) -> int:
        found = _found(self._rank, chain)
        for place, block in enumerate(chain):
            rank = self.rank(number, place, block)
            self._rank[block] = rank
            heapq.heappush(self._heap, (rank, block))
        while len(self._rank) > self._capacity:
            rank, block = heapq.heappop(self._heap)
            if self._rank.get(block) == rank:
                del self._rank[block]
                self.evicted(block, rank)
        if len(self._heap) > 4 * self._capacity:  # mostly ranks of the past
            self._heap = [(rank, block) for block, rank in self._rank.items()]
            heapq.heapify(self._heap)
        return found

    def rank(self, number: int, place: int, block: int) -> int:
        """The rank of a block that is used as number `place` of a request."""
        raise NotImplementedError

    def evicted(self, block: int, rank: int) -> None:
        """A block is gone."""


class _LfuDa(_Ranked):
    """Frequency with dynamic ageing: who goes raises the floor from which newcomers count."""

    def __init__(self, capacity: int, workload: Workload) -> None:
        super().__init__(capacity, workload)
        self._uses: dict[int, int] = {}
        self._floor = 0

    def rank(self, number: int, place: int, block: int) -> int:
        uses = self._uses[block] = self._uses.get(block, 0) + 1
        return ((self._floor + uses) << 64) + (number << 32) - place

    def evicted(self, block: int, rank: int) -> None:
        self._floor = max(self._floor, (rank + _PLACES) >> 64)
        del self._uses[block]


class _Belady(_Ranked):
    """Clairvoyant: whose next use is furthest goes first, of one chain the tail."""

    def __init__(self, capacity: int, workload: Workload) -> None:
        super().__init__(capacity, workload)
        self._next = _next_uses(workload)

    def rank(self, number: int, place: int, block: int) -> int:
        return -(self._next[number][place] << 32) - place


@functools.lru_cache(maxsize=1)
def _next_uses(workload: Workload) -> list[list[int]]:
    """For each block of each request: the request that uses it next."""
    next_use: dict[int, int] = {}
    next_uses = []
    for number in range(len(workload.requests) - 1, -1, -1):
        chain = workload.requests[number].hashes
        next_uses.append([next_use.get(block, _NEVER) for block in chain])
        next_use.update(dict.fromkeys(chain, number))
    next_uses.reverse()
    return next_uses


MODELS: dict[str, type[Model]] = {
    "fifo": _Fifo,
    "lru-head-first": _Lru,
    "lru": _LruTailFirst,
    "sieve": _Sieve,
    "lfu-da": _LfuDa,
    "belady": _Belady,
}
"""By name. `lru` is, as the pool, tail first; `lru-head-first` takes a chain in its own order."""
