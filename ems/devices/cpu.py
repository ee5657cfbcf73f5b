"""Memory that the CPU can address."""

from __future__ import annotations

from ems.devices.base import Device
from ems_native import _copy

__all__ = ["CpuDevice", "make_device"]


class CpuDevice:
    """Plain memory: nothing to register, and a copy has ended when its call returns."""

    name = "cpu"

    # The native functions themselves: a method around them would cost as much as a small copy.
    copy_in = staticmethod(_copy.copy_in)
    copy_out = staticmethod(_copy.copy_out)

    def register(self, address: int, nbytes: int) -> None:
        """Nothing to do: the mapping is addressable."""

    def unregister(self, address: int, nbytes: int) -> None:
        """Nothing to undo."""


def make_device() -> Device:
    """Return the back end."""
    return CpuDevice()
