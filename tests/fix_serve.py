"""A private root, real `ems serve` processes on it, and a bare client that saves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import pytest

import ems
from ems.client.writer import WriteChannel
from ems.common.deadline import Deadline
from ems.rpc._pb.ems.v1 import AttachReply, StatusReply
from ems.rpc.channel import Credentials, PoolChannel, Resumed
from ems.shm import layout
from ems.shm.liveness import LivenessLock
from ems.shm.segment import Segment
from ems.testing.child import child_environment, python_command
from ems.testing.memory_pool import UNIT, digest_of, u64s
from ems_native._index import ABI_VERSION, LAYOUT, Reader

START_S = 30
CAPACITY = ("--capacity", "16MiB")


def soon(ms: float = 10_000) -> Deadline:
    return Deadline.after_ms(ms)


def run_ems(
    *arguments: str, env: Mapping[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        python_command("ems", *arguments),
        env={**child_environment(), **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


class ServeProcess:
    """`ems serve` on a root; what it writes goes to a file.

    `before` is Python code that runs in the process before the command line does.
    """

    def __init__(
        self, root: str, *options: str, env: Mapping[str, str] | None = None, before: str = ""
    ) -> None:
        self.root = root
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - end() closes it
        code = f"{before}\nfrom ems.cli.main import main\nmain()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "--root", root, *options],
            env={**child_environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode()

    def wait_until_serving(self) -> ServeProcess:
        return self.wait_until(self._answers, "serving")

    def _answers(self) -> bool:
        # One that was killed leaves a socket at which nobody listens.
        with socket.socket(socket.AF_UNIX) as sock:
            return sock.connect_ex(os.path.join(self.root, layout.SOCKET)) == 0

    def wait_until(
        self, happened: Callable[[], bool], what: str, seconds: float = START_S
    ) -> ServeProcess:
        until = time.monotonic() + seconds
        while not happened():
            if self.process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"not {what}, exit code {self.process.poll()}: {self.text()}")
            time.sleep(0.005)
        return self

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(START_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()


class BareClient:
    """What a client is at least: a session, its lock, a write channel, a mapped index."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.reply = attach(root)
        self.lock = LivenessLock(os.path.join(root, layout.SESSIONS_LOCK), self.reply.session_id)
        self.channel = WriteChannel(
            os.path.join(root, layout.WRITE_SOCKET), self.reply.session_id, self.reply.secret
        )
        self.index = Segment.open(os.path.join(root, layout.INDEX), writable=False)
        self.reader = Reader(self.index.address, self.index.nbytes, 0)

    def reserve(self, *names: str) -> tuple[int, bytes, bytearray]:
        request = self.channel.next_request()
        digests = b"".join(map(digest_of, names))
        statuses, places = self.channel.reserve(
            request, digests, u64s([UNIT] * len(names)), False, False, soon()
        )
        return request, statuses, places

    def save(self, *names: str) -> bytes:
        request, _, places = self.reserve(*names)
        return self.channel.commit(request, None, places, False, soon())

    def has(self, name: str) -> bool:
        return bool(self.reader.present(digest_of(name), 1, 0))

    def close(self) -> None:
        self.channel.close()
        self.index.close()
        self.lock.close()


def attach(
    root: str,
    credentials: Credentials | None = None,
    resumed: Resumed | None = None,
    abi_version: int = ABI_VERSION,
) -> AttachReply:
    async def call() -> AttachReply:
        async with PoolChannel(root) as channel:
            return await channel.attach(
                soon(),
                abi_version=abi_version,
                layout_version=LAYOUT["LAYOUT_VERSION"],
                client_version=ems.__version__,
                credentials=credentials,
                resumed=resumed,
            )

    return asyncio.run(call())


def status_of(root: str) -> StatusReply:
    async def call() -> StatusReply:
        async with PoolChannel(root) as channel:
            return await channel.status(soon())

    return asyncio.run(call())


def status_json(root: str, *options: str) -> dict[str, Any]:
    result = run_ems("status", "--root", root, "--json", *options)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def root() -> Iterator[str]:
    """A path in /dev/shm where nothing is yet; whatever is there afterwards goes."""
    folder = tempfile.mkdtemp(prefix="ems-test-", dir="/dev/shm")
    yield os.path.join(folder, "root")
    shutil.rmtree(folder)


@pytest.fixture
def serve(root: str) -> Iterator[Callable[..., ServeProcess]]:
    """Starts servers on the root; those that still run at the end are killed."""
    with contextlib.ExitStack() as stack:

        def start(*options: str, **how: Any) -> ServeProcess:
            server = ServeProcess(root, *(options or CAPACITY), **how)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture
def client(root: str) -> Iterator[Callable[[], BareClient]]:
    """Attaches clients to the server on the root."""
    with contextlib.ExitStack() as stack:

        def connect() -> BareClient:
            made = BareClient(root)
            stack.callback(made.close)
            return made

        yield connect
