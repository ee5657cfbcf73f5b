"""What `ems status` says about the server that a workload runs against."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time

from ems.common.exception import internal_error, io_error
from ems.testing.child import child_environment, python_command

__all__ = ["ServerFigures", "read_server", "wait_until_prepared"]

_STATUS_TIMEOUT_S = 20.0
_POLL_S = 0.1


@dataclasses.dataclass(frozen=True)
class ServerFigures:
    """The part of a server's status that a report needs."""

    capacity: int
    ready: int
    page_kind: str
    evictions: int
    reserved: int
    sessions: int
    used: int


def read_server(root: str) -> ServerFigures:
    """Ask the server of a root, the way a person would.

    Raises:
        EmsException: `EMS_IO_ERROR` when no server answers there.
    """
    command = python_command("ems", "status", "--root", root, "--json")
    try:
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_STATUS_TIMEOUT_S,
            check=False,
            env=child_environment(),
            cwd="/",
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise io_error(f"the server of {root} did not answer in {_STATUS_TIMEOUT_S:g} s") from None
    if answer.returncode != 0:
        text = answer.stderr.decode("utf-8", "replace").strip()
        text = text or "nobody serves there; `ems serve` starts a server"
        raise io_error(f"the server of {root} gives no status: {text}")
    try:
        status = json.loads(answer.stdout)
        return ServerFigures(
            capacity=int(status["capacity"]),
            ready=int(status["ready"]),
            page_kind=str(status["page_kind"]),
            evictions=int(status["evictions"]),
            reserved=int(status["reserved"]),
            sessions=len(status["sessions"]),
            used=int(status["used"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise internal_error(
            f"`ems status --json` of {root} is not understood: {error!r}"
        ) from error


def wait_until_prepared(root: str, timeout_s: float = 60.0) -> ServerFigures:
    """Wait until all memory of the pool is in use, so that nobody measures its start."""
    give_up = time.monotonic() + timeout_s
    while True:
        figures = read_server(root)
        if figures.ready >= figures.capacity or time.monotonic() > give_up:
            return figures
        time.sleep(_POLL_S)
