"""Copies between a CUDA device and the pool, beside pinned copies of torch of the same bytes.

    python benchmarks/bench_cuda.py

The shape is that of an engine: 32 blocks of 2 MiB that are saved and loaded back. The roof is
`tensor.copy_(pinned, non_blocking=True)` with a synchronisation, over the same bytes, in the same
run.
"""

from __future__ import annotations

import dataclasses
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from ems.common.exception import EmsException
from ems.common.option import CcKvOption
from ems.devices import cuda
from ems.testing.local_pool import LocalPool

__all__ = ["CudaFigures", "measure_cuda", "why_not"]

BLOCKS = 32
BLOCK_BYTES = 2 << 20
TARGET = 0.9
"""Of the roof, in either direction."""


@dataclasses.dataclass(frozen=True)
class CudaFigures:
    """Medians over the rounds, GB/s."""

    device: str
    rounds: int
    save: float
    load: float
    roof_to_host: float
    roof_to_device: float
    mismatches: int

    @property
    def ratios(self) -> tuple[float, float]:
        """Save and load, each as a part of its roof."""
        return self.save / self.roof_to_host, self.load / self.roof_to_device


def why_not() -> str | None:
    """Return why there is nothing to measure here, None if there is."""
    try:
        runtime = cuda.find_runtime()
        runtime.init()
        if not runtime.device_count():
            return "no GPU"
    except Exception as error:
        return f"no CUDA device: {error}"
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        return f"no torch: {error}"
    return None if torch.cuda.is_available() else "torch was built without CUDA, or sees no GPU"


def measure_cuda(rounds: int) -> CudaFigures:
    """Measure `rounds` saves and loads; each is compared byte by byte afterwards."""
    torch: Any = importlib.import_module("torch")
    ems: Any = importlib.import_module("ems")
    names = [f"block {n}" for n in range(BLOCKS)]
    nbytes = BLOCKS * BLOCK_BYTES
    source = torch.randint(0, 256, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    pinned = torch.zeros((BLOCKS, BLOCK_BYTES), dtype=torch.uint8, pin_memory=True)

    def timed(call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return nbytes / (time.perf_counter() - begin) / 1e9

    wrap = ems.KvBufferWrapper.from_tensor
    sources = [[wrap(block)] for block in source]
    targets = [[wrap(block)] for block in target]
    option = CcKvOption()
    seen: dict[str, list[float]] = {"save": [], "load": [], "in": [], "out": []}
    mismatches = 0
    with LocalPool("1GiB") as pool:
        ems.Ems.init(pool.config)
        try:
            cc = ems.Ems.get_cc()
            for turn in range(rounds + 2):
                figures = {
                    "out": timed(lambda: pinned.copy_(source, non_blocking=True)),
                    "save": timed(lambda: cc.save(option, names, sources)),
                    "in": timed(lambda: target.copy_(pinned, non_blocking=True)),
                }
                target.zero_()
                figures["load"] = timed(lambda: cc.load(option, names, targets))
                mismatches += int((source != target).sum())
                for name, value in figures.items():
                    if turn >= 2:  # the first ones pin and register
                        seen[name].append(value)
        finally:
            ems.Ems.close()
    middle = {name: statistics.median(values) for name, values in seen.items()}
    return CudaFigures(
        device=torch.cuda.get_device_name(),
        rounds=rounds,
        save=middle["save"],
        load=middle["load"],
        roof_to_host=middle["out"],
        roof_to_device=middle["in"],
        mismatches=mismatches,
    )


def main() -> int:
    """Print the figures; 0 if they were right and fast enough, or could not be had."""
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    try:
        figures = measure_cuda(20)
    except EmsException as error:
        print(f"failed: {error}")
        return 1
    save, load = figures.ratios
    print(f"{figures.device}, {BLOCKS} blocks of {BLOCK_BYTES >> 20} MiB, {figures.rounds} rounds")
    for name, value, roof, ratio in (
        ("save", figures.save, figures.roof_to_host, save),
        ("load", figures.load, figures.roof_to_device, load),
    ):
        print(f"{name}  {value:6.2f} GB/s  {ratio:5.2f} of a pinned torch copy ({roof:.2f} GB/s)")
    print(f"mismatches: {figures.mismatches}")
    return 0 if min(save, load) >= TARGET and not figures.mismatches else 1
