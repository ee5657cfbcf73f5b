"""Fails a test that leaves shared memory, a process, a thread, a descriptor or a task behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import pytest_asyncio

# What ends by itself gets this long: a process that was killed, a thread that was told to stop.
_PATIENCE_S = 2.0
_POLL_S = 0.01

_SHARED_MEMORY = Path("/dev/shm")
_ME = str(os.getpid())


def _shared_memory() -> dict[str, str]:
    """Entries of /dev/shm that EMS made, and not for another test run on this machine."""
    found = {}
    for path in _SHARED_MEMORY.glob("ems*"):
        if not _is_used_elsewhere(path):
            found[path.name] = str(path)
    return found


def _is_used_elsewhere(path: Path) -> bool:
    """Whether a process of another test run names the path: not ours, and no orphan either."""
    needle = os.fsencode(str(path))
    for process in _processes():
        with contextlib.suppress(OSError):
            if _parent(process) not in (_ME, "1") and needle in _command(process):
                return True
    return False


def _children() -> dict[str, str]:
    found = {}
    for process in _processes():
        with contextlib.suppress(OSError):
            if _parent(process) == _ME and process.name != str(_resource_tracker("_pid")):
                found[process.name] = (
                    os.fsdecode(_command(process)) or "already dead, not waited for"
                )
    return found


def _processes() -> Iterator[Path]:
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def _parent(process: Path) -> str:
    # pid (name) state ppid ...: the name may hold blanks and brackets.
    return (process / "stat").read_text().rpartition(")")[2].split()[1]


def _command(process: Path) -> bytes:
    return (process / "cmdline").read_bytes().replace(b"\0", b" ")


def _threads() -> dict[str, str]:
    return {str(id(thread)): thread.name for thread in threading.enumerate()}


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) == _resource_tracker("_fd"):
                continue
            target = os.readlink(f"/proc/self/fd/{name}")
            mode = os.fstat(int(name)).st_mode
            found[f"{name} {target}"] = f"{target} ({stat.filemode(mode)})"
    return found


def _resource_tracker(attribute: str) -> object:
    """multiprocessing starts one process per interpreter, which stays on purpose."""
    return getattr(resource_tracker._resource_tracker, attribute, None)


_KINDS: dict[str, Callable[[], dict[str, str]]] = {
    "in /dev/shm": _shared_memory,
    "child process": _children,
    "thread": _threads,
    "descriptor": _descriptors,
}


def _left_behind(before: dict[str, dict[str, str]]) -> list[str]:
    return [
        f"{kind}: {text}"
        for kind, look in _KINDS.items()
        for key, text in look().items()
        if key not in before[kind]
    ]


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up first and torn down last, so that what fixtures own is gone by then."""
    before = {kind: look() for kind, look in _KINDS.items()}
    if request.node.get_closest_marker("asyncio"):
        request.getfixturevalue("leaves_no_task_behind")
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while left := _left_behind(before):
        if time.monotonic() > deadline:
            pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)
        gc.collect()
        time.sleep(_POLL_S)


@pytest_asyncio.fixture
async def leaves_no_task_behind() -> AsyncIterator[None]:
    """Looks before the loop of the test is closed, which would cancel what is left silently."""
    before = asyncio.all_tasks()
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while left := asyncio.all_tasks() - before - {asyncio.current_task()}:
        if time.monotonic() > deadline:
            pytest.fail("left behind:\n  " + "\n  ".join(map(repr, left)), pytrace=False)
        await asyncio.sleep(_POLL_S)
