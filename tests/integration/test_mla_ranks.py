"""Under MLA every rank is handed the whole list, and together they write it once."""

from __future__ import annotations

import pytest
from fix_pool import status_of
from mla_ranks import BLOCK_BYTES, save_together

from ems.testing import LocalPool

BLOCKS = 48


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_share_the_work(local_pool: LocalPool, ranks: int) -> None:
    answers = save_together(local_pool.root, ranks, BLOCKS)
    assert [answer["saved"] for answer in answers] == [BLOCKS] * ranks
    assert [answer["loaded"] for answer in answers] == [BLOCKS] * ranks
    assert all(answer["right"] for answer in answers)
    status = status_of(local_pool)
    assert status.entries == BLOCKS
    assert status.reserved == 0
    copied = [answer["stats"]["save_bytes"] for answer in answers]
    # About one list: a portion twice, here or there, when a rank waited long for a processor.
    assert BLOCKS * BLOCK_BYTES <= sum(copied) <= 1.5 * BLOCKS * BLOCK_BYTES
    assert sum(1 for nbytes in copied if nbytes) >= 2, "one rank did it all"
