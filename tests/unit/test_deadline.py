from __future__ import annotations

import time

import pytest

from ems.common.deadline import Deadline, DeadlineExpired


def test_a_deadline_ahead() -> None:
    before = time.monotonic_ns()
    deadline = Deadline.after_ms(60_000)
    assert deadline.at_ns >= before + 60_000_000_000
    assert not deadline.expired
    deadline.check()
    assert 59 < deadline.remaining_s() <= 60
    assert 59_000 < deadline.remaining_ms() <= 60_000


def test_a_deadline_that_passed() -> None:
    deadline = Deadline(time.monotonic_ns() - 1)
    assert deadline.expired
    assert deadline.remaining_s() == deadline.remaining_ms() == 0
    with pytest.raises(DeadlineExpired):
        deadline.check()
