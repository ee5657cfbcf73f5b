"""`ems bench v1`: registered blocks beside the copy engine alone."""

from __future__ import annotations

import click

from ems.bench.command import as_json_option, end, size, told_as_errors
from ems.bench.figure import print_figures
from ems.bench.v1 import MODELS, BlocksReport, BlocksSettings, measure_blocks
from ems.common.size import format_size

__all__ = ["v1"]


@click.command(name="v1", short_help="Loads of registered blocks beside the copy engine alone.")
@click.option(
    "--model",
    "models",
    type=click.Choice(sorted(MODELS)),
    multiple=True,
    help="Whose KV cache; may be given again. All by default.",
)
@click.option("--blocks", type=click.IntRange(1, 10_000), default=32, show_default=True)
@click.option(
    "--rotate",
    callback=size,
    metavar="SIZE",
    default="1GiB",
    show_default=True,
    help="Memory on either side that the calls rotate over; give more than the caches hold.",
)
@click.option("--rounds", type=click.IntRange(1, 100_000), default=15, show_default=True)
@as_json_option
def v1(models: tuple[str, ...], blocks: int, rotate: int, rounds: int, as_json: bool) -> None:
    """Time V1 loads, and the copy engine on the same pieces without the SDK, taking turns.

    Also what a load takes outside the copy, planning and `exists`. The exit code is 1 when a byte
    was wrong.
    """
    reports = []
    with told_as_errors():
        for name in models or sorted(MODELS):
            reports.append(measure_blocks(BlocksSettings(MODELS[name], blocks, rotate, rounds)))

    def show() -> None:
        click.echo(f"{reports[0].machine}\n")
        for report in reports:
            click.echo(_line(report))
        click.echo()
        print_figures([figure for report in reports for figure in report.figures], click.echo)

    found = {"reports": [report.as_dict() for report in reports]}
    end(found, show, as_json=as_json, wrong=any(report.mismatches for report in reports))


def _line(report: BlocksReport) -> str:
    settings = report.settings
    return (
        f"{settings.model.name}: {settings.blocks} x {format_size(settings.model.block_bytes)} a "
        f"call, load {report.load_ms:.2f} ms, engine {report.engine_ms:.2f} ms; pool on "
        f"{report.page_kind} pages; mismatches {report.mismatches}"
    )
