"""Memory of an emulated NPU, and a client that copies it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from ems import (
    CcKvOption,
    CcResult,
    ContextCaching,
    Ems,
    EmsErrorCode,
    EmsException,
    KvBufferWrapper,
)
from ems.testing import LocalPool
from ems.testing.emulated_npu import EmulatedNpu
from ems_native._copy import Spans

KIB = 1024
OPTION = CcKvOption(timeout=5000)


def pattern(name: str, nbytes: int) -> bytes:
    return (f"<{name}>".encode() * (nbytes // (len(name) + 2) + 1))[:nbytes]


class Block:
    """Memory of a device, freed at the end of the test, in pieces."""

    def __init__(
        self, npu: EmulatedNpu, device: int, nbytes: int, pieces: int = 1, data: bytes | None = None
    ) -> None:
        self.npu, self.nbytes = npu, nbytes
        # A gap behind each piece, so that none of them touch.
        size = -(-nbytes // pieces)
        self.sizes = [min(size, nbytes - at) for at in range(0, nbytes, size)]
        self.base = npu.allocate(device, len(self.sizes) * (size + 16))
        self.places = [self.base + n * (size + 16) for n in range(len(self.sizes))]
        self.wrappers = [KvBufferWrapper(at, n) for at, n in zip(self.places, self.sizes)]
        if data is not None:
            self.write(data)

    def write(self, data: bytes) -> None:
        at = 0
        for place, size in zip(self.places, self.sizes):
            self.npu.write(place, data[at : at + size])
            at += size

    def read(self) -> bytes:
        return b"".join(self.npu.read(at, n) for at, n in zip(self.places, self.sizes))

    def free(self) -> None:
        self.npu.free(self.base)


_models = itertools.count()


def opened(pool: LocalPool) -> ContextCaching:
    # The pool is that of all tests here, the names in it are not.
    Ems.init(pool.config_for(model_id=f"model-{next(_models)}"))
    found = Ems.get_cc()
    assert found is not None
    return found


def failed(code: EmsErrorCode, call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(EmsException) as caught:
        call(*arguments)
    assert caught.value.status_code() is code, caught.value
    return caught.value.message()


def nothing_reserved(pool: LocalPool) -> None:
    # A plug-in of pytest: it imports that first.
    from fix_pool import status_of, wait_until

    wait_until(lambda: sum(status_of(pool).session_reserved) == 0)


def fewest_calls(npu: EmulatedNpu, call: Callable[[], CcResult]) -> int:
    """Calls of the runtime for a batch, once its thread has entered the device."""
    fewest = 1 << 30
    for _ in range(8):
        npu.reset_counts()
        result = call()
        assert result.success == result.total
        fewest = min(fewest, npu.count())
    return fewest


class Device:
    type = "npu"

    def __str__(self) -> str:
        return "npu:1"


class FakeTensor:
    """As much of a tensor as a buffer needs."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.device = Device()
        self._address, self._nbytes = address, nbytes

    def data_ptr(self) -> int:
        return self._address

    def numel(self) -> int:
        return self._nbytes

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True


class DeviceBuffers:
    """Values in memory of a device, with the look of `client_bench.Buffers`."""

    def __init__(
        self, npu: EmulatedNpu, values: Sequence[bytes], pieces: int = 1, device: int = 1
    ) -> None:
        self.blocks = [
            Block(npu, device, len(value), min(pieces, len(value)), value) for value in values
        ]
        self.value_list = [block.wrappers for block in self.blocks]
        self.spans = Spans.from_buffers(self.value_list)

    def value(self, key: int) -> bytes:
        return self.blocks[key].read()

    def guards_intact(self) -> bool:
        return True  # the runtime copies nowhere but where it is told to, and checks that

    def free(self) -> None:
        for block in self.blocks:
            block.free()
