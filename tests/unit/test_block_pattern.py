from __future__ import annotations

import pytest

from ems.testing.workload import PAGE_BYTES, BlockPattern

NBYTES = 5 * PAGE_BYTES + 100


def made(pattern: BlockPattern, block: int) -> memoryview:
    view = memoryview(bytearray(pattern.nbytes))
    pattern.fill(block, view)
    return view


@pytest.mark.parametrize("nbytes", [16, 17, 100, 4096, 4100, 4112, NBYTES, 1 << 20])
@pytest.mark.parametrize("block", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_what_was_made_matches_and_nothing_else(nbytes: int, block: int) -> None:
    pattern = BlockPattern(nbytes)
    view = made(pattern, block)
    assert pattern.matches(block, view)
    assert not pattern.matches(block + 1, view)
    assert not BlockPattern(nbytes, salt=1).matches(block, view)
    assert not pattern.matches(block, view[1:])
    for place in {0, nbytes // 2, nbytes - 1}:
        view[place] ^= 1
        assert not pattern.matches(block, view)
        view[place] ^= 1
    assert pattern.matches(block, view)


def test_every_page_of_every_block_is_unique() -> None:
    pattern = BlockPattern(64 * PAGE_BYTES)
    pages = set()
    for block in range(50):
        view = made(pattern, block)
        pages.update(bytes(view[i : i + PAGE_BYTES]) for i in range(0, view.nbytes, PAGE_BYTES))
    assert len(pages) == 50 * 64


def test_a_torn_block_is_found() -> None:
    pattern = BlockPattern(NBYTES)
    one, other = made(pattern, 1), made(pattern, 2)
    for cut in (1, 64, PAGE_BYTES, NBYTES - 64):
        torn = memoryview(bytearray(bytes(one[:cut]) + bytes(other[cut:])))
        assert not pattern.matches(1, torn)
        assert not pattern.matches(2, torn)


def test_the_explanation_names_place_and_owner() -> None:
    pattern = BlockPattern(NBYTES)
    view = made(pattern, 7)
    assert pattern.explain(7, view) == "all bytes are right"
    view[PAGE_BYTES : 2 * PAGE_BYTES] = made(pattern, 9)[2 * PAGE_BYTES : 3 * PAGE_BYTES]
    text = pattern.explain(7, view)
    assert "first at 4096" in text
    assert "says hash 0x9, page 2" in text


def test_a_block_too_small_for_a_stamp_is_refused() -> None:
    with pytest.raises(ValueError, match="nbytes is 15"):
        BlockPattern(15)
