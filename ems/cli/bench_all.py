"""`ems bench all` and `ems bench report`: everything in one run, and the document of it."""

from __future__ import annotations

import dataclasses
import json

import click

from ems.bench.command import EXIT_MISMATCH, fail, told, told_as_errors
from ems.bench.document import read_run, write_document
from ems.bench.everything import EverythingSettings, measure_everything, quick
from ems.bench.figure import print_figures
from ems.cli.bench_peers import environments
from ems.cli.bench_replay import trace_option

__all__ = ["everything", "report"]

_STDOUT = "-"


@click.command(name="all", short_help="Everything but vllm, with the defaults of each.")
@click.option("--quick", "is_quick", is_flag=True, help="Toy sizes: the figures say nothing.")
@environments
@trace_option
@click.option(
    "--json",
    "json_path",
    is_flag=False,
    flag_value=_STDOUT,
    metavar="[FILE]",
    help="Write the report as JSON for `ems bench report`; without FILE to the standard output.",
)
def everything(
    is_quick: bool, folder: str | None, trace: str | None, json_path: str | None
) -> None:
    """Measure everything in a quarter of an hour, and say which of the wanted figures hold.

    What goes on is told on the standard error. The exit code is 1 when a byte was wrong.
    """
    settings = quick() if is_quick else EverythingSettings()
    settings = dataclasses.replace(
        settings,
        peers=dataclasses.replace(settings.peers, folder=folder),
        replay=dataclasses.replace(settings.replay, trace=trace),
    )
    with told_as_errors():
        found = measure_everything(settings, told)
    text = json.dumps(found.as_dict(), indent=2)
    if json_path == _STDOUT:
        click.echo(text)
    else:
        click.echo(f"{found.machine}\n")
        print_figures(found.figures, click.echo)
    if json_path is not None and json_path != _STDOUT:
        try:
            with open(json_path, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:
            fail(f"cannot write {json_path}: {error}")
    if found.mismatches:
        raise SystemExit(EXIT_MISMATCH)


@click.command(name="report", short_help="Tables and plots of runs of `ems bench all`.")
@click.argument("files", nargs=-1, required=True, type=click.Path())
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False),
    metavar="FILE.md",
    help="The document; plots go to `plots` beside it.",
)
def report(files: tuple[str, ...], out: str) -> None:
    """Make a Markdown document with plots (needs ems[bench]) of FILES, one run each.

    Of a document that is there only what stands between the two comment lines of an earlier report
    is replaced.
    """
    with told_as_errors():
        paths = write_document([read_run(file) for file in files], out)
    for path in paths:
        click.echo(path)
