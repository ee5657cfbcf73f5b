"""What every device back end must do; accelerators are emulated, for there is none in a gate."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from client_bench import Buffers, pattern
from npu_bench import DeviceBuffers

from ems.common.exception import EmsErrorCode, EmsException
from ems.devices import cuda
from ems.devices.base import CopyEnd, Device
from ems.devices.registry import BACK_ENDS, open_device
from ems.testing.emulated_npu import EmulatedNpu
from ems_native._copy import CancelFlag, checksum

SIZES = [1, 4096, 100_000, 65_536]
SLOT = 128 << 10


class Pool:
    """Memory as the pool's, registered with the device."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device = device
        self.memory = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.nbytes = nbytes
        device.register(self.address, nbytes)

    def places(self, sizes: list[int]) -> bytearray:
        places = bytearray(40 * len(sizes))
        words = memoryview(places).cast("Q")
        for key, nbytes in enumerate(sizes):
            words[5 * key + 2], words[5 * key + 3] = key * SLOT, nbytes
        return places

    def value(self, key: int, nbytes: int) -> bytes:
        return self.memory[key * SLOT : key * SLOT + nbytes]


@pytest.fixture(params=["acl", "auto", "cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    if request.param in ("acl", "auto"):
        request.getfixturevalue("npu_home")
    elif request.param == "cuda":
        variant = request.getfixturevalue("cuda_variant")
        monkeypatch.setattr(cuda, "LIBRARY", variant(13))
    one = open_device(request.param)
    one.verify_too()
    yield one
    one.close()


class Memory:
    """Makes buffers of the kind that the device copies: `Buffers`, or the like on the device."""

    def __init__(self, npu: EmulatedNpu | None) -> None:
        self.npu = npu
        self.made: list[DeviceBuffers] = []

    def __call__(self, values: list[bytes], pieces: int = 1) -> Any:
        if self.npu is None:
            return Buffers(values, pieces)
        self.made.append(DeviceBuffers(self.npu, values, pieces))
        return self.made[-1]

    def empty(self, sizes: list[int], pieces: int = 1) -> Any:
        return self([b"\xaa" * nbytes for nbytes in sizes], pieces)


@pytest.fixture
def memory(device: Device, request: pytest.FixtureRequest) -> Iterator[Memory]:
    npu = None
    if device.name == "acl":
        npu = request.getfixturevalue("npu")
    elif device.name == "cuda":
        npu = EmulatedNpu(cuda.LIBRARY)
    one = Memory(npu)
    yield one
    for buffers in one.made:
        buffers.free()


@pytest.fixture
def pool(device: Device) -> Iterator[Pool]:
    one = Pool(device, 4 << 20)
    yield one
    device.unregister(one.address, one.nbytes)


def checksums(places: bytearray) -> list[int]:
    return list(memoryview(places).cast("Q")[4::5])


def test_it_has_its_name(device: Device) -> None:
    assert device.name in BACK_ENDS


def test_values_travel_in_and_out_in_other_pieces(
    device: Device, pool: Pool, memory: Memory
) -> None:
    values = [pattern(key, nbytes) for key, nbytes in enumerate(SIZES)]
    source = memory(values)
    places = pool.places(SIZES)
    assert device.copy_in(source.spans, 0, 4, pool.address, places, None, 0) == (4, CopyEnd.DONE)
    assert [pool.value(key, nbytes) for key, nbytes in enumerate(SIZES)] == values
    assert checksums(places) == [
        checksum(pool.address + key * SLOT, nbytes) for key, nbytes in enumerate(SIZES)
    ]
    target = memory.empty(SIZES[1:], pieces=3)
    assert device.copy_out(target.spans, 0, 3, pool.address, places[40:], None, 0, True) == (
        3,
        CopyEnd.DONE,
    )
    assert [target.value(key) for key in range(3)] == values[1:]
    assert target.guards_intact() and source.guards_intact()


def test_only_the_keys_in_the_mask_are_copied_in(
    device: Device, pool: Pool, memory: Memory
) -> None:
    source = memory([pattern(key, nbytes) for key, nbytes in enumerate(SIZES)])
    places = pool.places(SIZES)
    end = device.copy_in(source.spans, 1, 3, pool.address, places, None, 0, b"\1\1\0\1")
    assert end == (4, CopyEnd.DONE)
    assert pool.value(0, SIZES[0]) == bytes(SIZES[0])
    assert pool.value(1, SIZES[1]) == pattern(1, SIZES[1])
    assert pool.value(2, SIZES[2]) == bytes(SIZES[2])
    assert pool.value(3, SIZES[3]) == pattern(3, SIZES[3])


def test_other_bytes_than_the_checksum_says(device: Device, pool: Pool, memory: Memory) -> None:
    source = memory([pattern(key, nbytes) for key, nbytes in enumerate(SIZES)])
    places = pool.places(SIZES)
    device.copy_in(source.spans, 0, 4, pool.address, places, None, 0)
    pool.memory[2 * SLOT + 77_777] ^= 4
    target = memory.empty(SIZES)
    arguments = (target.spans, 0, 4, pool.address, places, None, 0)
    assert device.copy_out(*arguments, True) == (2, CopyEnd.CHECKSUM)
    assert [target.value(key) for key in (0, 1)] == [pattern(k, SIZES[k]) for k in (0, 1)]
    assert device.copy_out(*arguments, False) == (4, CopyEnd.DONE)


def test_a_copy_that_is_cancelled_or_late_does_not_begin(
    device: Device, pool: Pool, memory: Memory
) -> None:
    cancelled = CancelFlag()
    cancelled.set()
    source = memory([pattern(key, nbytes) for key, nbytes in enumerate(SIZES)])
    places = pool.places(SIZES)
    past = time.monotonic_ns() - 1
    for cancel, deadline_ns, end in (
        (cancelled, 0, CopyEnd.CANCELLED),
        (None, past, CopyEnd.DEADLINE),
    ):
        assert device.copy_in(source.spans, 0, 4, pool.address, places, cancel, deadline_ns) == (
            0,
            end,
        )
        target = memory.empty(SIZES)
        assert device.copy_out(
            target.spans, 0, 4, pool.address, places, cancel, deadline_ns, True
        ) == (0, end)
        assert [target.value(key) for key in range(4)] == [b"\xaa" * n for n in SIZES]
    assert bytes(pool.memory[:]) == bytes(pool.nbytes)


def test_a_long_copy_ends_soon_after_its_cancellation(device: Device, memory: Memory) -> None:
    # One value in the pool, loaded as 200 keys: long, but not much memory.
    nbytes, nkeys = 4 << 20, 200
    pool = Pool(device, nbytes)
    source = memory([pattern("long", nbytes)])
    place = pool.places([nbytes])
    device.copy_in(source.spans, 0, 1, pool.address, place, None, 0)
    from ems_native._copy import Spans

    spans = Spans.from_buffers(memory.empty([nbytes]).value_list * nkeys)
    flag = CancelFlag()
    ends: list[tuple[int, int]] = []
    thread = threading.Thread(
        target=lambda: ends.append(
            device.copy_out(spans, 0, nkeys, pool.address, place * nkeys, flag, 0, True)
        )
    )
    thread.start()
    time.sleep(0.005)
    flag.set()
    told = time.monotonic()
    thread.join()
    assert time.monotonic() - told < 0.5
    assert ends[0][1] in (CopyEnd.CANCELLED, CopyEnd.DONE)
    device.unregister(pool.address, nbytes)


def test_an_unknown_name_is_an_argument_error() -> None:
    with pytest.raises(EmsException) as caught:
        open_device("abacus")
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
    assert "abacus" in caught.value.message()
    assert "cpu" in caught.value.message()


def test_a_back_end_without_its_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACK_ENDS, "broken", "ems.devices.there_is_no_such_module")
    with pytest.raises(EmsException) as caught:
        open_device("broken")
    assert caught.value.status_code() is EmsErrorCode.EMS_INTERNAL_ERROR
