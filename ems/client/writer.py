"""The client's end of the write channel: one short exchange per step of a save.

Blocking and thread safe: each exchange takes a connection of its own, kept for the next one when
it ended well. A connection that timed out is closed, never reused: its answer might still come.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from array import array

from ems.common.deadline import Deadline, DeadlineExpired
from ems.devices.base import (
    PLACE_BYTES,
    PLACE_CHECKSUM,
    PLACE_LENGTH,
    PLACE_OFFSET,
    PLACE_WORDS,
)
from ems.rpc import frames
from ems.rpc.frames import ANSWER, HEADER_BYTES, FrameError, Kind

_ALL_POSITIONS = array("I", range(frames.MAX_KEYS)).tobytes()
_IDLE_CONNECTIONS = 16
_RECEIVE_BYTES = 64 << 10


class ChannelBroken(OSError):
    """The server is not there, went away, or does not accept this session any more."""


class WriteChannel:
    """Reserves, commits and aborts for one session.

    Args:
        path: the write socket in the pool's root.
        session: id from the attach.
        secret: 16 bytes from the attach.
    """

    def __init__(self, path: str, session: int, secret: bytes) -> None:
        self.messages = 0
        self._path = path
        self._hello = frames.hello(session, secret)
        self._requests = itertools.count(1)
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._busy: list[socket.socket] = []
        self._generation = 0
        self._closed = False

    def next_request(self) -> int:
        """A number that no other request of this channel has."""
        return next(self._requests)

    def connect(self, deadline: Deadline) -> None:
        """Open a connection ahead for the first save; that it fails is the business of that one."""
        with contextlib.suppress(DeadlineExpired, OSError):
            self._give_back(*self._take(deadline))

    def reserve(
        self,
        request: int,
        digests: bytes,
        lengths: bytes,
        replace: bool,
        force: bool,
        deadline: Deadline,
    ) -> tuple[bytes, bytearray]:
        """Ask for extents for up to 8,192 keys.

        Returns:
            A status per key, and a place per key (40 bytes) whose offset is set where GRANTED.

        Raises:
            DeadlineExpired: no answer in time; the request must be aborted.
            ChannelBroken: the server went away.
        """
        answer = self._exchange(
            Kind.RESERVE,
            request,
            frames.reserve(request, digests, lengths, replace, force),
            deadline,
        )
        count = len(lengths) // 8
        if len(answer) != 9 * count:
            raise ChannelBroken(f"the server answered {len(answer)} bytes for {count} keys")
        places = bytearray(PLACE_BYTES * count)
        words = memoryview(places).cast("Q")
        words[PLACE_OFFSET::PLACE_WORDS] = memoryview(answer)[: 8 * count].cast("Q")
        words[PLACE_LENGTH::PLACE_WORDS] = memoryview(lengths).cast("Q")
        return answer[8 * count :], places

    def commit(
        self,
        request: int,
        positions: list[int] | None,
        places: bytearray,
        chain: bool,
        deadline: Deadline,
        mark_ns: int = 0,
    ) -> bytes:
        """Publish the keys at these rising positions (None = all); a status per position.

        `mark_ns`: when position 0 counts as used (CLOCK_MONOTONIC), 0 = on arrival.

        Raises:
            DeadlineExpired: no answer in time; what was committed is unknown.
            ChannelBroken: likewise, the server went away.
        """
        checksums = memoryview(places).cast("Q")[PLACE_CHECKSUM::PLACE_WORDS]
        if positions is None:
            count = len(checksums)
            column = _ALL_POSITIONS[: 4 * count]
            sums = checksums.tobytes()
        else:
            count = len(positions)
            column = array("I", positions).tobytes()
            sums = array("Q", [checksums[position] for position in positions]).tobytes()
        answer = self._exchange(
            Kind.COMMIT, request, frames.commit(request, column, sums, chain, mark_ns), deadline
        )
        if len(answer) != count:
            raise ChannelBroken(f"the server answered {len(answer)} bytes for {count} keys")
        return answer

    def abort(self, request: int, deadline: Deadline) -> None:
        """Give back what is left of a request. Idempotent, also before its grant was seen."""
        self._exchange(Kind.ABORT, request, frames.frame(Kind.ABORT, request), deadline)

    def suspect(self, digest: bytes, version: int, deadline: Deadline) -> bool:
        """Report a block that does not match its checksum; whether the server looks into it."""
        answer = self._exchange(Kind.SUSPECT, 0, frames.suspect(digest, version), deadline)
        return answer == b"\x01"

    def echo(self, payload: bytes, deadline: Deadline) -> bytes:
        """The same bytes back: what one exchange costs."""
        return self._exchange(Kind.ECHO, 0, frames.frame(Kind.ECHO, 0, payload), deadline)

    def drop_idle(self) -> None:
        """Close connections to a server that is gone; those in use are closed when given back."""
        with self._lock:
            self._generation += 1
            idle, self._idle = self._idle, []
        for sock in idle:
            sock.close()

    def close(self) -> None:
        """End all connections; exchanges under way fail at once with `ChannelBroken`."""
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        self.drop_idle()
        for sock in busy:
            # It may not be connected yet, or its thread may have closed it just now.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """In a forked child: close the parent's connections here, without a word to anybody.

        Takes no lock: another thread may have held it at the fork.
        """
        self._closed = True
        sockets, self._idle, self._busy = self._idle + self._busy, [], []
        for sock in sockets:
            sock.close()

    # ---- one exchange ----

    def _exchange(self, kind: Kind, request: int, data: bytes, deadline: Deadline) -> bytes:
        sock, generation = self._take(deadline)
        healthy = False
        try:
            answer = self._ask(sock, kind, request, data, deadline)
            healthy = True
            return answer
        except socket.timeout:
            raise DeadlineExpired("the server did not answer in time") from None
        except (OSError, FrameError) as error:
            if isinstance(error, ChannelBroken):
                raise
            raise ChannelBroken(f"the connection to {self._path} broke: {error}") from error
        finally:
            self._give_back(sock, generation if healthy else -1)

    def _take(self, deadline: Deadline) -> tuple[socket.socket, int]:
        with self._lock:
            if self._closed:
                raise ChannelBroken("the session is closed")
            generation = self._generation
            if self._idle:
                sock = self._idle.pop()
                self._busy.append(sock)
                return sock, generation
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._busy.append(sock)
        try:
            sock.settimeout(_left(deadline))
            sock.connect(self._path)
            self._ask(sock, Kind.HELLO, 0, self._hello, deadline)
        except socket.timeout:
            self._give_back(sock, -1)
            raise DeadlineExpired("the server did not answer in time") from None
        except (OSError, FrameError) as error:
            self._give_back(sock, -1)
            if isinstance(error, ChannelBroken):
                raise
            raise ChannelBroken(f"no server answers at {self._path}: {error}") from error
        except BaseException:
            self._give_back(sock, -1)
            raise
        return sock, generation

    def _give_back(self, sock: socket.socket, generation: int) -> None:
        with self._lock:
            if sock in self._busy:
                self._busy.remove(sock)
            keep = (
                generation == self._generation
                and not self._closed
                and len(self._idle) < _IDLE_CONNECTIONS
            )
            if keep:
                self._idle.append(sock)
        if not keep:
            sock.close()

    def _ask(
        self, sock: socket.socket, kind: Kind, request: int, data: bytes, deadline: Deadline
    ) -> bytes:
        self.messages += 1
        sock.settimeout(_left(deadline))
        sock.sendall(data)
        received = b""
        while len(received) < HEADER_BYTES or len(received) < _frame_bytes(received):
            sock.settimeout(_left(deadline))
            more = sock.recv(_RECEIVE_BYTES)
            if not more:
                raise ChannelBroken("the server closed the connection")
            received += more
        header = frames.parse_header(received[:HEADER_BYTES])
        payload = received[HEADER_BYTES:]
        if header.kind == Kind.REFUSED | ANSWER:
            raise ChannelBroken(f"the server refused: {payload.decode(errors='replace')}")
        if header.kind != kind | ANSWER or header.request != request:
            raise ChannelBroken("the answer belongs to another request")
        return payload


def _frame_bytes(received: bytes) -> int:
    return HEADER_BYTES + frames.parse_header(received[:HEADER_BYTES]).nbytes


def _left(deadline: Deadline) -> float:
    left = deadline.remaining_s()
    if left <= 0:
        raise DeadlineExpired("the deadline of the request passed")
    return left
