"""All benchmarks in one run, as one report."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable

from ems.bench.comparison import Comparison, ComparisonSettings, Shape, compare
from ems.bench.copy import SHAPES, CopyReport, CopySettings, measure_copy
from ems.bench.figure import Figure, figured
from ems.bench.latency import LatencySettings, measure_latency
from ems.bench.lookup import LookupSettings
from ems.bench.machine import Machine, read_machine
from ems.bench.planning import PlanningSettings
from ems.bench.readers import ReadersSettings
from ems.bench.replay import ReplayReport, ReplaySettings, measure_replay
from ems.bench.roof import RoofReport, RoofSettings, measure_roof
from ems.bench.scale import ScaleSettings, measure_scale
from ems.bench.steps import StepsSettings
from ems.bench.v1 import MODELS, BlocksReport, BlocksSettings, measure_blocks
from ems.bench.verify import VerifySettings, measure_verify
from ems.bench.writers import WritersSettings

__all__ = ["Everything", "EverythingSettings", "copy_settings", "measure_everything", "quick"]


def copy_settings(
    blocks: int | None = None,
    block_bytes: int | None = None,
    rotate_bytes: int = 1 << 30,
    rounds: int = 24,
    fresh: int = 5,
) -> tuple[CopySettings, ...]:
    """Both shapes for which something is wanted, or the one given; fresh clients of the first."""
    shapes = list(SHAPES)
    if blocks is not None or block_bytes is not None:
        shapes = [(blocks or SHAPES[0][0], block_bytes or SHAPES[0][1])]
    return tuple(
        CopySettings(*shape, rotate_bytes, rounds, 0 if number else fresh)
        for number, shape in enumerate(shapes)
    )


@dataclasses.dataclass(frozen=True)
class EverythingSettings:
    """Of each benchmark."""

    copies: tuple[CopySettings, ...] = dataclasses.field(default_factory=copy_settings)
    roof: RoofSettings = dataclasses.field(default_factory=RoofSettings)
    verify: VerifySettings = dataclasses.field(default_factory=VerifySettings)
    latency: LatencySettings = dataclasses.field(default_factory=LatencySettings)
    scale: ScaleSettings = dataclasses.field(default_factory=ScaleSettings)
    blocks: tuple[BlocksSettings, ...] = tuple(BlocksSettings(MODELS[name]) for name in MODELS)
    replay: ReplaySettings = dataclasses.field(default_factory=ReplaySettings)
    peers: ComparisonSettings = dataclasses.field(default_factory=ComparisonSettings)


def quick() -> EverythingSettings:
    """Toy sizes: it runs, but the figures say nothing."""
    small = CopySettings(*SHAPES[1], rotate_bytes=32 << 20, rounds=3, fresh=1)
    return EverythingSettings(
        copies=(small,),
        roof=RoofSettings(4, 64 << 10, 256 << 10, rotate_bytes=4 << 20, rounds=2),
        verify=VerifySettings(4, 64 << 10, pairs=2),
        latency=LatencySettings(rotate_bytes=8 << 20, rounds=100, local_loads=100, lag_s=0.05),
        scale=ScaleSettings(
            LookupSettings(4000, 1000, rotate_bytes=8 << 20, rounds=20),
            WritersSettings(2, keys=1024, seconds=0.1),
            StepsSettings(4000, keys=512, rounds=1),
            ReadersSettings(2, 2, 64 << 10, 1 << 20, seconds=0.1, cycles=1),
            PlanningSettings(256, rounds=2),
            client_calls=20,
        ),
        blocks=(BlocksSettings(MODELS["gqa"], 2, rotate_bytes=8 << 20, rounds=2),),
        replay=ReplaySettings(requests=50, block_bytes=4 << 10),
        peers=ComparisonSettings(
            shapes=(Shape(1, 64 << 10),),
            names=("shared_memory dict",),
            rotate_bytes=1 << 20,
            seconds=0,
            turns=2,
        ),
    )


@dataclasses.dataclass(frozen=True)
class Everything:
    """What was found, and when."""

    begun: str  # ISO 8601, UTC
    copies: tuple[CopyReport, ...]
    roof: RoofReport
    others: tuple[Figure, ...]  # of verify, latency and scale
    blocks: tuple[BlocksReport, ...]
    replay: ReplayReport
    peers: Comparison
    machine: Machine

    @property
    def figures(self) -> list[Figure]:
        """Everything for which something is wanted."""
        figures = [figure for report in self.copies for figure in report.figures]
        figures += self.roof.figures
        figures += self.others
        figures += [figure for report in self.blocks for figure in report.figures]
        return figures + self.replay.figures + self.peers.figures

    @property
    def mismatches(self) -> int:
        """Values that came back wrong, in all of them."""
        copies = sum(report.mismatches for report in self.copies)
        blocks = sum(report.mismatches for report in self.blocks)
        return copies + blocks + self.replay.mismatches + self.peers.mismatches

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain data, ready for JSON and `ems bench report`."""
        return {**figured(self), "mismatches": self.mismatches}


def measure_everything(
    settings: EverythingSettings, progress: Callable[[str], object] = lambda text: None
) -> Everything:
    """Measure one after the other; nothing is left behind.

    Takes `Ems` of this process for itself, so it must not be initialised.

    Raises:
        EmsException: whatever the pools say.
    """
    begun = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    progress("peers")
    peers = compare(settings.peers, progress)
    progress("copy")
    copies = tuple(measure_copy(one) for one in settings.copies)
    progress("roof")
    roof = measure_roof(settings.roof)
    progress("verify")
    others = measure_verify(settings.verify).figures
    progress("latency")
    others += list(measure_latency(settings.latency).figures)
    progress("scale")
    others += measure_scale(settings.scale, progress).figures
    progress("v1")
    blocks = tuple(measure_blocks(one) for one in settings.blocks)
    progress("replay")
    replay = measure_replay(settings.replay, progress)
    return Everything(begun, copies, roof, tuple(others), blocks, replay, peers, read_machine())
