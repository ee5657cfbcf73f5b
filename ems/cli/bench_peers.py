"""`ems bench peers`: EMS and other stores side by side."""

from __future__ import annotations

import click

from ems.bench.command import as_json_option, end, fail, told, told_as_errors
from ems.bench.comparison import SHAPES, Comparison, ComparisonSettings, Shape, compare
from ems.bench.figure import print_figures
from ems.bench.peers.catalogue import PEERS, install
from ems.common.size import parse_size

__all__ = ["environments", "peers"]

_DEFAULTS = ComparisonSettings()

environments = click.option(
    "--peers",
    "folder",
    type=click.Path(),
    metavar="DIR",
    help="Where the peers' virtual environments are; those that need one are skipped without.",
)


def _shapes(_ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]) -> list[Shape]:
    shapes = []
    for text in texts:
        keys, times, nbytes = text.partition("x")
        if not times or not keys.strip().isdigit() or int(keys) < 1:
            raise click.BadParameter(f"{text!r} is no shape; one looks like 32x2MiB")
        with told_as_errors():
            shapes.append(Shape(int(keys), parse_size(nbytes.strip())))
    return shapes


@click.command(name="peers", short_help="EMS beside LMCache, Mooncake, yuanrong, Valkey, Redis.")
@environments
@click.option("--install", "installs", is_flag=True, help="Make the environments in DIR, and end.")
@click.option(
    "--only",
    type=click.Choice([peer.name for peer in PEERS[1:]]),
    multiple=True,
    help="Beside EMS; can be repeated.  [default: all]",
)
@click.option(
    "--shape",
    "shapes",
    callback=_shapes,
    multiple=True,
    metavar="KEYSxSIZE",
    help="Of a call; can be repeated.  [default: 1, 32, 128 keys of 64 KiB to 8 MiB]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, 3600),
    default=_DEFAULTS.seconds,
    show_default=True,
    help="Of each shape.",
)
@click.option("--turns", type=click.IntRange(1), default=_DEFAULTS.turns, show_default=True)
@as_json_option
def peers(
    folder: str | None,
    installs: bool,
    only: tuple[str, ...],
    shapes: list[Shape],
    seconds: float,
    turns: int,
    as_json: bool,
) -> None:
    """Save and load the same bytes with EMS and its peers, taking turns.

    Each peer is started as its users start it, and skipped with a reason where it cannot be. The
    exit code is 1 when a byte was wrong.
    """
    if installs:
        if folder is None:
            fail("--install needs --peers DIR")
        with told_as_errors():
            install(folder, told)
        return
    settings = ComparisonSettings(
        shapes=tuple(shapes) or SHAPES, names=only, folder=folder, seconds=seconds, turns=turns
    )
    with told_as_errors():
        report = compare(settings, told)
    end(report.as_dict(), lambda: _print(report), as_json=as_json, wrong=report.mismatches)


def _print(report: Comparison) -> None:
    click.echo(f"{report.machine}\n")
    for name, version in report.versions:
        click.echo(f"{name:<24}{version}")
    for name, reason in report.skipped:
        click.echo(f"{name:<24}skipped: {reason}")
    click.echo(
        f"\n{'':<24}{'':<16}{'a call':<14}{'calls':>7}{'median us':>12}{'p99 us':>12}{'GB/s':>8}"
    )
    for one in report.timings:
        click.echo(
            f"{one.contender:<24}{one.operation:<16}{one.shape!s:<14}{one.calls:>7}"
            f"{one.median_us:>12.1f}{one.p99_us:>12.1f}{one.gb_per_s:>8.2f}"
        )
    click.echo(f"\nmismatches {report.mismatches}\n")
    print_figures(report.figures, click.echo)
