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
from typing import TYPE_CHECKING

from ems.client.batch import (
    CANCELLED,
    CHECKSUM,
    DEADLINE,
    CopyDeadline,
    OperationCancelled,
    key_ends,
    keys_within,
)
from ems.client.context import Context
from ems.client.saving import Save
from ems.client.stripes import Share
from ems.common.deadline import Deadline, DeadlineExpired
from ems.common.exception import EmsErrorCode, EmsException, internal_error, io_error
from ems.common.key import DIGEST_BYTES
from ems.common.metrics import Count
from ems.devices.base import PLACE_BYTES, PLACE_WORDS, DeviceError
from ems_native._shm import monotonic_ns

if TYPE_CHECKING:
    from ems_native._copy import Arrivals, CancelFlag, Spans

__all__ = ["exists", "load", "save"]

ATTEMPTS = 3
_MISS_CHANGING, _MISS_LENGTH, _MISS_RETIRED, _MISS_CHECKSUM = 2, 3, 4, 5
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

_log = logging.getLogger("ems.client")


def load(
    context: Context,
    digests: bytes,
    spans: Spans,
    deadline: Deadline,
    cancel: CancelFlag | None = None,
    arrivals: Arrivals | None = None,
) -> int:
    """Copy the values of keys to the caller's memory, up to the first miss.

    Args:
        context: the pool.
        digests: 16 bytes a key.
        spans: the caller's memory, as many keys; none of it read-only.
        deadline: looked at during the copy.
        cancel: the same.
        arrivals: told of the pieces of all keys in turn. Who works with them at once cannot be
            helped by another try, so there is none.

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
        hits = _load(context, digests, spans, deadline, cancel, arrivals, started)
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
    arrivals: Arrivals | None,
    tick: int,
) -> int:
    reader = context.reader
    nkeys = spans.nkeys
    places = bytearray(PLACE_BYTES * nkeys)
    chunk_bytes = context.device.chunk_bytes
    whole = arrivals is not None or spans.nbytes <= chunk_bytes
    ends = None if whole else key_ends(spans)
    tries = ATTEMPTS if arrivals is None else 0
    first = attempts = 0
    while first < nkeys:
        if attempts:
            count = 1  # whoever copies a whole batch again is likely to be overtaken again
        else:
            count = nkeys - first if ends is None else keys_within(ends, first, chunk_bytes)
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
                arrivals,
            )
            # Only now is known what the copied bytes are worth.
            good = reader.validate(places, first, end - first)
            if good:
                first += good
                attempts = 0
            if first < end:
                miss = _MISS_CHANGING
            elif why == DEADLINE:
                raise CopyDeadline
            elif why == CANCELLED:
                raise OperationCancelled
            elif why == CHECKSUM:
                # The checksum means nothing if the entry was another one meanwhile.
                miss = _MISS_CHECKSUM if reader.validate(places, first, 1) else _MISS_CHANGING
            elif good == count:
                continue
        if miss == _MISS_CHANGING and attempts < tries:
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
        digest = digests[DIGEST_BYTES * key : DIGEST_BYTES * (key + 1)]
        slot, version = memoryview(places).cast("Q")[PLACE_WORDS * key :][:2]
        _log.error("load: block %s in slot %d is corrupt in the pool", digest.hex(), slot)
        add(Count.SUSPECTS, 1)
        context.suspect(digest, version)


def exists(context: Context, digests: bytes) -> int:
    """Return how many keys in a row from the head are in the pool; moves nothing.

    Args:
        context: the pool.
        digests: 16 bytes a key.
    """
    nkeys = len(digests) // DIGEST_BYTES
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
        there = Save(context, digests, spans, deadline, cancel, replace, chain, share).run()
    except Exception as error:
        raise _translated(
            error, context, Count.SAVE_TIMEOUTS, Count.SAVE_CANCELLED, Count.SAVE_ERRORS
        ) from error
    add(_SAVE_NS, monotonic_ns() - started)
    return there


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
        where = "during the copy" if isinstance(error, CopyDeadline) else f"({error})"
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
