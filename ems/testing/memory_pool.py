"""A pool in this process's own memory, with a reader beside its writer: no server, no files.

For tests of the pool's state machine and for benchmarks of it. Everything is the real code; only
the memory is anonymous instead of a file.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Sequence

from ems.pool import Pool, ServerState, geometry
from ems.pool.eviction import EvictionPolicy
from ems_native._index import LAYOUT, Reader

UNIT = LAYOUT["UNIT"]


def digest_of(key: object) -> bytes:
    """A 16-byte digest that stands for a key."""
    return hashlib.blake2b(repr(key).encode(), digest_size=16).digest()


def u64s(values: Sequence[int]) -> bytes:
    """A column of 64-bit numbers."""
    return struct.pack(f"<{len(values)}Q", *values)


def u32s(values: Sequence[int]) -> bytes:
    """A column of 32-bit numbers."""
    return struct.pack(f"<{len(values)}I", *values)


class MemoryPool:
    """A formatted pool of `capacity` bytes and `entries` slots, `ready` of it (None: all) prepared.

    `policy` makes another eviction policy than the default one, for a number of buckets.

    `pool` is the server's view, `reader` a client's; `recover()` replaces `pool` by what a server
    that starts after a crash makes of the same memory.
    """

    def __init__(
        self,
        capacity: int,
        entries: int = 1024,
        ready: int | None = None,
        policy: Callable[[int], EvictionPolicy] | None = None,
    ) -> None:
        self.geometry = geometry(capacity, entries)
        self._index = mmap.mmap(-1, self.geometry.index_bytes)
        self._recency = mmap.mmap(-1, self.geometry.recency_bytes)
        self.pool = Pool.format(
            self.index_address,
            self.recency_address,
            self.geometry,
            os.urandom(16),
            os.getpid(),
            self.geometry.capacity if ready is None else ready,
            policy(self.geometry.slots // LAYOUT["BUCKET_SLOTS"]) if policy else None,
        )
        self.pool.set_server_state(ServerState.SERVING)
        self.reader = Reader(self.index_address, self.geometry.index_bytes, self.recency_address)
        self.now_ns = 1 << 40

    @property
    def index_address(self) -> int:
        """Where the index lies."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._index))

    @property
    def recency_address(self) -> int:
        """Where the recency file lies."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._recency))

    def later(self, ms: int = 200) -> int:
        """Let time pass; by default enough for recency marks to be renewed."""
        self.now_ns += ms * 1_000_000
        return self.now_ns

    def recover(self, held: Sequence[int] = ()) -> Pool:
        """Take the memory over as the next server would; sessions in `held` still live."""
        self.pool = Pool.recover(
            self.index_address,
            self.recency_address,
            self.geometry,
            os.getpid(),
            lambda session: session in held,
        )
        self.pool.set_server_state(ServerState.SERVING)
        return self.pool

    def session(self) -> int:
        """Open a session."""
        return self.pool.open_session(os.getpid(), b"s" * 16, self.now_ns)

    def reserve(
        self,
        session: int,
        request: int,
        sizes: dict[object, int],
        replace: bool = False,
        force: bool = False,
    ) -> tuple[bytes, list[int]]:
        """Reserve keys with these sizes in bytes; (statuses, offsets)."""
        digests = b"".join(digest_of(key) for key in sizes)
        lengths = u64s(list(sizes.values()))
        statuses, offsets = self.pool.reserve(
            session, request, digests, lengths, replace, force, self.now_ns
        )
        return statuses, list(memoryview(offsets).cast("Q"))

    def save(
        self, session: int, request: int, sizes: dict[object, int], replace: bool = False
    ) -> int:
        """Reserve and commit; how many keys are there afterwards."""
        statuses, _ = self.reserve(session, request, sizes, replace)
        granted = [position for position, status in enumerate(statuses) if status == 0]
        sums = u64s([position + 1000 * request for position in granted])
        self.pool.commit(session, request, u32s(granted), sums, True, self.now_ns)
        return sum(status in (0, 1) for status in statuses)

    def present(self, key: object, mark: bool = False) -> bool:
        """Whether a reader finds the key; `mark`: as a load would, which renews its recency."""
        return self.reader.present(digest_of(key), 1, self.now_ns if mark else 0) == 1

    def check(self) -> None:
        """Compare the allocator, the index and the figures with each other.

        Raises:
            AssertionError: they contradict each other.
        """
        stats = self.pool.stats()
        blocks = self.pool.extents()
        at = 0
        slots: list[int] = []
        used = reserved = 0
        for first, units, owner in blocks:
            assert first == at, f"a gap or an overlap at unit {at}"
            at += units
            if owner is None:
                continue
            used += units
            if owner[0] == "slot":
                slots.append(owner[1])
            else:
                reserved += units
        assert at * UNIT == stats.ready
        assert used * UNIT == stats.used
        assert reserved * UNIT == stats.reserved
        assert len(slots) == len(set(slots)) == stats.entries
        assert not any(
            before[2] is None and after[2] is None for before, after in zip(blocks, blocks[1:])
        ), "two free neighbours were not joined"
