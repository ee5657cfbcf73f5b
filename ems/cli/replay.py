"""`ems replay`: the main job on a real trace."""

from __future__ import annotations

import contextlib

import click

from ems.bench.command import as_json_option, fail, finish, run_with_progress, size, told_as_errors
from ems.bench.simulated import run_simulation
from ems.bench.simulation import DEFAULT_SHARES, POLICIES
from ems.bench.workload import read_mooncake_trace
from ems.common.config import CcConfig, EmsConfig, check_root
from ems.common.size import parse_size
from ems.testing import LocalPool
from ems.testing.figures import wait_until_prepared

__all__ = ["command"]

_NEXT = """
Try next:
  --capacity 4GiB        how the hit ratio grows with the pool
  --root DIR             the same against a server of your own (`ems serve`)"""
_DEFAULT_CAPACITY = "1GiB"


@click.command(name="replay", short_help="Replay a trace of real requests, every byte compared.")
@click.argument("trace", type=click.Path())
@click.option("--block-bytes", callback=size, metavar="SIZE", default="256KiB", show_default=True)
@click.option(
    "--capacity",
    callback=size,
    metavar="SIZE",
    help=f"Size of the private pool.  [default: {_DEFAULT_CAPACITY}]",
)
@click.option("--processes", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--limit", type=click.IntRange(1), help="Take this many requests from the start.")
@click.option("--root", type=click.Path(), help="Use the server of this root, start none.")
@as_json_option
@click.option(
    "--simulate", is_flag=True, help="Move no bytes: the pool's policy beside others, in seconds."
)
@click.option(
    "--policy",
    "policies",
    type=click.Choice(POLICIES),
    multiple=True,
    help="Of a simulation; can be repeated.  [default: all]",
)
@click.option(
    "--share",
    "percents",
    type=click.FloatRange(0, min_open=True),
    multiple=True,
    metavar="PERCENT",
    help="Capacity of a simulation in % of the distinct blocks; can be repeated.  "
    "[default: 2, 5, 10, 25, 50]",
)
@click.option("--plot", type=click.Path(), help="Draw the simulation (needs ems[bench]).")
def command(
    trace: str,
    block_bytes: int,
    capacity: int | None,
    processes: int,
    limit: int | None,
    root: str | None,
    as_json: bool,
    simulate: bool,
    policies: tuple[str, ...],
    percents: tuple[float, ...],
    plot: str | None,
) -> None:
    """Replay TRACE, a file in Mooncake's format: a JSON object per request, 512 tokens a block.

    The processes take the requests in the order of the trace (time stamps are ignored), load the
    prefix, save the blocks that miss, and compare every byte that they loaded. The exit code is 1
    when a byte was wrong.

    With --simulate the requests run one after the other through the pool's own index, allocator and
    policy in this process, and through models of other policies.
    """
    if simulate:
        with told_as_errors():
            shares = [percent / 100 for percent in percents] or DEFAULT_SHARES
            run_simulation(
                read_mooncake_trace(trace, limit),
                policies or POLICIES,
                shares,
                as_json=as_json,
                plot_path=plot,
            )
        return
    if policies or percents or plot is not None:
        fail("--policy, --share and --plot belong to --simulate")
    if root is not None and capacity is not None:
        fail("--capacity sizes a private pool, --root uses one that is there; give one of them")
    if root is None and block_bytes > (capacity or parse_size(_DEFAULT_CAPACITY)):
        fail("a block of --block-bytes is larger than the whole pool; give more --capacity")
    with told_as_errors(), contextlib.ExitStack() as stack:
        workload = read_mooncake_trace(trace, limit)
        if root is None:
            pool = stack.enter_context(LocalPool(capacity or _DEFAULT_CAPACITY))
            wait_until_prepared(pool.root)
            config = pool.config
        else:
            instance = CcConfig(rank_id=0, device_id=0, model_id="replay")
            config = EmsConfig(cc_config=instance, root=check_root("--root", root))
        report = run_with_progress(workload, config, processes=processes, block_bytes=block_bytes)
    finish(report, as_json=as_json, next_steps=_NEXT)
