"""The code samples of the SDK guide, run as they stand, on the emulated NPU, against a real server.

`tests/data/samples` holds them with nothing but their line breaks and indentation restored. Their
own slips are part of them, and of what they are to do here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ems.testing import LocalPool
from ems.testing.child import child_environment

HERE = Path(__file__).parent
SAMPLES = HERE.parent / "data" / "samples"
SEEDS = HERE.parent.parent.parent / "shared" / "spec" / "seeds"

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


def run(
    sample: str, pool: LocalPool, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    inherited = child_environment()
    path = os.pathsep.join([environment["PYTHONPATH"], inherited["PYTHONPATH"]])
    env = {**inherited, **environment, "PYTHONPATH": path, "EMS_ROOT": pool.root}
    env["PYTHONWARNINGS"] = "ignore:Failed to initialize NumPy"
    return subprocess.run(
        [sys.executable, str(SAMPLES / sample)],
        env=env,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with LocalPool("16MiB") as one:
        yield one


def told(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


@needs_torch
@pytest.mark.timeout(120)
def test_save_then_load(npu_environment: dict[str, str]) -> None:
    with LocalPool("16MiB") as fresh:
        none = run("load.py", fresh, npu_environment)
        saved = run("save.py", fresh, npu_environment)
        loaded = run("load.py", fresh, npu_environment)
    assert told(none) == (0, "succeed to load key num 0.\n0 of 2 keys\n", "")
    assert told(saved) == (0, "2 of 2 keys\n", "")
    assert told(loaded) == (0, "succeed to load key num 2.\n2 of 2 keys\n", "")


@needs_torch
def test_exception(pool: LocalPool, npu_environment: dict[str, str]) -> None:
    assert told(run("exception.py", pool, npu_environment)) == (0, "", "")


@needs_torch
def test_async_save_of_more_bytes_than_the_tensor_has(
    pool: LocalPool, npu_environment: dict[str, str]
) -> None:
    # len3 is 24 bytes of a tensor of 8: the allocator gives 512.
    done = run("async_save.py", pool, npu_environment)
    lines = ["rsult:2 of 2 keys", "rsult:1 of 1 keys"] * 2
    assert told(done) == (0, "".join(f"{line}\n" for line in lines), "")


@needs_torch
def test_quick_start_ends_at_a_call_that_torch_does_not_have(
    pool: LocalPool, npu_environment: dict[str, str]
) -> None:
    # The save succeeds. There is no torch.zero; `len` for a length, and a second save where a load
    # was meant, come after it.
    done = run("quick_start.py", pool, npu_environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("AttributeError: module 'torch' has no attribute 'zero'\n")


def test_get_cc(pool: LocalPool, npu_environment: dict[str, str]) -> None:
    assert told(run("get_cc.py", pool, npu_environment)) == (0, "", "")


@pytest.mark.parametrize("sample", ["init_keyless.py", "init_store.py"])
def test_init(sample: str, pool: LocalPool, npu_environment: dict[str, str]) -> None:
    assert told(run(sample, pool, npu_environment)) == (0, "", "")


def test_init_of_a_tenant_uses_a_name_that_it_did_not_import(
    pool: LocalPool, npu_environment: dict[str, str]
) -> None:
    done = run("init_tenant.py", pool, npu_environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert "\nNameError: name 'CcConfig' is not defined" in done.stderr


@pytest.mark.parametrize("sample", ["load.py", "init_keyless.py"])
def test_without_a_server(sample: str, tmp_path: Path, npu_environment: dict[str, str]) -> None:
    if sample == "load.py" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")

    class Nowhere:
        root = str(tmp_path)

    done = run(sample, Nowhere(), npu_environment)  # type: ignore[arg-type]
    assert done.returncode == (1 if sample == "load.py" else 0)
    assert done.stdout.startswith("exception: [EMS_RECOVERD_ERROR] ")
    assert done.stderr == ""


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the texts of the guide are not beside the checkout")
def test_nothing_but_white_space_differs_from_the_guide() -> None:
    guide = "".join(path.read_text(encoding="utf-8") for path in sorted(SEEDS.iterdir()))
    guide = re.sub(r"\s", "", guide)
    names = []
    for path in sorted(SAMPLES.glob("*.py")):
        assert re.sub(r"\s", "", path.read_text(encoding="utf-8")) in guide, path
        names.append(path.name)
    assert len(names) == 9
