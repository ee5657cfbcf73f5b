"""What the commands that run a workload share: option types, progress bar, printed report."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ems.bench.report import Direction, Report
from ems.bench.runner import run_workload
from ems.bench.workload import Workload
from ems.common.config import EmsConfig
from ems.common.exception import EmsException
from ems.common.size import format_size, parse_size

__all__ = ["EXIT_MISMATCH", "fail", "finish", "run_with_progress", "size", "told_as_errors"]

EXIT_MISMATCH = 1


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


def finish(report: Report, *, as_json: bool, next_steps: str) -> None:
    """Print the report and end the command: exit code 1 when a byte was wrong."""
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        _print(report)
        click.echo(next_steps)
    if report.mismatches:
        raise SystemExit(EXIT_MISMATCH)


def _print(report: Report) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_row("workload", f"{report.workload}: {report.requests:,} requests")
    table.add_row(
        "run",
        f"{report.processes} processes, {format_size(report.block_bytes)} a block, "
        f"pool of {format_size(report.capacity_bytes)} ({report.page_kind} pages), "
        f"{report.seconds:.1f} s",
    )
    table.add_row("machine", str(report.machine))
    table.add_row("hit ratio", f"{report.hit_ratio:.3f} of {report.prompt_tokens:,} prompt tokens")
    table.add_row("prefill avoided", f"{report.prefill_tokens_avoided:,} tokens")
    table.add_row("load", _direction(report.load))
    table.add_row("save", _direction(report.save))
    if report.memcpy_gb_per_s:
        table.add_row("memcpy", f"{report.memcpy_gb_per_s:.1f} GB/s, same amounts, same run")
    for name, direction in (("load latency", report.load), ("save latency", report.save)):
        if direction.latency is not None:
            one = direction.latency
            table.add_row(
                name,
                f"p50 {one.p50_ms:.2f}  p90 {one.p90_ms:.2f}  p99 {one.p99_ms:.2f}  "
                f"max {one.max_ms:.2f} ms a call",
            )
    table.add_row("evictions", f"{report.evictions:,} blocks")
    loaded = f"{report.load.blocks_done:,} blocks loaded"
    table.add_row("mismatches", f"{report.mismatches:,} of {loaded}")
    for example in report.mismatch_examples:
        table.add_row("", example)
    Console(highlight=False, soft_wrap=True).print(table)


def _direction(direction: Direction) -> str:
    ratio = "" if direction.to_memcpy is None else f", {direction.to_memcpy:.2f} x memcpy"
    return (
        f"{format_size(direction.nbytes)} in {direction.calls:,} calls, "
        f"{direction.gb_per_s:.1f} GB/s{ratio}; "
        f"{direction.blocks_done:,} of {direction.blocks_asked:,} blocks"
    )
