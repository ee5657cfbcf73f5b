"""`ems chaos`, as long as a test may take; `CHAOS_SECONDS` makes it longer."""

from __future__ import annotations

import json
import os

import pytest
from fix_serve import run_ems

from ems.testing.chaos import ChaosPlan, run_chaos

SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))


@pytest.mark.timeout(SECONDS + 120)
def test_nothing_is_wrong_lost_or_stuck() -> None:
    report = run_chaos(ChaosPlan(seconds=SECONDS, seed=7, clients=4, pause_s=0.3))
    assert report.wrong == 0, report
    assert sum(report.faults.values()) > SECONDS / 2
    assert min(report.faults.values()) > SECONDS / 30, report.faults
    assert report.tally.loaded > 100
    assert report.tally.outages > 0
    assert report.evictions > 1000


def test_the_command_prints_what_it_did() -> None:
    done = run_ems("chaos", "--seconds", "2", "--seed", "3", "--clients", "2", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["wrong"]) == (0, 0), done.stdout + done.stderr
    assert set(report) >= {"tally", "faults", "evictions", "mismatches", "hangs", "leaks"}
