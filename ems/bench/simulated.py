"""The outcomes of a simulation for people: one table, one plot."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ems.bench.plots import plot_lines
from ems.bench.simulation import Outcome, distinct_blocks, simulate_all
from ems.bench.workload import Workload

__all__ = ["plot", "run_simulation"]


def run_simulation(
    workload: Workload,
    policies: Sequence[str],
    shares: Sequence[float],
    *,
    as_json: bool,
    plot_path: str | None,
) -> None:
    """Simulate, with a progress bar on the standard error, and print what was found.

    Args:
        workload: the requests.
        policies: of `ems.bench.simulation.POLICIES`.
        shares: capacities, as shares of the workload's distinct blocks.
        as_json: print JSON instead of a table.
        plot_path: where a plot goes too; its suffix says which format.
    """
    distinct = distinct_blocks(workload)
    capacities = [max(1, int(share * distinct)) for share in shares]
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("simulations", total=len(policies) * len(capacities))
        outcomes = simulate_all(workload, policies, capacities, lambda: bar.advance(task))
    if plot_path is not None:
        plot(outcomes, workload.name, plot_path)
    if as_json:
        click.echo(json.dumps([outcome.as_dict() for outcome in outcomes], indent=2))
    else:
        Console().print(_table(outcomes, workload, distinct, len(capacities)))


def _table(outcomes: Sequence[Outcome], workload: Workload, distinct: int, columns: int) -> Table:
    table = Table(title=f"Hit ratio by tokens, {workload.name}: {distinct:,} distinct blocks")
    table.add_column("policy")
    for outcome in outcomes[:columns]:
        heading = f"{100 * outcome.share:.3g} %\n{outcome.capacity_blocks:,}"
        table.add_column(heading, justify="right")
    table.add_column("seconds", justify="right")
    for first in range(0, len(outcomes), columns):
        row = outcomes[first : first + columns]
        ratios = [f"{outcome.token_ratio:.3f}" for outcome in row]
        seconds = f"{sum(outcome.seconds for outcome in row):.1f}"
        table.add_row(row[0].policy, *ratios, seconds)
    return table


def plot(outcomes: Sequence[Outcome], name: str, path: str) -> None:
    """Draw hit ratio over capacity, a line for each policy."""
    plot_lines(
        path,
        {
            policy: [
                (100 * outcome.share, outcome.token_ratio)
                for outcome in outcomes
                if outcome.policy == policy
            ]
            for policy in dict.fromkeys(outcome.policy for outcome in outcomes)
        },
        title=name,
        x_label="capacity, % of the distinct blocks",
        y_label="hit ratio by tokens",
        thick="pool",
    )
