"""What this machine has of accelerators, and what EMS would do with it: for `ems doctor`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import mmap
import os
import subprocess
import sys
from collections.abc import Callable

from ems.common.exception import EmsException
from ems.devices import acl, cuda
from ems.devices.base import DeviceError
from ems.devices.registry import DEVICE_VARIABLE, chosen_device
from ems.devices.unit import REGISTRATIONS
from ems_native._acl import Runtime
from ems_native._copy import KvBufferWrapper

__all__ = ["RuntimeReport", "TorchReport", "chosen", "probe_runtimes", "probe_torch"]

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
CURE = (
    "torch loads torch_npu by itself and fails where CANN is not complete: set "
    f"{AUTOLOAD}=0, or install CANN and source its set_env.sh"
)
IMPORT_TIMEOUT_S = 120


@dataclasses.dataclass(frozen=True)
class RuntimeReport:
    """One vendor's runtime as it is found here."""

    name: str
    path: str | None = None
    """None: not found, and `problem` says where it was looked for or why it does not work."""
    problem: str | None = None
    version: str | None = None
    devices: int | None = None
    missing: tuple[str, ...] = ()
    """Calls that EMS would use and does without."""
    page_bytes: int | None = None
    """Of the host: what is registered begins and ends on one."""
    registration: str | None = None
    """What a registration of host memory gave: pinned, mapped, or why not."""


@dataclasses.dataclass(frozen=True)
class TorchReport:
    """What there is of torch; found out in a process of its own, as its import can fail."""

    torch: str | None
    torch_npu: str | None
    problem: str | None = None
    cure: str | None = None


def probe_runtimes() -> list[RuntimeReport]:
    """Look at each runtime; initialises those that are there."""
    return [
        _probe("acl", acl.find_runtime, acl.candidates()),
        _probe("cuda", cuda.find_runtime, cuda.candidates()),
    ]


def chosen() -> tuple[str, str]:
    """Return what EMS_DEVICE says, and what comes of it."""
    said = os.environ.get(DEVICE_VARIABLE) or "auto"
    try:
        device = chosen_device()
    except EmsException as error:
        return said, str(error)
    kinds = " and ".join(device.kinds)
    device.close()
    return said, f"memory of {kinds}"


def _probe(name: str, find: Callable[[], Runtime], places: list[str]) -> RuntimeReport:
    try:
        runtime = find()
    except OSError as error:
        return RuntimeReport(name, problem=f"{error} (looked for {', '.join(places)})")
    report = RuntimeReport(
        name, runtime.path, missing=tuple(runtime.missing), page_bytes=mmap.PAGESIZE
    )
    try:
        runtime.init()
        report = dataclasses.replace(report, version=".".join(map(str, runtime.version())))
        report = dataclasses.replace(report, devices=runtime.device_count())
    except DeviceError as error:
        return dataclasses.replace(report, problem=str(error))
    if not report.devices:
        return dataclasses.replace(report, problem="there is no device")
    return dataclasses.replace(report, registration=_registration(runtime))


def _registration(runtime: Runtime) -> str:
    """Try with one page, as the pool is registered."""
    try:
        previous = runtime.enter(0)
    except DeviceError as error:
        return f"device 0 cannot be used: {error}"
    page = mmap.mmap(-1, mmap.PAGESIZE)
    wrapper = KvBufferWrapper.from_buffer(page)
    address = wrapper.data_ptr
    try:
        how = runtime.register(address, mmap.PAGESIZE)
        runtime.unregister(address)
    except DeviceError as error:
        return f"not registered: {error}"
    finally:
        runtime.leave(previous)
        del wrapper
        page.close()
    return REGISTRATIONS[how]


def probe_torch() -> TorchReport:
    """Look at torch and torch_npu without importing them here."""
    report = TorchReport(_version("torch"), _version("torch_npu") or _version("torch-npu"))
    if report.torch is None:
        return report
    command = [sys.executable, "-c", "import torch"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        problem = f"import torch takes over {IMPORT_TIMEOUT_S} s"
        return dataclasses.replace(report, problem=problem)
    if done.returncode == 0:
        return report
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    named = any("libhccl" in line or "libascend" in line or "torch_npu" in line for line in lines)
    cure = CURE if named and os.environ.get(AUTOLOAD) != "0" else None
    return dataclasses.replace(report, problem=f"import torch fails: {lines[-1]}", cure=cure)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
