from __future__ import annotations

import dataclasses
import pickle

import pytest

from ems import CcResult


def test_a_result_is_two_ints_and_readable() -> None:
    result = CcResult(success=3, total=5)
    assert str(result) == "3 of 5 keys"
    assert result.success / result.total == 0.6
    assert pickle.loads(pickle.dumps(result)) == result


def test_a_result_without_a_hit_is_truthy() -> None:
    assert CcResult(0, 5)


def test_a_result_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CcResult(0, 5).success = 5  # type: ignore[misc]
