"""What EMS itself costs in memory: the index, and a client process.

Run as a child by `measure_client`: once as a client, once as an interpreter that only imports.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable

from ems.bench.figure import Figure, at_most
from ems.common.config import EmsConfig
from ems.pool import geometry
from ems.testing import LocalPool
from ems.testing.jobs import answer_job, started

__all__ = ["ClientJob", "ClientSize", "main", "measure_client", "measure_slot"]

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class ClientJob:
    """With a configuration: be a client and make calls. Without: import modules, nothing else."""

    config: EmsConfig | None
    modules: tuple[str, ...]
    calls: int


@dataclasses.dataclass(frozen=True)
class ClientSize:
    """Resident bytes without shared memory (which is the pool's), and the modules loaded."""

    resident: int
    modules: tuple[str, ...]


def measure_slot(slots: int = 1 << 22) -> Figure:
    """Bytes that a slot adds to the files of a pool."""
    small, large = geometry(1 << 30, slots), geometry(1 << 30, 2 * slots)
    added = (large.total_bytes - small.total_bytes) / (large.slots - small.slots)
    return at_most("memory of a slot", added, "bytes", 80)


def measure_client(calls: int) -> Figure:
    """Resident memory of a client after `calls` of each kind, above the same imports alone."""
    with LocalPool("64MiB") as pool:
        client = _run(ClientJob(pool.config, (), calls))
    bare = _run(ClientJob(None, client.modules, 0))
    return at_most(
        f"resident memory of a client after {calls:,} saves and loads",
        client.resident / _MIB,
        "MiB",
        60,
        roof=("same imports", bare.resident / _MIB),
        judged=("MiB above", (client.resident - bare.resident) / _MIB),
    )


def _run(job: ClientJob) -> ClientSize:
    with started("ems.bench.footprint", job, ClientSize) as child:
        return child.answer()


def _work(job: ClientJob, parent_is_gone: Callable[[], bool]) -> ClientSize:
    if job.config is not None:
        _be_client(job.config, job.calls)
    for name in job.modules:
        importlib.import_module(name)
    modules = tuple(name for name in sys.modules if _can_be_imported(name))
    return ClientSize(_resident(), modules)


def _be_client(config: EmsConfig, calls: int) -> None:
    from ems import CcKvOption, Ems, KvBufferWrapper

    Ems.init(config)
    cc = Ems.get_cc()
    assert cc is not None
    option = CcKvOption()
    block = bytearray(65536)
    values = [[KvBufferWrapper.from_buffer(block)]]
    for number in range(calls):
        keys = [f"footprint@{number % 512}"]
        cc.save(option, keys, values)
        cc.load(option, keys, values)
        cc.async_save(option, keys, values).result()
        cc.async_load(option, keys, values).result()


def _can_be_imported(name: str) -> bool:
    # Some packages make modules that exist under another name than their own.
    spec = getattr(sys.modules[name], "__spec__", None)
    return spec is not None and spec.name == name != "__main__"


def _resident() -> int:
    """Anonymous and file pages; shared memory is counted apart by the kernel."""
    kib = 0
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("RssAnon", "RssFile"):
                kib += int(value.split()[0])
    return kib << 10


def main() -> None:
    """Do the job on the standard input."""
    answer_job(_work)


if __name__ == "__main__":
    # By its full name, so that what is pickled belongs to a module that the parent knows.
    from ems.bench.footprint import main

    main()
