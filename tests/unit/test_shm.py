"""Mappings, page preparation, counters and the clock."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator

import pytest

from ems_native import _shm

NBYTES = (5 << 20) + 4096
HUGE = 2 << 20


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("ems-test")
    os.ftruncate(fd, NBYTES)
    yield fd
    os.close(fd)


def mapped_lines(address: int) -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line for line in maps if line.startswith(f"{address:x}-")]


def test_a_mapping_is_shared_and_aligned(file: int) -> None:
    writable = _shm.map_file(file, NBYTES, True)
    readonly = _shm.map_file(file, NBYTES, False)
    assert writable % HUGE == readonly % HUGE == 0
    assert " rw-s " in mapped_lines(writable)[0]
    assert " r--s " in mapped_lines(readonly)[0]
    ctypes.memmove(writable + NBYTES - 4, b"last", 4)
    assert ctypes.string_at(readonly + NBYTES - 4, 4) == b"last"
    assert os.pread(file, 4, NBYTES - 4) == b"last"
    for address in (writable, readonly):
        _shm.unmap(address, NBYTES)
        assert not mapped_lines(address)


def test_nothing_of_the_address_range_is_left(file: int) -> None:
    def count() -> int:
        with open("/proc/self/maps") as maps:
            return len(maps.readlines())

    _shm.unmap(_shm.map_file(file, NBYTES, True), NBYTES)
    before = count()
    for _ in range(20):
        _shm.unmap(_shm.map_file(file, NBYTES, True), NBYTES)
    assert count() <= before + 2


def test_a_forked_child_does_not_have_it(file: int) -> None:
    address = _shm.map_file(file, NBYTES, True)
    try:
        with open("/proc/self/smaps") as smaps:
            text = smaps.read()
        entry = text[text.index(f"{address:x}-") :]
        flags = entry[entry.index("VmFlags:") :].splitlines()[0].split()
        assert {"dc", "dd"} <= set(flags)  # don't copy at fork, don't dump
    finally:
        _shm.unmap(address, NBYTES)


def test_what_cannot_be_mapped(file: int) -> None:
    with pytest.raises(OSError, match="cannot map"):
        _shm.map_file(10_000, NBYTES, True)
    with pytest.raises(ValueError, match="at least one byte"):
        _shm.map_file(file, 0, True)
    with pytest.raises(ValueError, match="not one that map_file returned"):
        _shm.unmap(4096, NBYTES)


def test_pages_can_be_prepared(file: int) -> None:
    address = _shm.map_file(file, NBYTES, True)
    try:
        if not _shm.populate(address, NBYTES, True):
            return  # a kernel before 5.14
        assert os.fstat(file).st_blocks * 512 >= NBYTES
        assert _shm.populate(address, NBYTES, False)
        assert _shm.collapse(address, NBYTES) in (True, False)
        assert not _shm.collapse(address + 4096, HUGE)  # no aligned 2 MiB in it
        assert not _shm.collapse(1 << 46, HUGE)  # nothing there: no error
        with pytest.raises(OSError, match="cannot populate"):
            _shm.populate(1 << 46, HUGE, True)
    finally:
        _shm.unmap(address, NBYTES)


def test_counters_count() -> None:
    with mmap.mmap(-1, 4096) as page:
        anchor = ctypes.c_char.from_buffer(page)
        counters = _shm.Counters(ctypes.addressof(anchor), 3)
        counters.add(0, 5)
        counters.add(2, 2**40)
        counters.add(2, -1)
        assert counters.snapshot() == [5, 0, 2**40 - 1]
        assert counters.get(0) == 5
        assert page[:8] == (5).to_bytes(8, "little")
        counters.add(1, -1)
        assert counters.get(1) == 2**64 - 1
        counters.clear()
        assert counters.snapshot() == [0, 0, 0]
        for bad in (-1, 3):
            with pytest.raises(IndexError):
                counters.get(bad)
            with pytest.raises(IndexError):
                counters.add(bad, 1)
        del counters, anchor
    for address, count in ((0, 1), (4097, 1), (4096, 0)):
        with pytest.raises(ValueError, match="is"):
            _shm.Counters(address, count)


def test_the_kind_of_file_system() -> None:
    assert _shm.filesystem_magic("/dev/shm") == 0x01021994
    assert _shm.filesystem_magic(b"/proc") == 0x9FA0
    with pytest.raises(FileNotFoundError):
        _shm.filesystem_magic("/no/such/place")


def test_the_clock_is_the_one_of_deadlines() -> None:
    before, between, after = time.monotonic_ns(), _shm.monotonic_ns(), time.monotonic_ns()
    assert before <= between <= after
