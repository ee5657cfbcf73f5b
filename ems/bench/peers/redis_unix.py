"""Redis and Valkey: a server of their own over a unix socket, the `redis` client with hiredis."""

from __future__ import annotations

import os
from typing import Any

from ems.bench.peers.child import Peer, serve, wait_for

__all__ = ["RedisPeer"]


class RedisPeer(Peer):
    """`variant` is the program that serves: `redis-server` or `valkey-server`."""

    def open(self) -> str:
        """Start a server that keeps nothing on disk."""
        import redis
        from redis.utils import HIREDIS_AVAILABLE

        path = os.path.join(self.folder, "socket")
        server = self.start(
            [self.variant, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no"]
        )
        self._client = redis.Redis(unix_socket_path=path)
        wait_for(self._client.ping, server)
        info = self._client.info("server")
        version = info.get("valkey_version") or info["redis_version"]
        parser = "hiredis" if HIREDIS_AVAILABLE else "no hiredis"
        return f"{self.variant} {version}, redis-py {redis.__version__} ({parser})"

    def save(self, names: list[str], places: list[memoryview]) -> None:
        """`SET` of one key, `MSET` of more."""
        if len(names) == 1:
            self._client.set(names[0], places[0])
        else:
            self._client.mset(dict(zip(names, places)))

    def load(self, names: list[str], places: list[memoryview]) -> None:
        """`GET` of one key, `MGET` of more, and a copy to where the caller wants it."""
        one = len(names) == 1
        values: list[Any] = [self._client.get(names[0])] if one else self._client.mget(names)
        for value, view in zip(values, places):
            view[:] = value

    def drop(self, names: list[str]) -> None:
        """`DEL`."""
        self._client.delete(*names)


if __name__ == "__main__":
    serve(RedisPeer)
