"""The answers of the control plane: a few lines each over sessions and pool; none of them waits."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from grpclib import GRPCError
from grpclib.const import Status

from ems import __version__
from ems.common.metrics import Count
from ems.pool import Pool, PoolFull, ServerState
from ems.rpc import codec
from ems.rpc._pb.ems.v1 import (
    AttachReply,
    AttachRequest,
    ChallengeReply,
    ChallengeRequest,
    DetachReply,
    DetachRequest,
    PoolBase,
    ProbeReply,
    ProbeRequest,
    StatusReply,
    StatusRequest,
)
from ems.server.counters import CounterPages
from ems.server.credentials import Authenticator, WrongCredentials
from ems.server.prepare import PAGE_NAMES
from ems.server.sessions import NoSuchSession, Sessions
from ems.shm import layout
from ems_native._index import ABI_VERSION, LAYOUT

__all__ = ["PoolService"]

_log = logging.getLogger("ems.server.service")


class PoolService(PoolBase):
    """What `protos/ems/v1/ems.proto` describes, for one pool.

    Args:
        pool: the pool.
        pool_id: its id, hexadecimal.
        sessions: who is attached.
        pages: what the clients count.
        authenticator: checks credentials.
        suspect: called when a client said goodbye: its lock will be free soon.
        verify: what clients are told about checksums.
    """

    def __init__(
        self,
        pool: Pool,
        pool_id: str,
        sessions: Sessions,
        pages: CounterPages,
        authenticator: Authenticator,
        *,
        suspect: Callable[[], None],
        verify: bool,
    ) -> None:
        self._pool = pool
        self._pool_id = pool_id
        self._sessions = sessions
        self._pages = pages
        self._authenticator = authenticator
        self._suspect = suspect
        self._verify = verify
        self._started = time.monotonic()
        self.state = ServerState.SERVING

    async def challenge(self, challenge_request: ChallengeRequest) -> ChallengeReply:
        """Give out a nonce."""
        return ChallengeReply(
            nonce=self._authenticator.challenge(), required=self._authenticator.required
        )

    async def attach(self, attach_request: AttachRequest) -> AttachReply:
        """Open or resume a session."""
        request = attach_request
        _check_versions(request)
        try:
            self._authenticator.check(request.access_id, request.nonce, request.proof)
        except WrongCredentials as error:
            _log.warning("process %d was refused: %s", request.pid, error)
            raise GRPCError(Status.UNAUTHENTICATED, str(error)) from None
        if request.session_id:
            session_id, secret = self._resume(request)
        else:
            session_id, secret = self._open(request)
        return AttachReply(
            session_id=session_id,
            secret=secret,
            epoch=self._pool.epoch,
            pool_id=self._pool_id,
            abi_version=ABI_VERSION,
            layout_version=LAYOUT["LAYOUT_VERSION"],
            server_version=__version__,
            verify=self._verify,
        )

    def _open(self, request: AttachRequest) -> tuple[int, bytes]:
        if self.state is not ServerState.SERVING:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED, "the server is about to stop: attach to the next one"
            )
        try:
            return self._sessions.attach(request.pid & 0xFFFF_FFFF)  # no decoder sees to it
        except PoolFull as error:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, str(error)) from None

    def _resume(self, request: AttachRequest) -> tuple[int, bytes]:
        try:
            live = codec.unpack_u64(request.live_requests)
        except ValueError as error:
            raise GRPCError(Status.INVALID_ARGUMENT, str(error)) from None
        try:
            if request.pool_id != self._pool_id:
                raise NoSuchSession(request.session_id)
            self._sessions.resume(request.session_id, request.secret, live)
        except NoSuchSession:
            raise GRPCError(
                Status.NOT_FOUND,
                f"session {request.session_id} is not open in this pool: attach anew",
            ) from None
        return request.session_id, request.secret

    async def detach(self, detach_request: DetachRequest) -> DetachReply:
        """End a session once its lock is free."""
        try:
            self._sessions.detach(detach_request.session_id, detach_request.secret)
        except NoSuchSession:
            raise GRPCError(
                Status.NOT_FOUND, f"session {detach_request.session_id} is not open in this pool"
            ) from None
        self._suspect()
        return DetachReply()

    async def status(self, status_request: StatusRequest) -> StatusReply:
        """Tell all figures."""
        stats = self._pool.stats()
        records = self._pool.sessions()
        counters = self._pages.total([record.id for record in records])
        return StatusReply(
            state=self.state.name.lower(),
            epoch=stats.epoch,
            pool_id=self._pool_id,
            server_version=__version__,
            server_pid=os.getpid(),
            uptime_ms=int((time.monotonic() - self._started) * 1000),
            capacity=stats.capacity,
            used=stats.used,
            reserved=stats.reserved,
            free=stats.free,
            largest_free=stats.largest_free,
            ready=stats.ready,
            page_kind=PAGE_NAMES.get(stats.page_kind, "unknown"),
            entries=stats.entries,
            slots=stats.slots,
            evictions=stats.evictions,
            session_ids=[record.id for record in records],
            session_pids=[record.pid for record in records],
            session_reserved=[record.reserved_bytes for record in records],
            counter_names=[count.name.lower() for count in Count],
            counter_values=[counters[count] for count in Count],
        )

    async def probe(self, probe_request: ProbeRequest) -> ProbeReply:
        """Be there."""
        return ProbeReply(
            state=self.state.name.lower(), epoch=self._pool.epoch, pool_id=self._pool_id
        )


def _check_versions(request: AttachRequest) -> None:
    layout_version = int(LAYOUT["LAYOUT_VERSION"])
    readable = layout.is_readable(request.layout_version, layout_version)
    if request.abi_version != ABI_VERSION or not readable:
        raise GRPCError(
            Status.FAILED_PRECONDITION,
            f"client {request.client_version or '?'} speaks ABI {request.abi_version} and memory "
            f"layout {layout.describe_version(request.layout_version)}, "
            f"this server {__version__} ABI {ABI_VERSION} and layout "
            f"{layout.describe_version(layout_version)}: install the same version of ems on both "
            "sides",
        )
