"""A connector whose SDK raises in one call of seven: `kv_connector_module_path` names this file."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from layered_ems import EmsConnector

from ems import CcFuture, ContextCaching, EmsErrorCode, EmsException, PageCaching, PageLoad

__all__ = ["EmsConnector"]

_chosen = random.Random(11)
_raised = 0


def _faulty(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        global _raised
        if _chosen.random() < 1 / 7:
            _raised += 1
            if _raised % 2:
                raise EmsException(EmsErrorCode.EMS_IO_ERROR, f"fault {_raised}")
            raise RuntimeError(f"fault {_raised}")
        return method(*args, **kwargs)

    return call


for _owner, _names in (
    (PageCaching, ("exists", "load", "async_load", "load_by_page", "async_save")),
    (PageLoad, ("wait",)),
    (ContextCaching, ("register_pages",)),
    (CcFuture, ("result", "exception", "cancel", "cancelled")),
):
    for _name in _names:
        setattr(_owner, _name, _faulty(getattr(_owner, _name)))
