"""`ems demo`: the main job in one command, with nothing to prepare."""

from __future__ import annotations

import click

from ems.bench.command import as_json_option, finish, run_with_progress, size, told_as_errors
from ems.bench.conversations import make_conversations
from ems.testing import LocalPool
from ems.testing.figures import wait_until_prepared

__all__ = ["command"]

_NEXT = """
Try next:
  ems demo --capacity 512MiB     a pool that all running chats fit into: fewer evictions, more hits
  ems replay TRACE.jsonl         the same on a real trace in Mooncake's format
  ems serve --capacity 8GiB      a node server for your own processes; `ems status` looks at it
  docs/start.md                  the first save from your own code, in ten minutes"""


@click.command(name="demo", short_help="Show the whole thing at work: no file, no server needed.")
@click.option("--requests", type=click.IntRange(1, 1_000_000), default=2000, show_default=True)
@click.option("--processes", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--block-bytes", callback=size, metavar="SIZE", default="256KiB", show_default=True)
@click.option("--capacity", callback=size, metavar="SIZE", default="192MiB", show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Another seed, other chats.")
@as_json_option
def command(
    requests: int, processes: int, block_bytes: int, capacity: int, seed: int, as_json: bool
) -> None:
    """Start a private pool and let processes share the prefixes of chats through it.

    Each process loads the prefix of a prompt, saves the blocks that miss, and compares every byte
    that it loaded. Nothing is left behind. The exit code is 1 when a byte was wrong.
    """
    with told_as_errors(), LocalPool(capacity) as pool:
        workload = make_conversations(requests, seed)
        wait_until_prepared(pool.root)
        report = run_with_progress(
            workload, pool.config, processes=processes, block_bytes=block_bytes
        )
    finish(report, as_json=as_json, next_steps=_NEXT)
