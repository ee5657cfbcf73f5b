"""`ems bench`: measurements of this machine, each beside the roof that it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ems.bench.command import as_json_option, end, size, told, told_as_errors
from ems.bench.copy import CopyReport, measure_copy
from ems.bench.everything import copy_settings
from ems.bench.figure import Figure, print_figures
from ems.bench.latency import LatencySettings, measure_latency
from ems.bench.lookup import LookupSettings
from ems.bench.roof import RoofSettings, measure_roof
from ems.bench.scale import ScaleSettings, measure_scale
from ems.bench.steps import StepsSettings
from ems.bench.verify import SHAPES, VerifySettings, measure_verify
from ems.bench.writers import WritersSettings
from ems.cli.bench_all import everything, report
from ems.cli.bench_peers import peers
from ems.cli.bench_replay import replay
from ems.cli.bench_v1 import v1
from ems.cli.bench_vllm import vllm
from ems.common.size import format_size

__all__ = ["command"]

_ROTATE = "1GiB"
_F = TypeVar("_F", bound=Callable[..., Any])

_rotate = click.option(
    "--rotate",
    callback=size,
    metavar="SIZE",
    default=_ROTATE,
    show_default=True,
    help="Memory on either side that the calls rotate over; give more than the caches hold.",
)


def _rounds(default: int) -> Callable[[_F], _F]:
    return click.option(
        "--rounds", type=click.IntRange(1, 100_000), default=default, show_default=True
    )


@click.group(
    name="bench", short_help="Measure this machine; figures come with their ratio to a roof."
)
def command() -> None:
    """Measure EMS on this machine, with pools of its own that are gone afterwards.

    Each figure stands beside its roof (what the machine gives without EMS), measured in the same
    run, and beside what is wanted of it.
    """


command.add_command(everything)
command.add_command(peers)
command.add_command(replay)
command.add_command(report)
command.add_command(v1)
command.add_command(vllm)


@command.command(name="copy", short_help="Load and save of large blocks beside memcpy.")
@click.option("--blocks", type=click.IntRange(1, 100_000), help="Keys of a call.")
@click.option("--block-bytes", callback=size, metavar="SIZE", help="Size of a value.")
@_rotate
@_rounds(24)
@click.option(
    "--fresh",
    type=click.IntRange(0, 1000),
    default=5,
    show_default=True,
    help="Processes that make a first load, and as many a first save.",
)
@as_json_option
def copy(
    blocks: int | None,
    block_bytes: int | None,
    rotate: int,
    rounds: int,
    fresh: int,
    as_json: bool,
) -> None:
    """Time load, save and one-thread memcpy of the same batch, taking turns.

    Without --blocks and --block-bytes: 32 x 2 MiB and 128 x 64 KiB. First calls of fresh processes
    are measured for the first of them. The exit code is 1 when a byte was wrong.
    """
    reports = []
    with told_as_errors():
        for settings in copy_settings(blocks, block_bytes, rotate, rounds, fresh):
            reports.append(measure_copy(settings))

    def show() -> None:
        for one in reports:
            _print_copy(one)
        _print_figures([figure for one in reports for figure in one.figures])

    found = {"reports": [one.as_dict() for one in reports]}
    end(found, show, as_json=as_json, wrong=any(one.mismatches for one in reports))


@command.command(name="roof", short_help="Bare copies by one and two threads, EMS beside them.")
@_rotate
@_rounds(24)
@as_json_option
def roof(rotate: int, rounds: int, as_json: bool) -> None:
    """Time glibc's memcpy and the streaming copy on both kinds of pages, taking turns with EMS.

    One thread copies 32 x 2 MiB, two copy 32 x 8 MiB.
    """
    with told_as_errors():
        report = measure_roof(RoofSettings(rotate_bytes=rotate, rounds=rounds))

    def show() -> None:
        click.echo(f"{report.machine}; pool on {report.page_kind} pages\n")
        click.echo(f"{'':<8}{'threads':>8}{'pages':>8}{'GB/s':>8}")
        for one in report.rates:
            click.echo(f"{one.name:<8}{one.threads:>8}{one.pages:>8}{one.gb_per_s:>8.2f}")
        click.echo()
        _print_figures(report.figures)

    end(report.as_dict(), show, as_json=as_json)


@command.command(name="latency", short_help="One small key: sync, awaited, many outstanding.")
@_rotate
@_rounds(4000)
@click.option("--loads", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--lag-seconds", type=click.FloatRange(0.01, 600), default=2.0, show_default=True)
@as_json_option
def latency(rotate: int, rounds: int, loads: int, lag_seconds: float, as_json: bool) -> None:
    """Time calls of one key of 64 KiB, and look at the lag of an event loop that awaits many.

    Sync calls stand beside a bare memmove and a message to the server, awaited ones beside an empty
    hop through the home loop and a worker.
    """
    settings = LatencySettings(
        rotate_bytes=rotate,
        rounds=rounds,
        local_loads=loads,
        lag_s=lag_seconds,
    )
    with told_as_errors():
        report = measure_latency(settings)

    def show() -> None:
        click.echo(f"{report.machine}; pool on {report.page_kind} pages\n")
        _print_figures(report.figures)

    end(report.as_dict(), show, as_json=as_json)


@command.command(name="scale", short_help="Many entries, several writers, memory.")
@click.option("--entries", type=click.IntRange(1000), default=1_000_000, show_default=True)
@click.option("--few", type=click.IntRange(1000), default=4_000, show_default=True)
@_rotate
@_rounds(1000)
@click.option("--writers", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.1, 600), default=3.0, show_default=True)
@as_json_option
def scale(
    entries: int,
    few: int,
    rotate: int,
    rounds: int,
    writers: int,
    seconds: float,
    as_json: bool,
) -> None:
    """Measure what a key costs among many entries, what the server takes, what memory it all costs.

    A million entries take 4 GiB of shared memory.
    """
    settings = ScaleSettings(
        LookupSettings(entries, few, rotate_bytes=rotate, rounds=rounds),
        WritersSettings(writers, seconds=seconds),
        StepsSettings(entries),
    )
    with told_as_errors():
        report = measure_scale(settings, told)

    def show() -> None:
        click.echo(f"{report.machine}\n")
        _print_figures(report.figures)

    end(report.as_dict(), show, as_json=as_json)


@command.command(name="verify", short_help="What comparing checksums costs a load.")
@click.option("--pairs", type=click.IntRange(1, 100_000), default=200, show_default=True)
@as_json_option
def verify(pairs: int, as_json: bool) -> None:
    """Load the same blocks with and without a comparison of their checksums, in turns.

    32 x 2 MiB and 128 x 64 KiB, copied by one thread.
    """
    with told_as_errors():
        found = [measure_verify(VerifySettings(*shape, pairs)) for shape in SHAPES]

    def show() -> None:
        click.echo(f"{found[0].machine}\n")
        for one in found:
            shape = f"{one.settings.blocks} x {format_size(one.settings.block_bytes)}"
            click.echo(
                f"{shape}: {one.compared:.2f} GB/s compared, {one.not_compared:.2f} not; "
                f"{100 * (one.ratio - 1):+.1f} % (median of {pairs} pairs)"
            )
        click.echo()
        _print_figures([figure for one in found for figure in one.figures])

    end({"reports": [one.as_dict() for one in found]}, show, as_json=as_json)


def _print_copy(report: CopyReport) -> None:
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
    click.echo(f"\nmismatches {report.mismatches}\n")


def _print_figures(figures: list[Figure] | tuple[Figure, ...]) -> None:
    if figures:
        print_figures(figures, click.echo)
