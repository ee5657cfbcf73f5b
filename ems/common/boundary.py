"""The edge of the public API: `EmsException` is the only error that leaves it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ems.common.exception import EmsException, internal_error, invalid_argument

__all__ = ["public", "public_class"]

_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C", bound=type)
_log = logging.getLogger("ems")


def public(function: _F) -> _F:
    """Make a public call of a function: whatever it raises leaves as `EmsException`.

    Arguments that do not fit the signature are `EMS_INVALID_ARGUMENT`, stray errors
    `EMS_INTERNAL_ERROR` (logged with their traceback). What leaves carries no inner traceback: it
    would keep the frames alive, and with them the mapping of a pool.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except EmsException as error:
            failure = error
        except Exception as error:
            failure = _translated(function, error)
        failure.__cause__ = failure.__context__ = failure.__traceback__ = None
        try:
            raise failure
        finally:
            del failure  # a frame that its own exception refers to is a cycle

    return cast(_F, call)


def public_class(cls: _C) -> _C:
    """Make a public call of a class's constructor: see `public`."""
    cls.__init__ = public(cls.__init__)  # type: ignore[misc]
    return cls


def _translated(function: Callable[..., Any], error: Exception) -> EmsException:
    traceback = error.__traceback__
    if isinstance(error, TypeError) and traceback is not None and traceback.tb_next is None:
        # It comes from the call itself: no line of the function was reached.
        return invalid_argument(str(error))
    _log.error("%s failed unexpectedly", function.__qualname__, exc_info=error)
    return internal_error(f"{function.__qualname__}: {type(error).__name__}: {error}")
