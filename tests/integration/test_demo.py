from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ems.testing.child import child_environment, python_command

TOY = ["--requests", "200", "--block-bytes", "16KiB", "--capacity", "8MiB"]


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        python_command("ems", *arguments),
        capture_output=True,
        text=True,
        env=child_environment(),
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def test_the_demo_as_data() -> None:
    report: dict[str, Any] = json.loads(run("demo", *TOY, "--json").stdout)
    assert report["mismatches"] == 0
    assert report["mismatch_examples"] == []
    assert report["requests"] == 200
    assert report["processes"] == 2
    assert report["load"]["blocks_done"] > 0
    assert report["load"]["nbytes"] == report["load"]["blocks_done"] * 16384
    assert report["save"]["blocks_done"] > 0
    assert report["evictions"] > 0  # 8 MiB hold much less than all of them
    assert 0 < report["hit_tokens"] < report["prompt_tokens"]
    assert report["hit_ratio"] == report["hit_tokens"] / report["prompt_tokens"]
    assert report["prefill_tokens_avoided"] == report["hit_tokens"]
    assert report["memcpy_gb_per_s"] > 0
    latency = report["load"]["latency"]
    assert 0 < latency["p50_ms"] <= latency["p90_ms"] <= latency["p99_ms"] <= latency["max_ms"]


def test_the_demo_for_people() -> None:
    done = run("demo", *TOY, "--processes", "1")
    assert "\nmismatches       0 of " in done.stdout
    assert "hit ratio" in done.stdout
    assert "Try next:" in done.stdout
    assert done.stderr == ""


def test_one_process_in_order_hits_what_the_prefix_rule_says() -> None:
    from ems.bench.conversations import make_conversations

    workload = make_conversations(40)
    report = json.loads(
        run(
            "demo", "--requests", "40", "--block-bytes", "4KiB", "--capacity", "64MiB",
            "--processes", "1", "--json",
        ).stdout
    )  # fmt: skip
    stored: set[int] = set()
    hits = 0
    for request in workload.requests:
        for block in request.hashes:
            if block not in stored:
                break
            hits += 1
        stored.update(request.hashes)
    assert report["evictions"] == 0
    assert report["load"]["blocks_done"] == hits
    assert report["hit_tokens"] == hits * workload.block_tokens


def test_a_wrong_byte_is_found_and_decides_the_exit_code(tmp_path: Path) -> None:
    # A worker whose loads deliver one wrong byte: what the comparison is there for.
    (tmp_path / "sitecustomize.py").write_text(
        """
import ctypes
from ems import ContextCaching

right = ContextCaching.load

def wrong(self, option, keys, values):
    result = right(self, option, keys, values)
    if result.success:
        ctypes.memset(values[result.success - 1][0].data_ptr + 8191, 0, 1)
    return result

ContextCaching.load = wrong
"""
    )
    environment = child_environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    done = subprocess.run(
        python_command("ems", "demo", *TOY),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 1
    assert "of 16384 bytes differ" in done.stdout


@pytest.mark.parametrize("moment", ["pool", "workers"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_the_demo_nothing_is_left(how: signal.Signals, moment: str) -> None:
    with subprocess.Popen(
        python_command("ems", "demo", "--requests", "100000", "--capacity", "16MiB"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(),
        start_new_session=True,
    ) as demo:
        children = _wait_for_children(demo.pid, b"guard.py" if moment == "pool" else b"worker")
        demo.send_signal(how)
        demo.communicate(timeout=30)
    assert demo.returncode == (1 if how == signal.SIGINT else -how)
    for pid in children:
        _wait_for_end(pid)
    for command in children.values():
        if command[-2].endswith(b"guard.py"):
            assert not Path(os.fsdecode(command[-1])).exists()


def _wait_for_children(pid: int, word: bytes) -> dict[int, list[bytes]]:
    """Wait until the demo has a child with the word in its command; return all and their words."""
    pidfd = os.pidfd_open(pid)
    try:
        while True:
            found: dict[int, list[bytes]] = {}
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{child}/cmdline").read_bytes()
                    found[int(child)] = command.rstrip(b"\0").split(b"\0")
            if any(word in part for command in found.values() for part in command):
                return found
            assert not select.select([pidfd], [], [], 0.01)[0], "the demo ended"
    finally:
        os.close(pidfd)


def _wait_for_end(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], 20)[0], f"process {pid} is still there"
    finally:
        os.close(pidfd)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--capacity", "5x"], "5x"),
        (["--requests", "0"], "--requests"),
        (["--capacity", "4096TiB"], "its log"),
    ],
)
def test_a_wrong_option_is_told(arguments: list[str], text: str) -> None:
    done = run("demo", *arguments, code=2)
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_the_copy_benchmark_at_toy_size() -> None:
    toy = ["--blocks", "4", "--block-bytes", "64KiB", "--rotate", "2MiB", "--rounds", "3"]
    (report,) = json.loads(run("bench", "copy", *toy, "--json").stdout)["reports"]
    assert report["mismatches"] == 0
    assert [one["name"] for one in report["contenders"]] == ["memcpy", "load", "save"]
    assert all(one["median_ms"] >= one["best_ms"] > 0 for one in report["contenders"])
    assert "x memcpy" in run("bench", "copy", *toy).stdout
    assert "give room for 4" in run("bench", "copy", "--rotate", "1MiB", code=2).stderr
