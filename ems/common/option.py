"""The options of one request."""

from __future__ import annotations

import dataclasses

from ems.common.argument import check_bool, check_int, wrong_type
from ems.common.boundary import public_class

__all__ = ["DEFAULT_TIMEOUT_MS", "MAX_TIMEOUT_MS", "CcKvOption", "check_option"]

DEFAULT_TIMEOUT_MS = 5000
MAX_TIMEOUT_MS = 2**31 - 1


@public_class
@dataclasses.dataclass
class CcKvOption:
    """Options of one save, load or exists call (pages 0014b, 0027, 1801a).

    Args:
        write_rcache: keep this write also as a read-cache copy on the node that writes. Without a
            distributed engine the node is the whole pool and the option changes nothing.
        read_local_only: look on the local node only. The same remark holds.
        timeout: milliseconds the request may take, from submission, queueing included. 0 means the
            default, 5000 ms.

    The object may be changed and used again; each call takes the values at its submission and
    checks them there.
    """

    write_rcache: bool = True
    read_local_only: bool = False
    timeout: int = DEFAULT_TIMEOUT_MS


def check_option(option: object) -> CcKvOption:
    """Return a checked private copy: None means the defaults, timeout 0 means 5000 ms.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` when it is no `CcKvOption` or a field is out of range.
    """
    if option is None:
        return CcKvOption()
    if not isinstance(option, CcKvOption):
        raise wrong_type("option", option, "a CcKvOption, or None for the defaults")
    timeout_ms = check_int("option.timeout", option.timeout, 0, MAX_TIMEOUT_MS)
    return CcKvOption(
        write_rcache=check_bool("option.write_rcache", option.write_rcache),
        read_local_only=check_bool("option.read_local_only", option.read_local_only),
        timeout=timeout_ms or DEFAULT_TIMEOUT_MS,
    )
