"""Counts the asyncio tasks of a process, for whoever watches it from outside.

    python -m ems.testing.tasks FILE serve --root ...

is `ems serve --root ...` that writes their number to a file. Nobody outside can count them, and
nothing in a server has to know that somebody wants to.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import sys
import threading
import time

__all__ = ["count_tasks", "read_count", "tell_tasks"]

_PAUSE_S = 1.0
_WIDTH = 12


def count_tasks() -> int:
    """Return how many tasks are not done, of whatever loop of this process, from any thread."""
    while True:
        try:
            # What `asyncio.all_tasks` goes through: it wants to be told the loop, and nobody
            # outside knows that. (To look through `gc.get_objects()` breaks tuples in the making.)
            return sum(
                not task.done()
                for name in ("_all_tasks", "_scheduled_tasks", "_eager_tasks")
                for task in list(getattr(asyncio.tasks, name, ()))
            )
        except RuntimeError:  # changed meanwhile
            pass


def tell_tasks(path: str) -> None:
    """Write the number of tasks to an existing file, again and again until the process ends."""
    threading.Thread(target=_tell, args=(path,), name="ems-tasks", daemon=True).start()


def _tell(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    while True:
        os.pwrite(fd, b"%*d" % (_WIDTH, count_tasks()), 0)
        time.sleep(_PAUSE_S)


def read_count(path: str) -> int:
    """Return what `tell_tasks` wrote last.

    Raises:
        ValueError: nothing yet.
    """
    with open(path, "rb") as file:
        return int(file.read(_WIDTH))


def main() -> None:
    """Be the program `ems`, told of in the file that the first argument names."""
    tell_tasks(sys.argv.pop(1))
    runpy.run_module("ems", run_name="__main__")


if __name__ == "__main__":
    main()
