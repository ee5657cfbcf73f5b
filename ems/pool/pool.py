"""The state machine of one pool, around the native index that holds all of its state.

A method that changes state does no I/O and returns what is due; time comes in as an argument.

    absent --reserve--> held --commit--> committed --evict, replace--> absent
                          `---abort, death of the owner--> absent
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable

from ems.pool.eviction import EvictionPolicy, LearnedValue
from ems.pool.geometry import Geometry, geometry
from ems.rpc.frames import MAX_FRAME_BYTES, MIN_FRAME_BYTES, NO_ROOM
from ems_native._index import LAYOUT, Writer, format_index

UNIT = LAYOUT["UNIT"]
MAX_SESSIONS = LAYOUT["MAX_SESSIONS"] - 1  # id 0 is nobody

_FRAME_EVICTIONS = MIN_FRAME_BYTES // UNIT  # what one message may evict: some 8 ms of the loop

# A batch makes room for this share of the pool, and as many units, at most at a time.
_AHEAD_SHARE = 50
_AHEAD_UNITS = 4096
_AHEAD_KEYS = 512

_FIRST = bytes(4)  # the position of a single key


class PoolFull(Exception):
    """No session id is free."""


class ServerState(enum.IntEnum):
    """What the server that owns the pool is doing. Readers go on in every state."""

    STOPPED = LAYOUT["SERVER_STOPPED"]
    STARTING = LAYOUT["SERVER_STARTING"]
    SERVING = LAYOUT["SERVER_SERVING"]
    DRAINING = LAYOUT["SERVER_DRAINING"]


@dataclass(frozen=True)
class SessionRecord:
    """One open session: its id (also its byte in the lock file), process and reserved bytes."""

    id: int
    pid: int
    secret_hash: bytes
    opened_ns: int
    reserved_bytes: int


@dataclass(frozen=True)
class PoolStats:
    """Figures of a pool at one moment; all sizes in bytes."""

    state: ServerState
    epoch: int
    pool_id: str
    capacity: int
    ready: int
    used: int
    reserved: int
    free: int
    largest_free: int
    entries: int
    slots: int
    evictions: int
    sessions: int
    page_kind: int


@dataclass(frozen=True)
class Mended:
    """What was wrong in a pool that was taken over; all of it is right now.

    Args:
        intents: commits that the last server had begun, finished.
        entries: entries half written, or impossible: emptied.
        overlaps: entries that claimed the memory of others: emptied.
        reservations: impossible ones, freed.
    """

    intents: int
    entries: int
    overlaps: int
    reservations: int

    @property
    def any(self) -> bool:
        """Whether there was anything to mend."""
        return bool(self.intents or self.entries or self.overlaps or self.reservations)

    def __str__(self) -> str:
        return (
            f"{self.intents} commits finished, {self.entries} half-written or impossible entries "
            f"and {self.overlaps} overlapping ones emptied, {self.reservations} impossible "
            "reservations freed"
        )


class Pool:
    """The single writer's view of a pool. One thread (the server's loop) owns it.

    Args:
        index: address of the mapped index, formatted.
        recency: address of the mapped recency file.
        sizes: its geometry.
        policy: who is evicted first; by learned value unless told otherwise.
    """

    def __init__(
        self, index: int, recency: int, sizes: Geometry, policy: EvictionPolicy | None = None
    ) -> None:
        self._writer = Writer(index, sizes.index_bytes, recency)
        self._policy = policy or LearnedValue(sizes.slots // LAYOUT["BUCKET_SLOTS"])
        self._draining = False
        self.geometry = sizes
        self.epoch = 0
        self.mended = Mended(*self._writer.mended())

    # ---- birth -----------------------------------------------------------------------------

    @classmethod
    def format(
        cls,
        index: int,
        recency: int,
        sizes: Geometry,
        pool_id: bytes,
        pid: int,
        ready_bytes: int,
        policy: EvictionPolicy | None = None,
    ) -> Pool:
        """Lay a new pool out in zeroed memory; its first `ready_bytes` of data may be granted."""
        format_index(
            index,
            sizes.index_bytes,
            sizes.capacity,
            sizes.data_bytes,
            sizes.slots // LAYOUT["BUCKET_SLOTS"],
            sizes.reservations,
            pool_id,
        )
        pool = cls(index, recency, sizes, policy)
        pool.extend_ready(ready_bytes)
        pool.epoch = pool._writer.new_epoch(pid)
        pool._writer.set_state(LAYOUT["STATE_ACTIVE"])
        return pool

    @classmethod
    def recover(
        cls, index: int, recency: int, sizes: Geometry, pid: int, held: Callable[[int], bool]
    ) -> Pool:
        """Take a pool over from a server that is gone.

        Rolls intents forward, rebuilds the allocator from the index and gives back what sessions
        reserved whose lock is free (`held(session id)` is False).

        Raises:
            ValueError: the memory is not a pool that this version can serve.
        """
        pool = cls(index, recency, sizes)
        header = pool._writer.header()
        if header["state"] != LAYOUT["STATE_ACTIVE"]:
            raise ValueError(f"the pool is in state {header['state']}, not active")
        said = geometry(header["capacity"], header["slots"])
        if said != sizes or header["reservations"] != sizes.reservations:
            raise ValueError("the pool has another geometry than its header says")
        pool.epoch = pool._writer.new_epoch(pid)
        for session in range(MAX_SESSIONS + 1):
            if pool._writer.session(session) and not held(session):
                pool.close_session(session)
            elif not pool._writer.session(session):
                pool._writer.release_session(session, b"")
        return pool

    # ---- saving ----------------------------------------------------------------------------

    def reserve(
        self,
        session: int,
        request: int,
        digests: bytes,
        lengths: bytes,
        replace: bool,
        force: bool,
        now_ns: int,
    ) -> tuple[bytes, bytes]:
        """Reserve extents for a batch, evicting where there is no room.

        Args:
            session: owner of the reservations.
            request: the client's name for them, not used before by this session.
            digests: n keys of 16 bytes.
            lengths: n sizes in bytes, u64.
            replace: also when the key is there (V0); else such keys are PRESENT (V1).
            force: also when somebody else is writing the key; else such keys are BUSY.
            now_ns: CLOCK_MONOTONIC.

        Returns:
            n statuses (u8), and n offsets into the data file (u64), set where GRANTED.
        """
        count = len(lengths) // 8
        statuses = bytearray(count)
        offsets = bytearray(8 * count)
        if self._draining:
            return bytes([NO_ROOM]) * count, bytes(offsets)
        sizes = memoryview(lengths).cast("Q")
        hopeless = LAYOUT["UNIT"] << 40
        at = 0
        while True:
            at = self._writer.reserve(
                session, request, at, digests, lengths, replace, force, now_ns, statuses, offsets
            )
            if at == count:
                return bytes(statuses), bytes(offsets)
            ahead = sum(sizes[at : at + _AHEAD_KEYS])
            if sizes[at] < hopeless and self._make_room(sizes[at], ahead):
                continue
            hopeless = min(hopeless, sizes[at])  # nor will anything larger fit in this batch
            statuses[at] = NO_ROOM
            at += 1

    def commit(
        self,
        session: int,
        request: int,
        positions: bytes,
        checksums: bytes,
        chain: bool,
        mark_ns: int,
    ) -> bytes:
        """Publish reserved keys by rising position (u32); a status (u8) for each.

        KEPT: somebody's first copy was there already and stays (reserved with `replace` false).
        LOST: nothing is reserved under that name. `chain`: each key follows the one before it.
        `mark_ns`: when position 0 counts as used; later positions count as a little older.
        """
        return self._writer.commit(session, request, positions, checksums, chain, mark_ns)

    def put(
        self, session: int, request: int, digest: bytes, checksum: int, chain: bool, mark_ns: int
    ) -> int:
        """Publish the only extent of a request under this key, whatever it was reserved for.

        Returns:
            A status as of `commit`.
        """
        self._writer.rename(session, request, digest)
        sums = checksum.to_bytes(8, "little")
        return self.commit(session, request, _FIRST, sums, chain, mark_ns)[0]

    def abort(self, session: int, request: int) -> int:
        """Give back what is left of a request. Idempotent; how many keys that were."""
        return self._writer.abort(session, request)

    # ---- room ------------------------------------------------------------------------------

    def _make_room(self, nbytes: int, ahead: int) -> bool:
        """Evict until one extent of `nbytes` can be granted; False if that cannot be.

        Args:
            nbytes: of the value that found no room.
            ahead: of it and the values of its batch that follow; room for some of them is made
                too, since a search for each would cost more than all of the evictions.
        """
        units = -(-nbytes // UNIT)
        total, ready, free, reserved, _, _ = self._writer.space()
        if ready < total and units <= total - ready:
            return False  # prepared within moments: nobody is evicted for want of patience
        if units > ready - reserved:
            return False
        wanted = max(units, min(ahead // UNIT, total // _AHEAD_SHARE, _AHEAD_UNITS))
        evicted = 0
        # The oldest first; when twice the size came back and still lies in pieces, neighbours.
        while evicted < 2 * units:
            more = wanted - free if free < wanted else max(1, units // 4)
            got = self._policy.evict(self._writer, more)
            if got.entries == 0:
                break
            evicted += got.units
            free += got.units
            if self._writer.largest_free() >= units:
                return True
        return self._writer.clear_run(wanted) or self._writer.clear_run(units)

    def relieve(self) -> bool:
        """Choose who goes next, while nobody waits for it; True when more of that is due soon.

        Nothing is evicted before its room is needed: to evict costs a save next to nothing, to
        look for whom does.
        """
        total, ready, free, _, _, _ = self._writer.space()
        if ready == total and free < total // _AHEAD_SHARE:
            self._policy.prepare(self._writer)
        return False

    def extend_ready(self, nbytes: int) -> None:
        """The first `nbytes` of the data area are prepared and may be granted."""
        self._writer.extend_ready(min(nbytes, self.geometry.capacity))

    # ---- sessions --------------------------------------------------------------------------

    def open_session(
        self,
        pid: int,
        secret_hash: bytes,
        now_ns: int,
        usable: Callable[[int], bool] = lambda session: True,
    ) -> int:
        """A new session's id, 1 to 1023: the lowest free one that is `usable`.

        Raises:
            PoolFull: there is none.
        """
        for session in range(1, MAX_SESSIONS + 1):
            if self._writer.session(session) is None and usable(session):
                self._writer.open_session(session, pid, secret_hash, now_ns)
                return session
        raise PoolFull(f"all {MAX_SESSIONS} sessions of the pool are in use")

    def close_session(self, session: int) -> int:
        """End a session whose process is known to write no more; how many keys came back."""
        released = self._writer.release_session(session, b"")
        self._writer.close_session(session)
        return released

    def session(self, session: int) -> SessionRecord | None:
        """What is known of an open session, or None."""
        found = self._writer.session(session)
        if found is None:
            return None
        reserved_bytes = self._writer.reserved_units(session) * UNIT
        return SessionRecord(session, *found, reserved_bytes)

    def sessions(self) -> list[SessionRecord]:
        """All open sessions."""
        records = (self.session(session) for session in self._writer.sessions())
        return [record for record in records if record is not None]

    def session_secret_hash(self, session: int) -> bytes | None:
        """The 16-byte hash of the session's secret, None when it is not open."""
        found = self._writer.session(session)
        return found[1] if found else None

    def keep_requests(self, session: int, live: Sequence[int]) -> int:
        """Give back all of a session's reservations but those of the requests named."""
        column = b"".join(request.to_bytes(8, "little") for request in live)
        return self._writer.release_session(session, column)

    def reserved_requests(self, session: int) -> list[int]:
        """The requests of a session that still hold reservations."""
        return self._writer.requests(session)

    # ---- bad bytes -------------------------------------------------------------------------

    def locate(self, digest: bytes) -> tuple[int, int, int, int, int] | None:
        """(slot, version, offset, length, checksum) of a committed key, or None."""
        return self._writer.locate(digest)

    def drop(self, slot: int, version: int) -> bool:
        """Withdraw an entry if it still is that version."""
        return self._writer.withdraw(slot, version)

    # ---- header ----------------------------------------------------------------------------

    def beat(self, now_ns: int) -> None:
        """Show that the loop runs; every 100 ms. Says also what clients may ask for at once."""
        _, ready, free, _, entries, _ = self._writer.space()
        evictable = (
            (ready - free) * UNIT // entries * _FRAME_EVICTIONS if entries else MAX_FRAME_BYTES
        )
        most = min(evictable, self.geometry.capacity // 4, MAX_FRAME_BYTES)
        self._writer.beat(now_ns, max(most, MIN_FRAME_BYTES))

    def set_server_state(self, state: ServerState) -> None:
        """Say what the server does; while it drains, nothing new is reserved."""
        self._draining = state is ServerState.DRAINING
        self._writer.set_server_state(int(state))

    def retire(self) -> None:
        """The pool is given up for good: readers stop using it after their current copy."""
        self._writer.set_state(LAYOUT["STATE_RETIRED"])

    def set_page_kind(self, kind: int) -> None:
        """Which pages the data has, for people: one of LAYOUT's PAGE_* numbers."""
        self._writer.set_page_kind(kind)

    def set_verify(self, verify: bool) -> None:
        """Whether clients verify checksums on load unless told otherwise."""
        self._writer.set_verify(verify)

    def stats(self) -> PoolStats:
        """The figures of this moment."""
        header = self._writer.header()
        _, ready, free, reserved, entries, slots = self._writer.space()
        return PoolStats(
            state=ServerState(header["server_state"]),
            epoch=header["epoch"],
            pool_id=header["pool_id"],
            capacity=header["capacity"],
            ready=ready * UNIT,
            used=(ready - free) * UNIT,
            reserved=reserved * UNIT,
            free=free * UNIT,
            largest_free=self._writer.largest_free() * UNIT,
            entries=entries,
            slots=slots,
            evictions=header["evictions"],
            sessions=len(self._writer.sessions()),
            page_kind=header["page_kind"],
        )

    def extents(self) -> list[tuple[int, int, tuple[str, int] | None]]:
        """Every block of the data area as (first unit, units, owner), for checks and tests."""
        return self._writer.extents()
