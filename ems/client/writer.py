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
from ems.rpc.frames import ANSWER, GRANTED, HEADER_BYTES, FrameError, Kind
from ems_native._link import Link

_ALL_POSITIONS = array("I", range(frames.MAX_KEYS)).tobytes()
_IDLE_CONNECTIONS = 16
_AWAKE_NS = 200_000
"""How long an exchange stays awake for its answer. A server that sleeps answers within 120 us here,
and it must not look slow for that: if both sides slept, neither would find the other awake."""


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
        self._idle: list[_Connection] = []
        self._busy: list[_Connection] = []
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

    def put(
        self, request: int, what: frames.Put, deadline: Deadline
    ) -> tuple[int, bytearray | None]:
        """Publish the only key of a request, and ask for room for another value of its length.

        Returns:
            A status as of `commit`, and the other place (40 bytes); None when there is none.

        Raises:
            DeadlineExpired: no answer in time; what was committed or granted is unknown.
            ChannelBroken: likewise, the server went away.
        """
        answer = self._exchange(Kind.PUT, request, frames.put(request, what), deadline)
        try:
            offset, status, granted = frames.parse_put_answer(answer)
        except FrameError as error:
            raise ChannelBroken(str(error)) from error
        if not what.following or granted != GRANTED:
            return status, None
        place = bytearray(PLACE_BYTES)
        words = memoryview(place).cast("Q")
        words[PLACE_OFFSET], words[PLACE_LENGTH] = offset, what.length
        return status, place

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
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """End all connections; exchanges under way fail at once with `ChannelBroken`."""
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        self.drop_idle()
        for connection in busy:
            connection.shut()

    def forget(self) -> None:
        """In a forked child: close the parent's connections here, without a word to anybody.

        Takes no lock: another thread may have held it at the fork.
        """
        self._closed = True
        connections, self._idle, self._busy = self._idle + self._busy, [], []
        for connection in connections:
            connection.close()

    # ---- one exchange ----

    def _exchange(self, kind: Kind, request: int, data: bytes, deadline: Deadline) -> bytes:
        connection, generation = self._take(deadline)
        healthy = False
        try:
            answer = self._ask(connection, kind, request, data, deadline)
            healthy = True
            return answer
        finally:
            self._give_back(connection, generation if healthy else -1)

    def _take(self, deadline: Deadline) -> tuple[_Connection, int]:
        with self._lock:
            if self._closed:
                raise ChannelBroken("the session is closed")
            generation = self._generation
            if self._idle:
                connection = self._idle.pop()
                self._busy.append(connection)
                return connection, generation
            connection = _Connection()
            self._busy.append(connection)
        try:
            connection.connect(self._path, deadline)
            self._ask(connection, Kind.HELLO, 0, self._hello, deadline)
        except BaseException:
            self._give_back(connection, -1)
            raise
        return connection, generation

    def _give_back(self, connection: _Connection, generation: int) -> None:
        with self._lock:
            if connection in self._busy:
                self._busy.remove(connection)
            keep = (
                generation == self._generation
                and not self._closed
                and len(self._idle) < _IDLE_CONNECTIONS
            )
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()

    def _ask(
        self, connection: _Connection, kind: Kind, request: int, data: bytes, deadline: Deadline
    ) -> bytes:
        self.messages += 1
        try:
            header, payload = connection.exchange(data, deadline)
        except TimeoutError:
            raise DeadlineExpired("the server did not answer in time") from None
        except (OSError, FrameError) as error:
            if isinstance(error, ChannelBroken):
                raise
            raise ChannelBroken(f"the connection to {self._path} broke: {error}") from error
        if header.kind == Kind.REFUSED | ANSWER:
            raise ChannelBroken(f"the server refused: {payload.decode(errors='replace')}")
        if header.kind != kind | ANSWER or header.request != request:
            raise ChannelBroken("the answer belongs to another request")
        return payload


class _Connection:
    """One connection to the server; used by one thread at a time, ended by any."""

    def __init__(self) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._link = Link(self._sock.fileno(), _AWAKE_NS)

    def connect(self, path: str, deadline: Deadline) -> None:
        left_s = deadline.remaining_s()
        if left_s <= 0:
            raise DeadlineExpired("the deadline of the request passed")
        self._sock.settimeout(left_s)
        try:
            self._sock.connect(path)
        except socket.timeout:
            raise DeadlineExpired("the server did not answer in time") from None
        except OSError as error:
            raise ChannelBroken(f"no server answers at {path}: {error}") from error

    def exchange(self, data: bytes, deadline: Deadline) -> tuple[frames.Header, bytes]:
        """Send a frame; return the header and payload of the one that answers it.

        Raises:
            TimeoutError, OSError, FrameError: the connection cannot be used again.
        """
        self._link.send(data, deadline.at_ns)
        received = self._receive(deadline)
        while len(received) < HEADER_BYTES:
            received += self._receive(deadline)
        header = frames.parse_header(received[:HEADER_BYTES])
        while len(received) < HEADER_BYTES + header.nbytes:
            received += self._receive(deadline)
        return header, received[HEADER_BYTES:]

    def _receive(self, deadline: Deadline) -> bytes:
        more = self._link.receive(deadline.at_ns)
        if not more:
            raise ChannelBroken("the server closed the connection")
        return more

    def shut(self) -> None:
        """Make the exchange under way, in another thread, fail at once."""
        # It may not be connected yet, or its thread may have closed it just now.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
