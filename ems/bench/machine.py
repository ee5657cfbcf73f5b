"""The facts about this machine that a measured figure is worth nothing without."""

from __future__ import annotations

import dataclasses
import os
import platform

from ems_native import _copy

__all__ = ["Machine", "available_bytes", "read_machine"]


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the figures were measured on."""

    cpu: str
    cores: int
    kernel: str
    python: str
    copy: str  # which implementation of the native copy ran

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, Linux {self.kernel}, Python {self.python}, "
            f"copy: {self.copy}"
        )


def read_machine() -> Machine:
    """Return the facts about this machine and process."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        kernel=platform.release(),
        python=platform.python_version(),
        copy=_copy.implementation(),
    )


def available_bytes() -> int:
    """Return how much memory a benchmark may take now."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return 1024 * int(value.split()[0])
    return 0


def _cpu_model() -> str:
    # x86 says "model name"; many aarch64 kernels give numbers only.
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                found.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    if found.get("model name"):
        return found["model name"]
    maker, part = found.get("CPU implementer"), found.get("CPU part")
    return f"{platform.machine()} {maker}:{part}" if maker and part else platform.machine()
