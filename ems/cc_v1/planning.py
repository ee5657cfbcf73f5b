"""The arguments of a V1 call become one internal request: keys, and where their bytes are.

Three ways to address blocks, exactly one per call:

    hash         slot_mapping, hashes, offsets
    token        slot_mapping, token_ids, mask
    chunk_descs  hashes, chunk_descs[group][chunk]
"""

from __future__ import annotations

import array
import bisect
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from ems.cc_v1.registration import LayerGroup, Registration
from ems.cc_v1.token_hash import chain_hashes
from ems.common.argument import shown
from ems.common.exception import invalid_argument
from ems.common.key import DIGEST_BYTES
from ems.common.result import CcResult
from ems_native import _plan
from ems_native._copy import Spans

__all__ = ["Arguments", "Probe", "Request", "plan", "probe"]

_plan.set_argument_error(invalid_argument)
_INT64_MAX = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What a caller gave to address blocks; None for what he left out."""

    slot_mapping: object = None
    hashes: object = None
    offsets: object = None
    token_ids: object = None
    mask: object = None
    chunk_descs: object = None


@dataclasses.dataclass(frozen=True)
class Request:
    """Keys with their memory, and what so and so many of them mean to the caller.

    Args:
        digests: 16 bytes a key.
        spans: as many keys.
        total: what the caller asked for: blocks, chunks or tokens.
        ends: how many keys the first block (chunk, token) ends, the second, ...; None when they are
            the same thing.
        worth: of each key, where keys are worth more or less than 1; counted instead of `ends`.
    """

    digests: bytes
    spans: Spans
    total: int
    ends: Sequence[int] | None = None
    worth: Sequence[int] | None = None

    def result(self, keys: int) -> CcResult:
        """Return what it means that the first `keys` keys are done."""
        if self.ends is not None:
            return CcResult(bisect.bisect_right(self.ends, keys), self.total)
        if self.worth is not None:
            return CcResult(self.worth[keys - 1] if keys else 0, self.total)
        return CcResult(keys, self.total)


@dataclasses.dataclass(frozen=True)
class Probe:
    """Keys to look for, as many for each block (or as `ends` says)."""

    digests: bytes
    total: int
    ends: Sequence[int]

    def result(self, keys: int) -> CcResult:
        """Return what it means that the first `keys` keys are there."""
        return CcResult(bisect.bisect_right(self.ends, keys), self.total)


def plan(registration: Registration, given: Arguments) -> Request:
    """Turn the arguments of a save or a load into a request.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` naming argument, index, value and rule.
    """
    tokens = given.token_ids is not None or given.mask is not None
    if given.chunk_descs is not None:
        _refuse(given, "chunk_descs", "slot_mapping", "offsets", "token_ids", "mask")
        return _plan_chunks(registration, given)
    if tokens:
        _refuse(given, "mask" if given.token_ids is None else "token_ids", "hashes", "offsets")
        return _plan_tokens(registration, given)
    if given.hashes is not None or given.offsets is not None:
        return _plan_hashes(registration, given)
    have = "slot_mapping alone says" if given.slot_mapping is not None else "the arguments say"
    raise invalid_argument(
        f"{have} not which blocks: give slot_mapping, hashes and offsets; or slot_mapping, "
        "token_ids and mask; or hashes and chunk_descs; or (with string keys) key_list and "
        "value_list"
    )


def probe(registration: Registration, hashes: object, chunk_descs: object = None) -> Probe:
    """Turn the arguments of `exists` into the keys to look for.

    Args:
        registration: whose blocks.
        hashes: of whole blocks.
        chunk_descs: as in a load, for groups that do not keep every chunk; None if all groups do.
    """
    names = _hash_list(hashes)
    groups = registration.groups
    if chunk_descs is None:
        digests = _interleaved([group.hashed.digests(names) for group in groups])
        ends: Sequence[int] = range(len(groups), len(names) * len(groups) + 1, len(groups))
        return Probe(digests, len(names), ends)
    _, lengths = _chunk_columns(groups, chunk_descs, len(names))
    return Probe(
        _chunk_digests(groups, names, lengths),
        len(names),
        list(accumulate(sum(map(bool, at)) for at in zip(*map(_numbers, lengths)))),
    )


# ---- hash ----


def _plan_hashes(registration: Registration, given: Arguments) -> Request:
    for name in ("slot_mapping", "hashes", "offsets"):
        if getattr(given, name) is None:
            raise invalid_argument(
                f"{name} is missing; blocks by hash need slot_mapping, hashes and offsets"
            )
    group = _only_group(registration, "hashes with slot_mapping")
    names = _hash_list(given.hashes)
    slots = _plan.int64s(given.slot_mapping, "slot_mapping")
    counts = _plan.int64s(given.offsets, "offsets")
    if len(counts) != 8 * len(names):
        raise invalid_argument(
            f"offsets has {len(counts) // 8} entries and hashes {len(names)}; give the number of "
            "tokens of each block"
        )
    size = group.pages.block_size
    wrong, tokens = _plan.total(counts, 1, size)
    if wrong >= 0:
        raise invalid_argument(
            f"offsets[{wrong}] is {_numbers(counts)[wrong]}; a block has 1 to {size} tokens, the "
            "registered block size"
        )
    if tokens != len(slots) // 8:
        raise invalid_argument(
            f"sum(offsets) is {tokens} and slot_mapping has {len(slots) // 8} entries; they must "
            "be equal: a slot for each token"
        )
    digests = group.hashed.digests(names, counts)
    columns = _plan.plan_slots(group.pages, slots, counts, 0, "slot_mapping")
    return Request(digests, Spans.from_columns(*columns, registration), len(names))


# ---- token ----


def _plan_tokens(registration: Registration, given: Arguments) -> Request:
    for name in ("slot_mapping", "token_ids", "mask"):
        if getattr(given, name) is None:
            raise invalid_argument(
                f"{name} is missing; blocks by token need slot_mapping, token_ids and mask"
            )
    group = _only_group(registration, "token_ids")
    tokens = _plan.int64s(given.token_ids, "token_ids")
    slots = _plan.int64s(given.slot_mapping, "slot_mapping")
    mask = _plan.int64s(given.mask, "mask", True)
    if not tokens:
        raise invalid_argument("token_ids is empty; give at least one token")
    for name, column in (("slot_mapping", slots), ("mask", mask)):
        if len(column) != len(tokens):
            raise invalid_argument(
                f"{name} has {len(column) // 8} entries and token_ids {len(tokens) // 8}; they "
                "must be equal"
            )
    skipped, wrong = _plan.leading_zeros(mask)
    if wrong >= 0:
        raise invalid_argument(
            f"mask[{wrong}] is {_numbers(mask)[wrong]} behind {skipped} zeros; it must be zeros, "
            "then ones"
        )
    count, size = len(tokens) // 8, group.pages.block_size
    # A block that the mask cuts is moved as a whole: what is skipped there is the same anyway.
    first = skipped // size if skipped < count else -(-count // size)
    names = chain_hashes(tokens, size)[first:]
    ends = [min(count, at + size) for at in range(first * size, count, size)]
    starts = [first * size, *ends[:-1]]
    counts = array.array("q", [end - at for at, end in zip(starts, ends)]).tobytes()
    columns = _plan.plan_slots(group.pages, slots, counts, min(first * size, count), "slot_mapping")
    return Request(
        group.tokened.digests(names, counts),
        Spans.from_columns(*columns, registration),
        count - skipped,
        worth=[end - skipped for end in ends],
    )


# ---- chunk_descs ----


def _plan_chunks(registration: Registration, given: Arguments) -> Request:
    if given.hashes is None:
        raise invalid_argument("hashes is missing; chunk_descs need the hash of each chunk")
    groups = registration.groups
    names = _hash_list(given.hashes)
    starts, lengths = _chunk_columns(groups, given.chunk_descs, len(names))
    pieces, first, ends = _plan.plan_ranges([group.pages for group in groups], starts, lengths)
    return Request(
        _chunk_digests(groups, names, lengths),
        Spans.from_columns(pieces, first, registration),
        len(names),
        ends=_numbers(ends),
    )


def _chunk_columns(
    groups: Sequence[LayerGroup], chunk_descs: object, chunks: int
) -> tuple[list[bytes], list[bytes]]:
    """Return start slots and lengths: a column of int64 for each group."""
    outer = _elements("chunk_descs", chunk_descs, "a list for each layer group")
    if len(outer) != len(groups):
        raise invalid_argument(
            f"chunk_descs has {len(outer)} entries; give one for each layer group, there are "
            f"{len(groups)}"
        )
    starts: list[bytes] = []
    lengths: list[bytes] = []
    for g, inner in enumerate(outer):
        name = f"chunk_descs[{g}]"
        chunk_list = _elements(name, inner, "a (start_slot, length) for each hash")
        if len(chunk_list) != chunks:
            raise invalid_argument(
                f"{name} has {len(chunk_list)} entries and hashes {chunks}; they must be equal"
            )
        pairs = [_pair(name, index, chunk) for index, chunk in enumerate(chunk_list)]
        starts.append(_plan.int64s([pair[0] for pair in pairs], f"{name}[...].start_slot"))
        lengths.append(_plan.int64s([pair[1] for pair in pairs], f"{name}[...].length"))
        _check_ranges(name, groups[g].pages.slots, starts[-1], lengths[-1])
    return starts, lengths


def _check_ranges(name: str, slots: int, starts: bytes, lengths: bytes) -> None:
    for index, (start, length) in enumerate(zip(_numbers(starts), _numbers(lengths))):
        if length == 0:  # this group does not keep the chunk, so nobody looks at its start
            continue
        if length < 0:
            raise invalid_argument(f"{name}[{index}] has length {length}; it must be 0 or more")
        if start < 0 or start + length > slots:
            raise invalid_argument(
                f"{name}[{index}] is slots {start} to {start + length - 1}; the registered blocks "
                f"have slots 0 to {slots - 1}"
            )


def _pair(name: str, index: int, chunk: Any) -> tuple[object, object]:
    if isinstance(chunk, (list, tuple)):
        if len(chunk) == 2:
            return chunk[0], chunk[1]
    else:
        try:
            if isinstance(chunk, Mapping):
                return chunk["start_slot"], chunk["length"]
            return chunk.start_slot, chunk.length
        except Exception:
            pass  # the text below is what there is to say
    raise invalid_argument(
        f"{name}[{index}] is {shown(chunk)}; give (start_slot, length), or a mapping or an object "
        "with these names"
    )


def _chunk_digests(
    groups: Sequence[LayerGroup], names: Sequence[object], lengths: Sequence[bytes]
) -> bytes:
    columns = [
        group.hashed.digests(names, _partial(column, group.pages.block_size))
        for group, column in zip(groups, lengths)
    ]
    if all(0 not in _numbers(column) for column in lengths):
        return _interleaved(columns)
    kept = [_numbers(column) for column in lengths]
    return b"".join(
        columns[g][DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)]
        for i in range(len(names))
        for g in range(len(columns))
        if kept[g][i]
    )


def _partial(lengths: bytes, block_size: int) -> bytes:
    """Return lengths with every whole number of blocks as one block.

    `exists` knows no lengths, so chunks of whole blocks must have the name that it asks for; should
    the same hash ever come with another number of them, the load misses by its length.
    """
    numbers = _numbers(lengths)
    if all(number == block_size for number in numbers):
        return lengths
    return array.array("q", [n if n % block_size else block_size for n in numbers]).tobytes()


# ---- common ----


def _interleaved(columns: Sequence[bytes]) -> bytes:
    """Return digests chunk after chunk, within a chunk group after group."""
    if len(columns) == 1:
        return columns[0]
    size = DIGEST_BYTES
    return b"".join(
        column[at : at + size] for at in range(0, len(columns[0]), size) for column in columns
    )


def _numbers(column: bytes) -> memoryview:
    return memoryview(column).cast("q")


def _hash_list(hashes: object) -> Sequence[object]:
    names = tuple(_plan.sequence(hashes, "hashes"))  # private: a list may change meanwhile
    if not names:
        raise invalid_argument("hashes is empty; give at least one hash")
    return names


def _elements(name: str, value: object, wanted: str) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        with contextlib.suppress(Exception):
            value = value.tolist()  # type: ignore[attr-defined]  # arrays and tensors
    if not isinstance(value, (list, tuple)):
        raise invalid_argument(f"{name} is of type {type(value).__name__}; give {wanted}")
    return value


def _only_group(registration: Registration, what: str) -> LayerGroup:
    if len(registration.groups) != 1:
        raise invalid_argument(
            f"{what} cannot name blocks of {len(registration.groups)} layer groups, each of which "
            "has slots of its own; give hashes and chunk_descs"
        )
    return registration.groups[0]


def _refuse(given: Arguments, mode: str, *others: str) -> None:
    for name in others:
        if getattr(given, name) is not None:
            raise invalid_argument(
                f"{mode} and {name} are given; they belong to different ways to name blocks, give "
                "one of them"
            )
