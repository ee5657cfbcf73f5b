"""`ems bench vllm` at toy size, so that it cannot rot. Its figures mean nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ems.testing.child import child_environment

TOY = ["--tokens", "129", "--prompts", "1", "--rounds", "1", "--misses", "1", "--json"]


@pytest.mark.skipif(not os.environ.get("EMS_VLLM_LONG"), reason="set EMS_VLLM_LONG=1")
@pytest.mark.timeout(600)
def test_the_report_as_data(tmp_path: Path) -> None:
    plot = tmp_path / "first-tokens.svg"
    done = subprocess.run(
        [sys.executable, "-m", "ems", "bench", "vllm", *TOY, "--plot", str(plot)],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    ways = [(row["connector"], row["way"]) for row in report["rows"]]
    assert ways == [
        ("no connector", "cold"),
        ("no connector", "own cache"),
        ("EMS", "cold"),
        ("EMS", "same engine"),
        ("EMS", "second engine"),
        ("EMS", "restarted engine"),
        ("ExampleConnector", "cold"),
        ("ExampleConnector", "same engine"),
        ("ExampleConnector", "restarted engine"),
        ("OffloadingConnector", "cold"),
        ("OffloadingConnector", "same engine"),
    ]
    assert all(row["same"] for row in report["rows"])
    for row in report["rows"]:
        # What vLLM's example kept of a prompt this short is not a whole block.
        if row["way"] != "cold" and row["connector"] != "ExampleConnector":
            assert row["cached"] == 128
    assert len(report["figures"]) == 5 and report["machine"]["cores"] >= 1
    assert plot.stat().st_size > 0
