"""Save, load, exists: plain blocking functions, run in the caller's thread or a copy worker.

    load = lookup ─▶ copy out ─▶ validate          no message; works while no server runs
    save = reserve ─▶ copy in ─▶ commit            two round trips on the write channel
    exists = lookup                                no message

All count keys in a row from the head of the list: nothing behind the first miss is of use to
anybody. Whatever happens, when they return no further byte of the caller's memory or of the pool
is touched, and what was reserved is committed, given back, or noted as owed to the server.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Union

from ems.client.context import Context
from ems.client.stripes import Share, turns
from ems.common.deadline import Deadline, DeadlineExpired
from ems.common.exception import EmsErrorCode, EmsException, internal_error, io_error
from ems.common.metrics import Count
from ems.devices.base import CopyEnd, DeviceError
from ems_native._shm import monotonic_ns

if TYPE_CHECKING:
    from ems_native._copy import CancelFlag, Spans

__all__ = ["OperationCancelled", "exists", "load", "save"]

MAX_FRAME_KEYS = 2048
FRAME_BYTES = 24 << 20
"""Reserved by one message, and at least one key: in a pool of 4 KiB blocks that evicts 6,144 of
them, which keeps the server's loop busy for some 8 ms."""
ATTEMPTS = 3
ABORT_MS = 100
"""For the abort itself; a server that does not answer in this time gets it later."""
PATIENCE_S = 0.1
"""How long a rank that shares its saves waits for what a peer is writing, before it writes it too.

A peer that lives needs a millisecond or two for a portion; several ranks on one processor need
their turns. One that died gives its reservations back in less, one that is stopped does not.
"""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.008

_TICK_NS = 1 << 16  # of a recency mark: what a later key of a batch is older by
_KEPT_FREE = 16  # part of a pool that a batch larger than it leaves to others and to the evictor
_PREPARATION_PAUSE_S = 0.02
_SPARE_NS = 50_000_000
"""Who waits for memory leaves this much of his time for the result."""
PLACE_BYTES = 40
_DIGEST_BYTES = 16
_GRANTED, _PRESENT, _NO_ROOM, _BUSY = 0, 1, 2, 3
_COMMITTED, _KEPT = 0, 1
_MISS_CHANGING, _MISS_LENGTH, _MISS_RETIRED, _MISS_CHECKSUM = 2, 3, 4, 5
_GRANTED_MASK = bytes([1]) + bytes(255)
_DEADLINE, _CANCELLED, _CHECKSUM = (
    int(CopyEnd.DEADLINE),
    int(CopyEnd.CANCELLED),
    int(CopyEnd.CHECKSUM),
)
# Plain ints: an enum member costs a look-up at each use, and a small load counts five times.
_LOAD_CALLS, _LOAD_KEYS, _LOAD_HITS = (
    int(Count.LOAD_CALLS),
    int(Count.LOAD_KEYS),
    int(Count.LOAD_HITS),
)
_LOAD_BYTES, _LOAD_NS = int(Count.LOAD_BYTES), int(Count.LOAD_NS)
_SAVE_CALLS, _SAVE_KEYS, _SAVE_NS = (
    int(Count.SAVE_CALLS),
    int(Count.SAVE_KEYS),
    int(Count.SAVE_NS),
)
_SAVE_MESSAGES, _MESSAGES = int(Count.SAVE_MESSAGES), int(Count.MESSAGES)
_SAVE_COMMITTED, _SAVE_BYTES = int(Count.SAVE_COMMITTED), int(Count.SAVE_BYTES)

_log = logging.getLogger("ems.client")


class OperationCancelled(Exception):
    """The operation was asked to end, and did."""


class _CopyDeadline(DeadlineExpired):
    """The deadline passed during the copy, so the server is not to blame and can be told."""


def load(
    context: Context,
    digests: bytes,
    spans: Spans,
    deadline: Deadline,
    cancel: CancelFlag | None = None,
) -> int:
    """Copy the values of keys to the caller's memory, up to the first miss.

    Args:
        context: the pool.
        digests: 16 bytes a key.
        spans: the caller's memory, as many keys; none of it read-only.
        deadline: looked at during the copy.
        cancel: the same.

    Returns:
        How many keys in a row from the head were loaded. Memory of later keys may have been
        written.

    Raises:
        EmsException: `EMS_IO_TIMEOUT`, or `EMS_INTERNAL_ERROR` when the device failed.
        OperationCancelled: `cancel` was set.
    """
    started = monotonic_ns()
    add = context.counters.add
    nkeys = spans.nkeys
    add(_LOAD_CALLS, 1)
    add(_LOAD_KEYS, nkeys)
    try:
        hits = _load(context, digests, spans, deadline, cancel, started)
    except Exception as error:
        raise _translated(
            error, context, Count.LOAD_TIMEOUTS, Count.LOAD_CANCELLED, Count.LOAD_ERRORS
        ) from error
    add(_LOAD_HITS, hits)
    add(_LOAD_BYTES, spans.nbytes if hits == nkeys else _sum_lengths(spans, hits))
    add(_LOAD_NS, monotonic_ns() - started)
    return hits


def _load(
    context: Context,
    digests: bytes,
    spans: Spans,
    deadline: Deadline,
    cancel: CancelFlag | None,
    tick: int,
) -> int:
    reader = context.reader
    nkeys = spans.nkeys
    places = bytearray(PLACE_BYTES * nkeys)
    chunk_bytes = context.device.chunk_bytes
    ends = None if spans.nbytes <= chunk_bytes else _key_ends(spans)
    first = attempts = 0
    while first < nkeys:
        count = nkeys - first if ends is None else _chunk(ends, first, chunk_bytes)
        found, miss = reader.lookup(digests, spans.lengths, first, count, places, tick)
        if found:
            end, why = context.device.copy_out(
                spans,
                first,
                found,
                context.data,
                places,
                cancel,
                deadline.at_ns,
                context.verify,
            )
            # Only now is known what the copied bytes are worth.
            good = reader.validate(places, first, end - first)
            if good:
                first += good
                attempts = 0
            if first < end:
                miss = _MISS_CHANGING
            elif why == _DEADLINE:
                raise _CopyDeadline
            elif why == _CANCELLED:
                raise OperationCancelled
            elif why == _CHECKSUM:
                # The checksum means nothing if the entry was another one meanwhile.
                miss = _MISS_CHECKSUM if reader.validate(places, first, 1) else _MISS_CHANGING
            elif good == count:
                continue
        if miss == _MISS_CHANGING and attempts < ATTEMPTS:
            attempts += 1
            context.counters.add(Count.LOAD_RETRIES, 1)
            continue
        _note_miss(context, digests, spans, places, first, miss)
        break
    return first


def _note_miss(
    context: Context, digests: bytes, spans: Spans, places: bytearray, key: int, miss: int
) -> None:
    add = context.counters.add
    add(Count.MISS_ABSENT + miss - 1, 1)
    if spans.nkeys - key > 1:
        add(Count.MISS_BEHIND, spans.nkeys - key - 1)
    if miss == _MISS_LENGTH:
        _log.warning(
            "load: the stored value of key %d has another length than its buffers, %d bytes",
            key,
            spans.length_of(key),
        )
    elif miss == _MISS_RETIRED:
        context.broken()
    elif miss == _MISS_CHECKSUM:
        digest = digests[_DIGEST_BYTES * key : _DIGEST_BYTES * (key + 1)]
        slot, version = memoryview(places).cast("Q")[5 * key : 5 * key + 2]
        _log.error("load: block %s in slot %d is corrupt in the pool", digest.hex(), slot)
        add(Count.SUSPECTS, 1)
        context.suspect(digest, version)


def exists(context: Context, digests: bytes) -> int:
    """Return how many keys in a row from the head are in the pool; moves nothing.

    Args:
        context: the pool.
        digests: 16 bytes a key.
    """
    nkeys = len(digests) // _DIGEST_BYTES
    # Who asks is likely to load soon, so it counts as a use.
    found = context.reader.present(digests, nkeys, monotonic_ns())
    add = context.counters.add
    add(Count.EXISTS_CALLS, 1)
    add(Count.EXISTS_KEYS, nkeys)
    add(Count.EXISTS_HITS, found)
    return found


def save(
    context: Context,
    digests: bytes,
    spans: Spans,
    deadline: Deadline,
    cancel: CancelFlag | None = None,
    *,
    replace: bool,
    chain: bool = True,
    share: Share | None = None,
) -> int:
    """Copy the caller's memory into the pool and publish it under the keys.

    Args:
        context: the pool.
        digests: 16 bytes a key.
        spans: the caller's memory, as many keys.
        deadline: for messages and copies together.
        cancel: looked at between and during copies.
        replace: whether a key that is there gets the new bytes, or keeps what it has.
        chain: whether each key is of use only with those before it (a hint for eviction).
        share: with whom the work is shared, if others save the same list; only without `replace`.

    Returns:
        How many keys in a row from the head are in the pool. Keys for which there was no room are
        left out; later ones may be there all the same.

    Raises:
        EmsException: `EMS_IO_TIMEOUT`; `EMS_IO_ERROR` when the server is away; `EMS_INTERNAL_ERROR`
            when the device failed. What was reserved and not committed has been given back.
        OperationCancelled: `cancel` was set; the same.
    """
    started = monotonic_ns()
    add = context.counters.add
    add(_SAVE_CALLS, 1)
    add(_SAVE_KEYS, spans.nkeys)
    try:
        there = _Save(context, digests, spans, deadline, cancel, replace, chain, share).run()
    except Exception as error:
        raise _translated(
            error, context, Count.SAVE_TIMEOUTS, Count.SAVE_CANCELLED, Count.SAVE_ERRORS
        ) from error
    add(_SAVE_NS, monotonic_ns() - started)
    return there


_Keys = Union[range, Sequence[int]]


class _Save:
    """One save: what it works on, and which of its keys are in the pool already."""

    def __init__(
        self,
        context: Context,
        digests: bytes,
        spans: Spans,
        deadline: Deadline,
        cancel: CancelFlag | None,
        replace: bool,
        chain: bool,
        share: Share | None,
    ) -> None:
        self._context = context
        self._digests = digests
        self._spans = spans
        self._deadline = deadline
        self._cancel = cancel
        self._replace = replace
        self._chain = chain
        self._share = share
        self._there = bytearray(spans.nkeys)
        self._no_room: list[int] = []
        self._started_ns = monotonic_ns()

    def run(self) -> int:
        busy: list[int] = []
        for keys in self._turns():
            absent = keys if self._replace else self._absent(keys)
            if absent:
                busy += self._write(absent, force=False)
        if busy:
            # Somebody else was writing these. By now he may be done; if not, both write: nobody
            # waits for another process, but for peers that share the work, and for them not long.
            self._context.counters.add(Count.SAVE_BUSY, len(busy))
            busy = self._write_again(busy, force=False)
            if busy and self._share is not None:
                busy = self._wait_for_peers(busy)
            self._write_again(busy, force=True)
        if self._no_room:
            self._come_back()
            self._context.counters.add(Count.SAVE_NO_ROOM, len(self._no_room))
        return self._leading()

    def _turns(self) -> Iterable[range]:
        nkeys, nbytes = self._spans.nkeys, self._spans.nbytes
        if self._share is not None:
            return self._frames(turns(nkeys, nbytes, self._share))
        if nkeys <= MAX_FRAME_KEYS and nbytes <= FRAME_BYTES:
            return (range(nkeys),)
        return self._frames((range(self._fitting()),))

    def _fitting(self) -> int:
        """Of a batch larger than the pool, leave out the tail: it would only push out the head."""
        nkeys, capacity = self._spans.nkeys, self._context.reader.room()[1]
        if self._spans.nbytes <= capacity:
            return nkeys
        fitting = bisect_right(_key_ends(self._spans), capacity - capacity // _KEPT_FREE)
        self._context.counters.add(Count.SAVE_NO_ROOM, nkeys - fitting)
        return fitting

    def _frames(self, parts: Iterable[range]) -> Iterator[range]:
        """Cut parts of the list where a message would be too large."""
        ends = None if self._spans.nbytes <= FRAME_BYTES else _key_ends(self._spans)
        for part in parts:
            first = part.start
            while first < part.stop:
                count = min(part.stop - first, MAX_FRAME_KEYS)
                if ends is not None:
                    count = min(count, _chunk(ends, first, FRAME_BYTES))
                yield range(first, first + count)
                first += count

    def _absent(self, keys: range) -> range:
        """Leave out the keys at the head that the index shows: that costs no message."""
        first, count = keys.start, len(keys)
        digests = self._digests
        if count < self._spans.nkeys:
            digests = digests[_DIGEST_BYTES * first : _DIGEST_BYTES * keys.stop]
        found = self._context.reader.present(digests, count, self._mark_ns(first))
        if found:
            self._there[first : first + found] = b"\1" * found
            self._context.counters.add(Count.SAVE_PRESENT, found)
        return range(first + found, keys.stop)

    def _wait_for_peers(self, busy: list[int]) -> list[int]:
        """Ask for busy keys until peers have written them; return those that are still busy."""
        until_ns = min(self._deadline.at_ns, monotonic_ns() + int(1e9 * PATIENCE_S))
        pause_s = _FIRST_PAUSE_S
        while busy:
            left_s = (until_ns - monotonic_ns()) / 1e9
            if left_s <= 0:
                break
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            absent = [key for key in busy if self._absent(range(key, key + 1))]
            busy = self._write_again(absent, force=False)
        return busy

    def _mark_ns(self, key: int) -> int:
        """When a key counts as used: later keys a little earlier, in how many frames they go."""
        return self._started_ns - key * _TICK_NS

    def _come_back(self) -> None:
        """Ask again for room that comes by itself.

        While the server prepares memory it evicts nobody, so it is worth waiting. And a session
        gets a share of what is left, so a batch that fits into the pool gets the rest after its
        first part was committed. (One that does not fit would only push out its own head.)
        """
        last_ns = self._deadline.at_ns - _SPARE_NS
        there = self._there.count(1)
        while self._no_room and monotonic_ns() < last_ns:
            ready, capacity = self._context.reader.room()
            if ready < capacity:
                time.sleep(_PREPARATION_PAUSE_S)
            elif not there or self._spans.nbytes > capacity:
                break
            self._check_cancelled()
            keys, self._no_room = sorted(self._no_room), []
            before = self._there.count(1)
            # Somebody else who writes them now has found room for them.
            self._write_again(self._write_again(keys, force=False), force=True)
            there = self._there.count(1) - before

    def _leading(self) -> int:
        hole = self._there.find(0)
        return self._spans.nkeys if hole < 0 else hole

    def _write_again(self, keys: list[int], force: bool) -> list[int]:
        busy: list[int] = []
        for at in range(0, len(keys), MAX_FRAME_KEYS):
            busy += self._write(keys[at : at + MAX_FRAME_KEYS], force)
        return busy

    def _write(self, keys: _Keys, force: bool) -> Sequence[int]:
        """Write some keys under one request; return those that somebody else is writing."""
        context, channel = self._context, self._context.channel
        digests, lengths = self._columns(keys)
        self._check_cancelled()
        request = context.requests.begin(self._deadline)
        messages = 1
        try:
            statuses, places = channel.reserve(
                request, digests, lengths, self._replace, force, self._deadline
            )
            granted = statuses.count(_GRANTED)
            outcomes = b""
            if granted:
                positions = None
                if granted < len(keys):
                    positions = [at for at, status in enumerate(statuses) if status == _GRANTED]
                places = self._copy(keys, statuses, places, positions is None)
                self._check_cancelled()
                messages += 1
                outcomes = channel.commit(
                    request, positions, places, self._chain, self._deadline, self._mark_ns(keys[0])
                )
        except BaseException as error:
            messages += self._give_back(request, error)
            raise
        finally:
            context.counters.add(_SAVE_MESSAGES, messages)
            context.counters.add(_MESSAGES, messages)
        context.requests.end(request)
        return self._tally(keys, statuses, outcomes)

    def _columns(self, keys: _Keys) -> tuple[bytes, bytes]:
        digests, lengths = self._digests, self._spans.lengths
        if len(keys) == self._spans.nkeys:
            return digests, lengths
        if isinstance(keys, range):
            first, end = keys.start, keys.stop
            return digests[16 * first : 16 * end], lengths[8 * first : 8 * end]
        return (
            b"".join([digests[16 * k : 16 * k + 16] for k in keys]),
            b"".join([lengths[8 * k : 8 * k + 8] for k in keys]),
        )

    def _copy(
        self, keys: _Keys, statuses: bytes, places: bytearray, all_granted: bool
    ) -> bytearray:
        """Copy the granted keys into their places; return the places with the checksums."""
        first, last = keys[0], keys[-1]
        dense = last - first + 1 == len(keys)
        mask = None if all_granted else statuses.translate(_GRANTED_MASK)
        where = places
        if first or not dense:
            # The device counts places and mask from key 0 of the batch, the server from the first
            # key of the request.
            granted = mask if mask is not None else b"\1" * len(keys)
            where, mask = _spread(keys, places, granted, last + 1)
        end, why = self._context.device.copy_in(
            self._spans,
            first,
            last - first + 1,
            self._context.data,
            where,
            self._cancel,
            self._deadline.at_ns,
            mask,
        )
        if why == _DEADLINE:
            raise _CopyDeadline
        if why == _CANCELLED:
            raise OperationCancelled
        if why or end != last + 1:
            raise DeviceError(f"the copy ended at key {end} of {last + 1}, reason {why}")
        if where is places:
            return places
        return bytearray().join([where[PLACE_BYTES * k : PLACE_BYTES * (k + 1)] for k in keys])

    def _tally(self, keys: _Keys, statuses: bytes, outcomes: bytes) -> Sequence[int]:
        add, there = self._context.counters.add, self._there
        if outcomes.count(_COMMITTED) == len(keys):  # nearly always
            if len(keys) == len(there):
                self._there = bytearray(b"\1") * len(keys)
                nbytes = self._spans.nbytes
            else:
                nbytes = 0
                for key in keys:
                    there[key] = 1
                    nbytes += self._spans.length_of(key)
            add(_SAVE_COMMITTED, len(keys))
            add(_SAVE_BYTES, nbytes)
            return ()
        busy: list[int] = []
        nbytes = lost = 0
        outcome = iter(outcomes)
        for key, status in zip(keys, statuses):
            if status == _GRANTED:
                nbytes += self._spans.length_of(key)
                there[key] = next(outcome, 2) in (_COMMITTED, _KEPT)
                lost += not there[key]
            elif status == _PRESENT:
                there[key] = 1
            elif status == _BUSY:
                busy.append(key)
            else:
                self._no_room.append(key)
        add(_SAVE_COMMITTED, outcomes.count(_COMMITTED))
        add(Count.SAVE_KEPT, outcomes.count(_KEPT))
        add(Count.SAVE_LOST, lost)
        add(Count.SAVE_PRESENT, statuses.count(_PRESENT))
        add(_SAVE_BYTES, nbytes)
        return busy

    def _give_back(self, request: int, error: BaseException) -> int:
        """End a request that will not be committed; return the number of messages that took."""
        requests = self._context.requests
        unanswered = isinstance(error, (DeadlineExpired, OSError))
        if unanswered and not isinstance(error, _CopyDeadline):
            # The server is away or frozen: to wait for it once more would outlive the deadline.
            requests.owe(request)
            return 0
        try:
            self._context.channel.abort(request, Deadline.after_ms(ABORT_MS))
        except Exception:
            requests.owe(request)
        else:
            requests.end(request)
        return 1

    def _check_cancelled(self) -> None:
        if self._cancel is not None and self._cancel.is_set:
            raise OperationCancelled


def _spread(keys: _Keys, places: bytearray, granted: bytes, nkeys: int) -> tuple[bytearray, bytes]:
    """Return places and mask of a request's keys, at their indices in the batch."""
    spread, mask = bytearray(PLACE_BYTES * nkeys), bytearray(nkeys)
    if isinstance(keys, range):
        spread[PLACE_BYTES * keys.start :] = places
        mask[keys.start :] = granted
    else:
        for at, key in enumerate(keys):
            spread[PLACE_BYTES * key : PLACE_BYTES * (key + 1)] = places[
                PLACE_BYTES * at : PLACE_BYTES * (at + 1)
            ]
            mask[key] = granted[at]
    return spread, bytes(mask)


def _key_ends(spans: Spans) -> list[int]:
    """Return the offset behind each key in the batch."""
    return list(accumulate(memoryview(spans.lengths).cast("Q")))


def _chunk(ends: list[int], first: int, chunk_bytes: int) -> int:
    """Return how many keys from `first` make at most `chunk_bytes`, at least one."""
    start = ends[first - 1] if first else 0
    return max(1, bisect_right(ends, start + chunk_bytes, first) - first)


def _sum_lengths(spans: Spans, nkeys: int) -> int:
    return sum(memoryview(spans.lengths).cast("Q")[:nkeys])


def _translated(
    error: Exception, context: Context, timeouts: Count, cancelled: Count, errors: Count
) -> Exception:
    """Return what the caller is to see of a failure, and count it."""
    add = context.counters.add
    if isinstance(error, OperationCancelled):
        add(cancelled, 1)
        return error
    if isinstance(error, DeadlineExpired):
        add(timeouts, 1)
        where = "during the copy" if isinstance(error, _CopyDeadline) else f"({error})"
        return EmsException(
            EmsErrorCode.EMS_IO_TIMEOUT,
            f"the request's time-out passed {where}; raise CcKvOption.timeout or try again later",
        )
    add(errors, 1)
    if isinstance(error, EmsException):
        return error
    if isinstance(error, OSError):
        context.broken()
        return io_error(f"the EMS server is away: {error}")
    if isinstance(error, DeviceError):
        return internal_error(f"access to device memory failed: {error}")
    _log.error("an operation failed unexpectedly", exc_info=error)
    return internal_error(f"{type(error).__name__}: {error}")
