"""The V1 benchmark at toy size, so that it cannot rot. Its figures mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ems.testing.child import child_environment

TOY = ["--blocks", "2", "--rotate", "4MiB", "--rounds", "2"]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_v1.py"


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("model", "pieces", "block_bytes"), [("gqa", 64, 2 << 20)])
def test_the_report_as_data(model: str, pieces: int, block_bytes: int) -> None:
    (report,) = json.loads(run("--model", model, *TOY, "--json"))["reports"]
    assert report["mismatches"] == 0
    assert 0 < report["outside"] < 1
    for name in ("engine_ms", "load_ms", "plan_us", "exists_us"):
        assert report[name] > 0
    load = report["figures"][0]
    assert f"2 blocks of {pieces} pieces" in load["name"]
    assert load["measured"] == pytest.approx(2 * block_bytes / report["load_ms"] / 1e6)


def test_the_report_for_people() -> None:
    text = run("--model", "mla", *TOY)
    assert "2 x 8.58 MiB a call" in text
    assert "2 blocks of 122 pieces, 61 layers MLA" in text
    assert "mismatches 0" in text
