"""The native planner against a model: every slot's bytes, in the order of the definition."""

from __future__ import annotations

import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems_native._copy import Spans
from ems_native._plan import (
    Pages,
    int64s,
    leading_zeros,
    plan_ranges,
    plan_slots,
    sequence,
    total,
)

Component = tuple  # (address, block_stride, token_bytes)


def column(numbers: Any) -> bytes:
    return array.array("q", numbers).tobytes()


def numbers_of(raw: bytes) -> list[int]:
    return memoryview(raw).cast("q").tolist()


@st.composite
def memories(draw: Any) -> tuple[int, int, list[tuple[int, int, int]]]:
    """Number of blocks, block size, components that do not overlap."""
    num_blocks, block_size = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    components = []
    address = 1000
    for _ in range(draw(st.integers(1, 4))):
        token_bytes = draw(st.integers(1, 4))
        stride = block_size * token_bytes + draw(st.sampled_from([0, 0, 3]))
        components.append((address, stride, token_bytes))
        address += num_blocks * stride + draw(st.sampled_from([0, 5]))
    return num_blocks, block_size, components


def addresses(memory: Any, slots: list[int]) -> list[int]:
    """The address of each byte of a value, by the definition."""
    _, block_size, components = memory
    return [
        address + slot // block_size * stride + slot % block_size * token_bytes + i
        for address, stride, token_bytes in components
        for slot in slots
        for i in range(token_bytes)
    ]


def planned(spans: Spans, key: int) -> list[int]:
    pieces = spans.pieces_of(key)
    for (first, nbytes), (second, _) in zip(pieces, pieces[1:]):
        assert first + nbytes != second, "neighbours that could be one piece"
    return [address + i for address, nbytes in pieces for i in range(nbytes)]


@given(memories(), st.data())
def test_slots(memory: Any, data: st.DataObject) -> None:
    num_blocks, block_size, components = memory
    slot = st.integers(0, num_blocks * block_size - 1)
    run = st.tuples(slot, st.integers(1, 8)).map(
        lambda one: list(range(one[0], min(one[0] + one[1], num_blocks * block_size)))
    )
    keys = data.draw(st.lists(st.one_of(run, st.lists(slot, min_size=1, max_size=6)), max_size=5))
    skipped = data.draw(st.integers(0, 2))
    slots = [-1] * skipped + [one for key in keys for one in key]
    columns = plan_slots(
        Pages(num_blocks, block_size, components),
        column(slots),
        column(map(len, keys)),
        skipped,
        "s",
    )
    spans = Spans.from_columns(*columns, None)
    assert spans.nkeys == len(keys)
    for index, key in enumerate(keys):
        assert planned(spans, index) == addresses(memory, key)
        assert spans.length_of(index) == len(addresses(memory, key))
    assert spans.nbytes == sum(len(addresses(memory, key)) for key in keys)


@given(st.lists(memories(), min_size=1, max_size=3), st.integers(0, 4), st.data())
def test_ranges_of_groups(groups: list[Any], chunks: int, data: st.DataObject) -> None:
    ranges: list[list[tuple[int, int]]] = []
    for num_blocks, block_size, _ in groups:
        slots = num_blocks * block_size
        start = st.integers(0, slots)
        one = start.flatmap(lambda s, n=slots: st.tuples(st.just(s), st.integers(0, n - s)))  # type: ignore[misc]
        ranges.append(data.draw(st.lists(one, min_size=chunks, max_size=chunks)))
    pieces, first, ends = plan_ranges(
        [Pages(*memory) for memory in groups],
        [column(start for start, _ in group) for group in ranges],
        [column(length for _, length in group) for group in ranges],
    )
    spans = Spans.from_columns(pieces, first, None)
    expected: list[list[int]] = []
    expected_ends = []
    for chunk in range(chunks):
        for memory, group in zip(groups, ranges):
            start, length = group[chunk]
            if length:
                expected.append(addresses(memory, list(range(start, start + length))))
        expected_ends.append(len(expected))
    assert [planned(spans, key) for key in range(spans.nkeys)] == expected
    assert numbers_of(ends) == expected_ends


def test_a_block_whose_components_follow_each_other_is_one_piece() -> None:
    # [blocks, 2, block_size, …]: what a stacked tensor gives.
    pages = Pages(8, 4, [(4096, 80, 10), (4096 + 40, 80, 10)])
    slots = column([8, 9, 10, 11, 0, 1, 2, 3])
    spans = Spans.from_columns(*plan_slots(pages, slots, column([4, 4]), 0, "s"), None)
    assert [spans.pieces_of(k) for k in (0, 1)] == [[(4096 + 160, 80)], [(4096, 80)]]


def test_memory_of_a_plan_is_used_again_only_when_nobody_has_it() -> None:
    slots = 20_000  # large enough to be kept
    pages = Pages(slots, 1, [(4096, 16, 8)])
    plans = []
    for step in (0, 1, 2):
        numbers = [(slot * 7 + step) % slots for slot in range(slots - 1000 * step)]
        taken = int64s(numbers, "s")
        pieces, first = plan_slots(pages, taken, column([1] * len(numbers)), 0, "s")
        plans.append((numbers, taken, pieces, first))
    for numbers, taken, pieces, _ in plans:
        assert numbers_of(taken) == numbers
        assert numbers_of(pieces)[::2] == [4096 + 16 * slot for slot in numbers]
    del plans, taken, pieces, first
    for numbers in ([5, 3] * 10_000, [9] * 15_000):
        taken = int64s(numbers, "s")
        assert numbers_of(taken) == numbers
        pieces, _ = plan_slots(pages, taken, column([1] * len(numbers)), 0, "s")
        assert numbers_of(pieces)[::2] == [4096 + 16 * slot for slot in numbers]
        del taken, pieces


@pytest.mark.parametrize(("slots", "index"), [([0, 12], 1), ([-1, 0], 0), ([5, -(2**63)], 1)])
def test_a_slot_outside_is_named(slots: list[int], index: int) -> None:
    pages = Pages(3, 4, [(4096, 40, 10)])
    with pytest.raises(Exception) as caught:
        plan_slots(pages, column(slots), column([2]), 0, "slot_mapping")
    assert f"slot_mapping[{index}] is {slots[index]}" in str(caught.value)
    assert "slots 0 to 11" in str(caught.value)


def test_columns_from_all_that_holds_numbers() -> None:
    expected = [0, 1, 127]
    sources: list[Any] = [expected, tuple(expected), array.array("q", expected)]
    sources += [array.array(code, expected) for code in "bBhHiIlLqQ"]
    sources += [memoryview(array.array("i", [0, 9, 1, 9, 127]))[::2]]
    for source in sources:
        assert numbers_of(int64s(source, "x")) == expected
    assert numbers_of(int64s(array.array("b", [-1, -128]), "x")) == [-1, -128]
    assert numbers_of(int64s(range(3), "x")) == [0, 1, 2]
    assert numbers_of(int64s([True, 0, 1], "mask", True)) == [1, 0, 1]
    assert numbers_of(int64s(memoryview(b"\1\0").cast("?"), "mask", True)) == [1, 0]

    class Tensor:
        def tolist(self) -> list[int]:
            return expected

    assert numbers_of(int64s(Tensor(), "x")) == expected
    assert sequence(Tensor(), "x") == expected


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (None, "x is None"),
        ("12", "x is of type str"),
        (b"12", "x is of type bytes"),
        (5, "x is of type int"),
        ({1: 2}, "x is of type dict"),
        ([1, 2.0], "x[1] is 2.0 of type float"),
        ([1, "2"], "x[1] is '2' of type str"),
        ([None], "x[0] is None"),
        ([0, True], "x[1] is True, a bool"),
        ([2**63], "x[0] has 64 bits"),
        ([-(2**63) - 1], "x[0] has 64 bits"),
        ([10**5000], "x[0] has 16610 bits"),
        ([[1]], "x[0] is of type list"),
        (array.array("d", [1.0]), "x[0] is 1.0 of type float"),
        (array.array("Q", [2**63]), "x[0] has 64 bits"),
        (memoryview(b"\1").cast("?"), "x[0] is True, a bool"),
    ],
)
def test_what_is_no_column_of_numbers(values: Any, text: str) -> None:
    with pytest.raises(Exception) as caught:
        int64s(values, "x")
    assert text in str(caught.value)


def test_sums_and_masks() -> None:
    assert total(column([1, 2, 3]), 1, 3) == (-1, 6)
    assert total(column([1, 4, 3]), 1, 3) == (1, 1)
    assert total(b"", 1, 3) == (-1, 0)
    assert leading_zeros(column([0, 0, 1])) == (2, -1)
    assert leading_zeros(column([1, 1])) == (0, -1)
    assert leading_zeros(column([0, 0])) == (2, -1)
    assert leading_zeros(column([0, 1, 0])) == (1, 2)
    assert leading_zeros(column([0, 2])) == (1, 1)


def test_misuse_by_our_own_code() -> None:
    for wrong in ((0, 1, [(1, 1, 1)]), (1, 1, []), (1, 1, [(0, 1, 1)]), (2**62, 4, [(1, 1, 1)])):
        with pytest.raises(ValueError):
            Pages(*wrong)
    pages = Pages(2, 2, [(4096, 2, 1)])
    with pytest.raises(ValueError, match="key 0 has 3 of 2"):
        plan_slots(pages, column([0, 1]), column([3]), 0, "s")
    with pytest.raises(ValueError, match="chunk 0 of group 0"):
        plan_ranges([pages], [column([3])], [column([2])])
    with pytest.raises(ValueError, match="do not fit"):
        Spans.from_columns(b"", column([0, 1]), None)
