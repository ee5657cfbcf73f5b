"""The seam to a kind of device: how bytes travel between its memory and the pool.

    admit (in the submitting thread) ──▶ Copier ──copy_in / copy_out (in any thread)──▶ done

A back end is one module that has a `make_device()`; `ems.devices.registry` finds it by name and
imports it only when it is asked for. `tests/contract` holds the suite that each must pass.
"""

from __future__ import annotations

import abc
import enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ems_native._copy import Arrivals, CancelFlag, Spans

__all__ = [
    "PLACE_BYTES",
    "PLACE_CHECKSUM",
    "PLACE_LENGTH",
    "PLACE_OFFSET",
    "PLACE_WORDS",
    "AdmittedCopies",
    "CopyEnd",
    "Copier",
    "Device",
    "DeviceError",
    "NoContextError",
]

# Where a key lies in the pool: slot, version, offset, length, checksum, 64 bits each.
PLACE_WORDS, PLACE_OFFSET, PLACE_LENGTH, PLACE_CHECKSUM = 5, 2, 3, 4
PLACE_BYTES = 8 * PLACE_WORDS


class DeviceError(Exception):
    """Access to device memory failed. Callers of EMS see `EMS_INTERNAL_ERROR`."""


class NoContextError(DeviceError):
    """A call needs this thread to enter its device first."""


class CopyEnd(enum.IntEnum):
    """Why a copy stopped at a key."""

    DONE = 0
    DEADLINE = 1
    CANCELLED = 2
    CHECKSUM = 3


class Copier(Protocol):
    """Copies of one batch, run in any thread; must not hold the GIL while they copy.

    Both return only when the copy has really ended, streams of the device included: from then on
    not one byte of either side is touched. They look at the cancel flag and the deadline at least
    every 4 MiB (on a device with streams: while they wait for them). They return the first key that
    is not completely done, and a `CopyEnd`.
    """

    @property
    def chunk_bytes(self) -> int:
        """How much a load looks up, copies and validates together."""

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
        """Copy keys `first` to `first + count` into the pool and note their checksums in `places`.

        Args:
            spans: the callers' memory.
            first: first key.
            count: number of keys.
            base: address that the offsets in `places` count from.
            places: `PLACE_BYTES` a key, from key 0 on.
            cancel: looked at while copying.
            deadline_ns: on CLOCK_MONOTONIC, 0 for none.
            mask: a byte a key, from key 0 on; keys with 0 are left out.
        """

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
        """Copy keys `first` to `first + count` out of the pool.

        With `verify` the checksum of what was copied is compared, and `CopyEnd.CHECKSUM` reported
        with the first key whose bytes differ from it. `arrivals` asks for the pieces of all keys in
        turn, and is told of them; a back end need not.
        """


class AdmittedCopies(abc.ABC):
    """The copies of a back end that has to look first whose memory a batch is."""

    @abc.abstractmethod
    def admit(self, spans: Spans) -> Copier:
        """See `Device.admit`."""

    def copy_in(self, spans: Spans, *arguments: Any) -> tuple[int, int]:
        """See `Copier.copy_in`."""
        return self.admit(spans).copy_in(spans, *arguments)

    def copy_out(self, spans: Spans, *arguments: Any) -> tuple[int, int]:
        """See `Copier.copy_out`."""
        return self.admit(spans).copy_out(spans, *arguments)


class Device(Copier, Protocol):
    """A back end. What it copies without `admit` is not ordered behind anybody's kernels."""

    @property
    def name(self) -> str:
        """The name in the registry."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The devices whose memory it copies, as tensors name them: "cpu", "npu", "cuda"."""

    def admit(self, spans: Spans) -> Copier:
        """Say who copies a batch, and order it behind what its submitter's stream has to do.

        Called in the thread that submits the batch, before anything else happens to it. The copier
        is for this batch, and used for one operation.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT` when the memory is none of this device, or some of
                it another's; `EMS_INTERNAL_ERROR` when the runtime failed.
        """

    def verify_too(self) -> None:
        """Heed `verify` of `copy_out` where that costs a pass over the bytes of its own.

        The CPU compares checksums while it copies; a device with streams leaves it out until then.
        """

    def register(self, address: int, nbytes: int) -> None:
        """Prepare a mapping of the pool for copies; it stays until `unregister`."""

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo `register`; after it the device does not touch the mapping any more."""

    def close(self) -> None:
        """Give everything back; idempotent. No copy may be running."""

    def forget(self) -> None:
        """In a forked child: let go of what is the parent's, without a call of the runtime."""
