"""Devices with streams: copies that a runtime does while the CPU waits.

    caller's stream:   kernel ── event
                                   └──▶ copy stream: copies ── end
                                                               └──▶ the operation goes on

One copy stream per direction and device. To the pool: the device writes to pinned staging memory
of this process, the CPU takes it on into the pool and makes the checksum on the way. From the pool:
the device reads the pool itself, which is registered with it where that is possible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ems.common.exception import EmsException, internal_error, invalid_argument
from ems.devices.base import (
    PLACE_OFFSET,
    PLACE_WORDS,
    AdmittedCopies,
    CopyEnd,
    DeviceError,
)
from ems.devices.limits import Limits
from ems.devices.unit import Thread, Unit
from ems_native import _copy

if TYPE_CHECKING:
    from ems.devices.staging import Buffer
    from ems_native._acl import Runtime
    from ems_native._copy import Arrivals, CancelFlag, Spans

__all__ = ["StreamDevice", "refuse_mixture"]

CHUNK_BYTES = 64 << 20
"""Of a load: one submission, one wait. A call costs a device more than an entry that changes."""
_ALIGNMENT = 64


class StreamDevice(AdmittedCopies):
    """All devices of one runtime. Thread-safe; the memory of a batch says which one copies it.

    Args:
        name: in the registry.
        runtime: the vendor's.
        kind: of device, as tensors name it: "npu", "cuda".
        current_stream: returns the stream that the current thread works on for a device, None for
            the default one.
        slice_bytes: to the pool: how much the device copies while the CPU takes on what came
            before.
    """

    chunk_bytes = CHUNK_BYTES

    def __init__(
        self,
        name: str,
        runtime: Runtime,
        kind: str,
        current_stream: Callable[[int], int | None],
        slice_bytes: int,
    ) -> None:
        self.name = name
        self.runtime = runtime
        self.kinds = (kind,)
        self.slice_bytes = slice_bytes
        self.verifies = False
        self._current_stream = current_stream
        self._units: dict[int, Unit] = {}
        self._segments: dict[int, int] = {}
        self._lock = threading.Lock()

    # ---- the protocol ----

    def admit(self, spans: Spans) -> Batch:
        """See `Device.admit`; memory of the host is refused."""
        batch = self.admit_own(spans)
        if batch is None:
            key, piece = spans.where(0)
            raise invalid_argument(
                f"value_list[{key}][{piece}] is no memory of a device of kind {self.kinds[0]}; "
                f"EMS_DEVICE={self.name} takes no other, EMS_DEVICE=auto does"
            )
        return batch

    def admit_own(self, spans: Spans) -> Batch | None:
        """Admit a batch, or return None when all of it is memory of the host."""
        try:
            device, odd = self.runtime.classify(spans.handle, self._guess(spans))
            if odd is not None:
                raise refuse_mixture(spans, odd)
            if device < 0:
                return None
            unit = self.unit(device)
            return Batch(self, unit, unit.record(self._current_stream(device)))
        except DeviceError as error:
            raise internal_error(f"access to {self.kinds[0]} memory failed: {error}") from error

    def verify_too(self) -> None:
        """See `Device.verify_too`: the checksum of what the device has read of the pool."""
        self.verifies = True

    def register(self, address: int, nbytes: int) -> None:
        """Note a mapping; a device learns of it at its first load, if there ever is one."""
        self._segments[address] = nbytes

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo `register`."""
        self._segments.pop(address, None)
        for unit in list(self._units.values()):
            unit.unregister(address)

    def close(self) -> None:
        """Give streams, events and staging memory back."""
        with self._lock:
            units, self._units = self._units, {}
        for unit in units.values():
            unit.close()

    def forget(self) -> None:
        """See `Device.forget`; a lock may be held by a thread that the child does not have."""
        self._units = {}
        self._segments = {}

    # ---- the rest ----

    def unit(self, device: int) -> Unit:
        """Return what EMS holds of one device.

        Raises:
            DeviceError: it cannot be entered.
        """
        unit = self._units.get(device)
        if unit is None:
            with self._lock:
                unit = self._units.get(device)
                if unit is None:
                    unit = self._units[device] = Unit(self.runtime, device, self._segments)
        return unit

    def _guess(self, spans: Spans) -> int:
        """Return the device that a tensor names, for runtimes that cannot tell by the address."""
        where = spans.first_foreign() if spans.foreign else None
        kind, _, number = where[2].partition(":") if where is not None else ("", "", "")
        return int(number or 0) if kind in self.kinds else -1


def refuse_mixture(spans: Spans, odd: int) -> EmsException:
    """Make the exception for a batch of which a piece lies elsewhere than the first one."""
    key, piece = spans.where(odd)
    return invalid_argument(
        f"value_list[{key}][{piece}] lies on another device than value_list[0][0]: "
        "one call takes the memory of one device"
    )


class Batch:
    """A batch that was admitted, behind an event of its submitter's stream.

    Args:
        device: its runtime.
        unit: owns the memory.
        event: given back when the batch is gone.
    """

    chunk_bytes = CHUNK_BYTES

    def __init__(self, device: StreamDevice, unit: Unit, event: int) -> None:
        self._device = device
        self._unit = unit
        self._event = event
        self._waited: set[int] = set()
        self._event_free = True

    def __del__(self) -> None:
        # An event that a hanging stream still waits for is nobody's any more.
        if self._event_free:
            self._unit.release_event(self._event)

    def copy_in(
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
        """See `Copier.copy_in`. Returns at the deadline even if the device hangs."""
        limits = Limits(cancel, deadline_ns)
        unit = self._unit
        slices = _slices(spans, first, count, mask, self._device.slice_bytes)
        with contextlib.ExitStack() as stack:
            thread = stack.enter_context(unit.entered())
            lane = stack.enter_context(contextlib.ExitStack())
            why = lane.enter_context(unit.to_host.held(limits)) or limits.passed()
            if why:
                return first, why
            under_way = self._start(thread, spans, next(slices, None), mask)
            try:
                while under_way is not None:
                    why = self._wait(thread, limits)
                    if why:
                        return under_way.first, why
                    arrived, under_way = under_way, None
                    try:
                        under_way = self._start(thread, spans, next(slices, None), mask)
                        if under_way is None:
                            lane.close()  # what is left is work for the CPU
                        staged = spans.staged(arrived.first, arrived.count, arrived.address, mask)
                        keys = arrived.first, arrived.count
                        end, reason = _copy.copy_in(
                            staged, *keys, base, places, cancel, deadline_ns, mask
                        )
                    finally:
                        unit.staging.give(arrived.buffer)
                    if reason:
                        return end, reason
            finally:
                if under_way is not None:
                    self._give_up(under_way.buffer)
        return first + count, CopyEnd.DONE

    def copy_out(
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
        """See `Copier.copy_out`. Returns when the stream was synchronised, or aborted."""
        limits = Limits(cancel, deadline_ns)
        unit, runtime = self._unit, self._device.runtime
        with unit.to_device.held(limits) as why, unit.entered() as thread:
            why = why or limits.passed()
            if why:
                return first, why
            ended = False
            try:
                stream = unit.to_device.stream(thread)
                unit.register(thread)
                self._order(thread, stream)
                runtime.submit_to_device(
                    spans.handle, first, count, unit.device, base, places, stream
                )
                while not runtime.synchronize(stream, limits.wait_ms()):
                    why = limits.passed()
                    if why:
                        return first, why
                ended = True
            except DeviceError:
                # What was remembered of addresses may be what is wrong.
                runtime.forget()
                raise
            finally:
                if not ended:
                    unit.to_device.end(thread)
        if verify and self._device.verifies:
            return _verified(first, count, base, places)
        return first + count, CopyEnd.DONE

    def _order(self, thread: Thread, stream: int) -> None:
        """Let a stream wait for the submitter's, once."""
        if stream not in self._waited:
            thread.call(self._device.runtime.wait, stream, self._event)
            self._waited.add(stream)

    def _wait(self, thread: Thread, limits: Limits) -> CopyEnd:
        runtime, lane = self._device.runtime, self._unit.to_host
        while not runtime.synchronize(lane.stream(thread), limits.wait_ms()):
            why = limits.passed()
            if why:
                return why
        return CopyEnd.DONE

    def _start(
        self, thread: Thread, spans: Spans, keys: _Keys | None, mask: bytes | None
    ) -> _Slice | None:
        """Put the copies of the next keys on the stream."""
        if keys is None:
            return None
        unit = self._unit
        stream = unit.to_host.stream(thread)
        buffer = unit.staging.take(keys.nbytes, thread.inside)
        try:
            self._order(thread, stream)
            self._device.runtime.submit_to_host(
                spans.handle, keys.first, keys.count, unit.device, buffer.address, stream, mask
            )
        except BaseException:
            self._give_up(buffer)  # some of the copies may be under way
            raise
        return _Slice(keys.first, keys.count, buffer)

    def _give_up(self, buffer: Buffer) -> None:
        """Leave a copy alone that did not end well: its stream, its event, and where it writes."""
        self._device.runtime.forget()
        self._event_free = False
        self._unit.abandon(buffer)


@dataclasses.dataclass(frozen=True)
class _Keys:
    """Keys that go to staging memory together, and how much of it they take."""

    first: int
    count: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class _Slice:
    """Keys on their way to staging memory."""

    first: int
    count: int
    buffer: Buffer

    @property
    def address(self) -> int:
        return self.buffer.address


def _slices(
    spans: Spans, first: int, count: int, mask: bytes | None, slice_bytes: int
) -> Iterator[_Keys]:
    lengths = memoryview(spans.lengths).cast("Q")
    start, total = first, 0
    for key in range(first, first + count):
        if mask is not None and not mask[key]:
            continue
        nbytes = -(-lengths[key] // _ALIGNMENT) * _ALIGNMENT
        if total and total + nbytes > slice_bytes:
            yield _Keys(start, key - start, total)
            start, total = key, 0
        total += nbytes
    if total:
        yield _Keys(start, first + count - start, total)


def _verified(first: int, count: int, base: int, places: bytearray) -> tuple[int, int]:
    """Compare the checksums of what the device has read."""
    words = memoryview(places).cast("Q")
    for key in range(first, first + count):
        offset, length, checksum = words[PLACE_WORDS * key + PLACE_OFFSET : PLACE_WORDS * (key + 1)]
        if _copy.checksum(base + offset, length) != checksum:
            return key, CopyEnd.CHECKSUM
    return first + count, CopyEnd.DONE
