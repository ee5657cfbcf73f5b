"""One number shared by processes: which request of a workload is the next."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct

__all__ = ["Cursor"]

_WORD = struct.Struct("<q")


class Cursor:
    """A counter in shared memory under a lock that the kernel gives back when its holder dies."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _WORD.size)

    @classmethod
    def create(cls) -> Cursor:
        """Make a cursor at 0; a child that inherits `fd` opens the same one with `Cursor(fd)`."""
        fd = os.memfd_create("ems-cursor")
        os.ftruncate(fd, _WORD.size)
        return cls(fd)

    def take(self) -> int:
        """Return the number and step on: no two processes get the same one."""
        fcntl.lockf(self.fd, fcntl.LOCK_EX)
        try:
            (value,) = _WORD.unpack_from(self._map)
            _WORD.pack_into(self._map, 0, value + 1)
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)
        return int(value)

    @property
    def value(self) -> int:
        """The number of the next request, for a progress bar."""
        return int(_WORD.unpack_from(self._map)[0])

    def close(self) -> None:
        """Give the memory and the descriptor back."""
        self._map.close()
        os.close(self.fd)
