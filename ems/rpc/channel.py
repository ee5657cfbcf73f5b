"""A client's end of the control plane: one connection to `<root>/ems.sock`.

Used by the SDK's session and by the command line. Bound to the event loop it is used on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.metadata import Deadline as GrpcDeadline

from ems.common.deadline import Deadline, DeadlineExpired
from ems.rpc import codec
from ems.rpc._pb.ems.v1 import (
    AttachReply,
    AttachRequest,
    ChallengeRequest,
    DetachRequest,
    PoolStub,
    ProbeReply,
    ProbeRequest,
    StatusReply,
    StatusRequest,
)
from ems.shm import layout

__all__ = ["Credentials", "PoolChannel", "Reason", "Refused", "Resumed", "Unavailable"]

_T = TypeVar("_T")
_AGAIN_S = 0.01
_log = logging.getLogger("ems.rpc.channel")


class Unavailable(Exception):
    """No server answers: the socket is missing, refuses, or broke. Trying again later can help."""


class Reason(enum.Enum):
    """Why a server said no."""

    CREDENTIALS = "credentials"
    """Missing, unknown, or the wrong key."""
    VERSION = "version"
    """Client and server were built for different memory formats or write channels."""
    SESSION = "session"
    """The session to resume is not known to this pool: attach anew."""
    BUSY = "busy"
    """All sessions are taken, or the server is about to leave. Trying again later can help."""
    INTERNAL = "internal"
    """Anything else: a fault of the server."""


_REASONS = {
    Status.UNAUTHENTICATED: Reason.CREDENTIALS,
    Status.PERMISSION_DENIED: Reason.CREDENTIALS,
    Status.FAILED_PRECONDITION: Reason.VERSION,
    Status.UNIMPLEMENTED: Reason.VERSION,
    Status.NOT_FOUND: Reason.SESSION,
    Status.RESOURCE_EXHAUSTED: Reason.BUSY,
}


class Refused(Exception):
    """The server answered, and the answer is no.

    Args:
        reason: what a program decides by.
        text: what people read.
    """

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(reason, text)
        self.reason = reason
        self.text = text

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Credentials:
    """Who a client claims to be, and what proves it."""

    access_id: str
    access_key: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Resumed:
    """A session that outlived its server.

    Args:
        session_id: its number.
        secret: as `AttachReply` gave it.
        pool_id: of the pool it belongs to.
        live_requests: requests of the write channel that are still being written; all others are
            given back.
    """

    session_id: int
    secret: bytes
    pool_id: str
    live_requests: Sequence[int] = ()


class PoolChannel:
    """One connection to a node server; connects at the first call.

    Every call takes a `Deadline` that covers connecting too, and raises `DeadlineExpired`,
    `Unavailable` or `Refused`.

    Args:
        root: directory of the server.
    """

    def __init__(self, root: str) -> None:
        self.path = os.path.join(root, layout.SOCKET)
        self._channel = Channel(path=self.path)
        self._stub = PoolStub(self._channel)

    async def attach(
        self,
        deadline: Deadline,
        *,
        abi_version: int,
        layout_version: int,
        client_version: str,
        credentials: Credentials | None = None,
        resumed: Resumed | None = None,
    ) -> AttachReply:
        """Open a session, or take one up again.

        The client then locks byte `session_id` of `sessions.lock`, before it opens a write channel.
        """
        request = AttachRequest(
            abi_version=abi_version,
            layout_version=layout_version,
            client_version=client_version,
            pid=os.getpid(),
        )
        if credentials is not None:
            challenge = await self._call(self._stub.challenge, ChallengeRequest(), deadline)
            if challenge.required:
                request.access_id = credentials.access_id
                request.nonce = challenge.nonce
                request.proof = codec.proof(
                    credentials.access_key, challenge.nonce, credentials.access_id
                )
        if resumed is not None:
            request.session_id = resumed.session_id
            request.secret = resumed.secret
            request.pool_id = resumed.pool_id
            request.live_requests = codec.pack_u64(resumed.live_requests)
        return await self._call(self._stub.attach, request, deadline)

    async def detach(self, deadline: Deadline, session_id: int, secret: bytes) -> None:
        """End a session. Its reservations come back once its lock is free."""
        await self._call(
            self._stub.detach, DetachRequest(session_id=session_id, secret=secret), deadline
        )

    async def status(self, deadline: Deadline) -> StatusReply:
        """Ask for the figures of the pool."""
        return await self._call(self._stub.status, StatusRequest(), deadline)

    async def probe(self, deadline: Deadline) -> ProbeReply:
        """Ask whether the server is there."""
        return await self._call(self._stub.probe, ProbeRequest(), deadline)

    def close(self) -> None:
        """Close the connection; calls under way end with `Unavailable`."""
        self._channel.close()

    async def __aenter__(self) -> PoolChannel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    async def _call(
        self, method: Callable[..., Awaitable[_T]], request: object, deadline: Deadline
    ) -> _T:
        while True:
            try:
                return await self._call_once(method, request, deadline)
            except AttributeError as error:
                # How grpclib reports a connection that was lost before anything was sent: a unix
                # socket whose queue is full lets asyncio believe that it is connected.
                if "_transport" not in str(error):
                    raise
                _log.debug("%s: not connected (%s), trying again", self.path, error)
                await anyio.sleep(_AGAIN_S)

    async def _call_once(
        self, method: Callable[..., Awaitable[_T]], request: object, deadline: Deadline
    ) -> _T:
        left = deadline.remaining_s()
        if left <= 0:
            raise DeadlineExpired(f"no time was left to ask the server at {self.path}")
        try:
            # In a task of its own: grpclib reports what goes wrong by `cancel()` of the task that
            # calls, without `uncancel()`, and each cancel scope around would let that out later.
            call = asyncio.ensure_future(method(request, deadline=GrpcDeadline.from_timeout(left)))
            # The scope covers connecting too; grpclib's deadline is what it tells the server.
            with anyio.fail_after(left):
                return await call
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            raise DeadlineExpired(
                f"the server at {self.path} did not answer within {left:.3g} s"
            ) from None
        except GRPCError as error:
            if error.status is Status.DEADLINE_EXCEEDED:
                raise DeadlineExpired(str(error.message)) from None
            if error.status is Status.UNAVAILABLE:
                raise Unavailable(f"{self.path}: {error.message}") from None
            reason = _REASONS.get(error.status, Reason.INTERNAL)
            raise Refused(reason, error.message or error.status.name) from None
        except FileNotFoundError:
            raise Unavailable(f"no server: {self.path} does not exist") from None
        except ConnectionRefusedError:
            raise Unavailable(f"no server: nobody listens at {self.path}") from None
        except PermissionError:
            raise Unavailable(
                f"this user may not use {self.path}; a server opens its pool to a group with "
                "`ems serve --group NAME`"
            ) from None
        except (OSError, StreamTerminatedError, ProtocolError, AssertionError) as error:
            # AssertionError: how the generated stub reports a stream that ended without a message.
            raise Unavailable(f"the connection to {self.path} broke: {error}") from None
