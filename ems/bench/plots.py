"""Plots of what was measured, in a file: lines over something, and bars beside a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ems.bench.command import fail

__all__ = ["Lines", "plot_bars", "plot_lines", "plot_panels"]

Lines = Mapping[str, Sequence[tuple[float, float]]]
"""By name, points from left to right."""

_GOOD, _BAD = "tab:green", "tab:red"
_LEAST_BARS, _MOST_BARS = 0.05, 20.0


def plot_lines(
    path: str,
    lines: Lines,
    *,
    title: str,
    x_label: str,
    y_label: str,
    thick: str = "",
    y_log: bool = False,
) -> None:
    """Draw a line of points for each name, over a logarithmic axis; end the command if it cannot.

    Args:
        path: of the file; its suffix says which format.
        lines: what is drawn.
        title: of the plot.
        x_label: what is below, with its unit.
        y_label: what is beside, with its unit.
        thick: names that begin so are drawn thick; empty for none.
        y_log: whether the other axis is logarithmic too.
    """
    panels = {title: lines}
    plot_panels(path, panels, x_label=x_label, y_label=y_label, thick=thick, y_log=y_log)


def plot_panels(
    path: str,
    panels: Mapping[str, Lines],
    *,
    x_label: str,
    y_label: str,
    thick: str = "",
    y_log: bool = False,
    x_ticks: Mapping[float, str] | None = None,
) -> None:
    """The same for several plots beside each other, by title, of one scale and one legend.

    `x_ticks` are what to write where below, instead of powers of ten.
    """
    figure = _figure(8 if len(panels) == 1 else 4.5 * len(panels), 5)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    for one, (title, lines) in zip(axes, panels.items()):
        for name, points in lines.items():
            width = 3 if thick and name.startswith(thick) else 1
            colour = f"C{names.index(name) % 10}"
            one.plot(*zip(*points), marker="o", linewidth=width, label=name, color=colour)
        one.set_xscale("log")
        if x_ticks:
            one.set_xticks(list(x_ticks), labels=list(x_ticks.values()), minor=False)
            one.set_xticks([], minor=True)
        if y_log:
            one.set_yscale("log")
            one.yaxis.set_major_formatter("{x:g}")
            one.yaxis.set_minor_formatter("")
        one.set_xlabel(x_label)
        one.set_title(title)
        one.grid(visible=True, alpha=0.3)
    axes[0].set_ylabel(y_label)
    if len(panels) == 1:
        axes[0].legend()
    else:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    _write(figure, path)


def plot_bars(path: str, bars: Mapping[str, float], *, title: str, x_label: str) -> None:
    """Draw a bar for each name, green from 1 on and red below; end the command if it cannot.

    Bars end at 0.05 and at 20; the value stands beside each.
    """
    figure = _figure(9, 1.2 + 0.24 * len(bars))
    axes = figure.add_subplot()
    shown = [min(max(value, _LEAST_BARS), _MOST_BARS) for value in bars.values()]
    colours = [_GOOD if value >= 1 else _BAD for value in bars.values()]
    places = range(len(bars) - 1, -1, -1)
    axes.barh(places, shown, color=colours, height=0.7)
    axes.set_yticks(places, list(bars), fontsize=8)
    for place, value, length in zip(places, bars.values(), shown):
        text = f" {value:.3g}" if value <= _MOST_BARS else f" over {_MOST_BARS:g}"
        axes.text(length, place, text, va="center", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(left=min([0.5, *shown]), right=2 * _MOST_BARS)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_ylim(-0.6, len(bars) - 0.4)
    axes.set_xlabel(x_label)
    axes.set_title(title)
    _write(figure, path)


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fail("a plot needs matplotlib: pip install 'ems[bench]'")
    return Figure(figsize=(width, height), layout="constrained")


def _write(figure: Any, path: str) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        fail(f"cannot write the plot {path}: {error}")
