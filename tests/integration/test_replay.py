from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ems.bench.conversations import make_conversations
from ems.bench.replay import ReplaySettings, measure_replay
from ems.testing import LocalPool
from ems.testing.child import child_environment, python_command

SMALL = ["--block-bytes", "8KiB"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A made-up trace: four chats of five requests, each the one before and a block more."""
    path = tmp_path / "trace.jsonl"
    lines = []
    chain: list[int] = []
    for number in range(20):
        if number % 5 == 0:
            chain = [0, 1000 * number + 1]
        chain = [*chain, 1000 * number + 2]
        lines.append(
            {
                "timestamp": number,
                "input_length": 512 * len(chain) - 100,
                "output_length": 7,
                "hash_ids": chain,
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def replay(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        python_command("ems", "replay", *arguments),
        capture_output=True,
        text=True,
        env=child_environment(),
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def report_of(*arguments: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(replay(*arguments, "--json").stdout)
    return report


def test_the_hits_are_those_of_the_order_of_the_trace(trace: Path) -> None:
    report = report_of(str(trace), "--capacity", "16MiB", "--processes", "1", *SMALL)
    # The first request of a chat finds block 0 (the very first one nothing), the others all but
    # their last block.
    asked = [3 + 4 + 5 + 6 + 7] * 4
    found = [0 + 3 + 4 + 5 + 6] + [1 + 3 + 4 + 5 + 6] * 3
    assert report["mismatches"] == 0
    assert report["load"]["blocks_asked"] == sum(asked)
    assert report["load"]["blocks_done"] == sum(found)
    assert report["save"]["blocks_done"] == sum(asked) - sum(found)
    assert report["hit_tokens"] == 512 * sum(found)
    assert report["prompt_tokens"] == 512 * sum(asked) - 20 * 100


def test_two_processes_share_the_pool(trace: Path) -> None:
    report = report_of(str(trace), "--capacity", "16MiB", *SMALL)
    assert report["mismatches"] == 0
    assert report["requests"] == 20
    assert report["processes"] == 2


def test_the_limit_and_a_server_of_ones_own(trace: Path) -> None:
    with LocalPool("16MiB") as pool:
        first = report_of(str(trace), "--root", pool.root, "--limit", "5", *SMALL)
        again = report_of(str(trace), "--root", pool.root, "--limit", "5", *SMALL)
    assert first["requests"] == again["requests"] == 5
    assert again["load"]["blocks_done"] == again["load"]["blocks_asked"]
    assert again["save"]["calls"] == 0
    assert again["save"]["latency"] is None


def test_the_report_for_people(trace: Path) -> None:
    text = replay(str(trace), "--capacity", "16MiB", *SMALL).stdout
    assert "trace.jsonl: 20 requests" in text
    assert "\nmismatches       0 of " in text


def test_a_bad_trace_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"input_length": 3, "hash_ids": [1]}\nnonsense\n')
    assert "line 2 is no JSON" in replay(str(bad), code=2).stderr
    assert "cannot read the trace" in replay(str(tmp_path / "absent"), code=2).stderr


def test_options_that_exclude_each_other(trace: Path, tmp_path: Path) -> None:
    both = replay(str(trace), "--root", str(tmp_path), "--capacity", "1GiB", code=2)
    assert "give one of them" in both.stderr
    nobody = replay(str(trace), "--root", str(tmp_path), code=2)
    assert "nobody serves there" in nobody.stderr


# ---- simulation ----------------------------------------------------------------------------------


def test_a_simulation_compares_policies(trace: Path) -> None:
    outcomes = json.loads(replay(str(trace), "--simulate", "--share", "50", "--json").stdout)
    by_policy = {outcome["policy"]: outcome for outcome in outcomes}
    assert {"pool", "lru", "belady"} <= by_policy.keys()
    assert all(outcome["asked_blocks"] == 100 for outcome in outcomes)
    assert all(outcome["capacity_blocks"] == 12 for outcome in outcomes)
    assert by_policy["belady"]["found_blocks"] >= by_policy["pool"]["found_blocks"] > 0


def test_a_simulation_for_people(trace: Path) -> None:
    done = replay(str(trace), "--simulate", "--policy", "pool", "--share", "10", "--share", "100")
    assert "pool" in done.stdout
    assert "100 %" in done.stdout
    alone = replay(str(trace), "--policy", "pool", code=2)
    assert "belong to --simulate" in alone.stderr


# ---- the pool against its simulation -------------------------------------------------------------


def check_real_against_simulated(trace: Path | str, requests: int, share: float) -> None:
    """Real processes, files and recency words: within half a per cent of what was simulated."""
    report = measure_replay(ReplaySettings(str(trace), requests, 4096, share))
    assert report.mismatches == 0
    assert report.report.evictions > 1000
    assert report.report.hit_ratio == pytest.approx(report.simulated, abs=0.005)


@pytest.mark.parametrize("share", [0.10, 0.25])
def test_a_real_pool_finds_what_the_simulation_says(tmp_path: Path, share: float) -> None:
    """An hour of 200 chats squeezed into seconds; twelve runs lay within .004 of the simulation."""
    path = tmp_path / "chats.jsonl"
    with path.open("w") as file:
        for number, request in enumerate(make_conversations(4000, active=200).requests):
            line = {
                "timestamp": 1000 * number,
                "input_length": 512 * len(request.hashes),
                "output_length": 1,
                "hash_ids": request.hashes,
            }
            file.write(json.dumps(line) + "\n")
    check_real_against_simulated(path, 4000, share)


@pytest.mark.skipif("EMS_TRACE" not in os.environ, reason="EMS_TRACE names no trace file")
def test_a_real_pool_finds_what_the_simulation_says_of_a_real_trace() -> None:
    """The first half of Mooncake's conversation trace; a shorter part differs by chance alone."""
    check_real_against_simulated(os.environ["EMS_TRACE"], 6000, 0.10)
