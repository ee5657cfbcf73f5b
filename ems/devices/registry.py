"""Device back ends by name. Their modules are imported when, and only when, one is asked for."""

from __future__ import annotations

import importlib
import os
from typing import cast

from ems.common.argument import shown
from ems.common.exception import internal_error, invalid_argument
from ems.devices.base import Device, DeviceError

__all__ = ["BACK_ENDS", "DEVICE_VARIABLE", "chosen_device", "open_device"]

BACK_ENDS = {
    "acl": "ems.devices.acl",
    "auto": "ems.devices.auto",
    "cpu": "ems.devices.cpu",
    "cuda": "ems.devices.cuda",
}
"""Name to module; each module has a `make_device()`."""
DEVICE_VARIABLE = "EMS_DEVICE"
DEFAULT = "auto"


def chosen_device() -> Device:
    """Return a new instance of the back end that `EMS_DEVICE` names, `auto` if it names none.

    Raises:
        EmsException: as `open_device`.
    """
    return open_device(os.environ.get(DEVICE_VARIABLE) or DEFAULT)


def open_device(name: str) -> Device:
    """Return a new instance of a back end.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` for an unknown name, `EMS_INTERNAL_ERROR` when the back
            end exists but its run-time library does not work here. There is no fall-back to another
            one.
    """
    module = BACK_ENDS.get(name)
    if module is None:
        known = ", ".join(sorted(BACK_ENDS))
        raise invalid_argument(f"{DEVICE_VARIABLE} is {shown(name)}; there are: {known}")
    try:
        return cast(Device, importlib.import_module(module).make_device())
    except (ImportError, OSError, DeviceError) as error:
        raise internal_error(
            f"the device back end {name!r} does not work here: {error}; see `ems doctor`"
        ) from error
