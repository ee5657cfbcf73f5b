"""A file of the pool, mapped into this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ems_native import _shm

__all__ = ["AllocationStopped", "Segment"]

ALLOCATE_STEP_BYTES = 256 << 20
"""`fallocate` runs at about 4 GiB/s: a step is short enough to notice a signal in between."""


class AllocationStopped(Exception):
    """The caller's `going` said no while a file was being allocated; the file is gone again."""


class Segment:
    """A shared mapping of a whole file, 2 MiB aligned, absent in forked children and core dumps.

    The file never changes its size while it exists, and all of it is allocated before anybody maps
    it: an access cannot raise SIGBUS. `close()` is for the owner, once nobody uses the address any
    more.
    """

    def __init__(self, path: str, fd: int, nbytes: int, *, writable: bool) -> None:
        self.path = path
        self.nbytes = nbytes
        self.writable = writable
        self._lock = threading.Lock()
        try:
            self.address = _shm.map_file(fd, nbytes, writable)
        finally:
            os.close(fd)
        self._pid = os.getpid()

    @classmethod
    def create(
        cls,
        path: str,
        nbytes: int,
        mode: int = 0o600,
        gid: int | None = None,
        going: Callable[[], bool] = lambda: True,
    ) -> Segment:
        """Make a file of `nbytes`, allocate all of it, and map it for writing.

        Args:
            path: must not exist yet.
            nbytes: length; on hugetlbfs a multiple of its page size.
            mode: permissions of the file.
            gid: the group that the file is given to; None leaves the creator's.
            going: asked between two steps of the allocation.

        Raises:
            OSError: with nothing left behind, `ENOSPC` when the memory is not there.
            AllocationStopped: `going` returned False; nothing is left behind either.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            open_to_group(fd, mode, gid)
            os.ftruncate(fd, nbytes)
            for offset in range(0, nbytes, ALLOCATE_STEP_BYTES):
                if not going():
                    raise AllocationStopped(path)
                os.posix_fallocate(fd, offset, min(ALLOCATE_STEP_BYTES, nbytes - offset))
            mapped = os.dup(fd)  # the segment closes its own, also when mapping fails
            return cls(path, mapped, nbytes, writable=True)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(fd)

    @classmethod
    def open(cls, path: str, writable: bool) -> Segment:
        """Map the whole of an existing file.

        Raises:
            OSError: the file is missing, empty, or may not be opened this way.
        """
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
        fd = os.open(path, flags)
        return cls(path, fd, os.fstat(fd).st_size, writable=writable)

    def close(self) -> None:
        """Unmap; idempotent. In a forked child there is nothing to unmap."""
        with self._lock:
            address, self.address = self.address, 0
        if address and os.getpid() == self._pid:
            _shm.unmap(address, self.nbytes)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Segment({self.path!r}, {self.nbytes} bytes at {self.address:#x})"


def open_to_group(fd: int, mode: int, gid: int | None) -> None:
    """Give an open file its group and its mode, whatever the umask was.

    Some mounted directories allow neither: that is all right where owner (and group, if one was
    asked for) can read and write all the same.

    Raises:
        OSError: the file cannot be used as `mode` says.
    """
    try:
        if gid is not None and os.fstat(fd).st_gid != gid:
            os.fchown(fd, -1, gid)
        os.fchmod(fd, mode)
    except PermissionError:
        status = os.fstat(fd)
        group_served = gid is None or status.st_gid == gid or status.st_mode & 0o007 == 0o007
        if not group_served or status.st_mode & mode != mode:
            raise
