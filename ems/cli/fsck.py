"""`ems fsck`: says what is wrong with a pool's memory, and mends it."""

from __future__ import annotations

import asyncio
import contextlib
import os

import click

from ems import __version__
from ems.cli.status import root_option
from ems.client.writer import WriteChannel
from ems.common.deadline import Deadline, DeadlineExpired
from ems.common.size import format_size
from ems.pool.audit import Finding, FindingKind
from ems.rpc._pb.ems.v1 import AttachReply
from ems.rpc.channel import PoolChannel, Refused, Unavailable
from ems.server import fsck
from ems.shm import layout
from ems.shm.liveness import LivenessLock
from ems_native._index import ABI_VERSION, LAYOUT

__all__ = ["command"]

_TOLD_MS = 5000
_SHOWN = 20


@click.command("fsck")
@root_option
@click.option("--repair", is_flag=True, help="Mend what is wrong; wrong blocks are lost.")
@click.option(
    "--read/--no-read",
    "read_blocks",
    default=True,
    help="Compare every block with its checksum (some GiB a second). Default: do.",
)
def command(root: str, repair: bool, read_blocks: bool) -> None:
    """Check the memory of a pool, whether a server serves it or not.

    A server that died leaves changes half done; the next one finishes them, and so does --repair.
    While a server runs, --repair tells it which blocks are wrong, and it drops them.

    Exit codes: 0 nothing is wrong, or all of it was mended; 1 something is wrong; 2 there is no
    pool that can be checked.
    """
    try:
        report = fsck.check(root, read_blocks=read_blocks)
        _tell(root, report)
        mended = ""
        if repair and report.server_pid is None:
            mended = fsck.mend(root, report)
        elif repair and report.damage:
            mended = _tell_server(root, report.damage)
        if mended:
            click.echo(f"repaired: {mended}")
            report = fsck.check(root, read_blocks=read_blocks)
    except fsck.CannotCheck as error:
        click.echo(f"{error}", err=True)
        raise SystemExit(2) from None
    if not report.sound:
        click.echo("the pool is damaged" + ("" if repair else "; --repair mends it"))
        raise SystemExit(1)
    click.echo("the pool is sound")


def _tell(root: str, report: fsck.Report) -> None:
    found = report.audit
    who = "nobody serves it" if report.server_pid is None else f"served by {report.server_pid}"
    click.echo(f"pool in {root}: {who}, epoch {report.epoch}, last state {report.state}")
    click.echo(
        f"{found.entries} blocks and {found.reservations} reservations, "
        f"{format_size(found.used)} used, {format_size(found.reserved)} of it reserved, "
        f"{found.sessions} sessions"
    )
    for text in report.files:
        click.echo(f"file: {text}")
    for finding in found.findings[:_SHOWN]:
        note = " (the next server mends it)" if finding.kind.harmless else ""
        click.echo(f"{finding}{note}")
    if len(found.findings) > _SHOWN:
        click.echo(f"and {len(found.findings) - _SHOWN} more")


def _tell_server(root: str, damage: list[Finding]) -> str:
    blocks = [one for one in damage if one.kind is FindingKind.CHECKSUM]
    try:
        told = asyncio.run(_report(root, blocks))
    except (Refused, Unavailable, DeadlineExpired, OSError) as error:
        raise fsck.CannotCheck(f"the server of {root} cannot be told: {error}") from None
    left = len(damage) - len(blocks)
    text = f"the server was told of {told} blocks and drops those that are wrong"
    return f"{text}; {left} other findings need a restart" if left else text


async def _report(root: str, blocks: list[Finding]) -> int:
    async with PoolChannel(root) as control:
        reply = await control.attach(
            Deadline.after_ms(_TOLD_MS),
            abi_version=ABI_VERSION,
            layout_version=LAYOUT["LAYOUT_VERSION"],
            client_version=__version__,
            credentials=None,
            resumed=None,
        )
    # The session ends with its lock.
    told = await asyncio.to_thread(_report_blocks, root, reply, blocks)
    # The server reads the blocks in the background; one more exchange would not wait for that.
    await asyncio.sleep(0.2)
    return told


def _report_blocks(root: str, reply: AttachReply, blocks: list[Finding]) -> int:
    lock = LivenessLock(os.path.join(root, layout.SESSIONS_LOCK), reply.session_id)
    channel = WriteChannel(os.path.join(root, layout.WRITE_SOCKET), reply.session_id, reply.secret)
    with contextlib.closing(lock), contextlib.closing(channel):
        return sum(
            channel.suspect(one.digest, one.version, Deadline.after_ms(_TOLD_MS)) for one in blocks
        )
