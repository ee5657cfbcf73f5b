"""`ems status`: what a server and its pool are doing, for people or as JSON."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
import sys
import time

import anyio
import click

from ems.common.config import check_root
from ems.common.deadline import Deadline, DeadlineExpired
from ems.common.exception import EmsException
from ems.common.size import format_size
from ems.rpc._pb.ems.v1 import StatusReply
from ems.rpc.channel import PoolChannel, Refused, Unavailable
from ems.shm import layout, liveness
from ems.shm.segment import Segment

__all__ = ["command", "root_option"]

ANSWER_MS = 2000
"""What a living server needs far less of."""
WAIT_STEP_S = 0.02
SERVING = "serving"


class _RootType(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.2 on
    name = "directory"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        try:
            return check_root("--root", value)
        except EmsException as error:
            self.fail(error.message(), param, ctx)


root_option = click.option(
    "--root",
    type=_RootType(),
    envvar="EMS_ROOT",
    default="/dev/shm/ems",
    metavar="DIR",
    help="Directory of the pool. Default: /dev/shm/ems.  [EMS_ROOT]",
)


def _number(_ctx: click.Context, _param: click.Parameter, value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise click.BadParameter("it is no number of seconds")
    return value


@click.command("status")
@root_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0, max=31_536_000),
    callback=_number,
    metavar="SECONDS",
    help="Wait until a server serves, at most so long.",
)
def command(root: str, as_json: bool, wait_s: float | None) -> None:
    """Show state, sizes, sessions, hits and misses of the pool in a root.

    Exit codes: 0 a server serves; 1 none does (what is known of the pool is printed all the same).
    """
    try:
        reply = anyio.run(_ask, root, wait_s)
    except (Unavailable, Refused, DeadlineExpired) as error:
        _print_offline(root, str(error), as_json)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(as_dict(reply, root)))
    else:
        _print_table(reply, root)
    sys.exit(0 if reply.state == SERVING else 1)


async def _ask(root: str, wait_s: float | None) -> StatusReply:
    until = time.monotonic() + (wait_s or 0)
    while True:
        try:
            async with PoolChannel(root) as channel:
                reply = await channel.status(Deadline.after_ms(ANSWER_MS))
            if reply.state == SERVING or time.monotonic() >= until:
                return reply
        except (Unavailable, DeadlineExpired):
            if time.monotonic() >= until:
                raise
        await anyio.sleep(WAIT_STEP_S)


def as_dict(reply: StatusReply, root: str) -> dict[str, object]:
    """Return a reply as the JSON object that is printed."""
    counters = dict(zip(reply.counter_names, reply.counter_values))
    return {
        "root": root,
        "state": reply.state,
        "epoch": reply.epoch,
        "pool_id": reply.pool_id,
        "server": {
            "version": reply.server_version,
            "pid": reply.server_pid,
            "uptime_ms": reply.uptime_ms,
        },
        "capacity": reply.capacity,
        "used": reply.used,
        "reserved": reply.reserved,
        "free": reply.free,
        "largest_free": reply.largest_free,
        "ready": reply.ready,
        "page_kind": reply.page_kind,
        "entries": reply.entries,
        "slots": reply.slots,
        "evictions": reply.evictions,
        "hits": counters.get("load_hits", 0),
        "misses": _misses(counters),
        "sessions": [
            {"id": session, "pid": pid, "reserved": reserved}
            for session, pid, reserved in zip(
                reply.session_ids, reply.session_pids, reply.session_reserved
            )
        ],
        "counters": counters,
    }


def _misses(counters: dict[str, int]) -> int:
    """Keys that were asked for and not delivered."""
    return max(0, counters.get("load_keys", 0) - counters.get("load_hits", 0))


def _print_table(reply: StatusReply, root: str) -> None:
    from rich.console import Console
    from rich.table import Table

    counters = dict(zip(reply.counter_names, reply.counter_values))
    hits, misses = counters.get("load_hits", 0), _misses(counters)
    asked = hits + misses
    table = Table(title=f"pool in {root}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    rows = [
        ("state", f"{reply.state} for {reply.uptime_ms / 1000:.0f} s, process {reply.server_pid}"),
        ("version", reply.server_version),
        ("epoch", f"{reply.epoch}"),
        ("capacity", f"{format_size(reply.capacity)}, {format_size(reply.ready)} prepared"),
        ("used", f"{format_size(reply.used)} ({_share(reply.used, reply.capacity)})"),
        ("reserved", format_size(reply.reserved)),
        ("largest free", format_size(reply.largest_free)),
        ("pages", reply.page_kind),
        ("entries", f"{reply.entries:,} of {reply.slots:,}"),
        ("evictions", f"{reply.evictions:,}"),
        ("hits", f"{hits:,} ({_share(hits, asked)} of {asked:,} keys)"),
        ("misses", f"{misses:,}"),
        ("sessions", f"{len(reply.session_ids)}"),
    ]  # fmt: skip
    for session, pid, reserved in zip(
        reply.session_ids[:16], reply.session_pids, reply.session_reserved
    ):
        rows.append((f"  {session}", f"process {pid}, {format_size(reserved)} reserved"))
    if len(reply.session_ids) > 16:
        rows.append(("", f"and {len(reply.session_ids) - 16} more"))
    for name, text in rows:
        table.add_row(name, text)
    Console(highlight=False).print(table)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


# ---- without an answer ----


@dataclasses.dataclass(frozen=True)
class _Offline:
    """What can be known of a root without asking anybody."""

    state: str
    text: str
    header: dict[str, int | str] | None = None


def _look(root: str) -> _Offline:
    try:
        pid = liveness.server_pid(os.path.join(root, layout.SERVER_LOCK))
        head = layout.read_prologue(os.path.join(root, layout.INDEX))
    except OSError as error:
        return _Offline("unknown", f"{root} cannot be read: {error.strerror}")
    header = None if head is None else _header(root, head)
    how = f"start one with `ems serve --root {root}`"
    if pid is not None and header is None:
        return _Offline("starting", f"process {pid} is making a pool in {root}")
    if pid is not None:
        return _Offline(
            "silent", f"process {pid} holds {root} and does not answer{_age(header)}", header
        )
    if header is None:
        return _Offline("absent", f"there is no pool in {root}: {how}")
    text = f"there is a pool in {root}, but no server: {how}; clients read what is there"
    return _Offline("stopped", text, header)


def _age(header: dict[str, int | str] | None) -> str:
    beat_ns = int(header.get("heartbeat_ns", 0)) if header else 0
    if not beat_ns:
        return ""
    return f", last sign of life {(time.monotonic_ns() - beat_ns) / 1e9:.1f} s ago"


def _header(root: str, head: layout.Prologue) -> dict[str, int | str]:
    from ems.pool.audit import usage
    from ems.pool.geometry import geometry
    from ems_native import _index

    try:
        with Segment.open(os.path.join(root, layout.INDEX), writable=False) as index:
            header = dict(_index.Reader(index.address, index.nbytes, 0).header())
            sizes = geometry(header["capacity"], header["slots"])
            if sizes.index_bytes != index.nbytes:
                raise ValueError("the header contradicts the file")
            raw = (ctypes.c_char * index.nbytes).from_address(index.address)
            header["entries"], header["used"] = usage(memoryview(raw), sizes)
            return header
    except (OSError, ValueError):  # of another version, or spoiled: only its head can be read
        return {"pool_id": head.pool_id, "layout": head.layout_version}


def _print_offline(root: str, error: str, as_json: bool) -> None:
    found = _look(root)
    known = found.header or {}
    if as_json:
        names = ("epoch", "pool_id", "capacity", "used", "entries", "slots", "evictions")
        facts = {name: known[name] for name in names if name in known}
        fixed = {"root": root, "state": found.state, "server": None, "message": error}
        click.echo(json.dumps({**fixed, **facts}))
        return
    click.echo(f"ems status: {found.text}", err=True)
    if "capacity" in known:
        capacity = format_size(int(known["capacity"]))
        click.echo(
            f"  capacity {capacity}, {format_size(int(known['used']))} used by {known['entries']} "
            f"blocks of at most {known['slots']}, epoch {known['epoch']}, {known['evictions']} "
            "evictions",
            err=True,
        )
