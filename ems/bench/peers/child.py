"""A contender's side: its memory, its turns and the check of its bytes.

Runs in the interpreter of a peer's environment, with nothing but the standard library: a request is
a line of JSON on the standard input, the answer one on what was the standard output.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Peer", "alone_on_loopback", "serve", "wait_for"]

_HUGE = 2 << 20
_STAMPS = 8192
_SCRUB = 0xA5
_SIOCSIFFLAGS = 0x8914
_UP = 0x1 | 0x40  # IFF_UP, IFF_RUNNING
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_POLL_S = 0.05


class Peer:
    """What an adapter fills in. One object lives as long as its process.

    Args:
        variant: which way of running the peer.
        folder: a directory of its own for sockets, logs and data.
        pool_bytes: what the store must hold.
        memory_bytes: the caller's memory, from which is saved and into which is loaded.
    """

    operations: tuple[str, ...] = ("save", "load")
    """What is timed: `save`, then ways to load."""

    def __init__(self, variant: str, folder: str, pool_bytes: int, memory_bytes: int) -> None:
        self.variant = variant
        self.folder = folder
        self.pool_bytes = pool_bytes
        self.memory_bytes = memory_bytes
        self._servers: list[subprocess.Popen[bytes]] = []
        self._map: mmap.mmap | None = None

    def open(self) -> str:
        """Start what the peer needs, connect, and return versions for the report."""
        raise NotImplementedError

    def memory(self) -> int:
        """The address of `memory_bytes` of the caller's memory: private, on huge pages."""
        self._map = mmap.mmap(-1, self.memory_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def names(self, keys: list[str]) -> Any:
        """The keys of a batch as the calls below want them; not timed."""
        return keys

    def places(self, views: list[memoryview], addresses: list[int]) -> Any:
        """The memory of a batch as the calls below want it; not timed."""
        return views

    def save(self, names: Any, places: Any) -> None:
        """Store a batch of keys that are not there; raises when one was not stored."""
        raise NotImplementedError

    def load(self, names: Any, places: Any) -> None:
        """Copy a batch into the caller's memory; raises when one was not there."""
        raise NotImplementedError

    def drop(self, names: Any) -> None:
        """Forget keys before they are saved again; not timed, and they may not be there."""
        raise NotImplementedError

    def clear(self, batches: Sequence[Any]) -> None:
        """Leave nothing of these batches in the store; not timed."""
        for names in batches:
            self.drop(names)

    def close(self) -> None:
        """End what was started."""
        for server in reversed(self._servers):
            server.kill()
            server.wait()

    def start(
        self, command: Sequence[str], environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a server of the peer; it ends with this process."""
        name = f"{os.path.basename(command[0])}-{len(self._servers)}.log"
        with open(os.path.join(self.folder, name), "wb") as log:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **(environment or {})},
            )
        self._servers.append(server)
        return server


class _Turns:
    """Batches of one shape: as many places in the store as in the caller's memory."""

    def __init__(self, peer: Peer, address: int, keys: int, value_bytes: int, batches: int) -> None:
        self._peer = peer
        self._value_bytes = value_bytes
        self._keys = keys
        self._batches = batches
        self._noise = random.Random(keys ^ value_bytes).randbytes(value_bytes + 8 * _STAMPS)
        self._addresses = [
            [address + (batch * keys + key) * value_bytes for key in range(keys)]
            for batch in range(batches)
        ]
        self._views = [[_view(one, value_bytes) for one in part] for part in self._addresses]
        self._places = [
            peer.places(views, addresses) for views, addresses in zip(self._views, self._addresses)
        ]
        self._names = [
            peer.names([f"peers@{value_bytes}@{batch}@{key}" for key in range(keys)])
            for batch in range(batches)
        ]

    def fill(self) -> None:
        """Put every batch into the store and fetch it once: nobody is timed at its first touch."""
        for batch in range(self._batches):
            self._write(batch)
            self._peer.drop(self._names[batch])
            self._peer.save(self._names[batch], self._places[batch])
        for batch in range(self._batches):
            self._peer.load(self._names[batch], self._places[batch])

    def turn(self, what: str, first: int, calls: int) -> list[float]:
        """The seconds of `calls` calls. Each batch is loaded once for each time it was saved."""
        call: Callable[[Any, Any], None] = getattr(self._peer, what)
        ahead = (0, 0) if what == "save" else (calls, self._batches // 2)
        batches = [(first + at + ahead[0]) % self._batches for at in range(calls)]
        if what == "save":
            for batch in batches:
                self._peer.drop(self._names[batch])
        seconds = []
        clock = time.perf_counter
        for at, batch in enumerate(batches):
            names = self._names[batch]
            places = self._places[(first + at + ahead[1]) % self._batches]
            start = clock()
            call(names, places)
            seconds.append(clock() - start)
        return seconds

    def verify(self) -> int:
        """Save known bytes, load them elsewhere, each way; how many values are wrong."""
        wrong = 0
        for what in self._peer.operations[1:]:
            self._write(0)
            self._peer.drop(self._names[0])
            self._peer.save(self._names[0], self._places[0])
            target = self._addresses[1][0]
            ctypes.memset(target, _SCRUB, self._keys * self._value_bytes)
            getattr(self._peer, what)(self._names[0], self._places[1])
            wrong += sum(
                bytes(self._views[1][key]) != self._value(key) for key in range(self._keys)
            )
        return wrong

    def clear(self) -> None:
        """Leave nothing in the store."""
        self._peer.clear(self._names)

    def _write(self, batch: int) -> None:
        for key, view in enumerate(self._views[batch]):
            view[:] = self._value(batch * self._keys + key)

    def _value(self, number: int) -> memoryview:
        offset = 8 * (number % _STAMPS)
        return memoryview(self._noise)[offset : offset + self._value_bytes]


def serve(kind: type[Peer]) -> None:
    """Answer the requests of `ems.bench.comparison` until their end, which ends all servers too."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not look like an answer
    peer: Peer | None = None
    turns: _Turns | None = None
    address = 0
    try:
        for line in sys.stdin:
            request = json.loads(line)
            what = request.pop("do")
            answer: dict[str, object] = {}
            try:
                if what == "open":
                    peer = kind(**request)
                    answer["version"] = peer.open()
                    answer["operations"] = peer.operations
                    address = peer.memory()
                    ctypes.memset(address, _SCRUB, peer.memory_bytes)
                elif what == "shape":
                    assert peer is not None
                    turns = _Turns(peer, address, **request)
                    turns.fill()
                elif what == "turn":
                    assert turns is not None
                    answer["seconds"] = turns.turn(**request)
                elif what == "verify":
                    assert turns is not None
                    answer["mismatches"] = turns.verify()
                elif what == "clear":
                    assert turns is not None
                    turns.clear()
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        if peer is not None:
            peer.close()


def alone_on_loopback() -> None:
    """Move this process, and what it will start, into a network of its own: a loopback device.

    For peers that listen on every interface.

    Raises:
        OSError: the system gives no such network to this user.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NET) != 0 and libc.unshare(_NEW_USER | _NEW_NET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"no network namespace: {os.strerror(code)}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _UP))


def wait_for(
    ready: Callable[[], object], server: subprocess.Popen[bytes], timeout_s: float = 60.0
) -> Any:
    """Call until it raises no more, and return its answer.

    Raises:
        RuntimeError: the server ended, or the time did; the text holds the last reason.
    """
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            return ready()
        except Exception as error:
            reason = error
        name = os.path.basename(
            str(server.args[0] if isinstance(server.args, list) else server.args)
        )
        if server.poll() is not None:
            raise RuntimeError(f"{name} ended with exit code {server.returncode}")
        if time.monotonic() > give_up:
            raise RuntimeError(f"{name} is not ready after {timeout_s:g} s: {reason}")
        time.sleep(_POLL_S)


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
