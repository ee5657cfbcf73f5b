"""Locks that prove who lives: the kernel gives them up when, and only when, their holder is gone.

Open-file-description locks (`F_OFD_SETLK`) belong to an open file, not to a process: closing
another descriptor of the same file does not drop them, they work across containers and pid
namespaces, and a thread is as good as a process. They are inherited by `fork`, so each descriptor
is closed in the child at once; a child that kept it would outlive its parent in the eyes of the
server.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import weakref

__all__ = ["Held", "LivenessLock", "LockTable", "ServerLock", "server_pid"]

# struct flock of a 64-bit Linux: l_type, l_whence, (4), l_start, l_len, l_pid (must be 0 here), (4)
_FLOCK = struct.Struct("@hhqqi4x")
_WHOLE_PID_BYTES = 32


def _set_lock(fd: int, kind: int, start: int) -> bool:
    """Lock one byte; False when somebody else's lock is in the way."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _is_locked(fd: int, start: int, count: int) -> bool:
    """Whether anybody else holds a lock on one of the bytes (a write lock would meet any other)."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, count, 0)
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, request)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


class _Descriptor:
    """A descriptor that is closed in a forked child."""

    def __init__(self, path: str, flags: int, mode: int = 0o600) -> None:
        self.fd = os.open(path, flags | os.O_CLOEXEC, mode)
        _open_descriptors.add(self)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


_open_descriptors: weakref.WeakSet[_Descriptor] = weakref.WeakSet()


def _close_in_child() -> None:
    for descriptor in list(_open_descriptors):
        with contextlib.suppress(OSError):
            descriptor.close()


os.register_at_fork(after_in_child=_close_in_child)


class LivenessLock:
    """A client's side: holds the byte of its session for as long as it may write into the pool.

    Args:
        path: of `sessions.lock`.
        session_id: the byte.

    Raises:
        OSError: the file is missing or not readable.
    """

    def __init__(self, path: str, session_id: int) -> None:
        self._descriptor = _Descriptor(path, os.O_RDONLY)
        try:
            # A read lock: two that hold it by mistake only make the server wait for both.
            if not _set_lock(self._descriptor.fd, fcntl.F_RDLCK, session_id):
                raise OSError(errno.EAGAIN, f"byte {session_id} is locked for writing", path)
        except BaseException:
            self._descriptor.close()
            raise

    @property
    def held(self) -> bool:
        """Whether this object still has its lock (False once closed, and in a forked child)."""
        return self._descriptor.fd >= 0

    def close(self) -> None:
        """Give the byte up: the server may give the session's reservations away. Idempotent."""
        self._descriptor.close()


class LockTable:
    """The server's side: who of the sessions lives. Never holds a lock itself.

    Args:
        path: of `sessions.lock`; it is made when missing.
        count: number of bytes, which is one more than the last session.
    """

    def __init__(self, path: str, count: int, *, create: bool = False, mode: int = 0o600) -> None:
        # F_OFD_GETLK asks for no access mode: whoever may read the file may look.
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        self._descriptor = _Descriptor(path, flags, mode)
        self._count = count

    @property
    def fd(self) -> int:
        """The descriptor, for its permissions."""
        return self._descriptor.fd

    def is_held(self, session_id: int) -> bool:
        """Whether a living process holds the byte."""
        return _is_locked(self._descriptor.fd, session_id, 1)

    def holders(self) -> list[int]:
        """Return the bytes that are held, in order."""
        if not _is_locked(self._descriptor.fd, 0, self._count):
            return []
        return [byte for byte in range(self._count) if self.is_held(byte)]

    def close(self) -> None:
        """Close the file; idempotent."""
        self._descriptor.close()


class Held(Exception):
    """Another server holds the root.

    Args:
        root: the directory.
        pid: of the holder as it sees itself, None when it has not written it down yet.
    """

    def __init__(self, root: str, pid: int | None) -> None:
        super().__init__(root, pid)
        self.root = root
        self.pid = pid

    def __str__(self) -> str:
        holder = "a server that just starts" if self.pid is None else f"process {self.pid}"
        return f"{self.root} belongs to {holder}"


class ServerLock:
    """One server per root: holds byte 0 of `server.lock`.

    The file is never unlinked, or two could hold "it".

    Args:
        path: of `server.lock`; it is made when missing.
        mode: permissions of a new file.

    Raises:
        Held: by another process.
        OSError: the file cannot be opened for writing.
    """

    def __init__(self, path: str, mode: int = 0o600) -> None:
        self._descriptor = _Descriptor(path, os.O_RDWR | os.O_CREAT, mode)
        try:
            if not _set_lock(self._descriptor.fd, fcntl.F_WRLCK, 0):
                raise Held(os.path.dirname(path), _read_pid(self._descriptor.fd))
            os.ftruncate(self._descriptor.fd, 0)
            os.pwrite(self._descriptor.fd, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            self._descriptor.close()
            raise

    @property
    def fd(self) -> int:
        """The descriptor, for its permissions."""
        return self._descriptor.fd

    def close(self) -> None:
        """Give the root up; idempotent."""
        if self._descriptor.fd >= 0:
            # Before the lock goes: a holder that comes next must not find its own pid erased.
            os.ftruncate(self._descriptor.fd, 0)
        self._descriptor.close()

    def __enter__(self) -> ServerLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def server_pid(path: str) -> int | None:
    """Return the pid in `server.lock` if somebody holds it (0: not written yet), else None.

    Raises:
        OSError: the file is there and cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return (_read_pid(fd) or 0) if _is_locked(fd, 0, 1) else None
    finally:
        os.close(fd)


def _read_pid(fd: int) -> int | None:
    text = os.pread(fd, _WHOLE_PID_BYTES, 0).strip()
    return int(text) if text.isdigit() else None
