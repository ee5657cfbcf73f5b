"""EMS beside its peers at toy size, with those that need no installation."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from ems import EmsErrorCode, EmsException
from ems.bench.comparison import Comparison, ComparisonSettings, Shape, Timing, compare
from ems.bench.machine import read_machine
from ems.bench.peers.catalogue import PEERS, Peer
from ems.testing.child import child_environment, python_command

DICT = "shared_memory dict"
SMALL = ComparisonSettings(
    shapes=(Shape(1, 64 << 10), Shape(4, 256 << 10)),
    names=(DICT,),
    rotate_bytes=4 << 20,
    seconds=0,
    turns=3,
)


def test_contenders_move_the_same_batches_and_every_byte_is_right() -> None:
    told: list[str] = []
    report = compare(SMALL, told.append)
    assert report.mismatches == 0 and not report.skipped
    assert {(one.contender, one.operation, one.shape) for one in report.timings} == {
        (name, operation, shape)
        for name in ("EMS", DICT)
        for operation in ("save", "load")
        for shape in SMALL.shapes
    }
    # Each makes the same number of calls, in turns.
    assert {one.calls for one in report.timings if one.keys == 1} == {3 * 32}
    assert {one.calls for one in report.timings if one.keys == 4} == {3 * 2}
    assert all(0 < one.median_us <= one.p99_us for one in report.timings)
    assert [name for name, _ in report.versions] == ["EMS", DICT]
    assert any("64 KiB: preparing" in text for text in told)


def test_who_cannot_be_started_is_skipped_with_a_reason(tmp_path: Path) -> None:
    broken = tmp_path / "lmcache" / "bin" / "python"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    broken.chmod(0o755)
    report = compare(
        ComparisonSettings(
            shapes=(Shape(2, 64 << 10), Shape(1 << 20, 8 << 20)),
            names=("LMCache local CPU", "Mooncake own segment", DICT),
            folder=str(tmp_path),
            rotate_bytes=1 << 20,
            seconds=0,
            turns=1,
        )
    )
    reasons = dict(report.skipped)
    assert "exit code 3: no such module" in reasons["LMCache local CPU"]
    assert "--install makes it" in reasons["Mooncake own segment"]
    assert "two contenders need" in reasons["1048576 x 8 MiB"]
    assert {one.contender for one in report.timings} == {"EMS", DICT}


def test_a_call_too_large_for_all_is_measured_beside_one_peer_at_a_time() -> None:
    told: list[str] = []
    large = Shape(8, 64 << 10)
    settings = dataclasses.replace(SMALL, shapes=(large, Shape(1, 64 << 10)), most_bytes=64 << 10)
    report = compare(settings, told.append)
    assert report.mismatches == 0 and not report.skipped
    assert [one.contender for one in report.timings if one.shape == large] == [
        *["EMS"] * 2,
        *[DICT] * 2,
    ]
    assert told.count("starting EMS") == 2


def test_a_program_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    valkey = next(peer for peer in PEERS if peer.name == "Valkey")
    assert valkey.missing(None) == "valkey-server is not on PATH (Debian: valkey-server)"
    assert "--peers DIR" in Peer("other", "redis_unix", environment="redis").missing(None)


def test_an_unknown_contender_is_refused() -> None:
    with pytest.raises(EmsException, match="no contender is called 'Memcached'") as refused:
        compare(ComparisonSettings(names=("Memcached",)))
    assert refused.value.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT


def test_ems_is_judged_beside_the_best_of_those_that_count() -> None:
    def timing(name: str, operation: str, us: float) -> Timing:
        return Timing(name, operation, 32, 2 << 20, 10, us, us, 64 * 1048.576 / us)

    report = Comparison(
        SMALL,
        (),
        (),
        (
            timing("EMS", "save", 10.0),
            timing("EMS", "load", 5.0),
            timing("LMCache local CPU", "save", 8.0),
            timing("LMCache local CPU", "load", 6.0),
            timing("Valkey", "save", 11.0),
            timing("Valkey", "load", 50.0),
        ),
        0,
        read_machine(),
    )
    save_shared, save_alone = report.figures[1:]
    load = report.figures[0]
    assert (load.roof_name, load.judged, load.limit) == ("LMCache local CPU", 1.2, 1.4)
    assert (save_shared.roof_name, save_shared.reached) == ("Valkey", True)
    assert (save_alone.roof_name, save_alone.reached) == ("LMCache local CPU", False)


def test_the_command_ends_all_that_it_started() -> None:
    command = python_command("ems", "bench", "peers", "--only", DICT, "--shape", "2x64KiB")
    command += ["--seconds", "0", "--turns", "1", "--json"]
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mismatches"] == 0
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "ems-bench" in name}
    bad = subprocess.run(
        [*command, "--shape", "2MiB"],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert bad.returncode == 2 and "32x2MiB" in bad.stderr
