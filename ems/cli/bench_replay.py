"""`ems bench replay`: a trace through a real pool, beside its simulation."""

from __future__ import annotations

import click

from ems.bench.command import as_json_option, end, size, told, told_as_errors
from ems.bench.figure import print_figures
from ems.bench.replay import ReplaySettings, measure_replay

__all__ = ["replay", "trace_option"]

_DEFAULTS = ReplaySettings()

trace_option = click.option(
    "--trace",
    type=click.Path(),
    metavar="FILE",
    help="In Mooncake's format; made-up conversations without.",
)


@click.command(name="replay", short_help="A trace through a real pool beside its simulation.")
@trace_option
@click.option("--limit", type=click.IntRange(1), help="Take this many requests from the start.")
@click.option("--block-bytes", callback=size, metavar="SIZE", default="64KiB", show_default=True)
@click.option(
    "--share",
    type=click.FloatRange(0, 100, min_open=True),
    metavar="PERCENT",
    default=100 * _DEFAULTS.share,
    show_default=True,
    help="Of the distinct blocks that the pool holds.",
)
@click.option("--processes", type=click.IntRange(1, 64), default=1, show_default=True)
@as_json_option
def replay(
    trace: str | None,
    limit: int | None,
    block_bytes: int,
    share: float,
    processes: int,
    as_json: bool,
) -> None:
    """Replay requests as `ems replay` does, and judge hits, rate and bytes.

    The exit code is 1 when a byte was wrong.
    """
    settings = ReplaySettings(trace, limit, block_bytes, share / 100, processes)
    with told_as_errors():
        report = measure_replay(settings, told)

    def show() -> None:
        click.echo(f"{report.report.machine}; pool on {report.report.page_kind} pages\n")
        print_figures(report.figures, click.echo)

    end(report.as_dict(), show, as_json=as_json, wrong=report.mismatches)
