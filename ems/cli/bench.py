"""`ems bench`: measurements of this machine, each beside the roof that plain memory gives."""

from __future__ import annotations

import json

import click

from ems.bench.command import EXIT_MISMATCH, size, told_as_errors
from ems.bench.copy import CopyReport, CopySettings, measure_copy
from ems.cli.bench_v1 import v1
from ems.common.size import format_size

__all__ = ["command"]


@click.group(
    name="bench", short_help="Measure this machine; figures come with their ratio to memcpy."
)
def command() -> None:
    """Measure EMS on this machine, with a pool of its own that is gone afterwards."""


command.add_command(v1)


@command.command(name="copy", short_help="Load and save of large blocks beside memcpy.")
@click.option("--blocks", type=click.IntRange(1, 100_000), default=32, show_default=True)
@click.option("--block-bytes", callback=size, metavar="SIZE", default="2MiB", show_default=True)
@click.option(
    "--rotate",
    callback=size,
    metavar="SIZE",
    default="1GiB",
    show_default=True,
    help="Memory on either side that the calls rotate over; give more than the caches hold.",
)
@click.option("--rounds", type=click.IntRange(1, 100_000), default=24, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def copy(blocks: int, block_bytes: int, rotate: int, rounds: int, as_json: bool) -> None:
    """Time load, save and one-thread memcpy of the same batch, taking turns.

    The exit code is 1 when a byte was wrong.
    """
    settings = CopySettings(blocks, block_bytes, rotate, rounds)
    with told_as_errors():
        report = measure_copy(settings)
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        _print(report)
    if report.mismatches:
        raise SystemExit(EXIT_MISMATCH)


def _print(report: CopyReport) -> None:
    settings = report.settings
    click.echo(
        f"{settings.blocks} x {format_size(settings.block_bytes)} a call, over "
        f"{format_size(settings.rotate_bytes)}, {settings.rounds} rounds; "
        f"pool on {report.page_kind} pages\n{report.machine}\n"
    )
    click.echo(f"{'':<8}{'median ms':>11}{'best ms':>11}{'GB/s':>8}{'x memcpy':>10}")
    for one in report.contenders:
        click.echo(
            f"{one.name:<8}{one.median_ms:>11.2f}{one.best_ms:>11.2f}"
            f"{one.gb_per_s:>8.2f}{one.to_memcpy:>10.2f}"
        )
    click.echo(f"\nmismatches {report.mismatches}")
