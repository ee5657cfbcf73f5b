"""`ems purge`: takes a pool down and gives its memory back."""

from __future__ import annotations

import os

import click

from ems.cli.status import root_option
from ems.common.size import format_size
from ems.server import files
from ems.shm import layout
from ems.shm.liveness import Held, ServerLock

__all__ = ["command"]


@click.command("purge")
@root_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--force",
    is_flag=True,
    help="Even while clients use the pool: its memory comes back when the last one let go.",
)
def command(root: str, yes: bool, force: bool) -> None:
    """Remove the pool in a root, with all its blocks, and give its memory back.

    Refuses while a server runs, and while clients use the pool. The small file server.lock stays.

    Exit codes: 0 done, or nothing was there; 1 refused.
    """
    if not os.path.isdir(root):
        click.echo(f"nothing to do: {root} does not exist")
        return
    try:
        lock = ServerLock(os.path.join(root, layout.SERVER_LOCK))
    except Held as error:
        raise click.ClickException(f"{error}: stop that server first (SIGTERM)") from None
    except OSError as error:
        raise click.ClickException(f"{root} cannot be used: {error.strerror or error}") from None
    with lock:
        _purge(root, yes, force)


def _confirm(question: str) -> None:
    try:
        answer = click.confirm(question)
    except click.Abort:  # Ctrl-C, or nobody there who could answer
        click.echo()
        raise click.ClickException("nothing was removed; --yes does not ask") from None
    if not answer:
        raise click.ClickException("nothing was removed")


def _purge(root: str, yes: bool, force: bool) -> None:
    nbytes = sum(files.own_bytes(root).values())
    if not any(os.path.lexists(os.path.join(root, name)) for name in layout.POOL_FILES):
        files.remove_sockets(root)
        click.echo(f"nothing to do: there is no pool in {root}")
        return
    holders = files.holders_of(root)
    if holders and not force:
        raise click.ClickException(
            f"the pool in {root} is used by {files.named(holders)}: stop them first, or give "
            "--force"
        )
    if not yes:
        size = format_size(nbytes)
        _confirm(f"Remove the pool in {root} ({size}) and all its blocks?")
    try:
        if layout.read_prologue(os.path.join(root, layout.INDEX)) is not None:
            files.set_pool_state(root, layout.PoolState.RETIRED)  # who maps it stops using it
        files.remove_files(root)
        files.remove_sockets(root)
    except OSError as error:
        raise click.ClickException(f"{root} cannot be purged: {error.strerror or error}") from None
    later = " (once the last client let go)" if holders else ""
    click.echo(f"gave back {format_size(nbytes)}{later}")
