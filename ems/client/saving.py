"""One save: reserve, copy in, commit, in as many messages as its size takes."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Union

from ems.client.ahead import Grant
from ems.client.batch import (
    CANCELLED,
    DEADLINE,
    CopyDeadline,
    OperationCancelled,
    key_ends,
    keys_within,
)
from ems.client.context import Context
from ems.client.stripes import Share, turns
from ems.common.deadline import Deadline, DeadlineExpired
from ems.common.key import DIGEST_BYTES
from ems.common.metrics import Count
from ems.devices.base import PLACE_BYTES, PLACE_CHECKSUM, PLACE_LENGTH, DeviceError
from ems.rpc.frames import (
    BUSY,
    COMMITTED,
    GRANTED,
    KEPT,
    LOST,
    MAX_FRAME_BYTES,
    MIN_FRAME_BYTES,
    PRESENT,
    Put,
)
from ems_native._index import LAYOUT
from ems_native._shm import monotonic_ns

if TYPE_CHECKING:
    from ems_native._copy import CancelFlag, Spans

__all__ = ["Save"]

MAX_FRAME_KEYS = 2048
ABORT_MS = 100
"""For the abort itself; a server that does not answer in this time gets it later."""
PATIENCE_S = 0.1
"""How long a rank that shares its saves waits for what a peer is writing, before it writes it too.

A peer that lives needs a millisecond or two for a portion; several ranks on one processor need
their turns. One that died gives its reservations back in less, one that is stopped does not.
"""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.008

_TICK_NS = LAYOUT["TICK_NS"]  # of a recency mark: what a later key of a batch is older by
_KEPT_FREE = 16  # part of a pool that a batch larger than it leaves to others and to the evictor
_PREPARATION_PAUSE_S = 0.02
_SPARE_NS = 50_000_000
"""Who waits for memory leaves this much of his time for the result."""
_ONE_GRANTED = bytes([GRANTED])
_GRANTED_MASK = bytes([1]) + bytes(255)
_SAVE_MESSAGES, _MESSAGES = int(Count.SAVE_MESSAGES), int(Count.MESSAGES)
_SAVE_COMMITTED, _SAVE_BYTES = int(Count.SAVE_COMMITTED), int(Count.SAVE_BYTES)

_Keys = Union[range, Sequence[int]]


class Save:
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
        """Save; return how many keys in a row from the head are in the pool."""
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
        if nkeys <= MAX_FRAME_KEYS and nbytes <= MIN_FRAME_BYTES:
            return (range(nkeys),)
        return self._frames((range(self._fitting()),))

    def _fitting(self) -> int:
        """Of a batch larger than the pool, leave out the tail: it would only push out the head."""
        nkeys, capacity = self._spans.nkeys, self._context.reader.room()[1]
        if self._spans.nbytes <= capacity:
            return nkeys
        fitting = bisect_right(key_ends(self._spans), capacity - capacity // _KEPT_FREE)
        self._context.counters.add(Count.SAVE_NO_ROOM, nkeys - fitting)
        return fitting

    def _frames(self, parts: Iterable[range]) -> Iterator[range]:
        """Cut parts of the list where a message would be too large."""
        # The word of a shared page, so it is taken within limits.
        said = self._context.reader.frame_bytes()
        frame_bytes = min(max(said, MIN_FRAME_BYTES), MAX_FRAME_BYTES)
        ends = None if self._spans.nbytes <= frame_bytes else key_ends(self._spans)
        for part in parts:
            first = part.start
            while first < part.stop:
                count = min(part.stop - first, MAX_FRAME_KEYS)
                if ends is not None:
                    count = min(count, keys_within(ends, first, frame_bytes))
                yield range(first, first + count)
                first += count

    def _absent(self, keys: range) -> range:
        """Leave out the keys at the head that the index shows: that costs no message.

        Of a chain the last of them goes along, if something follows: it shows the server what that
        follows on, so that its head is kept as long as it is.
        """
        first, count = keys.start, len(keys)
        digests = self._digests
        if count < self._spans.nkeys:
            digests = digests[DIGEST_BYTES * first : DIGEST_BYTES * keys.stop]
        found = self._context.reader.present(digests, count, self._mark_ns(first))
        if found and found < count and self._chain and self._share is None:
            found -= 1
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
        ahead = self._granted_ahead(keys)
        request = context.requests.begin(self._deadline) if ahead is None else ahead.request
        messages = 0
        try:
            if ahead is None:
                messages += 1
                statuses, places = channel.reserve(
                    request, digests, lengths, self._replace, force, self._deadline
                )
            else:
                statuses, places = _ONE_GRANTED, ahead.place
            granted = statuses.count(GRANTED)
            outcomes = b""
            if granted:
                positions = None
                if granted < len(keys):
                    positions = [at for at, status in enumerate(statuses) if status == GRANTED]
                places = self._copy(keys, statuses, places, positions is None)
                self._check_cancelled()
                messages += 1
                mark_ns = self._mark_ns(keys[0])
                if len(keys) == 1:
                    outcomes = self._put(request, digests, places, mark_ns)
                else:
                    outcomes = channel.commit(
                        request, positions, places, self._chain, self._deadline, mark_ns
                    )
        except BaseException as error:
            messages += self._give_back(request, error)
            raise
        finally:
            context.counters.add(_SAVE_MESSAGES, messages)
            context.counters.add(_MESSAGES, messages)
        context.requests.end(request)
        return self._tally(keys, statuses, outcomes)

    def _granted_ahead(self, keys: _Keys) -> Grant | None:
        # Ranks that share their saves want to know of each other, which only a reserve tells.
        if len(keys) > 1 or self._share is not None:
            return None
        return self._context.ahead.take(self._spans.length_of(keys[0]), self._replace)

    def _put(self, request: int, digest: bytes, place: bytearray, mark_ns: int) -> bytes:
        """Commit the only key of a request; more of its kind may follow, which need room."""
        ahead, replace = self._context.ahead, self._replace
        words = memoryview(place).cast("Q")
        length, checksum = words[PLACE_LENGTH], words[PLACE_CHECKSUM]
        following = 0
        if self._share is None:
            capacity = self._context.reader.room()[1]
            following = ahead.ask(length, replace, capacity, self._deadline)
        what = Put(digest, checksum, self._chain, mark_ns, following, length, replace)
        try:
            outcome, other = self._context.channel.put(request, what, self._deadline)
        except BaseException:
            if following:
                ahead.unanswered(following)
            raise
        if following:
            ahead.answered(following, other, length, replace)
        return bytes((outcome,))

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
        if why == DEADLINE:
            raise CopyDeadline
        if why == CANCELLED:
            raise OperationCancelled
        if why or end != last + 1:
            raise DeviceError(f"the copy ended at key {end} of {last + 1}, reason {why}")
        if where is places:
            return places
        return bytearray().join([where[PLACE_BYTES * k : PLACE_BYTES * (k + 1)] for k in keys])

    def _tally(self, keys: _Keys, statuses: bytes, outcomes: bytes) -> Sequence[int]:
        add, there = self._context.counters.add, self._there
        if outcomes.count(COMMITTED) == len(keys):  # nearly always
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
            if status == GRANTED:
                nbytes += self._spans.length_of(key)
                there[key] = next(outcome, LOST) in (COMMITTED, KEPT)
                lost += not there[key]
            elif status == PRESENT:
                there[key] = 1
            elif status == BUSY:
                busy.append(key)
            else:
                self._no_room.append(key)
        add(_SAVE_COMMITTED, outcomes.count(COMMITTED))
        add(Count.SAVE_KEPT, outcomes.count(KEPT))
        add(Count.SAVE_LOST, lost)
        add(Count.SAVE_PRESENT, statuses.count(PRESENT))
        add(_SAVE_BYTES, nbytes)
        return busy

    def _give_back(self, request: int, error: BaseException) -> int:
        """End a request that will not be committed; return the number of messages that took."""
        requests = self._context.requests
        unanswered = isinstance(error, (DeadlineExpired, OSError))
        if unanswered and not isinstance(error, CopyDeadline):
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
