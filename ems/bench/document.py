"""Tables and plots of runs of `ems bench all`, as a Markdown document."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ems.bench.comparison import Shape, Timing
from ems.bench.figure import Figure, short
from ems.bench.machine import Machine
from ems.bench.plots import plot_bars, plot_panels
from ems.bench.roof import Rate
from ems.common.exception import invalid_argument, io_error
from ems.common.size import format_size

__all__ = ["BEGIN", "END", "Run", "read_run", "write_document"]

BEGIN, END = "<!-- ems bench report: begin -->", "<!-- ems bench report: end -->"
"""Lines of a document between which the report goes; what stands outside of them is kept."""

_PLOTS = "plots"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of `ems bench all`, as far as a document tells of it."""

    begun: str
    machine: Machine
    figures: tuple[Figure, ...]
    rates: tuple[Rate, ...]
    versions: tuple[tuple[str, str], ...]
    skipped: tuple[tuple[str, str], ...]
    timings: tuple[Timing, ...]
    mismatches: int


def read_run(path: str) -> Run:
    """Read what `ems bench all --json` wrote.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` when it cannot be read or is something else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found: dict[str, Any] = json.load(file)
        return Run(
            begun=found["begun"],
            machine=Machine(**found["machine"]),
            figures=tuple(_figure(one) for one in found["figures"]),
            rates=tuple(Rate(**one) for one in found["roof"]["rates"]),
            versions=tuple((name, text) for name, text in found["peers"]["versions"]),
            skipped=tuple((name, text) for name, text in found["peers"]["skipped"]),
            timings=tuple(Timing(**one) for one in found["peers"]["timings"]),
            mismatches=found["mismatches"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise invalid_argument(
            f"{path} is no report of `ems bench all --json`: {type(error).__name__}: {error}"
        ) from error


def write_document(runs: Sequence[Run], path: str) -> list[str]:
    """Write tables to `path` and plots to the folder `plots` beside it; return all paths.

    A document that is there keeps what stands outside of the lines `BEGIN` and `END`.

    Raises:
        EmsException: `EMS_IO_ERROR` when something cannot be written, `EMS_INVALID_ARGUMENT` for a
            document without these lines.
    """
    folder = os.path.join(os.path.dirname(path), _PLOTS)
    stem = os.path.splitext(os.path.basename(path))[0]
    try:
        before, after = _around(path)
        os.makedirs(folder, exist_ok=True)
        plots: list[str] = []
        parts = []
        for number, run in enumerate(runs):
            name = stem if len(runs) == 1 else f"{stem}-{number + 1}"
            mine = _draw(run, os.path.join(folder, name))
            plots += mine
            parts.append(_section(run, [f"{_PLOTS}/{os.path.basename(one)}" for one in mine]))
        if len(runs) > 1:
            parts.append(_side_by_side(runs))
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"{before}{BEGIN}\n\n" + "\n".join(parts) + f"\n{END}{after}")
    except OSError as error:
        raise io_error(f"cannot write {path}: {error}") from error
    return [path, *plots]


def _figure(fields: dict[str, Any]) -> Figure:
    return Figure(**{name: value for name, value in fields.items() if name != "reached"})


def _around(path: str) -> tuple[str, str]:
    if not os.path.exists(path):
        return "# Performance\n\n", "\n"
    with open(path, encoding="utf-8") as file:
        text = file.read()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise invalid_argument(f"{path} has no lines {BEGIN} and {END} for the report")
    return before, after


def _draw(run: Run, stem: str) -> list[str]:
    title = f"{run.machine.cpu}, {run.machine.cores} cores, {run.begun[:10]}"
    paths = [f"{stem}-reached.png"]
    bars = {one.name: _margin(one) for one in run.figures if one.limit}
    plot_bars(
        paths[0], bars, title=title, x_label="times what is wanted: right of the line is reached"
    )
    for operation in ("load", "save"):
        panels = _panels(run.timings, operation)
        if panels:
            paths.append(f"{stem}-peers-{operation}.png")
            sizes = sorted({one.value_bytes for one in run.timings})
            plot_panels(
                paths[-1],
                panels,
                x_label="size of a value",
                y_label=f"{operation}, GB/s",
                thick="EMS",
                y_log=True,
                x_ticks={size: format_size(size) for size in sizes},
            )
    return paths


def _margin(one: Figure) -> float:
    """How many times better than wanted; what is below nothing is endlessly better than a bound."""
    if one.rising:
        return one.judged / one.limit
    return one.limit / one.judged if one.judged > 0 else math.inf


def _panels(
    timings: Sequence[Timing], operation: str
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for one in timings:
        if one.operation.startswith(operation):
            title = f"{one.keys} key{'s' if one.keys > 1 else ''} a call"
            line = panels.setdefault(title, {}).setdefault(_name(one), [])
            line.append((one.value_bytes, one.gb_per_s))
    return panels


def _name(one: Timing) -> str:
    way = one.operation.partition("_")[2]
    return f"{one.contender}, {way}" if way else one.contender


def _section(run: Run, plots: Sequence[str]) -> str:
    day, _, clock = run.begun.partition("T")
    reached = sum(one.reached for one in run.figures)
    lines = [
        f"### {day}, {run.machine.cpu}",
        "",
        f"{run.machine}. `ems bench all`, begun at {clock[:5]} UTC. {reached} of "
        f"{len(run.figures)} figures reached; {run.mismatches} wrong values.",
        "",
        *_figures(run.figures),
        "",
        f"![what is reached]({plots[0]})",
        "",
        "#### Roofs",
        "",
        *_table(
            ("copy", "threads", "pages", "GB/s"),
            ((one.name, one.threads, one.pages, f"{one.gb_per_s:.2f}") for one in run.rates),
        ),
        "",
        "#### Peers",
        "",
        *_table(("contender", "version"), run.versions),
        "",
    ]
    for name, reason in run.skipped:
        lines.append(f"- Left out: {name}: {reason}".replace("\n", " "))
    lines.append("")
    for operation in ("load", "save"):
        lines += _comparison(run.timings, operation)
    for path in plots[1:]:
        lines += [f"![{os.path.basename(path)}]({path})", ""]
    return "\n".join(lines)


def _figures(figures: Iterable[Figure]) -> list[str]:
    return _table(
        ("what", "measured", "beside", "judged", "wanted", "reached"),
        (
            (
                one.name,
                *one.texts,
                f"{'at least' if one.rising else 'at most'} {short(one.limit)}",
                "yes" if one.reached else "**no**",
            )
            for one in figures
        ),
    )


def _comparison(timings: Sequence[Timing], operation: str) -> Iterator[str]:
    """GB/s of the median of each contender and shape, µs for one key; the best is bold."""
    mine = [one for one in timings if one.operation.startswith(operation)]
    for several in (False, True):
        shapes = list(dict.fromkeys(one.shape for one in mine if (one.keys > 1) is several))
        if not shapes:
            continue
        unit = "GB/s, and p99 of a call in ms" if several else "median / p99 of a call in µs"
        yield f"{operation.capitalize()}, {unit}:"
        yield ""
        best = {shape: min(one.median_us for one in mine if one.shape == shape) for shape in shapes}
        cells: dict[str, dict[Shape, str]] = {}
        for one in mine:
            first, second = f"{one.median_us:.0f}", f" / {one.p99_us:.0f}"
            if several:
                first, second = f"{one.gb_per_s:.2f}", f" ({one.p99_us / 1e3:.1f})"
            bold = "**" if one.median_us == best.get(one.shape) else ""
            cells.setdefault(_name(one), {})[one.shape] = f"{bold}{first}{bold}{second}"
        heads = map(str, shapes)
        rows = ([name, *(row.get(one, "") for one in shapes)] for name, row in cells.items())
        yield from _table(("", *heads), rows)
        yield ""


def _side_by_side(runs: Sequence[Run]) -> str:
    judged: dict[str, dict[int, str]] = {}
    for number, run in enumerate(runs):
        for one in run.figures:
            text = one.texts[-1]
            judged.setdefault(one.name, {})[number] = text if one.reached else f"**{text}**"
    heads = ("judged; bold is not reached", *(run.begun[:16].replace("T", " ") for run in runs))
    rows = ([name, *(row.get(at, "") for at in range(len(runs)))] for name, row in judged.items())
    return "\n".join(["### Runs side by side", "", *_table(heads, rows), ""])


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    return [line(heads), "|" + "---|" * len(heads), *(line(row) for row in rows)]
