"""What grows with entries, with writers and with clients: all figures of `ems bench scale`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ems.bench.figure import Figure, figured
from ems.bench.footprint import measure_client, measure_slot
from ems.bench.lookup import LookupSettings, measure_lookup
from ems.bench.machine import Machine, read_machine
from ems.bench.planning import PlanningSettings, measure_planning
from ems.bench.readers import ReadersSettings, measure_readers
from ems.bench.steps import StepsSettings, measure_steps
from ems.bench.writers import WritersSettings, measure_writers

__all__ = ["ScaleReport", "ScaleSettings", "measure_scale"]


@dataclasses.dataclass(frozen=True)
class ScaleSettings:
    """How far each of the measurements goes."""

    lookup: LookupSettings = dataclasses.field(default_factory=LookupSettings)
    writers: WritersSettings = dataclasses.field(default_factory=WritersSettings)
    steps: StepsSettings = dataclasses.field(default_factory=StepsSettings)
    readers: ReadersSettings = dataclasses.field(default_factory=ReadersSettings)
    planning: PlanningSettings = dataclasses.field(default_factory=PlanningSettings)
    client_calls: int = 5000


@dataclasses.dataclass(frozen=True)
class ScaleReport:
    """What was found."""

    settings: ScaleSettings
    figures: tuple[Figure, ...]
    machine: Machine

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain data, ready for JSON."""
        return figured(self)


def measure_scale(
    settings: ScaleSettings, progress: Callable[[str], object] = lambda text: None
) -> ScaleReport:
    """Measure one after the other; nothing is left behind.

    Raises:
        EmsException: whatever the pools say; memory must suffice for `settings.lookup.many` times
            4 KiB.
    """
    figures: list[Figure] = []
    progress(f"entries: {settings.lookup.few:,} and {settings.lookup.many:,}")
    figures += measure_lookup(settings.lookup)
    progress("planning")
    figures += measure_planning(settings.planning)
    progress("readers")
    figures += measure_readers(settings.readers)
    progress("writers")
    figures.append(measure_writers(settings.writers))
    progress("steps of the server")
    figures += measure_steps(settings.steps)
    progress("memory")
    figures += [measure_slot(), measure_client(settings.client_calls)]
    return ScaleReport(settings, tuple(figures), read_machine())
