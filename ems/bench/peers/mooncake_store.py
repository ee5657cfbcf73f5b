"""Mooncake Store with its own master: batch calls without a copy in between, registered memory."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Any

from ems.bench.peers.child import Peer, alone_on_loopback, serve, wait_for

__all__ = ["MooncakePeer"]

_HERE = "127.0.0.1"
_MASTER = f"{_HERE}:50051"
_CLIENT_PORT = 50052
_HANDSHAKE = "P2PHANDSHAKE"
_BUFFER = 64 << 20
# Another process whose memory holds the values: it serves until its parent is gone.
_SEGMENT = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup({here!r}, {handshake!r}, {nbytes}, {buffer}, "tcp", "", {master!r})
sys.exit(code) if code else time.sleep(1e6)
"""


class MooncakePeer(Peer):
    """`variant` says where the values lie.

    `own`: in a segment of this process. `tcp`: in a segment of another process, reached over TCP.
    `client`: in that of a `mooncake_client` process, with which this one shares its memory.
    """

    def open(self) -> str:
        """Start a master, and what the variant needs, in a network of their own."""
        alone_on_loopback()  # its ports listen on every interface
        os.environ.setdefault("GLOG_minloglevel", "2")
        import mooncake
        from mooncake.store import MooncakeDistributedStore

        self._programs = os.path.dirname(mooncake.__file__)
        master = self.start([os.path.join(self._programs, "mooncake_master"), "--rpc_port=50051"])
        self._store = MooncakeDistributedStore()
        start = {"own": self._own, "tcp": self._tcp, "client": self._client}[self.variant]
        wait_for(start, master)
        package = "mooncake-transfer-engine-non-cuda"
        return f"{package} {version(package)}"

    def _own(self) -> None:
        _check(self._setup(self.pool_bytes))

    def _tcp(self) -> None:
        if len(self._servers) == 1:
            script = _SEGMENT.format(
                here=_HERE,
                handshake=_HANDSHAKE,
                nbytes=self.pool_bytes,
                buffer=_BUFFER,
                master=_MASTER,
            )
            self.start([sys.executable, "-c", script])
            _check(self._setup(0))
        value = b"is there a segment?"
        _check(self._store.put("probe", value))

    def _client(self) -> None:
        if len(self._servers) == 1:
            self.start(
                [
                    os.path.join(self._programs, "mooncake_client"),
                    f"--host={_HERE}",
                    f"--port={_CLIENT_PORT}",
                    f"--global_segment_size={self.pool_bytes >> 20} MB",
                    f"--master_server_address={_MASTER}",
                    f"--metadata_server={_HANDSHAKE}",
                    "--protocol=tcp",
                ]
            )
        there = f"{_HERE}:{_CLIENT_PORT}"
        _check(self._store.setup_dummy(self.memory_bytes + _BUFFER, _BUFFER, there))

    def _setup(self, segment_bytes: int) -> int:
        code: int = self._store.setup(_HERE, _HANDSHAKE, segment_bytes, _BUFFER, "tcp", "", _MASTER)
        return code

    def memory(self) -> int:
        """Memory of this process, or shared with the `mooncake_client`; registered."""
        if self.variant == "client":
            address = int(self._store.alloc_from_mem_pool(self.memory_bytes))
            if not address:
                raise MemoryError(
                    f"no {self.memory_bytes} bytes of the pool shared with the client"
                )
        else:
            address = super().memory()
        _check(self._store.register_buffer(address, self.memory_bytes))
        return address

    def places(self, views: list[memoryview], addresses: list[int]) -> tuple[list[int], list[int]]:
        """Addresses and sizes."""
        return addresses, [len(view) for view in views]

    def save(self, names: list[str], places: tuple[list[int], list[int]]) -> None:
        """`batch_put_from`."""
        codes = self._store.batch_put_from(names, *places)
        if any(codes):
            raise RuntimeError(f"batch_put_from gave {codes}")

    def load(self, names: list[str], places: tuple[list[int], list[int]]) -> None:
        """`batch_get_into`."""
        sizes = self._store.batch_get_into(names, *places)
        if sizes != places[1]:
            raise RuntimeError(f"batch_get_into gave {sizes}")

    def drop(self, names: list[str]) -> None:
        """Remove, whatever was promised to readers."""
        self._store.batch_remove(names, True)

    def close(self) -> None:
        """Leave the master, then end it."""
        if hasattr(self, "_store"):
            self._store.close()
        super().close()


def _check(code: Any) -> None:
    if code:
        raise RuntimeError(f"the store says {code}")


if __name__ == "__main__":
    serve(MooncakePeer)
