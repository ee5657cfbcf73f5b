"""`ems stress`: many processes on one small pool, every byte verified."""

from __future__ import annotations

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ems.bench.command import as_json_option, end, size, told_as_errors
from ems.common.size import format_size
from ems.testing.stress_run import Growth, StressPlan, StressReport, run_stress

__all__ = ["command"]


@click.command(name="stress", short_help="Many processes on a small pool, every byte verified.")
@click.option("--minutes", type=click.FloatRange(0.05, 1440), default=1.0, show_default=True)
@click.option("--readers", type=click.IntRange(0, 64), default=4, show_default=True)
@click.option("--writers", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--keys", type=click.IntRange(1, 1_000_000), default=400, show_default=True)
@click.option("--batch", type=click.IntRange(1, 1024), default=16, show_default=True)
@click.option("--max-bytes", callback=size, default="64MiB", show_default=True)
@click.option("--capacity", callback=size, default="256MiB", show_default=True)
@click.option("--entries", type=click.IntRange(16), default=1024, show_default=True)
@click.option("--hurried", type=click.FloatRange(0, 1), default=0.1, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Another seed, other calls.")
@as_json_option
def command(
    minutes: float,
    readers: int,
    writers: int,
    keys: int,
    batch: int,
    max_bytes: int,
    capacity: int,
    entries: int,
    hurried: float,
    seed: int,
    as_json: bool,
) -> None:
    """Let processes save, overwrite and load random values on a private pool.

    Values have 1 byte to --max-bytes; a share of --hurried calls gets a time-out of milliseconds or
    is cancelled. Checked are every loaded byte, that no call writes to memory after it failed,
    that loads send no message, that nothing stays reserved, and that memory, descriptors, threads
    and tasks of no process grow. The exit code is 1 when one of these is broken.
    """
    plan = StressPlan(
        seconds=60 * minutes,
        seed=seed,
        readers=readers,
        writers=writers,
        keys=keys,
        max_bytes=max_bytes,
        batch=batch,
        hurried=hurried,
        capacity=capacity,
        entries=entries,
    )
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    quiet = not console.is_terminal
    with (
        told_as_errors(),
        Progress(*columns, console=console, transient=True, disable=quiet) as bar,
    ):
        task = bar.add_task("stress", total=plan.seconds)
        report = run_stress(plan, progress=lambda done: bar.update(task, completed=done))
    wrong = report.faults or report.grown
    end(report.as_dict(), lambda: _print(report), as_json=as_json, wrong=wrong)


def _print(report: StressReport) -> None:
    tally = report.tally
    rows = {
        "run": f"{report.processes} processes, {report.seconds:.0f} s, {tally.calls:,} calls",
        "saved": f"{tally.saved:,} values",
        "loaded": f"{tally.loaded:,} values, {format_size(tally.loaded_bytes)}",
        "time-outs": f"{tally.timeouts:,}",
        "cancelled": f"{tally.cancels:,}",
        "evictions": f"{report.evictions:,}",
        "mismatches": f"{tally.mismatches:,}",
        "written late": f"{tally.written_late:,}",
        "left reserved": f"{format_size(report.left_reserved_bytes)}, "
        f"{report.left_sessions} sessions, {tally.tasks_left} tasks",
    }
    for name, text in rows.items():
        click.echo(f"{name:<16} {text}")
    for example in tally.explanations:
        click.echo(f"{'':<16} {example}")
    if report.growth:
        table = Table("process", "private memory", "descriptors", "threads", "tasks")
        for growth in report.growth:
            table.add_row(growth.name, *_grown(growth))
        Console().print(table)
        grown = ", ".join(report.grown)
        click.echo(f"{'growth':<16} {'GREW: ' + grown if grown else 'none: early and late agree'}")


def _grown(growth: Growth) -> tuple[str, ...]:
    """Early and late medians, side by side."""
    early, late = growth.private_bytes
    counts = (growth.descriptors, growth.threads, growth.tasks)
    return (
        f"{format_size(int(early))} -> {format_size(int(late))}",
        *(f"{before:.0f} -> {after:.0f}" for before, after in counts),
    )
