from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fix_serve import run_ems

from ems.testing.child import child_environment


def asked(code: int = 0, **environment: str) -> dict[str, Any]:
    done = run_ems("doctor", "--json", env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_machine_without_an_accelerator() -> None:
    report = asked(EMS_DEVICE="cpu")
    assert report["device"] == {"EMS_DEVICE": "cpu", "outcome": "memory of cpu"}
    assert [one["name"] for one in report["runtimes"]] == ["acl", "cuda"]
    if report["runtimes"][0]["path"] is None:
        assert "looked for libascendcl.so" in report["runtimes"][0]["problem"]


def test_a_runtime(npu_folder: str) -> None:
    report = asked(ASCEND_HOME_PATH=str(Path(npu_folder).parent), EMS_DEVICE="acl")
    acl = report["runtimes"][0]
    assert acl["path"] == os.path.join(npu_folder, "libascendcl.so")
    assert (acl["version"], acl["devices"], acl["missing"]) == ("1.17.0", 8, [])
    assert (acl["page_bytes"], acl["registration"], acl["problem"]) == (4096, "pinned", None)
    assert report["device"]["outcome"] == "memory of npu"
    text = run_ems("doctor", env={"ASCEND_HOME_PATH": str(Path(npu_folder).parent)}).stdout
    assert "version 1.17.0, 8 devices" in text
    assert "EMS_DEVICE  auto: memory of cpu and npu" in text


def test_what_a_runtime_lacks_and_refuses(npu_variant: Callable[..., str]) -> None:
    folder = npu_variant("aclrtMemcpyBatchAsync")
    report = asked(ASCEND_HOME_PATH=str(Path(folder).parent), EMULATED_NPU_UNREGISTERED="1")
    assert report["runtimes"][0]["missing"] == ["aclrtMemcpyBatchAsync"]
    assert report["runtimes"][0]["registration"].startswith("not registered: ")


def test_no_device(npu_folder: str) -> None:
    home = str(Path(npu_folder).parent)
    report = asked(1, ASCEND_HOME_PATH=home, EMULATED_NPU_DEVICES="0", EMS_DEVICE="acl")
    assert report["runtimes"][0]["problem"] == "there is no device"
    assert "no NPU" in report["device"]["outcome"]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_npu_without_cann_breaks_torch_and_the_cure_is_told(tmp_path: Path) -> None:
    # As the wheel does it: an entry point that torch loads, and a library that is not there.
    package, facts = tmp_path / "torch_npu", tmp_path / "torch_npu-2.13.0.dist-info"
    package.mkdir()
    (package / "__init__.py").write_text(
        "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')"
    )
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    path = os.pathsep.join([str(tmp_path), child_environment()["PYTHONPATH"]])
    report = asked(1, PYTHONPATH=path)
    assert report["torch"]["torch_npu"] == "2.13.0"
    assert report["torch"]["problem"].startswith("import torch fails: ")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in report["torch"]["cure"]
    report = asked(0, PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert report["torch"]["problem"] is None
