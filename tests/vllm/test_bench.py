"""`ems bench vllm` at toy size, so that it cannot rot. Its figures mean nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ems.testing.child import child_environment

TOY = ["--tokens", "129", "--rounds", "1", "--no-peers", "--json"]


@pytest.mark.skipif(not os.environ.get("EMS_VLLM_LONG"), reason="set EMS_VLLM_LONG=1")
@pytest.mark.timeout(600)
def test_the_report_as_data() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ems", "bench", "vllm", *TOY],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {row["way"] for row in report["rows"] if row["connector"] == "EMS"} == {
        "cold, saving", "own cache", "same engine", "second engine", "restarted engine",
    }  # fmt: skip
    assert all(row["same"] for row in report["rows"])
    assert all(row["cached"] == 128 for row in report["rows"] if "cold" not in row["way"])
    assert set(report["decode_ms"]) == {"no connector", "EMS"}
