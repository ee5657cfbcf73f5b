"""A private EMS server for laptops, notebooks and tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import IO

from ems.common.config import CcConfig, EmsConfig, parse_size
from ems.common.exception import EmsException, invalid_argument, io_error
from ems.testing import guard
from ems.testing.child import child_environment, python_command

__all__ = ["LocalPool"]

_SOCKET = "ems.sock"
_POLL_S = 0.01
_LOG_CHARACTERS = 4000


class LocalPool:
    """A real server process on a private root; it and its memory go when the pool is stopped.

    Args:
        capacity: size of the pool, bytes or a text such as `"256MiB"`.
        entries: slots of the index, None for the server's default.
        options: more command line options for `ems serve`.
        directory: where the private root is made; it must lie on a tmpfs.
        program: what is run in place of `ems`, with the arguments for it; None: `ems`.
        start_timeout_s: how long the server may take to serve.

    Use it as a context manager, or call `start` and `stop`. Not thread safe.

    States::

        new --start--> serving --kill--> dead --start/restart--> serving
                          |                |
                          +------stop------+---> stopped (for good)

    Also a pool that is forgotten, or whose process is killed, leaves nothing behind: a small guard
    process notices the end of its owner and cleans up.
    """

    def __init__(
        self,
        capacity: str | int = "256MiB",
        entries: int | None = None,
        *,
        options: Sequence[str] = (),
        directory: str = "/dev/shm",
        program: Sequence[str] | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        self.capacity = parse_size(capacity, "capacity")
        self.process: subprocess.Popen[bytes] | None = None
        self._options = ["--capacity", str(self.capacity)]
        if entries is not None:
            self._options += ["--entries", str(entries)]
        self._options += options
        self._directory = directory
        self._program = program or python_command("ems")
        self._start_timeout_s = start_timeout_s
        self._root: str | None = None
        self._log: IO[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._finalizer: weakref.finalize[[subprocess.Popen[bytes]], LocalPool] | None = None

    @property
    def root(self) -> str:
        """The directory of the server, for `EmsConfig(root=...)` or `EMS_ROOT`."""
        if self._root is None:
            raise invalid_argument(
                "the pool was not started; use it in a with statement or call start()"
            )
        return self._root

    @property
    def config(self) -> EmsConfig:
        """A configuration that reaches the pool."""
        return self.config_for()

    def config_for(
        self,
        *,
        access_id: str | None = None,
        rank_id: int = 0,
        device_id: int = 0,
        model_id: str = "local",
        tp_world_size: int = 1,
        pp_world_size: int = 1,
    ) -> EmsConfig:
        """Return a configuration that reaches the pool as another tenant, rank or model."""
        instance = CcConfig(
            rank_id=rank_id,
            device_id=device_id,
            model_id=model_id,
            tp_world_size=tp_world_size,
            pp_world_size=pp_world_size,
        )
        return EmsConfig(cc_config=instance, access_id=access_id, root=self.root)

    def start(self) -> LocalPool:
        """Start the server (again, after `kill`) and wait until it serves; nothing if it runs.

        Raises:
            EmsException: `EMS_IO_ERROR` when it does not come up; the text holds the end of its
                log.
        """
        if self._stopped:
            raise invalid_argument("the pool was stopped; make a new LocalPool")
        if self.process is not None and self.process.poll() is None:
            return self
        try:
            self._prepare()
            self._spawn()
            self._wait_until_serving()
        except BaseException:
            self.stop()
            raise
        return self

    def kill(self) -> None:
        """End the server the hard way (SIGKILL). Its memory stays, as after a crash."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def restart(self) -> LocalPool:
        """End the server in order if it runs, and start another one on the same memory."""
        self._terminate()
        return self.start()

    def stop(self) -> None:
        """End the server and remove its memory; may be called again, and for a dead server."""
        self._stopped = True
        self._terminate()
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
        if self._guard is not None:
            assert self._guard.stdin is not None
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
            self._guard.wait()
            self._guard = None
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._finalizer is not None:
            self._finalizer.detach()

    def log_text(self) -> str:
        """Return what the server has written to its standard output and error so far."""
        if self._log is None:
            return ""
        # pread: the child writes at the position that this descriptor shares with it.
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace")

    def __enter__(self) -> LocalPool:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _prepare(self) -> None:
        if self._root is not None:
            return
        try:
            self._root = tempfile.mkdtemp(prefix="ems-local-", dir=self._directory)
        except OSError as error:
            raise io_error(f"no directory for the pool in {self._directory}: {error}") from error
        self._log = tempfile.TemporaryFile(prefix="ems-local-log-")  # noqa: SIM115 - stop() does
        self._guard = subprocess.Popen(
            [sys.executable, "-S", "-E", guard.__file__, self._root],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is the owner's business
            cwd="/",
        )
        # Reaches a pool that is dropped or left at interpreter exit; must not refer to self.
        self._finalizer = weakref.finalize(self, _drop, self._guard)

    def _spawn(self) -> None:
        assert self._log is not None
        self.process = subprocess.Popen(
            [*self._program, "serve", "--root", self.root, *self._options],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            cwd="/",
            env=child_environment(),
        )

    def _wait_until_serving(self) -> None:
        assert self.process is not None
        path = os.path.join(self.root, _SOCKET)
        give_up = time.monotonic() + self._start_timeout_s
        while not _accepts(path):
            code = self.process.poll()
            if code is not None:
                raise self._failure(f"the pool's server ended with exit code {code}")
            if time.monotonic() > give_up:
                raise self._failure(
                    f"the pool's server did not serve within {self._start_timeout_s:g} s"
                )
            time.sleep(_POLL_S)

    def _failure(self, what: str) -> EmsException:
        log = self.log_text().strip()[-_LOG_CHARACTERS:]
        return io_error(f"{what}; its log:\n{log}" if log else f"{what}, without a word in its log")

    def _terminate(self) -> None:
        process = self.process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            process.send_signal(signal.SIGCONT)  # a stopped process does not act on SIGTERM
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _drop(guarding: subprocess.Popen[bytes]) -> None:
    """Close the guard's pipe: it ends the server and removes the root."""
    if guarding.stdin is not None:
        with contextlib.suppress(OSError):
            guarding.stdin.close()
    guarding.wait()


def _accepts(path: str) -> bool:
    """Whether somebody listens on the socket (one that a killed server left behind refuses)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
