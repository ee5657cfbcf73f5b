"""How a child process finds the same `ems` as this process, wherever it was imported from."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import ems
import ems_native

__all__ = ["child_environment", "python_command"]

# The only variables of ours that a child keeps: the rest would configure a server that is private.
_KEPT = frozenset({"EMS_COPY_IMPL", "EMS_COPY_THREADS"})


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """Return this process's environment with the places of `ems` added and its options left out."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("EMS_") or name in _KEPT
    }
    places = [os.path.dirname(path) for path in _package_paths()]
    earlier = environment.get("PYTHONPATH")
    if earlier:
        places.append(earlier)
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(places))
    return environment


def _package_paths() -> Sequence[str]:
    return [os.path.abspath(path) for path in (*ems.__path__, *ems_native.__path__)]
