"""Checks a pool from outside, whether a server serves it or not, and mends it.

A pool that nobody serves is mended as the next server would do it, and loses the blocks that do
not match their checksum. A pool that is served is mended by its server: it is told of each block.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import time
from collections.abc import Iterator

from ems.pool import Geometry, Pool, ServerState, geometry
from ems.pool.audit import Audit, Finding, FindingKind, audit
from ems.server import files
from ems.shm import layout
from ems.shm.liveness import Held, LockTable, ServerLock, server_pid
from ems.shm.segment import Segment
from ems_native._copy import checksum
from ems_native._index import LAYOUT, Reader

__all__ = ["CannotCheck", "Report", "check", "mend"]

LOOK_AGAIN_S = 0.05
_KINDS = {
    layout.INDEX: "FILE_INDEX",
    layout.RECENCY: "FILE_RECENCY",
    layout.COUNTERS: "FILE_COUNTERS",
    layout.DATA: "FILE_DATA",
}


class CannotCheck(Exception):
    """There is no pool, or none that this version can read; the text says which."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What a check found.

    Args:
        server_pid: of the server, None when nobody serves the pool.
        epoch: how many servers the pool has had.
        state: of the last server, for people.
        audit: what the index says.
        files: what is wrong with the files themselves.
    """

    server_pid: int | None
    epoch: int
    state: str
    audit: Audit
    files: tuple[str, ...]

    @property
    def damage(self) -> list[Finding]:
        """Findings that no ordinary death explains."""
        return [finding for finding in self.audit.findings if not finding.kind.harmless]

    @property
    def sound(self) -> bool:
        """Whether there is no damage."""
        return not self.damage and not self.files


def check(root: str, *, read_blocks: bool = True) -> Report:
    """Look at the pool of a root. Changes nothing, may be used while it is served.

    Args:
        root: directory of the pool.
        read_blocks: compare every block with its checksum: reads all of the data.

    Raises:
        CannotCheck: see there.
    """
    wrong = tuple(_check_files(root))
    with _opened(root, writable=False) as (index, data, locks, sizes):
        serving = server_pid(os.path.join(root, layout.SERVER_LOCK))
        header = Reader(index.address, index.nbytes, 0).header()
        compare = (lambda at, n: checksum(data.address + at, n)) if read_blocks else None
        view = _view(index)
        found = audit(view, sizes, locks.is_held, compare)
        if serving is not None and found.findings:
            # What changes while one looks is no finding.
            time.sleep(LOOK_AGAIN_S)
            again = set(audit(view, sizes, locks.is_held, compare).findings)
            found = dataclasses.replace(
                found, findings=tuple(one for one in found.findings if one in again)
            )
    state = ServerState(header["server_state"]).name.lower()
    return Report(serving, header["epoch"], state, found, wrong)


def mend(root: str, report: Report) -> str:
    """Mend a pool that nobody serves; what was done, in words.

    Raises:
        CannotCheck: a server serves it meanwhile.
    """
    try:
        lock = ServerLock(os.path.join(root, layout.SERVER_LOCK))
    except Held as error:
        raise CannotCheck(f"{error}: check it again") from None
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock)
        index, _, locks, sizes = stack.enter_context(_opened(root, writable=True))
        recency = stack.enter_context(_recency(root))
        try:
            pool = Pool.recover(index.address, recency.address, sizes, os.getpid(), locks.is_held)
        except ValueError as error:
            raise CannotCheck(
                f"the pool in {root} cannot be mended: {error}; `ems serve --recreate` replaces it"
            ) from None
        bad = [one for one in report.damage if one.kind is FindingKind.CHECKSUM]
        dropped = sum(pool.drop(one.slot, one.version) for one in bad)
        pool.set_server_state(ServerState.STOPPED)
        mended = pool.mended
        del pool  # before its memory goes
        files.remove_sockets(root)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(root, layout.INDEX_UNFINISHED))
    return f"{mended}; {dropped} blocks that did not match their checksum dropped"


def _check_files(root: str) -> Iterator[str]:
    heads = {}
    for name in _KINDS:
        path = os.path.join(root, name)
        try:
            head = layout.read_prologue(path)
            nbytes = os.stat(path).st_size
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror or error}"
            continue
        if head is None:
            yield f"{name} does not begin like a file of a pool"
            continue
        heads[name] = head
        if head.file_kind != LAYOUT[_KINDS[name]]:
            yield f"{name} says that it is another of the pool's files"
        if head.file_bytes != nbytes:
            yield f"{name} says that it has {head.file_bytes} bytes, it has {nbytes}"
    if len({head.pool_id for head in heads.values()}) > 1:
        yield "the files belong to different pools"
    if os.path.exists(os.path.join(root, layout.INDEX_UNFINISHED)):
        yield f"{layout.INDEX_UNFINISHED} was left by a server that died while it made a pool"


@contextlib.contextmanager
def _opened(root: str, *, writable: bool) -> Iterator[tuple[Segment, Segment, LockTable, Geometry]]:
    head = None
    with contextlib.suppress(OSError):
        head = layout.read_prologue(os.path.join(root, layout.INDEX))
    if head is None:
        raise CannotCheck(f"there is no pool in {root}")
    version = int(LAYOUT["LAYOUT_VERSION"])
    if not layout.is_readable(head.layout_version, version):
        raise CannotCheck(
            f"the pool in {root} has memory layout {layout.describe_version(head.layout_version)}, "
            f"this version reads {layout.describe_version(version)}"
        )
    with contextlib.ExitStack() as stack:
        try:
            index = stack.enter_context(Segment.open(os.path.join(root, layout.INDEX), writable))
            data = stack.enter_context(Segment.open(os.path.join(root, layout.DATA), False))
            locks = LockTable(os.path.join(root, layout.SESSIONS_LOCK), LAYOUT["MAX_SESSIONS"])
            stack.callback(locks.close)
            header = Reader(index.address, index.nbytes, 0).header()
            sizes = geometry(header["capacity"], header["slots"])
        except (OSError, ValueError) as error:
            raise CannotCheck(f"the pool in {root} cannot be read: {error}") from None
        for part, nbytes in ((index, sizes.index_bytes), (data, sizes.data_bytes)):
            if part.nbytes != nbytes:
                raise CannotCheck(f"{part.path} has {part.nbytes} bytes, its header says {nbytes}")
        yield index, data, locks, sizes


@contextlib.contextmanager
def _recency(root: str) -> Iterator[Segment]:
    try:
        with Segment.open(os.path.join(root, layout.RECENCY), True) as recency:
            yield recency
    except OSError as error:
        raise CannotCheck(f"the pool in {root} cannot be mended: {error}") from None


def _view(index: Segment) -> memoryview:
    return memoryview((ctypes.c_char * index.nbytes).from_address(index.address))
