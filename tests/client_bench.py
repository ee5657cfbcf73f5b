"""A client's operations on a real pool in this process: no socket, no server, faults on command."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ems.client.ahead import Ahead
from ems.client.context import Context
from ems.client.requests import RequestBook
from ems.client.writer import ChannelBroken
from ems.common.deadline import Deadline, DeadlineExpired
from ems.common.metrics import Count
from ems.devices.base import Device
from ems.devices.cpu import CpuDevice
from ems.rpc.frames import GRANTED, Put
from ems.testing.memory_pool import MemoryPool, digest_of
from ems_native._copy import Arrivals, CancelFlag, KvBufferWrapper, Spans

GUARD = 64


class Counters:
    """A page of counters in plain memory."""

    def __init__(self) -> None:
        self.values = [0] * 128

    def add(self, i: int, n: int) -> None:
        self.values[i] += n

    def __getitem__(self, count: Count) -> int:
        return self.values[count]


class Faults:
    """What happens at named steps: `at["commit"] = action` runs before, `"commit done"` after."""

    def __init__(self) -> None:
        self.at: dict[str, Callable[[], object]] = {}
        self.steps: list[str] = []

    def step(self, name: str) -> None:
        self.steps.append(name)
        action = self.at.pop(name, None)
        if action is not None:
            action()


class DirectChannel:
    """The write channel without a wire: the server's part happens in the call."""

    def __init__(self, memory: MemoryPool, session: int, faults: Faults) -> None:
        self.memory = memory
        self.session = session
        self.faults = faults
        self.requests = 0
        self.away = False
        self.aborted: set[int] = set()

    def next_request(self) -> int:
        self.requests += 1
        return self.requests

    def reserve(
        self,
        request: int,
        digests: bytes,
        lengths: bytes,
        replace: bool,
        force: bool,
        deadline: Deadline,
    ) -> tuple[bytes, bytearray]:
        self._arrive("reserve", deadline)
        statuses, offsets = self.memory.pool.reserve(
            self.session, request, digests, lengths, replace, force, self.memory.later()
        )
        self._answer("reserve", deadline)
        places = bytearray(40 * len(statuses))
        words = memoryview(places).cast("Q")
        words[2::5] = memoryview(offsets).cast("Q")
        words[3::5] = memoryview(lengths).cast("Q")
        return statuses, places

    def commit(
        self,
        request: int,
        positions: list[int] | None,
        places: bytearray,
        chain: bool,
        deadline: Deadline,
        mark_ns: int = 0,
    ) -> bytes:
        self._arrive("commit", deadline)
        sums = memoryview(places).cast("Q")[4::5]
        chosen = range(len(sums)) if positions is None else positions
        outcome = self.memory.pool.commit(
            self.session,
            request,
            b"".join(at.to_bytes(4, "little") for at in chosen),
            b"".join(sums[at].to_bytes(8, "little") for at in chosen),
            chain,
            mark_ns or self.memory.later(),
        )
        self._answer("commit", deadline)
        return outcome

    def put(self, request: int, what: Put, deadline: Deadline) -> tuple[int, bytearray | None]:
        self._arrive("commit", deadline)
        pool, mark_ns = self.memory.pool, what.mark_ns or self.memory.later()
        outcome = pool.put(self.session, request, what.digest, what.checksum, what.chain, mark_ns)
        place = None
        if what.following:
            name, length = what.following.to_bytes(16, "little"), what.length.to_bytes(8, "little")
            statuses, offset = pool.reserve(
                self.session, what.following, name, length, what.replace, True, mark_ns
            )
            if statuses[0] == GRANTED:
                place = bytearray(bytes(16) + offset + length + bytes(8))
        self._answer("commit", deadline)
        return outcome, place

    def abort(self, request: int, deadline: Deadline) -> None:
        self._arrive("abort", deadline)
        self.memory.pool.abort(self.session, request)
        self.aborted.add(request)
        self._answer("abort", deadline)

    def _arrive(self, name: str, deadline: Deadline) -> None:
        self.faults.step(name)
        self._check(deadline)

    def _answer(self, name: str, deadline: Deadline) -> None:
        self.faults.step(f"{name} done")
        self._check(deadline)

    def _check(self, deadline: Deadline) -> None:
        if self.away:
            raise ChannelBroken("the server is away")
        if deadline.expired:
            raise DeadlineExpired("the server did not answer in time")


class FaultyDevice(CpuDevice):
    """The CPU, with a step before and after each copy, and after each key of it."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def copy_in(  # type: ignore[override]
        self,
        spans: Spans,
        first: int,
        count: int,
        base: int,
        places: bytearray,
        cancel: CancelFlag | None,
        deadline_ns: int,
        mask: bytes | None = None,
    ) -> tuple[int, int]:
        self.faults.step("copy in")
        answer = CpuDevice.copy_in(spans, first, count, base, places, cancel, deadline_ns, mask)
        self.faults.step("copy in done")
        return answer

    def copy_out(  # type: ignore[override]
        self,
        spans: Spans,
        first: int,
        count: int,
        base: int,
        places: bytearray,
        cancel: CancelFlag | None,
        deadline_ns: int,
        verify: bool,
        arrivals: Arrivals | None = None,
    ) -> tuple[int, int]:
        self.faults.step("copy out")
        limits = cancel, deadline_ns
        answer = CpuDevice.copy_out(spans, first, count, base, places, *limits, verify, arrivals)
        self.faults.step("copy out done")
        return answer


class Bench:
    """One client's session with a pool of `capacity` bytes; `again()` is another client of it."""

    def __init__(
        self, capacity: int = 8 << 20, entries: int = 1024, memory: MemoryPool | None = None
    ) -> None:
        self.memory = memory or MemoryPool(capacity, entries)
        self._data = mmap.mmap(-1, self.memory.geometry.data_bytes)
        self.data = ctypes.addressof(ctypes.c_char.from_buffer(self._data))
        self._open()

    def _open(self) -> None:
        self.session = self.memory.session()
        self.faults = Faults()
        self.channel = DirectChannel(self.memory, self.session, self.faults)
        self.counters = Counters()
        self.requests = RequestBook(self.channel.next_request)
        self.suspects: list[tuple[bytes, int]] = []
        self.broken = threading.Event()
        self.context = Context(
            reader=self.memory.reader,
            data=self.data,
            counters=self.counters,
            device=FaultyDevice(self.faults),
            verify=True,
            channel=self.channel,
            requests=self.requests,
            ahead=Ahead(self.requests),
            suspect=lambda digest, version: self.suspects.append((digest, version)),
            broken=self.broken.set,
        )

    def again(self) -> Bench:
        other = object.__new__(Bench)
        other.memory, other._data, other.data = self.memory, self._data, self.data
        other._open()
        return other

    def pay(self) -> None:
        """What the session does in the background once the server answers again."""
        self.channel.away = False
        for request in self.requests.owed():
            self.channel.abort(request, Deadline.after_ms(1000))
            self.requests.paid(request)

    def stored(self, key: object) -> bytes | None:
        """The value that a reader who looks into the pool finds, None for none."""
        place = self.memory.pool.locate(digest_of(key))
        if place is None:
            return None
        _, _, offset, length, _ = place
        return self._data[offset : offset + length]

    def check_quiet(self) -> None:
        """Nothing is reserved, nothing under way, and all figures of the pool fit together.

        But for what was granted ahead, which is given back first, as it is to who waits a while.
        """
        owed = set(self.requests.owed())
        self.context.ahead.expire(kept_ns=0)
        for request in set(self.requests.owed()) - owed:
            self.memory.pool.abort(self.session, request)
            self.requests.paid(request)
        assert self.requests.pause() == []
        self.requests.resume()
        assert self.memory.pool.reserved_requests(self.session) == []
        self.memory.check()


def digests_of(keys: Sequence[object]) -> bytes:
    return b"".join(digest_of(key) for key in keys)


def pattern(key: object, nbytes: int) -> bytes:
    seed = digest_of(("pattern", key))
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


def _address(memory: bytearray, address: int) -> int:
    return address


class Buffers:
    """Memory of a caller for some values, each in pieces, with guard bytes between all of them."""

    def __init__(self, values: Sequence[bytes], pieces: int = 1) -> None:
        self.memory = bytearray()
        self.ranges: list[list[tuple[int, int]]] = []
        for value in values:
            cuts = [len(value) * n // pieces for n in range(pieces + 1)]
            parts = []
            for start, end in zip(cuts, cuts[1:]):
                self.memory += b"\xee" * GUARD
                parts.append((len(self.memory), end - start))
                self.memory += value[start:end]
            self.ranges.append(parts)
        self.memory += b"\xee" * GUARD
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.value_list = [
            # A wrapper keeps the method that gave it its address, and that keeps the memory.
            [KvBufferWrapper(partial(_address, self.memory, address + at), n) for at, n in parts]
            for parts in self.ranges
        ]
        self.spans = Spans.from_buffers(self.value_list)

    @classmethod
    def empty(cls, sizes: Sequence[int], pieces: int = 1) -> Buffers:
        return cls([b"\xaa" * nbytes for nbytes in sizes], pieces)

    def value(self, key: int) -> bytes:
        return b"".join(bytes(self.memory[at : at + n]) for at, n in self.ranges[key])

    def guards_intact(self) -> bool:
        copy = bytearray(self.memory)
        for parts in self.ranges:
            for at, nbytes in parts:
                copy[at : at + nbytes] = b"\xee" * nbytes
        return copy == b"\xee" * len(copy)


class AdmittingDevice:
    """A device whose batches are copied by somebody else."""

    def __init__(self, device: Device, copier: object) -> None:
        self._device = device
        self._copier = copier

    def admit(self, spans: Spans) -> object:
        self._device.admit(spans)
        return self._copier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)
