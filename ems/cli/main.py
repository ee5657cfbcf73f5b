"""The entry point: finds the command and keeps tracebacks away from people."""

from __future__ import annotations

import importlib
import os
import sys

import click

import ems
from ems.common.environment import misspelt

__all__ = ["command", "main"]

COMMANDS = {
    "serve": "Serve a pool to the processes of this node.",
    "status": "Show what a server and its pool are doing.",
    "fsck": "Check a pool's memory, and mend it.",
    "purge": "Give a pool's memory back.",
    "doctor": "Tell what this machine has of accelerators.",
    "demo": "See it work: a pool, two processes, a conversation workload.",
    "replay": "Run a recorded trace of requests against a pool.",
    "stress": "Many processes on one small pool, every byte verified.",
    "chaos": "Kill, freeze and restart servers and clients, every byte verified.",
    "bench": "Measure on this machine.",
}


class _LazyGroup(click.Group):
    """Imports a command when somebody asks for it: `ems status` never loads the benchmarks."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"ems.cli.{cmd_name}")
        found: click.Command = module.command
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


HELP = """EMS: KV cache of LLM inference in host memory, shared by the processes of a node.

\b
See it work:       ems demo
Serve a pool:      ems serve --capacity 8GiB
Wait for it:       ems status --wait 10
Use it:            from ems import Ems   (in every inference process)
Give it back:      ems purge

All commands find the pool by --root, else by the environment variable EMS_ROOT, else in
/dev/shm/ems.
"""


@click.group(cls=_LazyGroup, help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ems.__version__, prog_name="ems", message="%(prog)s %(version)s")
def command() -> None:
    """The program; its help text is `HELP`."""


def main() -> None:
    """Run the command line; never returns."""
    for name, near in misspelt(os.environ):
        click.echo(
            f"ems: the environment variable {name} means nothing: did you mean {near}?", err=True
        )
    try:
        command.main(prog_name="ems")
    except BrokenPipeError:  # `ems status | head`: nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
