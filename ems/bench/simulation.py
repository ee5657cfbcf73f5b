"""A trace against eviction policies without moving a byte: the pool's real code and models.

The pool's index, allocator and policy run in this process's memory, with a block of the least size
that there is; what a block's bytes would be does not matter to them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from ems.bench.models import MODELS
from ems.bench.workload import Workload
from ems.common.exception import invalid_argument
from ems.pool.eviction import EvictionPolicy, LearnedValue, LeastRecentlyUsed
from ems.testing.memory_pool import UNIT, MemoryPool

__all__ = [
    "DEFAULT_SHARES",
    "POLICIES",
    "SLOTS_PER_BLOCK",
    "Outcome",
    "distinct_blocks",
    "simulate",
    "simulate_all",
]

DEFAULT_SHARES = (0.02, 0.05, 0.10, 0.25, 0.50)
_POOL_POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "pool-lru": LeastRecentlyUsed,
    "pool": LearnedValue,
}
POLICIES = (*MODELS, *_POOL_POLICIES)
"""What can be simulated; `pool` is what `ems serve` does."""

SLOTS_PER_BLOCK = 4  # what `ems serve` makes of 64 KiB blocks
SPACING_NS = 300_000_000  # between two requests, more than a recency mark is left alone


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one policy found in one trace with room for so many blocks.

    Args:
        policy: one of `POLICIES`.
        capacity_blocks: how many blocks the cache holds.
        share: the same, of the distinct blocks of the trace.
        found_blocks: blocks that were there, in a row from the head of their request.
        asked_blocks: all blocks of all requests.
        hit_tokens: tokens in the found blocks.
        prompt_tokens: tokens of all requests.
        seconds: how long the simulation took.
    """

    policy: str
    capacity_blocks: int
    share: float
    found_blocks: int
    asked_blocks: int
    hit_tokens: int
    prompt_tokens: int
    seconds: float

    @property
    def token_ratio(self) -> float:
        """Hit ratio by tokens: the share of prefill that is saved."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def block_ratio(self) -> float:
        """Hit ratio by blocks."""
        return self.found_blocks / self.asked_blocks if self.asked_blocks else 0.0

    def as_dict(self) -> dict[str, object]:
        """Return the outcome as plain data, ready for JSON."""
        ratios = {"token_ratio": self.token_ratio, "block_ratio": self.block_ratio}
        return {**dataclasses.asdict(self), **ratios}


def distinct_blocks(workload: Workload) -> int:
    """How many different blocks a workload has: what a cache that never evicts would hold."""
    return len({block for request in workload.requests for block in request.hashes})


def simulate(
    workload: Workload, policy: str, capacity_blocks: int, *, whole: bool = True
) -> Outcome:
    """Serve a workload in its order and count what is found.

    Args:
        workload: the requests; each loads what it finds of its prefix and saves its blocks.
        policy: one of `POLICIES`.
        capacity_blocks: room of the cache, at least 1.
        whole: whether the pool is told of all blocks of a save, as by engines that name them by
            hash (what is there costs a look); or only of those behind what was found, as by the
            key-value calls of a replay.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` for a policy that does not exist or no room.
    """
    if capacity_blocks < 1:
        raise invalid_argument(f"capacity_blocks is {capacity_blocks}, at least 1 is needed")
    started = time.perf_counter()
    if policy in MODELS:
        model = MODELS[policy](capacity_blocks, workload)
        found: Iterator[int] = (
            model.serve(n, request.hashes) for n, request in enumerate(workload.requests)
        )
    elif policy in _POOL_POLICIES:
        found = _serve_from_pool(workload, _POOL_POLICIES[policy], capacity_blocks, whole)
    else:
        known = ", ".join(POLICIES)
        raise invalid_argument(f"there is no policy {policy!r}; there are {known}")
    found_blocks = hit_tokens = 0
    for request, blocks in zip(workload.requests, found):
        found_blocks += blocks
        hit_tokens += min(blocks * workload.block_tokens, request.input_tokens)
    return Outcome(
        policy=policy,
        capacity_blocks=capacity_blocks,
        share=capacity_blocks / max(distinct_blocks(workload), 1),
        found_blocks=found_blocks,
        asked_blocks=sum(len(request.hashes) for request in workload.requests),
        hit_tokens=hit_tokens,
        prompt_tokens=sum(request.input_tokens for request in workload.requests),
        seconds=time.perf_counter() - started,
    )


def simulate_all(
    workload: Workload,
    policies: Sequence[str],
    capacities: Iterable[int],
    progress: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Simulate each policy with each capacity, calling `progress` after each of them."""
    outcomes = []
    capacities = list(capacities)
    for policy in policies:
        for capacity in capacities:
            outcomes.append(simulate(workload, policy, capacity))
            progress()
    return outcomes


def _serve_from_pool(
    workload: Workload,
    policy: Callable[[int], EvictionPolicy],
    capacity_blocks: int,
    whole: bool,
) -> Iterator[int]:
    memory = MemoryPool(capacity_blocks * UNIT, capacity_blocks * SLOTS_PER_BLOCK, policy=policy)
    pool, session = memory.pool, memory.session()
    digests: dict[int, bytes] = {}
    for number, request in enumerate(workload.requests, 1):
        memory.now_ns += SPACING_NS
        for block in request.hashes:
            if block not in digests:
                digests[block] = hashlib.blake2b(b"%d" % block, digest_size=16).digest()
        keys = b"".join([digests[block] for block in request.hashes])
        count = len(request.hashes)
        found = memory.reader.present(keys, count, memory.now_ns)
        yield found
        if found < count:
            begin = 0 if whole else found
            _save(memory, session, number, keys[16 * begin :], count - begin)
        pool.relieve()


def _save(memory: MemoryPool, session: int, request: int, keys: bytes, count: int) -> None:
    lengths = struct.pack("<Q", UNIT) * count
    statuses, _ = memory.pool.reserve(session, request, keys, lengths, False, False, memory.now_ns)
    granted = [position for position in range(count) if statuses[position] == 0]
    positions = struct.pack(f"<{len(granted)}I", *granted)
    sums = bytes(8 * len(granted))
    memory.pool.commit(session, request, positions, sums, True, memory.now_ns)
