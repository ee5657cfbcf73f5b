"""Checks of arguments; their texts say which it is, its value, the limit, and what to do."""

from __future__ import annotations

import operator

from ems.common.exception import EmsException, invalid_argument

__all__ = ["check_bool", "check_int", "shown", "wrong_type"]

_SHOWN_CHARACTERS = 60


def shown(value: object) -> str:
    """Return a short `repr` of any object for an error text; never raises."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__} without a usable repr>"
    if len(text) > _SHOWN_CHARACTERS:
        text = text[: _SHOWN_CHARACTERS - 3] + "..."
    return text


def wrong_type(name: str, value: object, wanted: str) -> EmsException:
    """Make the exception for an argument of a wrong type (`EMS_INVALID_ARGUMENT`)."""
    return invalid_argument(
        f"{name} is {shown(value)} of type {type(value).__name__}; give {wanted}"
    )


def check_int(name: str, value: object, low: int, high: int) -> int:
    """Return `value` as an int of `low..high` (a bool is none), or raise `EMS_INVALID_ARGUMENT`."""
    if isinstance(value, bool):
        raise invalid_argument(f"{name} is {value}, a bool; give an int of {low} to {high}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # its TypeError is the check
    except Exception:
        raise wrong_type(name, value, f"an int of {low} to {high}") from None
    if not low <= number <= high:
        raise invalid_argument(f"{name} is {shown(number)}; it must be from {low} to {high}")
    return number


def check_bool(name: str, value: object) -> bool:
    """Return `value` if it is a bool, or raise `EMS_INVALID_ARGUMENT`."""
    if not isinstance(value, bool):
        raise wrong_type(name, value, "True or False")
    return value
