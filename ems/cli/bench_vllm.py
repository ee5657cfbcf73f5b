"""`ems bench vllm`."""

from __future__ import annotations

import importlib.util

import click

from ems.bench.command import as_json_option, end, fail, size, told, told_as_errors
from ems.bench.figure import print_figures
from ems.bench.plots import plot_lines
from ems.bench.vllm import VllmReport, VllmSettings, measure_vllm
from ems.testing.vllm_engine import MODELS

__all__ = ["vllm"]


@click.command(name="vllm", short_help="Time to first token of a real vLLM engine.")
@click.option("--model", type=click.Choice(list(MODELS)), default="tiny", show_default=True)
@click.option(
    "--tokens",
    type=click.IntRange(2, 7000),
    multiple=True,
    default=VllmSettings.tokens,
    show_default=True,
    help="Length of a prompt; may be given several times.",
)
@click.option(
    "--prompts",
    type=click.IntRange(1, 100),
    default=VllmSettings.prompts,
    show_default=True,
    help="Prompts of each length.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=VllmSettings.rounds,
    show_default=True,
    help="How often each hit is repeated, and an engine restarted.",
)
@click.option(
    "--misses",
    type=click.IntRange(1, 1000),
    default=VllmSettings.misses,
    show_default=True,
    help="Pairs of prompts, without and with EMS, that nobody has cached.",
)
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True
)
@click.option("--threads", type=click.IntRange(1, 1024), default=1, show_default=True)
@click.option("--capacity", callback=size, metavar="SIZE", default="2GiB", show_default=True)
@click.option("--peers/--no-peers", default=True, help="Whether vLLM's own connectors run too.")
@click.option("--plot", "plot_path", metavar="FILE", help="Where a plot goes too, as PNG or SVG.")
@as_json_option
def vllm(
    model: str,
    tokens: tuple[int, ...],
    prompts: int,
    rounds: int,
    misses: int,
    dtype: str,
    threads: int,
    capacity: int,
    peers: bool,
    plot_path: str | None,
    as_json: bool,
) -> None:
    """Start real engines one after the other on a model made on the spot, and time first tokens.

    Needs vLLM (see docs/guides/vllm.md). The exit code is 1 when a hit in EMS generated another
    token than a hit in the engine's own cache.
    """
    if importlib.util.find_spec("vllm") is None:
        fail("vllm is not installed here; docs/guides/vllm.md says how to get it")
    settings = VllmSettings(
        model,
        tuple(tokens),
        prompts,
        rounds,
        dtype,
        threads,
        capacity,
        misses=misses,
        peers=peers,
    )
    with told_as_errors():
        report = measure_vllm(settings, told)
    if plot_path is not None:
        _plot(report, plot_path)
    wrong = not all(row.same for row in report.rows)
    end(report.as_dict(), lambda: _print(report), as_json=as_json, wrong=wrong)


def _print(report: VllmReport) -> None:
    click.echo(f"{report.machine}\n")
    click.echo(
        f"{'connector':<20}{'way':<18}{'tokens':>7}{'cached':>8}{'ms':>10}{'own cache':>11}{'x':>7}"
    )
    for row in report.rows:
        beside = ""
        if row.local_ms:
            beside = f"{row.local_ms:>11.1f}{row.ratio:>7.3f}"
        other = "" if row.same else "  other tokens"
        click.echo(
            f"{row.connector:<20}{row.way:<18}{row.tokens:>7}{row.cached:>8}"
            f"{row.median_ms:>10.1f}{beside}{other}"
        )
    click.echo()
    print_figures(report.figures, click.echo)


def _plot(report: VllmReport, path: str) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in report.rows:
        lines.setdefault(f"{row.connector}, {row.way}", []).append((row.tokens, row.median_ms))
    plot_lines(
        path,
        lines,
        title=f"vLLM, model {report.settings.model}, {report.settings.dtype}",
        x_label="tokens of the prompt",
        y_label="time to the first token, ms",
        thick="EMS",
        y_log=True,
    )
