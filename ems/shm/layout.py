"""What lies in a pool's directory, and the head of each file that every version can read.

The formats behind that head are defined once, in `ems_native/csrc/layout.h`; their numbers are
`LAYOUT` here.

    <root>/server.lock     held by the server; never unlinked; holds its pid as text
           sessions.lock   a byte per session, held by its client
           ems.sock        control plane (gRPC); there only while the server serves
           write.sock      write channel
           index           the pool exists if and only if this file does
           recency  counters  data.0
"""

from __future__ import annotations

import dataclasses
import enum
import os
import struct

__all__ = [
    "COUNTERS",
    "DATA",
    "INDEX",
    "INDEX_UNFINISHED",
    "POOL_FILES",
    "RECENCY",
    "SERVER_LOCK",
    "SESSIONS_LOCK",
    "SOCKET",
    "SOCKET_UNNAMED",
    "WRITE_SOCKET",
    "PoolState",
    "Prologue",
    "describe_version",
    "is_readable",
    "parse_prologue",
    "read_prologue",
]

SERVER_LOCK = "server.lock"
SESSIONS_LOCK = "sessions.lock"
SOCKET = "ems.sock"
SOCKET_UNNAMED = "ems.sock.new"
"""The control plane's socket before the server serves."""
WRITE_SOCKET = "write.sock"
INDEX = "index"
INDEX_UNFINISHED = "index.new"
"""The index while a pool is being made. Whoever finds it finds the debris of a server that died."""
RECENCY = "recency"
COUNTERS = "counters"
DATA = "data.0"
"""A symbolic link when the server was told to keep the data elsewhere."""

POOL_FILES = (INDEX, INDEX_UNFINISHED, RECENCY, COUNTERS, DATA, SESSIONS_LOCK)
"""In the order in which a pool is taken down: without its index it does not exist any more."""

MAGIC = b"EMSPOOL1"
_MAJOR = 0xFFFFFFFF
_PROLOGUE = struct.Struct("<8s16sQQQQQ")


class PoolState(enum.IntEnum):
    """The state word of a prologue."""

    FORMATTING = 1
    ACTIVE = 2
    RETIRED = 3


@dataclasses.dataclass(frozen=True)
class Prologue:
    """The eternal head of a file.

    Args:
        pool_id: hexadecimal, 32 characters.
        layout_version: of everything behind the head.
        state: a `PoolState`, as a number, since a later version may know more of them.
        file_kind: which of the pool's files this is.
        file_bytes: length of the file.
    """

    pool_id: str
    layout_version: int
    state: int
    file_kind: int
    file_bytes: int


def is_readable(layout_version: int, ours: int) -> bool:
    """Whether a version of the format can be read by one that knows `ours`: any minor version."""
    return layout_version & _MAJOR == ours & _MAJOR


def describe_version(layout_version: int) -> str:
    """Return a layout version for a text, as major.minor."""
    return f"{layout_version & _MAJOR}.{layout_version >> 32}"


def parse_prologue(head: bytes) -> Prologue | None:
    """Return what the first 64 bytes of a file say, None when it is no file of a pool."""
    if len(head) < _PROLOGUE.size:
        return None
    magic, pool_id, layout, state, kind, nbytes, _ = _PROLOGUE.unpack_from(head)
    if magic != MAGIC:
        return None
    return Prologue(pool_id.hex(), layout, state, kind, nbytes)


def read_prologue(path: str) -> Prologue | None:
    """Return the head of the file at `path`, None when there is none or it is no file of a pool.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return parse_prologue(os.pread(fd, _PROLOGUE.size, 0))
    finally:
        os.close(fd)
