"""Frames of the write channel: how a client reserves, commits and aborts.

A frame is a 16-byte header and a payload of packed little-endian columns, one value per key:

    header   magic u16 | abi u8 | kind u8 | payload bytes u32 | request u64
    HELLO    session u32, zero u32, secret 16           -> epoch u64
    RESERVE  count u32, flags u32, lengths u64 * n, digests 16 * n
                                                        -> offsets u64 * n, statuses u8 * n
    COMMIT   count u32, flags u32, mark_ns u64, checksums u64 * n, positions u32 * n
                                                        -> statuses u8 * n
    PUT      mark_ns u64, checksum u64, following u64, length u64, digest 16, flags u32, zero u32
                                                        -> offset u64, status u8, granted u8
    ABORT    -                                          -> -
    SUSPECT  version u64, digest 16                     -> dropped u8
    ECHO     anything                                   -> the same

PUT is the COMMIT of a request of one key, which may get another name by it. When `following` is
not 0, `length` bytes are reserved under that number, for a key that will be told by its PUT: the
offset, and `granted` as a RESERVE says it.

An answer carries the kind with the top bit set and the request's number; `REFUSED` carries a text
instead and the connection ends. Requests of one connection are answered in their order. The
frames and the memory format are one ABI: `ABI_VERSION` counts changes of either.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from ems_native._index import ABI_VERSION

MAGIC = 0xE35E
HEADER = struct.Struct("<HBBIQ")
HEADER_BYTES = HEADER.size
MAX_KEYS = 8192
MAX_PAYLOAD_BYTES = 8 + 24 * MAX_KEYS
SECRET_BYTES = 16

MIN_FRAME_BYTES = 24 << 20
"""A client may always reserve as much by one message. A pool of blocks of 4 KiB evicts 6,144 of
them for it, which keeps the server's loop busy for some 8 ms."""
MAX_FRAME_BYTES = 64 << 20
"""What the server lets it be in a pool of larger blocks, and of four times the size."""

ANSWER = 0x80
FLAG_REPLACE = 1
FLAG_FORCE = 2
FLAG_CHAIN = 1
FLAG_REPLACE_NEXT = 2

# Status of a key, in the answer to RESERVE ...
GRANTED, PRESENT, NO_ROOM, BUSY = range(4)
# ... and to COMMIT.
COMMITTED, KEPT, LOST = range(3)

_HELLO = struct.Struct("<II16s")
HELLO_BYTES = _HELLO.size
_COUNT = struct.Struct("<II")
_COUNTED = struct.Struct(HEADER.format + _COUNT.format[1:])
_SUSPECT = struct.Struct("<Q16s")
_EPOCH = struct.Struct("<Q")
_MARK = struct.Struct("<Q")
_PUT = struct.Struct("<QQQQ16sII")
_PUT_ANSWER = struct.Struct("<QBB")


class Kind(enum.IntEnum):
    """What a frame asks for."""

    HELLO = 1
    RESERVE = 2
    COMMIT = 3
    ABORT = 4
    SUSPECT = 5
    ECHO = 6
    PUT = 7
    REFUSED = 0x7F


_RESERVE, _COMMIT, _PUT_KIND = int(Kind.RESERVE), int(Kind.COMMIT), int(Kind.PUT)


class FrameError(Exception):
    """Bytes that are no frame of this ABI, or a payload that contradicts its header."""


class Header(NamedTuple):
    """A frame's header, checked: `kind` may carry `ANSWER`."""

    kind: int
    nbytes: int
    request: int


def parse_header(data: bytes) -> Header:
    """Read the 16 bytes that begin a frame.

    Raises:
        FrameError: another magic or ABI, or a payload longer than any frame may be.
    """
    magic, abi, kind, nbytes, request = HEADER.unpack(data)
    if magic != MAGIC:
        raise FrameError("these bytes are not a frame of the write channel")
    if abi != ABI_VERSION:
        raise FrameError(f"the frame is of ABI {abi}, this side speaks {ABI_VERSION}")
    if nbytes > MAX_PAYLOAD_BYTES:
        raise FrameError(f"the payload is {nbytes} bytes, the limit is {MAX_PAYLOAD_BYTES}")
    return Header(kind, nbytes, request)


def frame(kind: int, request: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    return HEADER.pack(MAGIC, ABI_VERSION, kind, len(payload), request) + payload


def hello(session: int, secret: bytes) -> bytes:
    """The first frame of a connection: whose it is."""
    return frame(Kind.HELLO, 0, _HELLO.pack(session, 0, secret))


def parse_hello(payload: bytes) -> tuple[int, bytes]:
    """(session, secret)."""
    if len(payload) != _HELLO.size:
        raise FrameError(f"a HELLO has {_HELLO.size} bytes, this one {len(payload)}")
    session, _, secret = _HELLO.unpack(payload)
    return session, secret


def hello_answer(epoch: int) -> bytes:
    """What a HELLO is answered with when the session is known."""
    return frame(Kind.HELLO | ANSWER, 0, _EPOCH.pack(epoch))


def reserve(request: int, digests: bytes, lengths: bytes, replace: bool, force: bool) -> bytes:
    """Ask for extents for a batch of at most `MAX_KEYS` keys."""
    flags = FLAG_REPLACE * replace | FLAG_FORCE * force
    count = len(lengths) // 8
    head = _COUNTED.pack(MAGIC, ABI_VERSION, _RESERVE, 8 + 24 * count, request, count, flags)
    return head + lengths + digests


def parse_reserve(payload: bytes) -> tuple[bytes, bytes, bool, bool]:
    """(digests, lengths, replace, force)."""
    count, flags = _parse_count(payload, 24)
    lengths = payload[8 : 8 + 8 * count]
    digests = payload[8 + 8 * count :]
    return digests, lengths, bool(flags & FLAG_REPLACE), bool(flags & FLAG_FORCE)


def commit(
    request: int, positions: bytes, checksums: bytes, chain: bool, mark_ns: int = 0
) -> bytes:
    """Publish keys of a request: u32 positions, rising, with their u64 checksums.

    `mark_ns` is when position 0 counts as used (CLOCK_MONOTONIC, 0 = on arrival), so that a batch
    in several frames keeps its order of eviction.
    """
    count = len(positions) // 4
    head = _COUNTED.pack(
        MAGIC, ABI_VERSION, _COMMIT, 16 + 12 * count, request, count, FLAG_CHAIN * chain
    )
    return head + _MARK.pack(mark_ns) + checksums + positions


def parse_commit(payload: bytes) -> tuple[bytes, bytes, bool, int]:
    """(positions, checksums, chain, mark_ns)."""
    count, flags = _parse_count(payload, 12, _MARK.size)
    (mark_ns,) = _MARK.unpack_from(payload, 8)
    sums = payload[16 : 16 + 8 * count]
    return payload[16 + 8 * count :], sums, bool(flags & FLAG_CHAIN), mark_ns


class Put(NamedTuple):
    """What a PUT says of the only key of its request, and of the one that may follow.

    Args:
        digest: of the key; the request may have been made under another one.
        checksum: of the value.
        chain: as of COMMIT.
        mark_ns: as of COMMIT.
        following: the request for another place, 0 for none.
        length: of the value that will get there, bytes.
        replace: whether it will replace a value that is there.
    """

    digest: bytes
    checksum: int
    chain: bool
    mark_ns: int
    following: int
    length: int
    replace: bool


def put(request: int, what: Put) -> bytes:
    """Publish the only key of a request, and reserve for the one that follows."""
    digest, checksum, chain, mark_ns, following, length, replace = what
    flags = FLAG_CHAIN * chain | FLAG_REPLACE_NEXT * replace
    payload = _PUT.pack(mark_ns, checksum, following, length, digest, flags, 0)
    return frame(_PUT_KIND, request, payload)


def parse_put(payload: bytes) -> Put:
    """What `put` was given."""
    if len(payload) != _PUT.size:
        raise FrameError(f"a PUT has {_PUT.size} bytes, this one {len(payload)}")
    mark_ns, checksum, following, length, digest, flags, _ = _PUT.unpack(payload)
    chain, replace = bool(flags & FLAG_CHAIN), bool(flags & FLAG_REPLACE_NEXT)
    return Put(digest, checksum, chain, mark_ns, following, length, replace)


def put_answer(offset: int, status: int, granted: int) -> bytes:
    """The payload of an answer to a PUT."""
    return _PUT_ANSWER.pack(offset, status, granted)


def parse_put_answer(payload: bytes) -> tuple[int, int, int]:
    """(offset, status, granted)."""
    if len(payload) != _PUT_ANSWER.size:
        raise FrameError(f"the answer to a PUT has {_PUT_ANSWER.size} bytes, not {len(payload)}")
    offset, status, granted = _PUT_ANSWER.unpack(payload)
    return offset, status, granted


def suspect(digest: bytes, version: int) -> bytes:
    """Report that this version of a key did not match its checksum."""
    return frame(Kind.SUSPECT, 0, _SUSPECT.pack(version, digest))


def parse_suspect(payload: bytes) -> tuple[bytes, int]:
    """(digest, version)."""
    if len(payload) != _SUSPECT.size:
        raise FrameError(f"a SUSPECT has {_SUSPECT.size} bytes, this one {len(payload)}")
    version, digest = _SUSPECT.unpack(payload)
    return digest, version


def _parse_count(payload: bytes, bytes_per_key: int, more: int = 0) -> tuple[int, int]:
    if len(payload) < _COUNT.size:
        raise FrameError(f"the payload of {len(payload)} bytes has no room for its count")
    count: int
    flags: int
    count, flags = _COUNT.unpack_from(payload)
    if not 1 <= count <= MAX_KEYS:
        raise FrameError(f"the frame says {count} keys, it may have 1 to {MAX_KEYS}")
    if len(payload) != _COUNT.size + more + bytes_per_key * count:
        raise FrameError(f"{len(payload)} bytes do not hold {count} keys")
    return count, flags
