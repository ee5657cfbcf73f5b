"""openYuanrong datasystem: two workers with shared memory, found through etcd."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version
from typing import Any

from ems.bench.peers.child import Peer, alone_on_loopback, serve, wait_for

__all__ = ["YuanrongPeer"]

_HERE = "127.0.0.1"
_ETCD = f"{_HERE}:2379"
_PORTS = (31501, 31502)


class YuanrongPeer(Peer):
    """Saves into buffers of the first worker; loads from there, or through the other worker."""

    operations = ("save", "load", "load_elsewhere")

    def open(self) -> str:
        """Start etcd and both workers in a network of their own, and wait until they serve."""
        alone_on_loopback()
        from yr import datasystem

        folder = os.path.dirname(datasystem.__file__)
        url = f"http://{_ETCD}"
        data = os.path.join(self.folder, "etcd")
        self.start(
            [
                "etcd",
                f"--data-dir={data}",
                f"--listen-client-urls={url}",
                f"--advertise-client-urls={url}",
            ]
        )
        clients = []
        for number, port in enumerate(_PORTS):
            home = os.path.join(self.folder, str(number))
            os.mkdir(home)
            worker = self.start(
                [
                    os.path.join(folder, "datasystem_worker"),
                    f"--worker_address={_HERE}:{port}",
                    f"--etcd_address={_ETCD}",
                    f"--shared_memory_size_mb={self.pool_bytes >> 20}",
                    f"--log_dir={home}/logs",
                    f"--rocksdb_store_dir={home}/rocksdb",
                    f"--unix_domain_socket_dir={home}",
                ],
                {"LD_LIBRARY_PATH": os.path.join(folder, "lib")},
            )
            clients.append(self._connect(datasystem, port, worker))
        self._client, self._other = clients
        program = subprocess.run(["etcd", "--version"], capture_output=True, text=True, check=True)
        package = "openyuanrong-datasystem"
        return f"{package} {version(package)}, {program.stdout.splitlines()[0]}"

    def _connect(self, datasystem: Any, port: int, worker: subprocess.Popen[bytes]) -> Any:
        def connect() -> Any:
            client = datasystem.KVClient(_HERE, port, connect_timeout_ms=5000)
            client.init()
            client.set("probe", b"does it serve?")
            return client

        return wait_for(connect, worker)

    def save(self, names: list[str], places: list[memoryview]) -> None:
        """Buffers of the worker's shared memory, filled and published."""
        buffers = self._client.mcreate(names, [len(view) for view in places])
        for buffer, view in zip(buffers, places):
            buffer.MutableData()[:] = view
        self._client.mset_buffer(buffers)

    def load(self, names: list[str], places: list[memoryview]) -> None:
        """Buffers of the same worker's shared memory, copied."""
        _copy(self._client, names, places)

    def load_elsewhere(self, names: list[str], places: list[memoryview]) -> None:
        """The same through the other worker, which fetches what it does not hold yet."""
        _copy(self._other, names, places)

    def drop(self, names: list[str]) -> None:
        """Delete everywhere."""
        self._client.delete(names)


def _copy(client: Any, names: list[str], places: list[memoryview]) -> None:
    for buffer, view in zip(client.get_read_only_buffers(names), places):
        view[:] = buffer.immutable_data()


if __name__ == "__main__":
    serve(YuanrongPeer)
