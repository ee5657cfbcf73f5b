"""Reads the shared memory of a pool as a stranger would, and says what cannot be true in it.

It shares no code with the writer: it is what the writer's own view is compared with, by tests and
by `ems fsck`. Everything is read once, so it may look at a pool that is being served; what it finds
there counts only when a second look finds the same.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator

from ems.pool.geometry import Geometry
from ems_native._index import LAYOUT

__all__ = ["Audit", "Finding", "FindingKind", "audit", "usage"]

_UNIT = LAYOUT["UNIT"]
_DATA_START = LAYOUT["DATA_START"]
_SLOTS = LAYOUT["BUCKET_SLOTS"]
_BUCKET_WORDS = LAYOUT["BUCKET_BYTES"] // 8
_RESERVATION_WORDS = LAYOUT["RESERVATION_BYTES"] // 8
_SESSION_WORDS = LAYOUT["SESSION_BYTES"] // 8
_MAX_SESSIONS = LAYOUT["MAX_SESSIONS"]
_HELD, _INTENT = 1, 2  # 0 is free
_WORD = 0xFFFFFFFFFFFFFFFF


class FindingKind(enum.Enum):
    """What is wrong. The first three are what a server that dies leaves, and the next one mends."""

    UNFINISHED = "unfinished change"
    INTENT = "commit to be finished"
    ORPHAN = "reservation of a process that is gone"
    MISPLACED = "entry where it cannot be"
    OUTSIDE = "entry beyond the data"
    OVERLAP = "memory claimed twice"
    RESERVATION = "impossible reservation"
    CHECKSUM = "block that does not match its checksum"

    @property
    def harmless(self) -> bool:
        """Whether this is an ordinary trace of a death, not damage."""
        return self in (FindingKind.UNFINISHED, FindingKind.INTENT, FindingKind.ORPHAN)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        kind: what.
        text: where, with the numbers.
        slot: of the entry; -1 for a reservation.
        version: of the entry, 0 for a reservation.
        digest: of the key.
    """

    kind: FindingKind
    text: str
    slot: int
    version: int
    digest: bytes

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Audit:
    """What there is, and what is wrong with it. Sizes in bytes, whole units."""

    entries: int
    used: int
    reservations: int
    reserved: int
    sessions: int
    findings: tuple[Finding, ...]


@dataclasses.dataclass
class _Block:
    """A piece of the data that somebody claims."""

    offset: int
    end: int
    what: str
    slot: int
    version: int
    digest: bytes


def audit(
    index: memoryview,
    sizes: Geometry,
    held: Callable[[int], bool],
    checksum: Callable[[int, int], int] | None = None,
) -> Audit:
    """Check the index of a pool.

    Args:
        index: all of the file, contiguous bytes.
        sizes: of the pool.
        held: whether a living process holds the lock of a session.
        checksum: of (offset, length) in the data; None: the blocks' bytes are not looked at.
    """
    words = index.cast("B").cast("Q")
    end = _DATA_START + sizes.capacity
    nbuckets = sizes.slots // _SLOTS
    after_buckets = LAYOUT["BUCKETS_OFFSET"] // 8 + nbuckets * _BUCKET_WORDS
    findings: list[Finding] = []
    blocks: list[_Block] = []
    entries = 0
    for block in _entries(words, nbuckets, end, findings):
        entries += 1
        blocks.append(block)
        if checksum is not None:
            _compare(words, block, checksum, findings)
    used = sum(block.end - block.offset for block in blocks)
    after_sessions = after_buckets + _MAX_SESSIONS * _SESSION_WORDS
    states = words[after_buckets:after_sessions:_SESSION_WORDS].tolist()
    sessions = {number for number, state in enumerate(states) if state and number}
    columns = words[after_sessions : after_sessions + sizes.reservations * _RESERVATION_WORDS]
    records = list(_reservations(columns, end, sessions, held, findings))
    findings += _overlaps(blocks + records)
    return Audit(
        entries=entries,
        used=used + sum(block.end - block.offset for block in records),
        reservations=len(records),
        reserved=sum(block.end - block.offset for block in records),
        sessions=len(sessions),
        findings=tuple(findings),
    )


def usage(index: memoryview, sizes: Geometry) -> tuple[int, int]:
    """Return how many blocks an index holds and the bytes they take, believing what it says."""
    words = index.cast("B").cast("Q")
    nbuckets = sizes.slots // _SLOTS
    start = LAYOUT["BUCKETS_OFFSET"] // 8
    end = start + nbuckets * _BUCKET_WORDS
    entries = used = 0
    for i in range(_SLOTS):
        tags = words[start + i : end : _BUCKET_WORDS].tolist()
        lengths = words[start + _SLOTS + 8 * i + 4 : end : _BUCKET_WORDS].tolist()
        taken = [_whole(length) for tag, length in zip(tags, lengths) if tag]
        entries += len(taken)
        used += sum(taken)
    return entries, used


def _entries(
    words: memoryview, nbuckets: int, end: int, findings: list[Finding]
) -> Iterator[_Block]:
    for bucket in range(nbuckets):
        at = LAYOUT["BUCKETS_OFFSET"] // 8 + bucket * _BUCKET_WORDS
        copy = words[at : at + _BUCKET_WORDS].tolist()
        for i in range(_SLOTS):
            tag = copy[i]
            version, low, high, offset, length = copy[_SLOTS + 8 * i : _SLOTS + 8 * i + 5]
            if not tag and not version & 1 and not length:
                continue
            slot = bucket * _SLOTS + i
            digest = low.to_bytes(8, "little") + high.to_bytes(8, "little")
            where = f"slot {slot}, key {digest.hex()}"
            kind = None
            if version & 1 or not tag:
                kind, text = FindingKind.UNFINISHED, f"{where}, version {version}"
            elif tag != (low ^ (high << 1 & _WORD) or 1) or bucket not in _homes(
                low, high, nbuckets
            ):
                kind, text = FindingKind.MISPLACED, where
            elif not _inside(offset, length, end):
                kind, text = FindingKind.OUTSIDE, f"{where}, {length} bytes at {offset}"
            if kind is not None:
                findings.append(Finding(kind, text, slot, version, digest))
            else:
                yield _Block(
                    offset, offset + _whole(length), f"{where}, {length} bytes", slot, version,
                    digest,
                )  # fmt: skip


def _compare(
    words: memoryview,
    block: _Block,
    checksum: Callable[[int, int], int],
    findings: list[Finding],
) -> None:
    bucket, i = divmod(block.slot, _SLOTS)
    at = LAYOUT["BUCKETS_OFFSET"] // 8 + bucket * _BUCKET_WORDS + _SLOTS + 8 * i
    length, want = words[at + 4], words[at + 5]
    if words[at] != block.version:
        return
    got = checksum(block.offset, length)
    if got != want and words[at] == block.version:
        findings.append(
            Finding(FindingKind.CHECKSUM, block.what, block.slot, block.version, block.digest)
        )


def _reservations(
    words: memoryview,
    end: int,
    sessions: set[int],
    held: Callable[[int], bool],
    findings: list[Finding],
) -> Iterator[_Block]:
    living: dict[int, bool] = {}
    states = words[::_RESERVATION_WORDS].tolist()
    for number in [number for number, state in enumerate(states) if state]:
        state = states[number]
        at = number * _RESERVATION_WORDS
        session, request, _, low, high, offset, length = words[at + 1 : at + 8].tolist()
        digest = low.to_bytes(8, "little") + high.to_bytes(8, "little")
        where = f"record {number} of session {session}, request {request}, key {digest.hex()}"
        if state not in (_HELD, _INTENT) or not _inside(offset, length, end):
            text = f"{where}, state {state}, {length} bytes at {offset}"
            findings.append(Finding(FindingKind.RESERVATION, text, -1, 0, digest))
            continue
        if session not in living:
            living[session] = session in sessions and held(session)
        if state == _INTENT:
            findings.append(Finding(FindingKind.INTENT, where, -1, 0, digest))
        elif not living[session]:
            findings.append(Finding(FindingKind.ORPHAN, where, -1, 0, digest))
        yield _Block(offset, offset + _whole(length), where, -1, 0, digest)


def _overlaps(blocks: list[_Block]) -> Iterator[Finding]:
    blocks.sort(key=lambda block: block.offset)
    last: _Block | None = None
    for block in blocks:
        # A record whose commit is to be finished may name the entry's own extent.
        if (
            last is not None
            and block.offset < last.end
            and (block.digest, block.offset) != (last.digest, last.offset)
        ):
            text = f"{last.what} and {block.what}"
            yield Finding(FindingKind.OVERLAP, text, block.slot, block.version, block.digest)
        if last is None or block.end > last.end:
            last = block


def _homes(low: int, high: int, nbuckets: int) -> tuple[int, int]:
    first, second = low * nbuckets >> 64, high * nbuckets >> 64
    return first, (first + 1) % nbuckets if second == first else second


def _inside(offset: int, length: int, end: int) -> bool:
    return 0 < length <= end - offset and offset >= _DATA_START and offset % _UNIT == 0


def _whole(length: int) -> int:
    return -(-length // _UNIT) * _UNIT
