"""The emulated NPU, built once for a test run."""

from __future__ import annotations

import functools
import glob
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from npu_bench import Block, opened

from ems import ContextCaching, Ems
from ems.testing import LocalPool, emulated_npu
from ems.testing.emulated_npu import LIBRARY, EmulatedNpu, build, find_compiler, site_folder

SETTINGS = {
    "copy_delay_us": 0,
    "hang": 0,
    "fail_call": 0,
    "fail_name": "",
    "fail_code": 507000,
    "fail_copy": 0,
    "unregistered": 0,
}


@pytest.fixture(scope="session")
def npu_variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Builds the library, lacking some calls, and returns its folder."""
    if find_compiler() is None:
        pytest.skip("the emulated NPU needs a C compiler")

    @functools.cache
    def variant(*without: str) -> str:
        folder = tmp_path_factory.mktemp("npu") / "lib64"
        folder.mkdir()
        return build(folder, without)

    return variant


@pytest.fixture(scope="session")
def cuda_variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """Builds a CUDA driver over the emulated NPU, with the batches of CUDA 13, 12 or none (0)."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("the emulated driver needs a C compiler")
    npu = os.path.dirname(emulated_npu.__file__)
    sources = [str(Path(__file__).parent / "native" / "emulated_cuda.c")]
    sources += glob.glob(os.path.join(npu, "*.c"))

    @functools.cache
    def variant(batch: int) -> str:
        target = str(tmp_path_factory.mktemp("cuda") / "libcuda.so.1")
        command = [compiler, "-std=gnu11", "-O1", "-shared", "-fPIC", "-pthread", "-I", npu]
        subprocess.run([*command, f"-DBATCH={batch}", "-o", target, *sources], check=True)
        return target

    return variant


@pytest.fixture(scope="session")
def npu_folder(npu_variant: Callable[..., str]) -> str:
    return npu_variant()


@pytest.fixture
def npu(npu_folder: str) -> Iterator[EmulatedNpu]:
    """The library in this process, as the tests turn it."""
    emulated = EmulatedNpu(str(Path(npu_folder, LIBRARY)))
    emulated.reset_counts()
    yield emulated
    for name, value in SETTINGS.items():
        emulated.set(name, value)


@pytest.fixture
def npu_environment(npu_folder: str) -> dict[str, str]:
    """What makes another process find the emulated NPU, and a `torch_npu` over it."""
    return {"LD_LIBRARY_PATH": npu_folder, "PYTHONPATH": site_folder()}


@pytest.fixture
def npu_home(npu_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process find the emulated NPU, and use it."""
    monkeypatch.setenv("ASCEND_HOME_PATH", str(Path(npu_folder).parent))
    monkeypatch.setenv("EMS_DEVICE", "acl")


@pytest.fixture
def blocks(npu: EmulatedNpu) -> Iterator[Callable[..., Block]]:
    """Makes memory of devices: `blocks(device, nbytes, pieces, data)`."""
    made: list[Block] = []

    def make(device: int, nbytes: int, pieces: int = 1, data: bytes | None = None) -> Block:
        made.append(Block(npu, device, nbytes, pieces, data))
        return made[-1]

    yield make
    for block in made:
        block.free()


@pytest.fixture(scope="module")
def npu_pool() -> Iterator[LocalPool]:
    """A pool for all tests of a module; `opened` gives each its own names in it."""
    with LocalPool("256MiB") as pool:
        yield pool


@pytest.fixture
def npu_cc(npu_home: None, npu: EmulatedNpu, npu_pool: LocalPool) -> Iterator[ContextCaching]:
    """A client that copies memory of NPUs."""
    yield opened(npu_pool)
    Ems.close()
