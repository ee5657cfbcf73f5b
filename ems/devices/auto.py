"""Whatever memory a call brings: the device that owns it copies it, the CPU what nobody owns."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ems.common.exception import invalid_argument
from ems.devices import acl, cuda
from ems.devices.base import AdmittedCopies, Copier, Device
from ems.devices.cpu import CHUNK_BYTES, CpuDevice
from ems.devices.streams import StreamDevice
from ems_native._acl import first_unreadable

if TYPE_CHECKING:
    from ems_native._copy import Spans

__all__ = ["AutoDevice", "make_device"]

_log = logging.getLogger("ems.devices")


class AutoDevice(AdmittedCopies):
    """Asks each runtime, then the CPU.

    A runtime that nobody initialised owns nothing, and is not initialised here: a process that uses
    no accelerator gets none.

    Args:
        accelerators: the back ends whose runtimes were found.
    """

    name = "auto"
    chunk_bytes = CHUNK_BYTES

    def __init__(self, accelerators: list[StreamDevice]) -> None:
        self.accelerators = accelerators
        self._cpu = CpuDevice()
        self.kinds = self._cpu.kinds + tuple(kind for one in accelerators for kind in one.kinds)

    def admit(self, spans: Spans) -> Copier:
        """See `Device.admit`."""
        for accelerator in self.accelerators:
            batch = accelerator.admit_own(spans)
            if batch is not None:
                return batch
        copier = self._cpu.admit(spans)
        # Rather refused here than found out by the CPU, which dies of it.
        piece = first_unreadable(spans.handle)
        if piece is not None:
            key, at = spans.where(piece)
            raise invalid_argument(
                f"value_list[{key}][{at}] is memory of no device, and none that this process can "
                "read: is data_ptr right, and what it belonged to still alive?"
            )
        return copier

    def verify_too(self) -> None:
        """See `Device.verify_too`."""
        for accelerator in self.accelerators:
            accelerator.verify_too()

    def register(self, address: int, nbytes: int) -> None:
        """See `Device.register`."""
        for accelerator in self.accelerators:
            accelerator.register(address, nbytes)

    def unregister(self, address: int, nbytes: int) -> None:
        """See `Device.unregister`."""
        for accelerator in self.accelerators:
            accelerator.unregister(address, nbytes)

    def close(self) -> None:
        """See `Device.close`."""
        for accelerator in self.accelerators:
            accelerator.close()

    def forget(self) -> None:
        """See `Device.forget`."""
        for accelerator in self.accelerators:
            accelerator.forget()


def make_device() -> Device:
    """Return the back end for what this machine has: the CPU's own where there is nothing else."""
    accelerators: list[StreamDevice] = []
    for name, find in (("acl", _find_acl), ("cuda", _find_cuda)):
        try:
            accelerators.append(find())
        except OSError as error:
            _log.debug("no %s: %s", name, error)
    return AutoDevice(accelerators) if accelerators else CpuDevice()


def _find_acl() -> StreamDevice:
    return acl.make_stream_device(acl.find_runtime())


def _find_cuda() -> StreamDevice:
    return cuda.make_stream_device(cuda.find_runtime())
