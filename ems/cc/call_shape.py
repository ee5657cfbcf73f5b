"""Two generations of calls under the same names: which one is meant, and with which arguments.

    V0   (option, key_list, value_list)                              string keys and buffers
    V1   (slot_mapping, hashes, offsets, option, **how to name blocks)   registered memory

A call is told by its arguments, never by the configuration, so that code of either kind runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ems.cc_v1.planning import Arguments
from ems.common.exception import EmsException, invalid_argument
from ems.common.key import PrimaryKey
from ems.common.option import MAX_TIMEOUT_MS, CcKvOption, check_option

__all__ = ["is_key_value_call", "key_value_arguments", "registered_arguments", "timeout_ms"]

_V1_NAMES = frozenset(
    ("slot_mapping", "hashes", "offsets", "token_ids", "mask", "chunk_descs", "option")
)


def is_key_value_call(args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Return whether arguments are those of a V0 call."""
    if args and isinstance(args[0], CcKvOption):
        return True
    if "key_list" in named or "value_list" in named:
        return True
    if len(args) != 3:
        return False
    if args[0] is None:
        # A V1 call without slots names its blocks by a keyword.
        return not named.keys() & _V1_NAMES
    keys = args[1]
    return isinstance(keys, (list, tuple)) and bool(keys) and isinstance(keys[0], (str, PrimaryKey))


def key_value_arguments(
    call: str, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """Return option, key_list and value_list of a V0 call.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` when there are others.
    """
    try:
        return _key_value(*args, **named)
    except TypeError as error:
        failure = error
    raise _signature(call, failure)


def registered_arguments(
    call: str, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, Arguments]:
    """Return option and addressing of a V1 call.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` when there are others.
    """
    try:
        return _registered(*args, **named)
    except TypeError as error:
        failure = error
    raise _signature(call, failure)


def timeout_ms(option: object) -> int:
    """Return the time-out of a checked option; None means the defaults."""
    # The usual option is recognised at a third of what its full check costs: a small load takes a
    # few microseconds altogether.
    if type(option) is CcKvOption:
        timeout = option.timeout
        if (
            type(timeout) is int
            and 0 < timeout <= MAX_TIMEOUT_MS
            and type(option.write_rcache) is bool
            and type(option.read_local_only) is bool
        ):
            return timeout
    return check_option(option).timeout


def _key_value(
    option: Any = None, key_list: Any = None, value_list: Any = None
) -> tuple[Any, Any, Any]:
    return option, key_list, value_list


def _registered(
    slot_mapping: Any = None,
    hashes: Any = None,
    offsets: Any = None,
    option: Any = None,
    *,
    token_ids: Any = None,
    mask: Any = None,
    chunk_descs: Any = None,
) -> tuple[Any, Arguments]:
    return option, Arguments(slot_mapping, hashes, offsets, token_ids, mask, chunk_descs)


def _signature(call: str, error: TypeError) -> EmsException:
    text = str(error)
    for name in ("_key_value()", "_registered()"):
        text = text.replace(name, f"{call}()")
    return invalid_argument(text)
