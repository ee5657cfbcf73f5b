"""One pool with its mapped files, taken over or made new. Blocking; runs in a worker thread."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Callable

from ems.common.size import format_size
from ems.pool import Geometry, Pool, geometry
from ems.server import files
from ems.server.config import ServerConfig
from ems.server.files import Demand, RefusedToStart
from ems.shm import layout
from ems.shm.liveness import LockTable
from ems.shm.segment import AllocationStopped, Segment, open_to_group
from ems.shm.space import file_system, read_space
from ems_native import _index
from ems_native._index import LAYOUT

__all__ = ["Store", "check_room", "open_store"]

_log = logging.getLogger("ems.server.store")

HUGE_PAGE_BYTES = 2 << 20
DEFAULT_SHARE = 4
"""Without `--capacity` a new pool takes one part in so many of the free memory."""
BYTES_PER_ENTRY = 16 << 10
MIN_DEFAULT_ENTRIES = 1024
LEAVE_S = 5.0
"""How long the users of a retired pool get to notice and let go."""


@dataclasses.dataclass(frozen=True)
class Store:
    """A pool that this process owns.

    Args:
        pool: the state machine over the mappings.
        pool_id: hexadecimal.
        index, recency, counters, data: the mapped files.
        locks: who of the sessions lives.
        hugetlb: the data lies on hugetlbfs.
        ready_bytes: how much of the data a former server prepared, and
        page_kind: in which pages.
    """

    pool: Pool
    pool_id: str
    index: Segment
    recency: Segment
    counters: Segment
    data: Segment
    locks: LockTable
    hugetlb: bool
    ready_bytes: int
    page_kind: int

    def close(self) -> None:
        """Unmap everything; the pool object must not be used any more. The files stay."""
        for part in (self.index, self.recency, self.counters, self.data):
            part.close()
        self.locks.close()


def open_store(config: ServerConfig, going: Callable[[], bool]) -> Store:
    """Open the pool of a root, or make one; `server.lock` is held.

    Args:
        config: what the server was told.
        going: asked now and then; False gives up.

    Raises:
        RefusedToStart: the pool there does not fit what was asked for, or memory does not suffice.
        AllocationStopped: `going` returned False; nothing is left behind.
    """
    root = config.root
    if not os.path.exists(os.path.join(root, layout.INDEX)):
        files.remove_files(root)  # the debris of a server that died while it made a pool
        return _create(config, going)
    head = _read_head(root)
    retired = head is not None and head.state == layout.PoolState.RETIRED
    if retired and not files.holders_of(root):
        files.remove_files(root)  # a server died between giving the pool up and unlinking it
        return _create(config, going)
    if head is not None and not retired and not config.recreate:
        version = int(LAYOUT["LAYOUT_VERSION"])
        if not layout.is_readable(head.layout_version, version):
            # A cache of another version is worth less than a server that does not start.
            _log.warning(
                "the pool in %s has memory layout %s, this server knows %s: it is replaced and its "
                "blocks are lost",
                root, layout.describe_version(head.layout_version),
                layout.describe_version(version),
            )  # fmt: skip
            retired = True
    if config.recreate or retired:
        _take_down(config, going)
        return _create(config, going)
    if head is None:
        raise RefusedToStart(
            f"{root} holds a file `{layout.INDEX}` that is no pool; --recreate replaces it, `ems "
            "purge` removes it"
        )
    return _recover(config)


def _read_head(root: str) -> layout.Prologue | None:
    try:
        return layout.read_prologue(os.path.join(root, layout.INDEX))
    except OSError as error:
        raise RefusedToStart(f"the pool in {root} cannot be read: {error.strerror}") from None


# ---- a new pool ----


def _create(config: ServerConfig, going: Callable[[], bool]) -> Store:
    root, data_dir = config.root, config.data_dir or config.root
    sizes = check_room(config)
    started = time.monotonic()
    mode, gid = config.file_mode, config.gid
    pool_id = secrets.token_bytes(16)
    with contextlib.ExitStack() as undo:
        undo.callback(files.remove_files, root)

        def make(path: str, kind: str, nbytes: int) -> Segment:
            segment = Segment.create(path, nbytes, mode, gid, going)
            undo.callback(segment.close)
            _index.write_prologue(
                segment.address, pool_id, LAYOUT[kind], nbytes, LAYOUT["STATE_ACTIVE"]
            )
            return segment

        try:
            recency = make(os.path.join(root, layout.RECENCY), "FILE_RECENCY", sizes.recency_bytes)
            counters = make(
                os.path.join(root, layout.COUNTERS), "FILE_COUNTERS", sizes.counters_bytes
            )
            data_path = os.path.join(root, layout.DATA)
            if config.data_dir is not None:
                # The link first: whatever happens next, it leads the next server to the debris.
                target = os.path.join(config.data_dir, f"ems-{pool_id.hex()}.{layout.DATA}")
                os.symlink(target, data_path)
                data_path = target
            data = make(data_path, "FILE_DATA", sizes.data_bytes)
            unfinished = os.path.join(root, layout.INDEX_UNFINISHED)
            index = Segment.create(unfinished, sizes.index_bytes, mode, gid, going)
            undo.callback(index.close)
            locks = _open_locks(config)
            undo.callback(locks.close)
        except OSError as error:
            space = read_space(data_dir)
            raise RefusedToStart(
                f"the pool of {format_size(sizes.total_bytes)} cannot be allocated in "
                f"{error.filename or data_dir}: "
                f"{error.strerror}; there are {space}"
            ) from None
        pool = Pool.format(index.address, recency.address, sizes, pool_id, os.getpid(), 0)
        os.rename(unfinished, os.path.join(root, layout.INDEX))
        undo.pop_all()
    _log.info(
        "made a pool of %s in %.1f s, room for %d blocks",
        format_size(sizes.capacity), time.monotonic() - started, sizes.slots,
    )  # fmt: skip
    return Store(
        pool, pool_id.hex(), index, recency, counters, data, locks,
        hugetlb=file_system(data_dir).hugetlb, ready_bytes=0, page_kind=LAYOUT["PAGE_UNKNOWN"],
    )  # fmt: skip


def check_room(config: ServerConfig) -> Geometry:
    """Return the sizes of a new pool as configured, if there is room for it.

    Raises:
        RefusedToStart: there is not; the text has both figures.
    """
    sizes = _sizes_of_new(config)
    missing = files.shortage(_demands(config, sizes))
    if missing is not None:
        raise RefusedToStart(
            f"capacity {format_size(sizes.capacity)} is too much: {missing}; "
            "give a smaller --capacity"
        )
    return sizes


def _sizes_of_new(config: ServerConfig) -> Geometry:
    capacity = config.capacity
    if capacity is None:
        place = config.data_dir or files.nearest(config.root)
        capacity = read_space(place).least // DEFAULT_SHARE
        capacity = max(capacity - capacity % HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
    entries = config.entries or max(MIN_DEFAULT_ENTRIES, capacity // BYTES_PER_ENTRY)
    try:
        return geometry(_whole_pages(capacity), entries)
    except ValueError as error:
        raise RefusedToStart(str(error)) from None


def _whole_pages(capacity: int) -> int:
    return -(-capacity // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _demands(config: ServerConfig, sizes: Geometry) -> list[Demand]:
    rest = sizes.total_bytes - sizes.data_bytes
    root = files.nearest(config.root)
    return [Demand(root, rest), Demand(config.data_dir or root, sizes.data_bytes)]


def _open_locks(config: ServerConfig) -> LockTable:
    path = os.path.join(config.root, layout.SESSIONS_LOCK)
    locks = LockTable(path, LAYOUT["MAX_SESSIONS"], create=True, mode=config.file_mode)
    try:
        open_to_group(locks.fd, config.file_mode, config.gid)
    except OSError:
        locks.close()
        raise
    return locks


# ---- a pool that is there ----


def _recover(config: ServerConfig) -> Store:
    root = config.root
    started = time.monotonic()
    with contextlib.ExitStack() as undo:

        def map_file(name: str) -> Segment:
            segment = Segment.open(os.path.join(root, name), writable=True)
            undo.callback(segment.close)
            return segment

        try:
            index = map_file(layout.INDEX)
            header = _index.Reader(index.address, index.nbytes, 0).header()
            sizes = geometry(header["capacity"], header["slots"])
            _check_same(config, sizes)
            recency, counters, data = (
                map_file(name) for name in (layout.RECENCY, layout.COUNTERS, layout.DATA)
            )
            for part, nbytes in (
                (index, sizes.index_bytes),
                (recency, sizes.recency_bytes),
                (counters, sizes.counters_bytes),
                (data, sizes.data_bytes),
            ):
                if part.nbytes != nbytes:
                    raise ValueError(f"{part.path} has {part.nbytes} bytes instead of {nbytes}")
                _open_path_to_group(part.path, config)
            locks = _open_locks(config)
            undo.callback(locks.close)
            pool = Pool.recover(index.address, recency.address, sizes, os.getpid(), locks.is_held)
        except (OSError, ValueError) as error:
            raise RefusedToStart(
                f"the pool in {root} cannot be served: {error}; --recreate replaces it"
            ) from None
        undo.pop_all()
    _log.info(
        "took over a pool of %s with %d blocks in %.1f s, epoch %d",
        format_size(sizes.capacity), pool.stats().entries, time.monotonic() - started, pool.epoch,
    )  # fmt: skip
    if pool.mended.any:
        _log.warning("mended what the last server left: %s", pool.mended)
    return Store(
        pool, header["pool_id"], index, recency, counters, data, locks,
        hugetlb=file_system(os.path.dirname(os.path.realpath(data.path))).hugetlb,
        ready_bytes=header["ready_bytes"], page_kind=header["page_kind"],
    )  # fmt: skip


def _check_same(config: ServerConfig, sizes: Geometry) -> None:
    """An existing pool keeps its size and its place."""
    if config.capacity is not None and _whole_pages(config.capacity) != sizes.capacity:
        raise RefusedToStart(
            f"the pool in {config.root} has a capacity of {format_size(sizes.capacity)}, not "
            f"{format_size(config.capacity)}: "
            "leave --capacity away to serve it as it is, or add --recreate to replace it and lose "
            "its blocks"
        )
    if config.entries is not None and geometry(sizes.capacity, config.entries) != sizes:
        raise RefusedToStart(
            f"the pool in {config.root} has room for {sizes.slots} blocks, not {config.entries}: "
            "leave --entries away to serve it as it is, or add --recreate to replace it and lose "
            "its blocks"
        )
    folder = os.path.dirname(os.path.realpath(os.path.join(config.root, layout.DATA)))
    if config.data_dir is not None and os.path.realpath(config.data_dir) != folder:
        raise RefusedToStart(
            f"the data of the pool in {config.root} lies in {folder}, not in {config.data_dir}: "
            "leave --data-dir away to serve it as it is, or add --recreate to replace it and lose "
            "its blocks"
        )


def _open_path_to_group(path: str, config: ServerConfig) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        open_to_group(fd, config.file_mode, config.gid)
    finally:
        os.close(fd)


# ---- replacing a pool ----


def _take_down(config: ServerConfig, going: Callable[[], bool]) -> None:
    """Retire the pool that is there and unlink it, if its successor will find room.

    Who still maps it keeps its memory until it lets go. So either there is room for both, or
    everybody has to leave first; when somebody stays, nothing has changed.
    """
    root = config.root
    head = _read_head(root)
    own = files.own_bytes(root)
    demands = []
    if config.capacity is not None:
        sizes = _sizes_of_new(config)
        demands = _demands(config, sizes)
        missing = files.shortage(demands, own)
        if missing is not None:
            raise RefusedToStart(
                f"capacity {format_size(sizes.capacity)} is too much, even without the pool that "
                f"is there: {missing}; give a smaller --capacity"
            )
    with contextlib.ExitStack() as undo:
        if head is not None:
            undo.callback(files.set_pool_state, root, layout.PoolState(head.state))
            files.set_pool_state(root, layout.PoolState.RETIRED)
        if files.shortage(demands) is not None:
            holders = _wait_for_holders(root, going)
            if holders:
                raise RefusedToStart(
                    f"the pool in {root} cannot be replaced: its {format_size(sum(own.values()))} "
                    f"are still used by {files.named(holders)}, and memory does not suffice for "
                    f"both ({read_space(root)}); stop them first, or give a smaller --capacity"
                )
        undo.pop_all()
    files.remove_files(root)
    _log.info("gave up the pool that was in %s", root)


def _wait_for_holders(root: str, going: Callable[[], bool]) -> list[files.Holder]:
    until = time.monotonic() + LEAVE_S
    holders = files.holders_of(root)
    while holders and time.monotonic() < until:
        if not going():
            raise AllocationStopped(root)
        time.sleep(0.05)
        holders = files.holders_of(root)
    return holders
