"""The least that can write into a pool: a session, its lock, a write channel. It copies nothing.

With it the server's part of a save is measured alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from types import TracebackType

from ems import __version__
from ems.client.writer import WriteChannel
from ems.common.deadline import Deadline
from ems.rpc.channel import PoolChannel
from ems.shm import layout
from ems.shm.liveness import LivenessLock
from ems_native._index import ABI_VERSION, LAYOUT

__all__ = ["BareWriter"]

_TIMEOUT_MS = 10_000


class BareWriter:
    """Attached to the server of a root; `channel` is its write channel. A context manager."""

    def __init__(self, root: str) -> None:
        self._closing = contextlib.ExitStack()
        session_id, secret = asyncio.run(_attach(root))
        lock = LivenessLock(os.path.join(root, layout.SESSIONS_LOCK), session_id)
        self._closing.callback(lock.close)
        self.channel = WriteChannel(os.path.join(root, layout.WRITE_SOCKET), session_id, secret)
        self._closing.callback(self.channel.close)

    def echo(self, payload: bytes) -> None:
        """Have the server send a payload back: what one exchange costs."""
        self.channel.echo(payload, Deadline.after_ms(_TIMEOUT_MS))

    def save(self, digests: bytes, lengths: bytes) -> int:
        """Reserve and commit keys without a copy; how many were granted."""
        channel = self.channel
        deadline = Deadline.after_ms(_TIMEOUT_MS)
        request = channel.next_request()
        statuses, places = channel.reserve(request, digests, lengths, True, False, deadline)
        granted = statuses.count(0)
        positions = None
        if granted < len(statuses):
            positions = [at for at, status in enumerate(statuses) if status == 0]
        channel.commit(request, positions, places, False, deadline)
        return granted

    def __enter__(self) -> BareWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.close()


async def _attach(root: str) -> tuple[int, bytes]:
    async with PoolChannel(root) as channel:
        reply = await channel.attach(
            Deadline.after_ms(_TIMEOUT_MS),
            abi_version=ABI_VERSION,
            layout_version=LAYOUT["LAYOUT_VERSION"],
            client_version=__version__,
        )
    return reply.session_id, reply.secret
