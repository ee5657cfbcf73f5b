"""A pool in memory behind a real write server, whose loop runs in a thread."""

from __future__ import annotations

import asyncio
import threading
import time

from ems.client.writer import WriteChannel
from ems.server.write_channel import WriteServer, bind_unix_socket
from ems.testing.memory_pool import UNIT, MemoryPool

SECRET = b"a session secret"
BLOCK = 16 * UNIT


class ServedPool:
    """A pool in memory behind a real write server. The pool is touched on the loop only."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.memory = MemoryPool(64 * BLOCK)
        self.session = self.memory.session()
        self.gone: list[int] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server = WriteServer(
            self.memory.pool, 0, lambda session, secret: secret == SECRET, self.gone.append
        )
        self.on_loop(self.server.start(bind_unix_socket(path, 0o600)))

    def on_loop(self, coroutine: object) -> object:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(5)  # type: ignore[arg-type]

    def freeze(self, seconds: float) -> None:
        self._loop.call_soon_threadsafe(time.sleep, seconds)

    def channel(self, session: int = 0) -> WriteChannel:
        return WriteChannel(self.path, session or self.session, SECRET)

    def close(self) -> None:
        self.on_loop(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
