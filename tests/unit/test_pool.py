"""The pool's state machine on bare memory: reserve, commit, abort, evict, recover."""

from __future__ import annotations

import pytest

from ems.pool import PoolFull, geometry
from ems.pool.pool import MAX_SESSIONS
from ems.rpc.frames import BUSY, COMMITTED, GRANTED, KEPT, LOST, NO_ROOM, PRESENT
from ems.testing.memory_pool import UNIT, MemoryPool, digest_of, u32s, u64s

BLOCK = 16 * UNIT


@pytest.fixture
def memory() -> MemoryPool:
    return MemoryPool(64 * BLOCK)


def commit(memory: MemoryPool, session: int, request: int, positions: list[int]) -> list[int]:
    sums = u64s([7 * position for position in positions])
    return list(memory.pool.commit(session, request, u32s(positions), sums, False, memory.now_ns))


def test_a_block_is_invisible_until_its_commit(memory: MemoryPool) -> None:
    session = memory.session()
    statuses, offsets = memory.reserve(session, 1, {"a": BLOCK})
    assert list(statuses) == [GRANTED]
    assert not memory.present("a")
    assert memory.pool.stats().reserved == BLOCK
    assert commit(memory, session, 1, [0]) == [COMMITTED]
    assert memory.present("a")
    _slot, version, offset, length, checksum = memory.pool.locate(digest_of("a")) or (0,) * 5
    assert (offset, length, checksum) == (offsets[0], BLOCK, 0)
    assert version % 2 == 0
    assert memory.pool.stats().reserved == 0
    memory.check()


def test_an_abort_gives_everything_back_and_is_idempotent(memory: MemoryPool) -> None:
    session = memory.session()
    memory.reserve(session, 1, {"a": BLOCK, "b": 3 * UNIT})
    assert memory.pool.abort(session, 1) == 2
    assert memory.pool.abort(session, 1) == 0
    assert memory.pool.stats().used == 0
    assert commit(memory, session, 1, [0]) == [LOST]
    assert not memory.present("a")
    memory.check()


def test_keep_reports_what_is_there_and_what_is_being_written(memory: MemoryPool) -> None:
    first, second = memory.session(), memory.session()
    memory.save(first, 1, {"there": BLOCK})
    memory.reserve(first, 2, {"coming": BLOCK})
    statuses, _ = memory.reserve(second, 1, {"there": BLOCK, "coming": BLOCK, "new": BLOCK})
    assert list(statuses) == [PRESENT, BUSY, GRANTED]


def test_a_busy_key_can_be_forced_and_the_first_commit_stays(memory: MemoryPool) -> None:
    first, second = memory.session(), memory.session()
    memory.reserve(first, 1, {"a": BLOCK})
    statuses, _ = memory.reserve(second, 1, {"a": BLOCK}, force=True)
    assert list(statuses) == [GRANTED]
    assert commit(memory, second, 1, [0]) == [COMMITTED]
    before = memory.pool.locate(digest_of("a"))
    assert commit(memory, first, 1, [0]) == [KEPT]
    assert memory.pool.locate(digest_of("a")) == before
    assert memory.pool.stats().used == BLOCK
    memory.check()


def test_replace_puts_the_new_value_in_the_same_slot(memory: MemoryPool) -> None:
    session = memory.session()
    memory.save(session, 1, {"a": BLOCK}, replace=True)
    old = memory.pool.locate(digest_of("a"))
    memory.save(session, 2, {"a": 5 * UNIT}, replace=True)
    new = memory.pool.locate(digest_of("a"))
    assert old is not None
    assert new is not None
    assert new[0] == old[0]
    assert new[1] > old[1]
    assert new[3] == 5 * UNIT
    assert memory.pool.stats().entries == 1
    assert memory.pool.stats().used == 5 * UNIT
    memory.check()


def test_a_reader_notices_that_its_block_was_replaced_or_evicted(memory: MemoryPool) -> None:
    session = memory.session()
    memory.save(session, 1, {"a": BLOCK, "b": BLOCK}, replace=True)
    places = bytearray(80)
    digests = digest_of("a") + digest_of("b")
    assert memory.reader.lookup(digests, u64s([BLOCK, BLOCK]), 0, 2, places, 0) == (2, 0)
    assert memory.reader.validate(places, 0, 2) == 2
    memory.save(session, 2, {"b": BLOCK}, replace=True)
    assert memory.reader.validate(places, 0, 2) == 1
    slot, version, *_ = memory.pool.locate(digest_of("a")) or (0, 0)
    assert memory.pool.drop(slot, version)
    assert not memory.pool.drop(slot, version)
    assert memory.reader.validate(places, 0, 2) == 0


def test_lookup_stops_at_the_first_miss_and_says_why(memory: MemoryPool) -> None:
    session = memory.session()
    memory.save(session, 1, {"a": BLOCK, "c": BLOCK})
    places = bytearray(120)
    digests = digest_of("a") + digest_of("b") + digest_of("c")
    assert memory.reader.lookup(digests, u64s([BLOCK] * 3), 0, 3, places, 0) == (1, 1)
    assert memory.reader.lookup(digests, u64s([BLOCK + 1] * 3), 0, 3, places, 0) == (0, 3)
    memory.pool.retire()
    assert memory.reader.lookup(digests, None, 0, 3, places, 0) == (0, 4)


def test_a_full_pool_evicts_the_least_recently_used(memory: MemoryPool) -> None:
    session = memory.session()
    for number in range(64):
        memory.later(1)
        memory.save(session, number + 1, {number: BLOCK})
    memory.later()
    assert memory.present(0, mark=True)
    memory.later()
    assert memory.save(session, 100, {"new": BLOCK}) == 1
    assert memory.present(0)
    assert not memory.present(1)
    assert memory.present(2)
    assert memory.pool.stats().evictions == 1
    memory.check()


def test_a_chain_loses_its_tail_first(memory: MemoryPool) -> None:
    session = memory.session()
    memory.save(session, 1, dict.fromkeys(range(64), BLOCK))
    memory.save(session, 2, {"new": 10 * BLOCK})
    assert [number for number in range(64) if not memory.present(number)] == list(range(54, 64))


def test_what_is_being_written_is_never_evicted(memory: MemoryPool) -> None:
    sessions = [memory.session() for _ in range(64)]
    for key, session in enumerate(sessions):
        assert list(memory.reserve(session, 1, {key: BLOCK})[0]) == [GRANTED]
    for session in sessions:
        assert list(memory.reserve(session, 2, {"other": UNIT})[0]) == [NO_ROOM]
    for session in sessions:
        assert commit(memory, session, 1, [0]) == [COMMITTED]
    assert list(memory.reserve(sessions[0], 3, {"other": UNIT})[0]) == [GRANTED]
    memory.check()


def test_a_session_that_takes_all_it_can_leaves_something_to_others(memory: MemoryPool) -> None:
    hogs = [memory.session() for _ in range(3)]
    taken = [
        list(memory.reserve(hog, 1, {(hog, n): UNIT for n in range(1024)})[0]).count(GRANTED)
        for hog in hogs
    ]
    assert taken == [896, 112, 14]
    # What they gave up is theirs again, and one value goes whatever its size.
    memory.pool.abort(hogs[0], 1)
    assert list(memory.reserve(hogs[0], 2, {"large": 890 * UNIT})[0]) == [GRANTED]
    assert list(memory.reserve(memory.session(), 1, {"other": UNIT})[0]) == [GRANTED]
    memory.check()


def test_a_session_cannot_use_up_the_records(memory: MemoryPool) -> None:
    memory = MemoryPool(8192 * UNIT, entries=1024)  # 4,096 records
    statuses, _ = memory.reserve(memory.session(), 1, dict.fromkeys(range(5000), UNIT))
    assert statuses.count(GRANTED) == 3584
    assert list(memory.reserve(memory.session(), 1, {"other": UNIT})[0]) == [GRANTED]


def test_a_value_larger_than_the_pool_has_no_room(memory: MemoryPool) -> None:
    session = memory.session()
    memory.save(session, 1, {"a": BLOCK})
    statuses, _ = memory.reserve(session, 2, {"huge": 65 * BLOCK, "b": BLOCK})
    assert list(statuses) == [NO_ROOM, GRANTED]
    assert memory.present("a")


def test_neighbours_go_when_the_free_space_lies_in_pieces(memory: MemoryPool) -> None:
    session = memory.session()
    for number in range(64):
        memory.later(1)
        memory.save(session, number + 1, {number: BLOCK})
    # Every second block is young: the oldest alone never make two neighbours.
    memory.later()
    for number in range(0, 64, 2):
        memory.present(number, mark=True)
    memory.later()
    assert memory.save(session, 100, {"wide": 8 * BLOCK}) == 1
    assert memory.present("wide")
    memory.check()


def test_nothing_is_evicted_before_its_room_is_needed() -> None:
    small = MemoryPool(1024 * UNIT, entries=4096)
    session = small.session()
    for number in range(1024):
        small.later(1)
        small.save(session, number + 1, {number: UNIT})
    assert not small.pool.relieve()
    assert small.pool.stats().entries == 1024
    # What was chosen in the background goes, but for those that were used since.
    assert small.present(0, mark=True)
    assert small.save(session, 2000, {"new": UNIT}) == 1
    assert [number for number in range(1024) if not small.present(number)] == [1]
    small.check()


def test_two_full_buckets_evict_the_worst_of_sixteen() -> None:
    memory = MemoryPool(256 * UNIT, entries=16)
    session = memory.session()
    for number in range(40):
        memory.later(1)
        assert memory.save(session, number + 1, {number: UNIT}) == 1
        assert memory.present(number)
        memory.check()
    assert memory.pool.stats().entries == 16
    assert memory.pool.stats().evictions == 24


def test_only_prepared_memory_is_granted() -> None:
    memory = MemoryPool(64 * BLOCK, ready=2 * BLOCK)
    sessions = [memory.session() for _ in range(3)]
    answers = [list(memory.reserve(one, 1, {one: BLOCK})[0]) for one in sessions]
    assert answers == [[GRANTED], [GRANTED], [NO_ROOM]]
    memory.pool.extend_ready(3 * BLOCK)
    keys: dict[object, int] = dict.fromkeys(sessions, BLOCK)
    assert list(memory.reserve(sessions[2], 2, keys)[0]) == [BUSY, BUSY, GRANTED]
    memory.check()


# ---- sessions and recovery -------------------------------------------------------------------


def test_a_dead_session_gives_its_reservations_back(memory: MemoryPool) -> None:
    first, second = memory.session(), memory.session()
    memory.reserve(first, 1, {"a": BLOCK})
    memory.reserve(first, 2, {"b": BLOCK})
    memory.reserve(second, 1, {"c": BLOCK})
    assert memory.pool.close_session(first) == 2
    assert memory.pool.stats().reserved == BLOCK
    assert list(memory.reserve(second, 2, {"a": BLOCK})[0]) == [GRANTED]
    memory.check()


def test_requests_that_go_on_are_kept(memory: MemoryPool) -> None:
    session = memory.session()
    for request in (1, 2, 3):
        memory.reserve(session, request, {request: BLOCK})
    assert memory.pool.keep_requests(session, [2]) == 2
    assert memory.pool.reserved_requests(session) == [2]
    assert commit(memory, session, 2, [0]) == [COMMITTED]


def test_session_ids_run_out_and_come_back(memory: MemoryPool) -> None:
    sessions = [memory.session() for _ in range(MAX_SESSIONS)]
    assert sessions == list(range(1, MAX_SESSIONS + 1))
    with pytest.raises(PoolFull):
        memory.session()
    memory.pool.close_session(500)
    assert memory.session() == 500


def test_a_restart_serves_what_was_committed_and_nothing_else(memory: MemoryPool) -> None:
    dead, alive = memory.session(), memory.session()
    memory.save(dead, 1, dict.fromkeys(range(20), BLOCK))
    memory.reserve(dead, 2, {"half": BLOCK})
    memory.reserve(alive, 1, {"mine": BLOCK, "too": BLOCK})
    epoch = memory.pool.epoch
    pool = memory.recover(held=[alive])
    assert pool.epoch == epoch + 1
    assert all(memory.present(number) for number in range(20))
    assert not memory.present("half")
    assert pool.stats().reserved == 2 * BLOCK
    assert pool.session(dead) is None
    assert commit(memory, alive, 1, [0, 1]) == [COMMITTED, COMMITTED]
    assert memory.present("too")
    memory.check()


def test_versions_go_on_over_a_restart(memory: MemoryPool) -> None:
    session = memory.session()
    memory.save(session, 1, {"a": BLOCK})
    slot, version, *_ = memory.pool.locate(digest_of("a")) or (0, 0)
    memory.pool.drop(slot, version)
    memory.recover(held=[session])
    memory.save(session, 2, {"a": BLOCK})
    again = memory.pool.locate(digest_of("a"))
    assert again is not None
    assert again[0] != slot or again[1] > version


def test_geometry_is_its_own_inverse_and_has_bounds() -> None:
    sizes = geometry(123 << 20, 777)
    assert geometry(sizes.capacity, sizes.slots) == sizes
    assert sizes.slots >= 777
    for wrong in (0, 1 << 60):
        with pytest.raises(ValueError, match="capacity is"):
            geometry(wrong, 777)
        with pytest.raises(ValueError, match="entries is"):
            geometry(1 << 20, wrong)
    four_million = geometry(1 << 34, 4_000_000)
    per_slot = (four_million.index_bytes + four_million.recency_bytes) / four_million.slots
    assert per_slot < 83


def test_large_values_find_room_among_many_small_ones() -> None:
    memory = MemoryPool(16384 * UNIT, 32768)
    session = memory.session()
    for request in range(4):
        first = 4096 * request
        names: dict[object, int] = dict.fromkeys(range(first, first + 4096), UNIT)
        assert memory.save(session, request + 1, names) == 4096
    # Scattered gaps: what is evicted lies all over the place, and nothing large is free.
    big: dict[object, int] = {f"big {n}": 32 * UNIT for n in range(128)}
    statuses, _ = memory.reserve(session, 10, big)
    assert statuses == bytes(128)
    # What the batch takes, and the little more that its last search made room for.
    assert memory.pool.stats().evictions <= 128 * 32 + 2 * 16384 // 50
    memory.check()
    memory.pool.abort(session, 10)
    statuses, _ = memory.reserve(session, 11, {"huge": 8192 * UNIT})
    assert statuses == bytes(1)
    memory.check()


def test_nobody_is_evicted_while_memory_is_still_prepared() -> None:
    memory = MemoryPool(64 * BLOCK, ready=4 * BLOCK)
    session = memory.session()
    assert memory.save(session, 1, dict.fromkeys(range(3), BLOCK)) == 3
    statuses, _ = memory.reserve(session, 2, {"a": BLOCK, "b": BLOCK})
    assert list(statuses) == [GRANTED, NO_ROOM]
    assert memory.reader.room() == (4 * BLOCK, 64 * BLOCK)
    memory.pool.abort(session, 2)
    memory.pool.extend_ready(64 * BLOCK)
    assert memory.reader.room() == (64 * BLOCK, 64 * BLOCK)
    assert memory.save(session, 3, dict.fromkeys(range(3, 53), BLOCK)) == 50
    assert memory.pool.stats().evictions == 0


def test_clients_may_ask_for_more_at_once_where_blocks_are_large() -> None:
    def frame_bytes(blocks: int, block_bytes: int, capacity: int) -> int:
        memory = MemoryPool(capacity)
        if blocks:
            memory.save(memory.session(), 1, dict.fromkeys(map(str, range(blocks)), block_bytes))
        memory.pool.beat(memory.now_ns)
        return memory.reader.frame_bytes()

    assert frame_bytes(0, 4096, 1 << 30) == 64 << 20
    assert frame_bytes(100, 4096, 1 << 30) == 24 << 20
    assert frame_bytes(100, 8192, 1 << 30) == 48 << 20
    assert frame_bytes(100, 1 << 20, 1 << 30) == 64 << 20
    assert frame_bytes(10, 1 << 20, 128 << 20) == 32 << 20
    assert frame_bytes(10, 1 << 20, 64 << 20) == 24 << 20
