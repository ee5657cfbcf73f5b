"""Big batches are copied by several threads; nobody but the clock can tell."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ems_native import _copy
from ems_native._copy import CancelFlag, Spans, copy_in, copy_out

from .test_copy import DEADLINE, DIFFERS, DONE, Memory, checksums, places_of, spans_of

KEY = 300_001
KEYS = 24  # 7 MB: large enough to be shared


@pytest.fixture(params=[2, 4], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    _copy.set_threads(request.param)
    yield request.param
    _copy.set_threads(1)


class Batch:
    def __init__(self, seed: int) -> None:
        random = Random(seed)
        self.source = [Memory(KEY, random.randrange(64)) for _ in range(KEYS)]
        for memory in self.source:
            memory.bytes = random.randbytes(KEY) if seed < 3 else bytes([seed]) * KEY
        self.target = [Memory(KEY, random.randrange(64)) for _ in range(KEYS)]
        self.places, pool_bytes = places_of([KEY] * KEYS)
        self.pool = Memory(pool_bytes)

    def save(self) -> tuple[int, int]:
        spans = spans_of([[memory] for memory in self.source])
        return copy_in(spans, 0, KEYS, self.pool.address, self.places, None, 0)

    def load(self, deadline_ns: int = 0, cancel: CancelFlag | None = None) -> tuple[int, int]:
        spans = self.spans_out()
        return copy_out(spans, 0, KEYS, self.pool.address, self.places, cancel, deadline_ns, True)

    def spans_out(self) -> Spans:
        return spans_of([[memory] for memory in self.target])

    def check(self) -> None:
        for source, target in zip(self.source, self.target):
            assert source.bytes == target.bytes
            target.check_guards()
        self.pool.check_guards()


def round_trip(seed: int) -> None:
    batch = Batch(seed)
    assert batch.save() == (KEYS, DONE)
    assert checksums(batch.places)[5] == _copy.checksum(batch.source[5].wrapper().data_ptr, KEY)
    assert batch.load() == (KEYS, DONE)
    batch.check()


def test_every_byte_arrives() -> None:
    for _ in range(8):  # alone at first, then in turns with helpers
        round_trip(1)


@given(
    st.lists(st.integers(1, 400_000), min_size=2, max_size=20),
    st.lists(st.integers(0, 64), min_size=1, max_size=5),
    st.integers(0, 2**32),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_lengths_at_any_alignments(sizes: list[int], shifts: list[int], seed: int) -> None:
    sizes = [*sizes, 2 << 20]  # large enough to be shared, whatever is drawn
    places, room = places_of(sizes)
    shift = [shifts[at % len(shifts)] for at in range(len(sizes))]
    pool, random = Memory(room), Random(seed)
    source = [[Memory(size, by)] for size, by in zip(sizes, shift)]
    target = [[Memory(size, by)] for size, by in zip(sizes, reversed(shift))]
    for [memory] in source:
        memory.bytes = random.randbytes(len(memory.bytes))
    everything = 0, len(sizes), pool.address, places
    assert copy_in(spans_of(source), *everything, None, 0) == (len(sizes), DONE)
    assert copy_out(spans_of(target), *everything, None, 0, True) == (len(sizes), DONE)
    pool.check_guards()
    for [original], [copy] in zip(source, target):
        assert original.bytes == copy.bytes
        copy.check_guards()


def test_the_lowest_bad_key_is_named() -> None:
    batch = Batch(2)
    for _ in range(8):
        assert batch.save() == (KEYS, DONE)
        assert batch.load() == (KEYS, DONE)
    stored = bytearray(batch.pool.bytes)
    extent = len(stored) // KEYS
    for key in (19, 7, 12):
        stored[key * extent + 1000] ^= 1
    batch.pool.bytes = bytes(stored)
    for _ in range(8):
        assert batch.load() == (7, DIFFERS)


def test_limits_hold() -> None:
    batch = Batch(2)
    batch.save()
    assert batch.load(deadline_ns=1) == (0, DEADLINE)
    flag = CancelFlag()
    flag.set()
    assert batch.load(cancel=flag)[0] == 0
    assert batch.target[0].bytes == bytes(b"\xa5" * KEY)


def test_several_callers_share_the_helpers() -> None:
    wrong: list[BaseException] = []

    def caller(seed: int) -> None:
        try:
            round_trip(seed)
        except BaseException as error:
            wrong.append(error)

    callers = [threading.Thread(target=caller, args=(seed,)) for seed in range(3, 7)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not wrong


def test_a_forked_child_starts_its_own_helpers() -> None:
    round_trip(1)
    pid = os.fork()
    if pid == 0:
        try:
            round_trip(2)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def helpers() -> int:
    names = [task / "comm" for task in Path("/proc/self/task").iterdir()]
    return [name.read_text() for name in names].count("ems-copy\n")


def wait_for_helpers(count: int) -> None:
    give_up = time.monotonic() + 10
    while helpers() != count:
        assert time.monotonic() < give_up, f"{helpers()} helpers, wanted {count}"
        time.sleep(0.001)


def test_there_are_as_many_threads_as_were_asked_for(threads: int) -> None:
    for wanted in (threads, 1, threads):
        _copy.set_threads(wanted)
        for _ in range(17):  # where help does not pay it is tried every sixteenth time
            round_trip(1)
            if wanted == 1 or helpers():
                break
        wait_for_helpers(wanted - 1)  # beside the caller
