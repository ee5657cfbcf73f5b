"""What an operation works on, and what it needs of the parts it is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from ems.client.ahead import Ahead
from ems.client.requests import RequestBook
from ems.common.deadline import Deadline
from ems.devices.base import Copier
from ems.rpc.frames import Put

__all__ = ["Context", "Counting", "Reading", "Writing"]


class Reading(Protocol):
    """The shared index, as `ems_native._index.Reader` reads it."""

    def lookup(
        self,
        digests: bytes,
        lengths: bytes | None,
        first: int,
        count: int,
        places: bytearray,
        tick: int,
    ) -> tuple[int, int]:
        """Find keys in a row; see there."""

    def validate(self, places: bytearray, first: int, count: int) -> int:
        """Return how many places are still what they were."""

    def present(self, digests: bytes, n: int, tick: int) -> int:
        """Return how many keys in a row from the head are there."""

    def room(self) -> tuple[int, int]:
        """Return the bytes of the pool that are prepared for use, and those there will be."""

    def frame_bytes(self) -> int:
        """Return what the server wants to be asked for by one message; 0 when it does not say."""

    def pulse(self) -> tuple[int, int, int]:
        """Return state of the pool, epoch, heartbeat."""


class Counting(Protocol):
    """The session's page of counters."""

    def add(self, i: int, n: int) -> None:
        """Add to a counter."""


class Writing(Protocol):
    """The write channel, as `ems.client.writer.WriteChannel` speaks it."""

    def reserve(
        self,
        request: int,
        digests: bytes,
        lengths: bytes,
        replace: bool,
        force: bool,
        deadline: Deadline,
    ) -> tuple[bytes, bytearray]:
        """Ask for extents; statuses and places."""

    def commit(
        self,
        request: int,
        positions: list[int] | None,
        places: bytearray,
        chain: bool,
        deadline: Deadline,
        mark_ns: int = 0,
    ) -> bytes:
        """Publish keys; a status per position."""

    def put(self, request: int, what: Put, deadline: Deadline) -> tuple[int, bytearray | None]:
        """Publish one key; its status, and a place for another."""

    def abort(self, request: int, deadline: Deadline) -> None:
        """Give back what is left of a request."""


@dataclasses.dataclass(frozen=True)
class Context:
    """What an operation works on: one mapping of one pool, and the way to write into it.

    Args:
        reader: of the mapped index.
        data: address that the index counts offsets from.
        counters: the session's page.
        device: copies from and to the caller's memory.
        verify: whether loads compare checksums.
        channel: to the server.
        requests: those under way on it.
        ahead: room for the next small value.
        suspect: told (digest, version) of a block that did not match its checksum; must not wait.
        broken: told that the channel broke; must not wait.
        keep: whatever must stay alive (the mapping) as long as somebody works on it.
    """

    reader: Reading
    data: int
    counters: Counting
    device: Copier
    verify: bool
    channel: Writing
    requests: RequestBook
    ahead: Ahead
    suspect: Callable[[bytes, int], object]
    broken: Callable[[], object]
    keep: object = None
