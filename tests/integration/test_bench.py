"""The benchmarks at toy size, so that they cannot rot. Their figures mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ems.bench.figure import at_least, at_most, percentile, print_figures, take_turns
from ems.testing.child import child_environment, python_command

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
# One of each sentence of what is wanted; of shapes and counts that the toy size has.
WANTED = (
    "load 128 x 64 KiB",
    "save 128 x 64 KiB",
    "first load of a fresh client",
    "first save of a fresh client",
    "sync load of one key of 64 KiB",
    "load 4 x 64 KiB, one thread",
    "load 4 x 256 KiB, two threads, 2 MiB pages",
    "messages in 100 local loads",
    "sync save of one key of 64 KiB",
    "awaited load of one key of 64 KiB",
    "lag of the event loop, p99, 32 loads outstanding",
    "lag of the event loop, p99, 1,000 loads outstanding",
    "exists, a key of 128, 4,000 entries",
    "load of 4 KiB, a key of 128, 4,000 entries",
    "plan 256 keys",
    "2 processes reading, together",
    "server, 2 processes reading",
    "keys reserved and committed by 2 writers, 128 a call",
    "server step: reserve 512 keys that evict 1 each, 4,000 entries",
    "memory of a slot",
    "resident memory of a client after 20 saves and loads",
    "load 2 blocks of 64 pieces, 32 layers GQA",
    "replay of 50 requests: wrong blocks",
    "load 1 x 64 KiB, beside the best peer",
)


def run(*command: str) -> str:
    done = subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(180)
def test_every_wanted_figure_is_measured_and_stands_in_the_document(tmp_path: Path) -> None:
    found, document = tmp_path / "run.json", tmp_path / "docs" / "performance.md"
    run(*python_command("ems", "bench", "all", "--quick", "--json", str(found)))
    report = json.loads(found.read_text())
    figures = {figure["name"]: figure for figure in report["figures"]}
    # Pages of 2 MiB are the system's to give.
    assert {name.replace("4 KiB pages", "2 MiB pages") for name in figures} >= set(WANTED)
    for figure in figures.values():
        better = figure["judged"] >= figure["limit"]
        worse = figure["judged"] <= figure["limit"]
        assert figure["reached"] is (better if figure["rising"] else worse)
        assert bool(figure["roof_name"]) is (figure["roof"] > 0)
    # What no noise can change.
    assert figures["messages in 100 local loads"]["reached"]
    assert figures["memory of a slot"]["reached"]
    assert figures["replay of 50 requests: wrong blocks"]["reached"]
    assert report["mismatches"] == 0
    assert report["machine"]["cores"] >= 1

    document.parent.mkdir()
    paths = run(*python_command("ems", "bench", "report", str(found), "--out", str(document)))
    text = document.read_text()
    for name in figures:
        assert f"| {name} |" in text
    assert report["machine"]["cpu"] in text and report["begun"][:10] in text
    for path in paths.splitlines()[1:]:
        assert Path(path).read_bytes().startswith(b"\x89PNG")
        assert f"](plots/{Path(path).name})" in text


@pytest.mark.parametrize(
    ("script", "options", "line"),
    [
        (
            "bench_copy.py",
            [
                "--blocks",
                "2",
                "--block-bytes",
                "64KiB",
                "--rotate",
                "1MiB",
                "--rounds",
                "2",
                "--fresh",
                "0",
            ],
            "mismatches 0",
        ),
    ],
)
def test_scripts_print_tables(script: str, options: list[str], line: str) -> None:
    assert line in run(sys.executable, str(SCRIPTS / script), *options)


def test_a_figure_is_judged_by_its_limit() -> None:
    rising = at_least("load", 20.0, "GB/s", 1.4, roof=("memcpy", 10.0), judged=("x memcpy", 2.0))
    falling = at_most("step", 12.0, "ms", 10)
    assert rising.reached and not falling.reached
    lines: list[str] = []
    print_figures([rising, falling], lines.append)
    assert " ".join(lines[1].split()) == "load 20 GB/s memcpy 10 2 x memcpy >= 1.4 reached"
    assert " ".join(lines[2].split()) == "step 12 ms 12 ms <= 10 NOT reached"


def test_contenders_take_turns() -> None:
    calls: list[str] = []
    times = take_turns(
        {name: lambda number, name=name: calls.append(f"{name}{number}") for name in "ab"},
        3,
        prepare=lambda name: calls.append(f"prepare {name}"),
    )
    assert [call for call in calls if " " not in call] == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert calls[:2] == ["prepare a", "a0"]
    assert [len(one) for one in times.values()] == [3, 3]
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
