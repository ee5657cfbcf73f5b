from __future__ import annotations

from ems.common.metrics import PAGE_COUNTERS, Count, as_dict, miss_counter


def test_every_counter_has_its_own_place_on_the_page() -> None:
    assert len({int(count) for count in Count}) == len(Count.__members__)
    assert max(Count) < PAGE_COUNTERS


def test_numbers_that_other_versions_know() -> None:
    assert (Count.LOAD_CALLS, Count.MISS_ABSENT, Count.SAVE_CALLS) == (0, 16, 32)
    assert (Count.EXISTS_CALLS, Count.MESSAGES) == (56, 64)


def test_a_miss_is_counted_under_the_reason_of_the_reader() -> None:
    assert [miss_counter(reason) for reason in (1, 2, 3, 4)] == [
        Count.MISS_ABSENT,
        Count.MISS_CHANGING,
        Count.MISS_LENGTH,
        Count.MISS_RETIRED,
    ]


def test_a_page_as_names_and_numbers() -> None:
    page = list(range(PAGE_COUNTERS))
    assert as_dict(page)["save_calls"] == Count.SAVE_CALLS
    assert as_dict(page[:10])["save_calls"] == 0
