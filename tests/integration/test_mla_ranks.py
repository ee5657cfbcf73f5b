"""Under MLA every rank is handed the whole list, and together they write it once."""

from __future__ import annotations

import pytest
from fix_pool import status_of
from mla_ranks import BLOCK_BYTES, save_together

from ems.testing import LocalPool

BLOCKS = 48


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_share_the_work(ranks: int) -> None:
    # On a busy machine one rank may have done it all before another has begun.
    assert any(ranks_that_copied(ranks) >= 2 for _ in range(3)), "one rank did it all"


def ranks_that_copied(ranks: int) -> int:
    with LocalPool(capacity="64MiB") as pool:
        answers = save_together(pool.root, ranks, BLOCKS)
        status = status_of(pool)
    assert [answer["saved"] for answer in answers] == [BLOCKS] * ranks
    assert [answer["loaded"] for answer in answers] == [BLOCKS] * ranks
    assert all(answer["right"] for answer in answers)
    assert status.entries == BLOCKS
    assert status.reserved == 0
    copied = [answer["stats"]["save_bytes"] for answer in answers]
    # About one list: a portion twice, here or there, when a rank waited long for a processor.
    assert BLOCKS * BLOCK_BYTES <= sum(copied) <= 1.5 * BLOCKS * BLOCK_BYTES
    return sum(1 for nbytes in copied if nbytes)
