"""The server's end of the write channel: reserve, commit, abort on a lean unix socket.

A connection begins with HELLO and then belongs to one session. All frames that are there at one
wake-up are answered by one write. Nothing here waits, but the check of a suspected block, whose
bytes are read in a worker thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import time
from collections import OrderedDict
from typing import Callable, cast

from ems.pool import Pool
from ems.rpc import frames
from ems.rpc.frames import ANSWER, HEADER_BYTES, NO_ROOM, FrameError, Kind
from ems_native._copy import checksum

_log = logging.getLogger("ems.server.write_channel")

_REMEMBERED_ABORTS = 1024
_RECEIVE_BYTES = 256 << 10
_STRANGER_BYTES = 4 << 10
"""Buffer of a connection that has not said whose it is."""
_HELLO_WITHIN_S = 5.0
_LONGEST_SAVE_NS = 600_000_000_000  # what a client may say that its batch began ago
_MOST_STRANGERS = 512
_MOST_CONNECTIONS = 256
"""Of one session; its client keeps 16 that are idle and one per operation under way."""
_MOST_CHECKS = 16
BACKLOG = 1024
"""Connections that wait to be accepted, for either socket: asyncio takes a full queue for a lost
connection."""


_GRANTED_AHEAD = struct.Struct("<QQ")


class _Refused(Exception):
    """A frame that is well formed but may not be asked for now; the text goes to the client."""


class _Session:
    """What all connections of one session share."""

    def __init__(self) -> None:
        self.connections: set[_Connection] = set()
        # An abort may overtake its reserve: the client timed out, closed that connection and
        # aborted on another one while the first frame still lay in a socket. Such a reserve must
        # find nothing to take.
        self._aborted: OrderedDict[int, None] = OrderedDict()

    def remember_abort(self, request: int) -> None:
        self._aborted[request] = None
        if len(self._aborted) > _REMEMBERED_ABORTS:
            self._aborted.popitem(last=False)

    def was_aborted(self, request: int) -> bool:
        return request in self._aborted


class WriteServer:
    """Accepts connections of the write channel and applies their frames to the pool.

    Args:
        pool: changed on the loop's thread only.
        data: address of the mapped data file, to check suspected blocks.
        authorize: whether a session with that secret may write now.
        on_disconnect: called when the last connection of a session ended.
        most_strangers: connections that have not said whose they are; beyond, the oldest ends.
    """

    def __init__(
        self,
        pool: Pool,
        data: int,
        authorize: Callable[[int, bytes], bool],
        on_disconnect: Callable[[int], None],
        most_strangers: int = _MOST_STRANGERS,
    ) -> None:
        self.pool = pool
        self.messages = 0
        self._data = data
        self._authorize = authorize
        self._on_disconnect = on_disconnect
        self._sessions: dict[int, _Session] = {}
        self._strangers: dict[_Connection, None] = {}  # oldest first
        self._most_strangers = most_strangers
        self._checks: dict[int, asyncio.Task[None]] = {}  # by slot
        self._server: asyncio.AbstractServer | None = None

    async def start(self, sock: socket.socket) -> None:
        """Serve on a bound, listening or not yet listening, unix socket."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self.connection, sock=sock, backlog=BACKLOG)

    def connection(self) -> asyncio.BufferedProtocol:
        """The protocol of one accepted connection."""
        return _Connection(self)

    async def close(self) -> None:
        """Stop accepting, end all connections and wait for the checks under way."""
        if self._server is not None:
            self._server.close()
        for session in list(self._sessions):
            self.drop_session(session)
        for stranger in list(self._strangers):
            stranger.close()
        if self._checks:
            await asyncio.gather(*self._checks.values(), return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    def drop_session(self, session: int) -> None:
        """End all connections of a session, so that no frame of it can act any more."""
        known = self._sessions.pop(session, None)
        if known is not None:
            for connection in list(known.connections):
                connection.close()

    # ---- called by connections ----

    def joined(self, connection: _Connection) -> None:
        """Count a connection that has not said whose it is; too many push the oldest out."""
        self._strangers[connection] = None
        if len(self._strangers) > self._most_strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.close()

    def left(self, connection: _Connection) -> None:
        """Forget a connection that ended."""
        self._strangers.pop(connection, None)
        known = self._sessions.get(connection.session)
        if known is None or connection not in known.connections:
            return
        known.connections.discard(connection)
        if not known.connections:
            # What it aborted stays remembered until the session ends: a frame of a connection
            # that closed may still come.
            self._on_disconnect(connection.session)

    def greet(self, connection: _Connection, payload: bytes) -> bytes:
        """Answer a HELLO: from here on the connection acts for its session."""
        session, secret = frames.parse_hello(payload)
        if not self._authorize(session, secret):
            raise _Refused(f"session {session} is not known here or does not hold its lock")
        known = self._sessions.setdefault(session, _Session())
        if len(known.connections) >= _MOST_CONNECTIONS:
            raise _Refused(
                f"session {session} has {_MOST_CONNECTIONS} connections already; close some of them"
            )
        self._strangers.pop(connection, None)
        connection.session = session
        known.connections.add(connection)
        return frames.hello_answer(self.pool.epoch)

    def answer(self, session: int, kind: int, request: int, payload: bytes) -> bytes:
        """Apply one frame of a session to the pool; the whole answering frame."""
        now_ns = time.monotonic_ns()
        if kind == Kind.RESERVE:
            statuses, offsets = self._reserve(
                session, request, frames.parse_reserve(payload), now_ns
            )
            reply = offsets + statuses
        elif kind == Kind.COMMIT:
            positions, checksums, chain, mark_ns = frames.parse_commit(payload)
            mark_ns = _believed(mark_ns, now_ns)
            reply = self.pool.commit(session, request, positions, checksums, chain, mark_ns)
        elif kind == Kind.PUT:
            reply = self._put(session, request, frames.parse_put(payload), now_ns)
        elif kind == Kind.ABORT:
            self.pool.abort(session, request)
            self._sessions[session].remember_abort(request)
            reply = b""
        elif kind == Kind.SUSPECT:
            reply = bytes([self._check_later(*frames.parse_suspect(payload))])
        elif kind == Kind.ECHO:
            reply = payload
        else:
            raise FrameError(f"there is no frame of kind {kind}")
        return frames.frame(kind | ANSWER, request, reply)

    def _reserve(
        self, session: int, request: int, asked: tuple[bytes, bytes, bool, bool], now_ns: int
    ) -> tuple[bytes, bytes]:
        if self._sessions[session].was_aborted(request):
            count = len(asked[1]) // 8
            return bytes([NO_ROOM]) * count, bytes(8 * count)
        return self.pool.reserve(session, request, *asked, now_ns)

    def _put(self, session: int, request: int, put: frames.Put, now_ns: int) -> bytes:
        mark_ns = _believed(put.mark_ns, now_ns)
        status = self.pool.put(session, request, put.digest, put.checksum, put.chain, mark_ns)
        if not put.following:
            return frames.put_answer(0, status, NO_ROOM)
        # Nobody asks for it under this name; it gets that of its key by its PUT.
        name = _GRANTED_AHEAD.pack(session, put.following)
        length = put.length.to_bytes(8, "little")
        asked = (name, length, put.replace, True)
        granted, offset = self._reserve(session, put.following, asked, now_ns)
        return frames.put_answer(int.from_bytes(offset, "little"), status, granted[0])

    def _check_later(self, digest: bytes, version: int) -> bool:
        found = self.pool.locate(digest)
        if found is None or found[1] != version:
            return False
        slot = found[0]
        if slot not in self._checks:
            if len(self._checks) >= _MOST_CHECKS:
                return False  # whoever reads it next reports it again
            task = asyncio.ensure_future(self._check(*found))
            self._checks[slot] = task
            task.add_done_callback(lambda done: self._checks.pop(slot, None))
        return True

    async def _check(self, slot: int, version: int, offset: int, length: int, want: int) -> None:
        """Drop an entry whose bytes are not those that were committed.

        The extent may be granted to somebody else meanwhile; then the version moved, and `drop`
        does nothing.
        """
        loop = asyncio.get_running_loop()
        got = await loop.run_in_executor(None, checksum, self._data + offset, length)
        if got != want and self.pool.drop(slot, version):
            _log.error("block in slot %d does not match its checksum: dropped", slot)


class _Connection(asyncio.BufferedProtocol):
    """One accepted connection. `session` is 0 until HELLO."""

    def __init__(self, server: WriteServer) -> None:
        self.session = 0
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._view = memoryview(bytearray(_STRANGER_BYTES))
        self._filled = 0
        self._hello_timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._server.joined(self)
        loop = asyncio.get_running_loop()
        self._hello_timer = loop.call_later(_HELLO_WITHIN_S, self._no_hello)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._transport = None
        self._server.left(self)

    def pause_writing(self) -> None:
        """The client does not read its answers: stop reading its frames until it does."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def _no_hello(self) -> None:
        if self.session == 0:
            self.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        answers: list[bytes] = []
        at = 0
        try:
            while self._filled - at >= HEADER_BYTES:
                header = frames.parse_header(bytes(self._view[at : at + HEADER_BYTES]))
                if self.session == 0 and header.kind != Kind.HELLO:
                    raise FrameError("the first frame of a connection must be HELLO")
                if self.session == 0 and header.nbytes != frames.HELLO_BYTES:
                    raise FrameError(f"a HELLO has {frames.HELLO_BYTES} bytes, not {header.nbytes}")
                end = at + HEADER_BYTES + header.nbytes
                if end > self._filled:
                    break
                payload = bytes(self._view[at + HEADER_BYTES : end])
                at = end
                answers.append(self._answer(header, payload))
        except (FrameError, _Refused) as error:
            _log.warning("write channel: %s; the connection ends", error)
            answers.append(frames.frame(Kind.REFUSED | ANSWER, 0, str(error).encode()))
            self._send(answers)
            if self._transport is not None:
                self._transport.close()
            return
        if at:
            left = bytes(self._view[at : self._filled])
            if self.session and len(self._view) < _RECEIVE_BYTES:
                self._view = memoryview(bytearray(_RECEIVE_BYTES))
            self._view[: len(left)] = left
            self._filled = len(left)
        self._send(answers)

    def _answer(self, header: frames.Header, payload: bytes) -> bytes:
        self._server.messages += 1
        if self.session == 0:
            return self._server.greet(self, payload)
        return self._server.answer(self.session, header.kind, header.request, payload)

    def _send(self, answers: list[bytes]) -> None:
        if answers and self._transport is not None:
            self._transport.write(b"".join(answers))


def _believed(mark_ns: int, now_ns: int) -> int:
    return mark_ns if 0 <= now_ns - mark_ns < _LONGEST_SAVE_NS else now_ns


def bind_unix_socket(path: str, mode: int) -> socket.socket:
    """A unix socket bound to `path`, which must be free, with these permissions from the start."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mask = os.umask(0o777 & ~mode)
        try:
            sock.bind(path)
        finally:
            os.umask(mask)
    except BaseException:
        sock.close()
        raise
    return sock
