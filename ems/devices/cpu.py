"""Memory that the CPU can address."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ems.common.exception import invalid_argument
from ems.devices.base import Device
from ems_native import _copy

if TYPE_CHECKING:
    from ems_native._copy import Spans

__all__ = ["CHUNK_BYTES", "CpuDevice", "make_device"]

CHUNK_BYTES = 32 << 20
"""The longer, the likelier an entry changes below a copy."""


class CpuDevice:
    """Plain memory: nothing to register, and a copy has ended when its call returns."""

    name = "cpu"
    kinds: tuple[str, ...] = ("cpu",)
    chunk_bytes = CHUNK_BYTES

    # The native functions themselves: a method around them would cost as much as a small copy.
    copy_in = staticmethod(_copy.copy_in)
    copy_out = staticmethod(_copy.copy_out)

    def admit(self, spans: Spans) -> CpuDevice:
        """Refuse tensors of other devices: the CPU would die of their addresses."""
        if spans.foreign:
            where = spans.first_foreign()
            assert where is not None
            raise invalid_argument(
                f"value_list[{where[0]}][{where[1]}] is a tensor on {where[2]}, and this process "
                "copies with the CPU; see `ems doctor` and EMS_DEVICE"
            )
        return self

    def verify_too(self) -> None:
        """Nothing to do: it is done in passing."""

    def register(self, address: int, nbytes: int) -> None:
        """Nothing to do: the mapping is addressable."""

    def unregister(self, address: int, nbytes: int) -> None:
        """Nothing to undo."""

    def close(self) -> None:
        """Nothing to give back."""

    def forget(self) -> None:
        """Nothing of the parent's."""


def make_device() -> Device:
    """Return the back end."""
    return CpuDevice()
