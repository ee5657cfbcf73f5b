"""`ems bench vllm`."""

from __future__ import annotations

import importlib.util
import json

import click

from ems.bench.command import EXIT_MISMATCH, fail, size, told_as_errors
from ems.bench.vllm import NOTHING, VllmReport, VllmSettings, measure_vllm
from ems.testing.vllm_engine import MODELS

__all__ = ["vllm"]


@click.command(name="vllm", short_help="Time to first token of a real vLLM engine.")
@click.option("--model", type=click.Choice(list(MODELS)), default="tiny", show_default=True)
@click.option(
    "--tokens",
    type=click.IntRange(2, 7000),
    multiple=True,
    default=(129, 1000, 2000),
    show_default=True,
    help="Length of a prompt; may be given several times.",
)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True)
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True
)
@click.option("--threads", type=click.IntRange(1, 1024), default=1, show_default=True)
@click.option("--capacity", callback=size, metavar="SIZE", default="2GiB", show_default=True)
@click.option("--peers/--no-peers", default=True, help="Whether vLLM's ExampleConnector runs too.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def vllm(
    model: str,
    tokens: tuple[int, ...],
    rounds: int,
    dtype: str,
    threads: int,
    capacity: int,
    peers: bool,
    as_json: bool,
) -> None:
    """Start real engines one after the other on a model made on the spot, and time first tokens.

    Needs vLLM (see docs/vllm.md). The exit code is 1 when a restored engine generated other tokens
    than the same engine with a hit in its own cache.
    """
    if importlib.util.find_spec("vllm") is None:
        fail("vllm is not installed here; docs/vllm.md says how to get it")
    settings = VllmSettings(model, tuple(tokens), rounds, dtype, threads, capacity, peers)
    with told_as_errors():
        report = measure_vllm(settings, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        _print(report)
    if not all(row.same for row in report.rows if not row.way.startswith("cold")):
        raise SystemExit(EXIT_MISMATCH)


def _print(report: VllmReport) -> None:
    local = {
        row.tokens: row.median_ms
        for row in report.rows
        if (row.connector, row.way) == (NOTHING, "own cache")
    }
    click.echo(
        f"{'connector':<18}{'way':<18}{'tokens':>7}{'cached':>8}{'ms':>10}{'x own cache':>13}"
    )
    for row in report.rows:
        ratio = row.median_ms / local[row.tokens]
        other = "" if row.same else "  other tokens"
        click.echo(
            f"{row.connector:<18}{row.way:<18}{row.tokens:>7}{row.cached:>8}"
            f"{row.median_ms:>10.1f}{ratio:>13.2f}{other}"
        )
    for connector, ms in report.decode_ms.items():
        click.echo(f"a decoded token, {connector}: {ms:.2f} ms")
