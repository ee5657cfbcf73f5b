"""Device back ends by name. Their modules are imported when, and only when, one is asked for."""

from __future__ import annotations

import importlib
from typing import cast

from ems.common.argument import shown
from ems.common.exception import internal_error, invalid_argument
from ems.devices.base import Device

__all__ = ["BACK_ENDS", "open_device"]

BACK_ENDS = {"cpu": "ems.devices.cpu"}
"""Name to module; each module has a `make_device()`."""


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
        raise invalid_argument(f"device is {shown(name)}; there are: {known}")
    try:
        return cast(Device, importlib.import_module(module).make_device())
    except (ImportError, OSError) as error:
        raise internal_error(f"the device back end {name!r} does not work here: {error}") from error
