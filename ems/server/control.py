"""The control plane's listener: grpclib's server with a bound on its connections.

Clients connect for one call and leave. Whoever connects and stays silent costs a descriptor and
some 100 KiB; when there are too many, the oldest connection ends, so that new ones are served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, cast

from grpclib.protocol import H2Protocol
from grpclib.server import Server

__all__ = ["ControlServer"]


class ControlServer(Server):
    """Serves gRPC handlers to at most `most_connections` peers at a time.

    Args:
        handlers: as grpclib's.
        most_connections: beyond, the oldest connection is closed.
    """

    def __init__(self, handlers: Collection[Any], most_connections: int) -> None:
        super().__init__(handlers)
        self._most_connections = most_connections
        self._connected: dict[H2Protocol, asyncio.Transport] = {}  # oldest first

    @property
    def connections(self) -> int:
        """How many peers are connected."""
        return len(self._connected)

    def _protocol_factory(self) -> H2Protocol:
        protocol = super()._protocol_factory()
        made: Callable[[asyncio.BaseTransport], None] = protocol.connection_made
        lost: Callable[[BaseException | None], None] = protocol.connection_lost

        def connection_made(transport: asyncio.BaseTransport) -> None:
            # uvloop's is no subclass of it
            self._connected[protocol] = cast(asyncio.Transport, transport)
            if len(self._connected) > self._most_connections:
                oldest = next(iter(self._connected))
                self._connected.pop(oldest).abort()
            made(transport)

        def connection_lost(exc: BaseException | None) -> None:
            self._connected.pop(protocol, None)
            lost(exc)

        protocol.connection_made = connection_made  # type: ignore[method-assign]
        protocol.connection_lost = connection_lost  # type: ignore[method-assign]
        return protocol
