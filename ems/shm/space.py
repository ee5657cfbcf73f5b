"""How much memory a pool may take: the least of what three parties have left.

`statvfs` of a tmpfs promises up to half of the machine's memory whether or not it is there, the
kernel's MemAvailable knows nothing of the container, and a container's limit nothing of the file
system. So all are asked, and the smallest answer counts.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from ems.common.size import format_size
from ems_native import _shm

__all__ = ["FileSystem", "Space", "file_system", "read_space"]

_TMPFS_MAGIC = 0x01021994
_RAMFS_MAGIC = 0x858458F6
_HUGETLBFS_MAGIC = 0x958458F6
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as 2**63 rounded down to a page


@dataclasses.dataclass(frozen=True)
class FileSystem:
    """What a directory lies on.

    Args:
        in_memory: tmpfs, ramfs or hugetlbfs.
        hugetlb: hugetlbfs: regular files only, and in pages of `page_bytes`.
        page_bytes: its block size.
    """

    in_memory: bool
    hugetlb: bool
    page_bytes: int


def file_system(path: str) -> FileSystem:
    """Return what `path` lies on.

    Raises:
        OSError: the path does not exist.
    """
    magic = _shm.filesystem_magic(path) & 0xFFFFFFFF
    return FileSystem(
        in_memory=magic in (_TMPFS_MAGIC, _RAMFS_MAGIC, _HUGETLBFS_MAGIC),
        hugetlb=magic == _HUGETLBFS_MAGIC,
        page_bytes=os.statvfs(path).f_bsize,
    )


@dataclasses.dataclass(frozen=True)
class Space:
    """Free memory, in bytes.

    Args:
        fs_free: of the file system.
        mem_available: of the machine; None where it does not matter (reserved huge pages).
        cgroup_left: the least that an enclosing memory cgroup has left; None without any limit.
    """

    fs_free: int
    mem_available: int | None
    cgroup_left: int | None

    @property
    def least(self) -> int:
        """The figure that limits."""
        others = [n for n in (self.mem_available, self.cgroup_left) if n is not None]
        return max(0, min([self.fs_free, *others]))

    def holds(self, fs_bytes: int, memory_bytes: int) -> bool:
        """Whether so much fits on this file system, and so much into memory altogether."""
        others = [n for n in (self.mem_available, self.cgroup_left) if n is not None]
        return fs_bytes <= self.fs_free and all(memory_bytes <= n for n in others)

    def plus(self, fs_bytes: int, memory_bytes: int) -> Space:
        """Return the space once so much is given back: on this file system, and altogether."""
        return Space(
            self.fs_free + fs_bytes,
            None if self.mem_available is None else self.mem_available + memory_bytes,
            None if self.cgroup_left is None else self.cgroup_left + memory_bytes,
        )

    def __str__(self) -> str:
        parts = [f"{format_size(max(0, self.fs_free))} free on the file system"]
        if self.mem_available is not None:
            parts.append(f"{format_size(max(0, self.mem_available))} of memory available")
        if self.cgroup_left is not None:
            parts.append(f"{format_size(max(0, self.cgroup_left))} left in the memory cgroup")
        return ", ".join(parts)


def read_space(path: str, *, system_root: str = "/") -> Space:
    """Return the room for new files below `path`.

    Args:
        path: a directory.
        system_root: where `proc` and `sys` are looked for; tests give their own.

    Raises:
        OSError: the path does not exist.
    """
    where = os.statvfs(path)
    fs_free = where.f_bavail * where.f_frsize
    if file_system(path).hugetlb:
        # Those pages left MemAvailable and the cgroup's account when they were reserved. A mount
        # without a size reports zero blocks: the free pages are the only limit then.
        pages = _free_huge_bytes(where.f_bsize, system_root)
        return Space(min(fs_free, pages) if where.f_blocks else pages, None, None)
    if not where.f_blocks:  # a tmpfs without a size (`size=0`), or ramfs: memory is the limit
        fs_free = _UNLIMITED_BYTES
    available = _mem_available(system_root)
    left = min(_cgroups_left(system_root), default=None)
    return Space(fs_free, available, left)


def _mem_available(system_root: str) -> int | None:
    for line in _lines(os.path.join(system_root, "proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _free_huge_bytes(page_bytes: int, system_root: str) -> int:
    folder = os.path.join(system_root, f"sys/kernel/mm/hugepages/hugepages-{page_bytes >> 10}kB")
    free = _number(os.path.join(folder, "free_hugepages")) or 0
    promised = _number(os.path.join(folder, "resv_hugepages")) or 0
    return max(0, free - promised) * page_bytes


def _cgroups_left(system_root: str) -> Iterator[int]:
    """Yield what each memory cgroup around this process has left, v1 and v2, innermost first."""
    groups = dict(_own_groups(system_root))
    for version, mount_point, mount_root in _mounts(system_root):
        group = groups.get(version)
        if group is None:
            continue
        top = os.path.join(system_root, mount_point.lstrip("/"))
        # The mount may show a subtree only (a container's): what lies above is nobody's business
        # here.
        inside = os.path.relpath(group, mount_root) if group.startswith(mount_root) else "."
        folder = os.path.normpath(os.path.join(top, "." if inside.startswith("..") else inside))
        while True:
            left = _group_left(folder, version)
            if left is not None:
                yield left
            if os.path.normpath(folder) == os.path.normpath(top):
                break
            folder = os.path.dirname(folder)


def _own_groups(system_root: str) -> Iterator[tuple[int, str]]:
    """Yield (version, path) of the own memory cgroups from lines like `4:memory:/a` and `0::/a`."""
    for line in _lines(os.path.join(system_root, "proc/self/cgroup")):
        number, controllers, group = line.split(":", 2)
        if number == "0" and not controllers:
            yield 2, group
        elif "memory" in controllers.split(","):
            yield 1, group


def _mounts(system_root: str) -> Iterator[tuple[int, str, str]]:
    """Yield (version, mount point, root of the mount) of each cgroup mount that counts memory."""
    for line in _lines(os.path.join(system_root, "proc/self/mountinfo")):
        left, separator, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield 2, fields[4], fields[3]
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield 1, fields[4], fields[3]


def _group_left(folder: str, version: int) -> int | None:
    if version == 2:
        limits = [
            _number(os.path.join(folder, name)) for name in ("memory.max", "memory.high")
        ]  # above `high` the kernel throttles: no place for a pool either
        usage = _number(os.path.join(folder, "memory.current"))
        reclaimable = "inactive_file"
    else:
        limits = [_number(os.path.join(folder, "memory.limit_in_bytes"))]
        usage = _number(os.path.join(folder, "memory.usage_in_bytes"))
        reclaimable = "total_inactive_file"
    known = [limit for limit in limits if limit is not None and limit < _UNLIMITED_BYTES]
    if not known or usage is None:
        return None
    # Page cache counts as usage and goes away when memory is asked for; this is what container
    # run-times subtract too.
    cache = 0
    for line in _lines(os.path.join(folder, "memory.stat")):
        name, _, value = line.partition(" ")
        if name == reclaimable:
            cache = int(value)
    return max(0, min(known) - max(0, usage - cache))


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


def _number(path: str) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None
