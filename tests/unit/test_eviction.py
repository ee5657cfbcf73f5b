"""What goes first: chains, nonsense in recency words, values against recency."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ems.bench.conversations import make_conversations
from ems.bench.models import MODELS
from ems.bench.simulation import simulate
from ems.bench.workload import Request, Workload
from ems.pool.eviction import LeastRecentlyUsed
from ems.testing.memory_pool import UNIT, MemoryPool, digest_of
from ems_native._index import LAYOUT

RECENCY_OFFSET = LAYOUT["RECENCY_OFFSET"]


def load(memory: MemoryPool, keys: Sequence[object]) -> int:
    memory.later()
    digests = b"".join(digest_of(key) for key in keys)
    return memory.reader.present(digests, len(keys), memory.now_ns)


def save(memory: MemoryPool, session: int, keys: Sequence[object], request: int) -> None:
    memory.later()
    assert memory.save(session, request, dict.fromkeys(keys, UNIT)) == len(keys)


def recency_word(memory: MemoryPool, key: object) -> ctypes.c_uint64:
    located = memory.pool.locate(digest_of(key))
    assert located is not None
    return ctypes.c_uint64.from_address(memory.recency_address + RECENCY_OFFSET + 8 * located[0])


# ---- chains --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, LeastRecentlyUsed])
def test_a_head_that_nobody_loads_stays_while_its_tail_is_used(policy: None) -> None:
    """An engine that keeps the head of a chain in device memory loads the rest only."""
    memory = MemoryPool(256 * UNIT, policy=policy)
    session = memory.session()
    chain = [f"chain {number}" for number in range(20)]
    save(memory, session, chain, 1)
    for turn in range(60):  # six pools full of something else
        assert load(memory, chain[8:]) == 12
        save(memory, session, [(turn, n) for n in range(25)], 2 + turn)
    assert load(memory, chain) == 20
    memory.check()


def test_a_save_that_begins_with_what_is_there_goes_on_with_its_chain() -> None:
    memory = MemoryPool(256 * UNIT)
    session = memory.session()
    save(memory, session, range(10), 1)
    save(memory, session, range(20), 2)  # the first ten are there
    for turn in range(60):
        assert load(memory, range(10, 20)) == 10
        save(memory, session, [(turn, n) for n in range(25)], 3 + turn)
    assert load(memory, range(20)) == 20


def test_who_took_the_place_of_a_head_is_not_lifted() -> None:
    memory = MemoryPool(64 * UNIT, entries=16)  # sixteen slots, so that places are taken at once
    session = memory.session()
    save(memory, session, ["head", "tail"], 1)
    located = memory.pool.locate(digest_of("head"))
    assert located is not None
    assert memory.pool.drop(located[0], located[1])
    others = list(range(14))
    for number in others:
        save(memory, session, [number], 2 + number)
    there = {n: recency_word(memory, n).value for n in others if memory.present(n)}
    assert load(memory, ["tail"]) == 1
    memory.pool._policy.prepare(memory.pool._writer)
    assert {n: recency_word(memory, n).value for n in there} == there


def test_where_no_slot_is_free_those_go_first_that_nobody_can_find() -> None:
    """One slot a block: a chain that lost its head makes way before older ones that are whole."""
    memory = MemoryPool(64 * UNIT, entries=16)  # two buckets: every key may live in every slot
    session = memory.session()
    whole = [("whole", n) for n in range(8)]
    save(memory, session, whole, 1)
    save(memory, session, [("broken", n) for n in range(8)], 2)
    head = memory.pool.locate(digest_of(("broken", 0)))
    assert head is not None
    assert memory.pool.drop(head[0], head[1])
    for turn in range(8):
        save(memory, session, [("new", turn)], 3 + turn)
    assert load(memory, whole) == 8
    assert not any(memory.present(("broken", n)) for n in range(8))
    memory.check()


# ---- hints that are none -------------------------------------------------------------------------


def test_a_word_from_the_future_does_not_keep_its_entry_for_ever() -> None:
    memory = MemoryPool(64 * UNIT)
    session = memory.session()
    save(memory, session, ["liar"], 1)
    recency_word(memory, "liar").value = (1 << 64) - 1
    for turn in range(20):
        save(memory, session, [(turn, n) for n in range(20)], 2 + turn)
    assert not memory.present("liar")
    memory.check()


def test_nonsense_in_every_word_costs_nothing_but_order() -> None:
    memory = MemoryPool(64 * UNIT)
    session = memory.session()
    rng = random.Random(5)
    for turn in range(200):
        keys = [(turn, n) for n in range(20)]
        save(memory, session, keys, 1 + turn)
        for key in keys:
            recency_word(memory, key).value = rng.getrandbits(64) >> rng.choice([0, 8, 24, 63])
    memory.check()
    assert memory.pool.stats().entries == 64


def test_a_machine_may_be_up_for_decades() -> None:
    """A recency word has 48 bits for the time, which suffice for 36 years."""
    memory = MemoryPool(256 * UNIT, policy=LeastRecentlyUsed)
    memory.now_ns = 35 * 365 * 86400 * 10**9
    session = memory.session()
    save(memory, session, ["used"], 1)
    for turn in range(60):
        assert load(memory, ["used"]) == 1
        save(memory, session, [(turn, n) for n in range(25)], 2 + turn)
    assert recency_word(memory, "used").value >> 16 < 1 << 48
    assert load(memory, [(59, n) for n in range(25)]) == 25
    assert not memory.present((0, 0))


def test_a_young_word_is_left_alone() -> None:
    """Many readers of one key must not write one cache line all the time."""
    memory = MemoryPool(64 * UNIT)
    save(memory, memory.session(), ["hot"], 1)
    saved = recency_word(memory, "hot").value
    memory.later(ms=8)
    assert memory.present("hot", mark=True)
    assert recency_word(memory, "hot").value == saved
    memory.later(ms=4)
    assert memory.present("hot", mark=True)
    assert recency_word(memory, "hot").value & 0xFFFF == (saved & 0xFFFF) + 1


# ---- values against recency ----------------------------------------------------------------------


def workload(chains: Sequence[Sequence[int]]) -> Workload:
    return Workload("made up", 1, tuple(Request(tuple(chain), len(chain)) for chain in chains))


def blocks_found(chains: Sequence[Sequence[int]], policy: str, capacity: int) -> int:
    return simulate(workload(chains), policy, capacity).found_blocks


def loop(capacity: int, rng: random.Random) -> list[list[int]]:
    """More than fits, over and over: the worst case of LRU."""
    return [[number % (capacity * 5 // 4)] for number in range(24 * capacity)]


def just_fits(capacity: int, rng: random.Random) -> list[list[int]]:
    """All that fits, over and over: who keeps a block of room free finds nothing."""
    return [[number % capacity] for number in range(12 * capacity)]


def drift(capacity: int, rng: random.Random) -> list[list[int]]:
    """Much used now, never again later."""
    return [[int(n / 20 + abs(rng.gauss(0, capacity / 4)))] for n in range(20 * capacity)]


def turns(capacity: int, rng: random.Random) -> list[list[int]]:
    """What teaches to keep the old, and then what needs the young; in turns."""
    out = []
    for phase in range(6):
        first = phase * 10**6
        if phase % 2:
            recent = [first + n for n in range(4 * capacity)]
            for n in recent:
                out += [[n], [max(first, n - rng.randrange(capacity * 4 // 5))]]
        else:
            out += [[first + n % (capacity * 3 // 2)] for n in range(6 * capacity)]
    return out


def chains(capacity: int, rng: random.Random) -> list[list[int]]:
    """Conversations, the recent ones more likely to go on; some are half as long as the pool."""
    out: list[list[int]] = []
    active: list[list[int]] = []
    for number in range(2 * capacity):
        fresh = [1000 * number + n for n in range(rng.randrange(1, 30))]
        if active and rng.random() < 0.6:
            at = max(0, len(active) - 1 - int(rng.expovariate(0.1)))
            active[at] = active[at] + fresh[:10]
        else:
            at = len(active)
            active.append(fresh)
        out.append(active[at])
    return out


def halves(capacity: int, rng: random.Random) -> list[list[int]]:
    """Two chains that fit together, now and then a third that takes the room of much of one."""
    half = capacity * 12 // 25
    out: list[list[int]] = []
    for number in range(100):
        out.append([10**6 * (number % 2) + n for n in range(half)])
        if number % 17 == 0:
            out.append([10**6 * (5 + number) + n for n in range(rng.randrange(half))])
    return out


def long_ones(capacity: int, rng: random.Random) -> list[list[int]]:
    """Chains of a third to two thirds of the pool, three at a time."""

    def fresh(name: int) -> list[int]:
        return [name * 10**6 + n for n in range(int(capacity * rng.uniform(0.3, 0.6)))]

    held = [fresh(name) for name in range(3)]
    out = []
    for number in range(80):
        out.append(held[number % rng.choice([1, 2, 2, 3])])
        if rng.random() < 0.1:
            held[rng.randrange(3)] = fresh(100 + number)
    return out


def pairs(capacity: int, rng: random.Random) -> list[list[int]]:
    """Everything is used twice, the second time just before LRU lets it go."""
    gap = capacity * 9 // 20
    return [[at] for n in range(8 * capacity) for at in ([n, n - gap] if n >= gap else [n])]


def flips(capacity: int, rng: random.Random) -> list[list[int]]:
    """A loop that does not fit, then pairs, again and again: each teaches the wrong thing."""
    out: list[list[int]] = []
    for phase in range(8):
        part = (loop, pairs)[phase % 2](capacity, rng)[: 3 * capacity]
        out += [[10**7 * phase + n for n in one] for one in part]
    return out


def scans(capacity: int, rng: random.Random) -> list[list[int]]:
    """What is used often, between what is used once."""
    hot = capacity * 3 // 5
    return [[rng.choice([rng.randrange(hot), hot + n])] for n in range(20 * capacity)]


FAMILIES = [loop, just_fits, drift, turns, chains, halves, long_ones, pairs, flips, scans]


def check_beside_lru(requests: Sequence[Sequence[int]], capacity: int) -> None:
    ours, lru = (blocks_found(requests, policy, capacity) for policy in ("pool", "lru"))
    assert ours >= 0.99 * lru - capacity


@pytest.mark.parametrize("make", FAMILIES)
@pytest.mark.parametrize("capacity", [256, 1000])
def test_never_much_worse_than_lru(make: object, capacity: int) -> None:
    check_beside_lru(make(capacity, random.Random(capacity)), capacity)  # type: ignore[operator]


@given(
    st.lists(st.tuples(st.sampled_from(FAMILIES), st.integers(0, 2**16)), min_size=2, max_size=6)
)
@settings(max_examples=int(os.environ.get("EMS_EVICTION_EXAMPLES", "15")))
def test_nor_where_one_thing_follows_another(parts: list[tuple[object, int]]) -> None:
    """The long form: EMS_EVICTION_EXAMPLES=1000."""
    capacity = 256
    requests: list[list[int]] = []
    for number, (make, seed) in enumerate(parts):
        part = make(capacity, random.Random(seed))  # type: ignore[operator]
        at, left = seed % len(part), 4 * capacity
        while left > 0 and at < len(part):
            requests.append([10**10 * number + n for n in part[at]])
            left -= len(part[at])
            at += 1
    check_beside_lru(requests, capacity)


def test_a_loop_larger_than_the_pool_is_kept_in_part() -> None:
    requests = loop(1000, random.Random(1))
    assert blocks_found(requests, "lru", 1000) == 0
    assert blocks_found(requests, "pool", 1000) > 12 * 1000


def test_the_pool_under_lru_is_lru() -> None:
    made = make_conversations(600, seed=3)
    for capacity in (300, 600):
        pool, model = (simulate(made, policy, capacity) for policy in ("pool-lru", "lru"))
        assert abs(pool.token_ratio - model.token_ratio) < 0.005


def test_the_same_trace_gives_the_same_hits() -> None:
    made = make_conversations(400, seed=4)
    first, second = (simulate(made, "pool", 200) for _ in range(2))
    assert first.found_blocks == second.found_blocks


# ---- the models ----------------------------------------------------------------------------------


def test_models_on_a_trace_one_can_follow() -> None:
    requests = [[1], [2], [1], [3], [1], [2], [4], [1]]
    # Room for two.
    expected = {"fifo": 1, "lru": 2, "lru-head-first": 2, "sieve": 2, "lfu-da": 3, "belady": 4}
    assert {name: blocks_found(requests, name, 2) for name in MODELS} == expected


@pytest.mark.parametrize("name", MODELS)
def test_only_what_follows_in_a_row_is_found(name: str) -> None:
    assert blocks_found([[1, 2, 3], [1, 2, 3, 4], [9, 2, 3]], name, 10) == 3


def test_nobody_finds_more_than_the_clairvoyant() -> None:
    made = make_conversations(300, seed=5)
    found = {name: simulate(made, name, 100).found_blocks for name in (*MODELS, "pool")}
    assert max(found, key=lambda name: found[name]) == "belady"
