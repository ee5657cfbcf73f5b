"""The harness's side of a contender: its process, its requests, its end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from typing import Any

from ems.bench.peers.catalogue import Peer
from ems.common.exception import internal_error

__all__ = ["Contender"]

_OPEN_S = 120.0
_ANSWER_S = 300.0
_CLOSE_S = 15.0
_WORDS = 400
_READ = 1 << 16


class Contender:
    """A running adapter of a peer. Not thread-safe.

    Args:
        peer: which.
        environments: where the peers' virtual environments are.
        folder: a directory of its own, made here and left to whoever made its parent.
    """

    def __init__(self, peer: Peer, environments: str | None, folder: str) -> None:
        os.mkdir(folder)
        self.peer = peer
        self.operations: list[str] = []
        self._folder = folder
        self._rest = b""
        with open(os.path.join(folder, "words"), "wb") as words:
            self._process = subprocess.Popen(
                peer.command(environments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                cwd=folder,
                env=peer.variables(),
                start_new_session=True,  # with all that it starts, to be ended together
            )

    def open(self, pool_bytes: int, memory_bytes: int) -> str:
        """Let it start its store; return the versions it tells."""
        sizes = {"pool_bytes": pool_bytes, "memory_bytes": memory_bytes}
        place = {"variant": self.peer.variant, "folder": self._folder}
        answer = self.ask("open", _OPEN_S, **place, **sizes)
        self.operations = answer["operations"]
        return str(answer["version"])

    def ask(self, what: str, timeout_s: float = _ANSWER_S, /, **fields: object) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            EmsException: `EMS_INTERNAL_ERROR` with what the adapter says, or its last words.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(json.dumps({"do": what, **fields}).encode() + b"\n")
            self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line(what, timeout_s))
        if "error" in answer:
            raise internal_error(f"{what}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End it in order, and whatever it left by force."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_CLOSE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()

    def _line(self, what: str, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        give_up = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            if not select.select([fd], [], [], max(0.0, give_up - time.monotonic()))[0]:
                raise internal_error(f"{what}: no answer in {timeout_s:g} s")
            more = os.read(fd, _READ)
            if not more:
                code = self._process.wait()
                raise internal_error(f"{what}: ended with exit code {code}: {self._last_words()}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _last_words(self) -> str:
        with open(os.path.join(self._folder, "words"), "rb") as words:
            return words.read().decode("utf-8", "replace").strip()[-_WORDS:] or "no word"
