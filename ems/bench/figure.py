"""A measured figure beside its roof, and contenders that take turns."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

__all__ = [
    "Figure",
    "at_least",
    "at_most",
    "figured",
    "median_us",
    "percentile",
    "print_figures",
    "short",
    "take_turns",
    "take_turns_awaiting",
]


@dataclasses.dataclass(frozen=True)
class Figure:
    """One thing that EMS wants to reach on a machine.

    Args:
        name: what was measured.
        measured: its value.
        unit: of `measured` and `roof`.
        roof_name: what it is compared with, measured in the same run; empty for nothing.
        roof: the value of that.
        judged: what the limit is for: a ratio, a difference, or `measured` itself.
        judged_as: what `judged` is, for people.
        limit: the wanted bound of `judged`.
        rising: True when more is better.
    """

    name: str
    measured: float
    unit: str
    roof_name: str
    roof: float
    judged: float
    judged_as: str
    limit: float
    rising: bool

    @property
    def reached(self) -> bool:
        """Whether the limit was kept."""
        return self.judged >= self.limit if self.rising else self.judged <= self.limit

    @property
    def texts(self) -> tuple[str, str, str]:
        """What was measured, what stands beside it, and what is judged, for people."""
        return (
            f"{short(self.measured)} {self.unit}",
            f"{self.roof_name} {short(self.roof)}" if self.roof_name else "",
            f"{short(self.judged)} {self.judged_as}",
        )

    def as_dict(self) -> dict[str, object]:
        """The figure as plain data."""
        return {**dataclasses.asdict(self), "reached": self.reached}


class Figured(Protocol):
    """A dataclass that judges itself."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def figures(self) -> Sequence[Figure]:
        """The figures for which something is wanted."""


def figured(report: Figured) -> dict[str, object]:
    """Return a report as plain data, ready for JSON, with its figures as they are judged."""
    figures = [one.as_dict() for one in report.figures]
    return {**dataclasses.asdict(report), "figures": figures}


def at_least(
    name: str,
    measured: float,
    unit: str,
    limit: float,
    *,
    roof: tuple[str, float] = ("", 0.0),
    judged: tuple[str, float] | None = None,
) -> Figure:
    """A figure of which more is better; `judged` (what it is, value) is `measured` by default."""
    what, value = judged or (unit, measured)
    return Figure(name, measured, unit, *roof, value, what, limit, rising=True)


def at_most(
    name: str,
    measured: float,
    unit: str,
    limit: float,
    *,
    roof: tuple[str, float] = ("", 0.0),
    judged: tuple[str, float] | None = None,
) -> Figure:
    """A figure of which less is better; see `at_least`."""
    what, value = judged or (unit, measured)
    return Figure(name, measured, unit, *roof, value, what, limit, rising=False)


def take_turns(
    contenders: Mapping[str, Callable[[int], object]],
    rounds: int,
    calls: int = 1,
    prepare: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Seconds of each call by contender.

    In each round every contender makes `calls` calls, with a running number; they take turns in
    going first, so that a change of clock or a noisy neighbour meets all of them. `prepare` is
    called with the contender's name before each call, and not timed.
    """
    order = list(contenders.items())
    times: dict[str, list[float]] = {name: [] for name in contenders}
    clock = time.perf_counter
    for number in range(rounds):
        turn = number % len(order)
        for name, call in order[turn:] + order[:turn]:
            mine = times[name]
            for at in range(number * calls, (number + 1) * calls):
                prepare(name)
                start = clock()
                call(at)
                mine.append(clock() - start)
    return times


async def take_turns_awaiting(
    contenders: Mapping[str, Callable[[int], Awaitable[object]]], rounds: int
) -> dict[str, list[float]]:
    """The same for contenders that are awaited."""
    order = list(contenders.items())
    times: dict[str, list[float]] = {name: [] for name in contenders}
    clock = time.perf_counter
    for number in range(rounds):
        turn = number % len(order)
        for name, call in order[turn:] + order[:turn]:
            start = clock()
            await call(number)
            times[name].append(clock() - start)
    return times


def median_us(seconds: Iterable[float]) -> float:
    """The median of times in seconds, in microseconds."""
    return 1e6 * statistics.median(seconds)


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which `part` (0.0 to 1.0) of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def print_figures(figures: Sequence[Figure], echo: Callable[[str], object]) -> None:
    """Print a line per figure: measured, its roof, what is judged, what was wanted."""
    rows = [("", "measured", "beside", "judged", "wanted", "")]
    for one in figures:
        rows.append(
            (
                one.name,
                *one.texts,
                f"{'>=' if one.rising else '<='} {short(one.limit)}",
                "reached" if one.reached else "NOT reached",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            text.ljust(width) if column in (0, 2) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths))
        ]
        echo("  ".join(cells).rstrip())


def short(value: float) -> str:
    """A number in as many digits as say something."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
