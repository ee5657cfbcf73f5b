from __future__ import annotations

from ems.testing.verify_cost import measure_verify


def test_a_toy_run() -> None:
    cost = measure_verify(4, blocks=4, block_bytes=64 << 10)
    assert (cost.pairs, cost.blocks) == (4, 4)
    assert min(cost.compared, cost.not_compared, cost.ratio) > 0
