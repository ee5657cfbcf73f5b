"""The directory of a pool: made, checked for room, taken down. Everything under `server.lock`.

A pool begins as `index.new`, exists once that is renamed to `index`, is retired, and ends when its
index is unlinked. Whatever lies there without an index is debris of a server that died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Iterable, Mapping, Sequence

from ems.common.size import format_size
from ems.server.config import ServerConfig
from ems.shm import layout
from ems.shm.liveness import LockTable
from ems.shm.segment import Segment, open_to_group
from ems.shm.space import Space, file_system, read_space
from ems_native import _index
from ems_native._index import LAYOUT

__all__ = [
    "Demand",
    "Holder",
    "RefusedToStart",
    "Shortage",
    "check_place",
    "holders_of",
    "make_root",
    "named",
    "nearest",
    "own_bytes",
    "remove_files",
    "remove_sockets",
    "set_pool_state",
    "shortage",
]


class RefusedToStart(Exception):
    """Nothing was changed; the text says why, with the figures, and what to do. Exit code 2."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """A living process that uses a pool: its session, its pid as it sees itself (0: unknown)."""

    session_id: int
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} (session {self.session_id})"


def nearest(path: str) -> str:
    """Return the path itself, or the closest directory above it that exists."""
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def check_place(config: ServerConfig) -> None:
    """Find out whether a pool can live in the root, without making it.

    Raises:
        RefusedToStart: it cannot.
    """
    root = config.root
    try:
        there = nearest(root)
        system = file_system(there)
    except OSError as error:
        raise RefusedToStart(f"--root {root} cannot be used: {error.strerror or error}") from None
    if system.hugetlb:
        raise RefusedToStart(
            f"--root {root} lies on hugetlbfs, which has no sockets: keep the root on a tmpfs and "
            f"give --data-dir {root}"
        )
    if not system.in_memory:
        raise RefusedToStart(
            f"--root {root} does not lie on a tmpfs: a pool is memory; choose a directory on a "
            "tmpfs, /dev/shm/ems say"
        )
    if os.path.lexists(root) and not os.path.isdir(root):
        raise RefusedToStart(f"--root {root} is no directory; choose another root")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RefusedToStart(
            f"--root {root} is not writable for user {os.geteuid()}: change the owner or mode of "
            f"{there}, or choose another root"
        )
    if config.data_dir is not None:
        _check_data_dir(config.data_dir)


def make_root(config: ServerConfig) -> None:
    """Make the root, or give the one that is there the mode it should have, where that is possible.

    Raises:
        RefusedToStart: it cannot be made.
    """
    root = config.root
    try:
        os.makedirs(os.path.dirname(root), exist_ok=True)
        made = False
        with contextlib.suppress(FileExistsError):
            os.mkdir(root, config.root_mode)
            made = True
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not made and os.fstat(fd).st_mode & stat.S_ISVTX:
                return  # a shared directory such as /dev/shm itself
            # A mounted directory may allow neither chmod nor chown; its mode is then its mounter's
            # business.
            with contextlib.suppress(PermissionError):
                open_to_group(fd, config.root_mode, config.gid)
        finally:
            os.close(fd)
    except OSError as error:
        raise RefusedToStart(f"--root {root} cannot be made: {error.strerror or error}") from None


def _check_data_dir(data_dir: str) -> None:
    try:
        in_memory = file_system(data_dir).in_memory
    except OSError as error:
        why = error.strerror or error
        raise RefusedToStart(f"--data-dir {data_dir} cannot be used: {why}") from None
    if not in_memory:
        raise RefusedToStart(
            f"--data-dir {data_dir} does not lie in memory: give a directory on a hugetlbfs or "
            "a tmpfs"
        )
    if not os.access(data_dir, os.W_OK | os.X_OK):
        raise RefusedToStart(f"--data-dir {data_dir} is not writable for user {os.geteuid()}")


@dataclasses.dataclass(frozen=True)
class Demand:
    """Bytes that are to be allocated in a directory."""

    folder: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Shortage:
    """Both figures: what is needed in a directory, and the room there is."""

    folder: str
    nbytes: int
    space: Space

    def __str__(self) -> str:
        return f"it needs {format_size(self.nbytes)} in {self.folder}, but there are {self.space}"


def shortage(demands: Sequence[Demand], given_back: Mapping[int, int] = {}) -> Shortage | None:
    """Return what is missing where, None when the room suffices.

    Args:
        demands: what is needed where.
        given_back: bytes of our own that will be free by then, by device.
    """
    by_device: dict[int, tuple[str, int]] = {}
    for demand in demands:
        device = os.stat(demand.folder).st_dev
        _, sum_bytes = by_device.get(device, ("", 0))
        by_device[device] = (demand.folder, sum_bytes + demand.nbytes)
    ordinary_bytes = 0
    for device, (folder, nbytes) in by_device.items():
        space = read_space(folder).plus(given_back.get(device, 0), sum(given_back.values()))
        if space.mem_available is not None:
            ordinary_bytes += nbytes  # two tmpfs draw on the same memory
        if not space.holds(nbytes, ordinary_bytes):
            return Shortage(folder, max(nbytes, ordinary_bytes), space)
    return None


def own_bytes(root: str) -> dict[int, int]:
    """Return the memory that the files of the pool in `root` take, by device."""
    sizes: dict[int, int] = {}
    for name in layout.POOL_FILES:
        with contextlib.suppress(OSError):
            status = os.stat(os.path.join(root, name))
            sizes[status.st_dev] = sizes.get(status.st_dev, 0) + 512 * status.st_blocks
    return sizes


def remove_files(root: str) -> None:
    """Unlink whatever there is of a pool, the index first; not the sockets, not `server.lock`."""
    for name in layout.POOL_FILES:
        path = os.path.join(root, name)
        with contextlib.suppress(OSError):
            os.unlink(os.readlink(path))  # data that lies elsewhere
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def remove_sockets(root: str) -> None:
    """Unlink the sockets, whoever left them."""
    for name in (layout.SOCKET, layout.SOCKET_UNNAMED, layout.WRITE_SOCKET):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(root, name))


def holders_of(root: str) -> list[Holder]:
    """Return the living processes that use the pool in `root`."""
    try:
        locks = LockTable(os.path.join(root, layout.SESSIONS_LOCK), LAYOUT["MAX_SESSIONS"])
    except FileNotFoundError:
        return []
    try:
        held = locks.holders()
    finally:
        locks.close()
    pids = dict(_known_sessions(root)) if held else {}
    return [Holder(session_id, pids.get(session_id, 0)) for session_id in held]


def _known_sessions(root: str) -> Iterable[tuple[int, int]]:
    try:
        with Segment.open(os.path.join(root, layout.INDEX), writable=False) as index:
            return list(_index.Reader(index.address, index.nbytes, 0).sessions())
    except (OSError, ValueError):  # another layout: its sessions have no names
        return []


def set_pool_state(root: str, state: layout.PoolState) -> None:
    """Write the state of a pool, whatever its layout version."""
    with Segment.open(os.path.join(root, layout.INDEX), writable=True) as index:
        _index.set_prologue_state(index.address, int(state))


def named(holders: Sequence[Holder]) -> str:
    """Return holders for a text, the first few of them."""
    text = ", ".join(str(holder) for holder in holders[:8])
    return text if len(holders) <= 8 else f"{text} and {len(holders) - 8} more"
