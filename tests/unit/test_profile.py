from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from v1_bench import Cache, V1Bench, filled, whole

from ems import CcKvOption, EmsException
from ems.client.profile import Profiler


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "ems"


@pytest.fixture
def profiled(folder: Path) -> Iterator[V1Bench]:
    profiler = Profiler.from_environment({"ENABLE_CC_PROFILING": "1", "EMS_SDK_LOG": str(folder)})
    assert profiler is not None
    bench = V1Bench(profiler=profiler)
    yield bench
    bench.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.iterdir()
    assert file.name == f"cc_profiling.{os.getpid()}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_one_line_per_call(profiled: V1Bench, folder: Path) -> None:
    cc, cache = profiled.cc(), Cache()
    cc.register_kvcache(cache.tensors)
    given = filled(cache, [0, 1], [1, 2])
    cc.save(**given)
    cc.load(**given)
    cc.get_result(cc.async_save(**given))
    cc.get_result(cc.async_load(**whole(cache, [3, 4], [1, 9])))
    cc.exists([1, 2, 3])
    found = lines(folder)
    assert [one["operation"] for one in found] == ["save", "load", "save", "load", "exists"]
    assert [(one["success"], one["total"]) for one in found] == [
        (2, 2),
        (2, 2),
        (2, 2),
        (1, 2),
        (2, 3),
    ]
    for one in found:
        assert one["outcome"] == "ok"
        assert one["blocks"] == one["total"]
        spent = one["queue_ms"] + one["copy_ms"] + one["message_ms"]
        assert 0 <= spent <= one["total_ms"]
    save, load = found[:2]
    assert save["bytes"] == load["bytes"] == 2 * 4 * 4 * 8 * 2
    assert save["message_ms"] > 0 and save["copy_ms"] > 0
    assert load["message_ms"] == 0 and load["copy_ms"] > 0


def test_failures_and_what_never_ran_have_their_line_too(profiled: V1Bench, folder: Path) -> None:
    cc, cache = profiled.cc(), Cache()
    cc.register_kvcache(cache.tensors)
    given = filled(cache, [0, 1], [1, 2])
    profiled.bench.channel.away = True
    with pytest.raises(EmsException):
        cc.save(**given)
    with pytest.raises(EmsException):
        cc.get_result(cc.async_save(**given))
    profiled.bench.pay()
    with pytest.raises(EmsException):  # refused before it is a call
        cc.save(option=CcKvOption(timeout=-1), **given)
    assert [one["outcome"] for one in lines(folder)] == ["EMS_IO_ERROR"] * 2


def test_it_is_off_unless_the_variable_is_one(tmp_path: Path) -> None:
    for value in (None, "0", "", "true", "2"):
        environment = {"EMS_SDK_LOG": str(tmp_path)}
        if value is not None:
            environment["ENABLE_CC_PROFILING"] = value
        assert Profiler.from_environment(environment) is None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with caplog.at_level(logging.WARNING, "ems"):
        found = Profiler.from_environment(
            {"ENABLE_CC_PROFILING": "1", "EMS_SDK_LOG": str(blocker / "below")}
        )
    assert found is None
    assert len(caplog.records) == 1
    assert str(blocker) in caplog.text
    assert stat.S_ISREG(blocker.stat().st_mode)
