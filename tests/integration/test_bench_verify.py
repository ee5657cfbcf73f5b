from __future__ import annotations

from ems.bench.verify import VerifySettings, measure_verify


def test_a_toy_run() -> None:
    report = measure_verify(VerifySettings(4, 64 << 10, pairs=4))
    assert min(report.compared, report.not_compared, report.ratio) > 0
    assert report.figures == []  # nothing is wanted of blocks of this size
