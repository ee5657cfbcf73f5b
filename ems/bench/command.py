"""What the commands that run a workload share: option types, progress bar, printed report."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ems.bench.report import Direction, Report
from ems.bench.runner import run_workload
from ems.bench.workload import Workload
from ems.common.config import EmsConfig
from ems.common.exception import EmsException
from ems.common.size import format_size, parse_size

__all__ = [
    "EXIT_MISMATCH",
    "as_json_option",
    "end",
    "fail",
    "finish",
    "run_with_progress",
    "size",
    "told",
    "told_as_errors",
]

EXIT_MISMATCH = 1

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
"""The option that `end` is told."""


class _Failure(click.ClickException):
    exit_code = 2  # one that no mismatch gives


def size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    """Read an option that is a number of bytes (click's callback): `256KiB`, `1GiB`, `1048576`."""
    try:
        return None if value is None else parse_size(value)
    except EmsException as error:
        raise click.BadParameter(error.message()) from None


def fail(text: str) -> NoReturn:
    """End the command with a message."""
    raise _Failure(text)


def told(text: str) -> None:
    """Say on the standard error what is going on."""
    click.echo(text, err=True)


@contextlib.contextmanager
def told_as_errors() -> Iterator[None]:
    """Turn an `EmsException` of the body into the command's error message."""
    try:
        yield
    except EmsException as error:
        fail(str(error))


def run_with_progress(
    workload: Workload, config: EmsConfig, *, processes: int, block_bytes: int
) -> Report:
    """Run a workload with a progress bar on the standard error (none when that is no terminal)."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("requests", total=len(workload.requests))
        return run_workload(
            workload,
            config,
            processes=processes,
            block_bytes=block_bytes,
            progress=lambda done: bar.update(task, completed=done),
        )


def end(
    found: Mapping[str, object], show: Callable[[], object], *, as_json: bool, wrong: object = False
) -> None:
    """Print what was found and end the command.

    Args:
        found: plain data, for JSON.
        show: prints it for people.
        as_json: which of the two.
        wrong: whether a byte was wrong: exit code 1.
    """
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        show()
    if wrong:
        raise SystemExit(EXIT_MISMATCH)


def finish(report: Report, *, as_json: bool, next_steps: str) -> None:
    """Print the report of a workload and end the command: exit code 1 when a byte was wrong."""

    def show() -> None:
        _print_rows(_rows(report))
        click.echo(next_steps)

    end(report.as_dict(), show, as_json=as_json, wrong=report.mismatches)


def _print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print names and what belongs to them, in two columns."""
    for name, text in rows:
        click.echo(f"{name:<16} {text}".rstrip())


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    yield "workload", f"{report.workload}: {report.requests:,} requests"
    yield (
        "run",
        f"{report.processes} processes, {format_size(report.block_bytes)} a block, pool of "
        f"{format_size(report.capacity_bytes)} ({report.page_kind} pages), {report.seconds:.1f} s",
    )
    yield "machine", str(report.machine)
    yield "hit ratio", f"{report.hit_ratio:.3f} of {report.prompt_tokens:,} prompt tokens"
    yield "prefill avoided", f"{report.prefill_tokens_avoided:,} tokens"
    yield "load", _direction(report.load)
    yield "save", _direction(report.save)
    if report.save.calls:
        per_call = format_size(report.save.nbytes // report.save.calls)
        yield "", f"a save asks the server twice; {per_call} a call here"
    if report.memcpy_gb_per_s:
        yield "memcpy", f"{report.memcpy_gb_per_s:.1f} GB/s, same amounts, same run"
    for name, latency in (
        ("load latency", report.load.latency),
        ("save latency", report.save.latency),
    ):
        if latency is not None:
            yield (
                name,
                f"p50 {latency.p50_ms:.2f}  p90 {latency.p90_ms:.2f}  p99 {latency.p99_ms:.2f}  "
                f"max {latency.max_ms:.2f} ms a call",
            )
    yield "evictions", f"{report.evictions:,} blocks"
    yield "mismatches", f"{report.mismatches:,} of {report.load.blocks_done:,} blocks loaded"
    for example in report.mismatch_examples:
        yield "", example


def _direction(direction: Direction) -> str:
    ratio = "" if direction.to_memcpy is None else f", {direction.to_memcpy:.2f} x memcpy"
    return (
        f"{format_size(direction.nbytes)} in {direction.calls:,} calls, "
        f"{direction.gb_per_s:.1f} GB/s{ratio}; "
        f"{direction.blocks_done:,} of {direction.blocks_asked:,} blocks"
    )
