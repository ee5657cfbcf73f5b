"""The connector with a clock around every method; `kv_connector_module_path` names this file."""

from __future__ import annotations

import atexit
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

from ems.integrations.vllm import EmsConnector

__all__ = ["EmsConnector"]

NOT_A_STEP = ("__init__", "register_kv_caches", "shutdown")
spent_s = 0.0
depth = 0


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        global spent_s, depth
        started = time.perf_counter()
        depth += 1
        try:
            return method(*args, **kwargs)
        finally:
            depth -= 1
            if not depth:  # one that another calls counts once
                spent_s += time.perf_counter() - started

    return call


for _name, _method in list(vars(EmsConnector).items()):
    if callable(_method) and _name not in NOT_A_STEP and not isinstance(_method, type):
        setattr(EmsConnector, _name, _timed(_method))


@atexit.register
def _tell() -> None:
    print(f"inside the connector: {spent_s:.6f} s", file=sys.stderr, flush=True)
