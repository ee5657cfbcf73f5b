"""The one exception that leaves EMS, and its codes."""

from __future__ import annotations

import enum

__all__ = ["EmsErrorCode", "EmsException", "internal_error", "invalid_argument", "io_error"]


class EmsErrorCode(enum.Enum):
    """What kind of failure an `EmsException` reports.

    Public contract: pages 0021b and 0021c of the SDK guide; the fifth code is known from clients
    only.
    """

    EMS_INVALID_ARGUMENT = 1
    """An argument or a call sequence was wrong. Correct it; EMS itself is healthy."""

    EMS_IO_ERROR = 2
    """The pool or the way to it failed. Stop using EMS until `Ems.check_health()` is True."""

    EMS_IO_TIMEOUT = 3
    """The deadline of the request passed. Raise `CcKvOption.timeout` or try again later."""

    EMS_INTERNAL_ERROR = 4
    """EMS itself or access to device memory failed. Stop using EMS until it is healthy."""

    EMS_RECOVERD_ERROR = 5
    """`Ems.init` failed for a reason that can heal (the spelling is the published one)."""

    EMS_RECOVERED_ERROR = EMS_RECOVERD_ERROR
    """Alias of `EMS_RECOVERD_ERROR`: the same member, spelt right."""


class EmsException(Exception):
    """The only exception type that EMS calls raise (beside cancellation of the awaiting task).

    Args:
        code: the member of `EmsErrorCode` that a program decides by.
        message: one sentence for people: what was wrong, with the value, and what to do.

    Public contract: page 0021. Instances are immutable in practice, can be pickled, and can be read
    from any thread.
    """

    def __init__(self, code: EmsErrorCode, message: str) -> None:
        super().__init__(code, message)

    def status_code(self) -> EmsErrorCode:
        """Return the error code."""
        code: EmsErrorCode = self.args[0]
        return code

    def message(self) -> str:
        """Return the text without the code."""
        text: str = self.args[1]
        return text

    def __str__(self) -> str:
        return f"[{self.args[0].name}] {self.args[1]}"


def invalid_argument(text: str) -> EmsException:
    """Make the exception for a wrong argument (`EMS_INVALID_ARGUMENT`)."""
    return EmsException(EmsErrorCode.EMS_INVALID_ARGUMENT, text)


def io_error(text: str) -> EmsException:
    """Make the exception for a broken pool or way to it (`EMS_IO_ERROR`)."""
    return EmsException(EmsErrorCode.EMS_IO_ERROR, text)


def internal_error(text: str) -> EmsException:
    """Make the exception for a fault inside EMS (`EMS_INTERNAL_ERROR`)."""
    return EmsException(EmsErrorCode.EMS_INTERNAL_ERROR, text)
