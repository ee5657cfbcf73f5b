"""`ems chaos`: random faults on a pool in use, every byte verified."""

from __future__ import annotations

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ems.bench.command import as_json_option, end, size, told_as_errors
from ems.common.size import format_size
from ems.testing.chaos import ChaosPlan, ChaosReport, run_chaos

__all__ = ["command"]


@click.command(name="chaos", short_help="Kill and freeze servers and clients, every byte verified.")
@click.option("--seconds", type=click.FloatRange(1, 86_400), default=60.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Another seed, other faults.")
@click.option("--clients", type=click.IntRange(1, 64), default=5, show_default=True)
@click.option("--capacity", callback=size, default="24MiB", show_default=True)
@click.option("--entries", type=click.IntRange(16), default=256, show_default=True)
@as_json_option
def command(
    seconds: float, seed: int, clients: int, capacity: int, entries: int, as_json: bool
) -> None:
    """Use a small private pool while clients and servers are killed, frozen and replaced.

    Clients save and load values whose bytes prove themselves, on a pool that evicts all the time;
    bytes of its memory are flipped too. The exit code is 1 when a byte was wrong, a call late, a
    process hung, or something was left in the end that belongs to nobody.
    """
    plan = ChaosPlan(
        seconds=seconds, seed=seed, clients=clients, capacity=capacity, entries=entries
    )
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    quiet = not console.is_terminal
    with (
        told_as_errors(),
        Progress(*columns, console=console, transient=True, disable=quiet) as bar,
    ):
        task = bar.add_task("chaos", total=plan.seconds)
        report = run_chaos(plan, progress=lambda done: bar.update(task, completed=done))
    wrong = report.wrong
    end(report.as_dict(), lambda: _print(report), as_json=as_json, wrong=wrong)


def _print(report: ChaosReport) -> None:
    tally = report.tally
    rows = {
        "run": f"{report.seconds:.0f} s",
        "operations": f"{tally.calls:,} calls of clients that lived to tell: {tally.saved:,} "
        f"values saved, {tally.loaded:,} loaded ({format_size(tally.loaded_bytes)})",
        "not done": f"{tally.outages:,} without a server, {tally.timeouts:,} time-outs, "
        f"{tally.cancels:,} cancelled",
        "faults": ", ".join(f"{count} {name}" for name, count in report.faults.items()),
        "evictions": f"{report.evictions:,}",
        "mismatches": f"{report.mismatches + tally.mismatches}",
        "written late": f"{tally.written_late}",
        "late calls": f"{tally.late}",
        "hangs": f"{report.hangs}",
        "failures": f"{len(report.failures)}",
        "leaks": f"{len(report.leaks)}",
    }
    for name, text in rows.items():
        click.echo(f"{name:<16} {text}")
    for text in report.failures + report.leaks + tally.explanations:
        click.echo(f"{'':<16} {text}")
