"""`ems serve`: one process, one loop, one pool.

    STARTING ──(first range prepared, sockets bound)──▶ SERVING ──SIGTERM──▶ DRAINING
                                                                                │ nothing reserved,
      a second signal: gone at once                              STOPPED ◀──────┘ or 5 s

Being gone at once is safe at any moment: everything that matters lies in shared memory, and the
next server takes it over.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread

from ems import __version__
from ems.common.size import format_size
from ems.pool import ServerState
from ems.server import files, store
from ems.server.config import ServerConfig
from ems.server.control import ControlServer
from ems.server.counters import CounterPages
from ems.server.credentials import Authenticator
from ems.server.files import RefusedToStart
from ems.server.logs import LogThread
from ems.server.prepare import Preparation
from ems.server.service import PoolService
from ems.server.sessions import Sessions
from ems.server.store import Store
from ems.server.write_channel import BACKLOG, WriteServer, bind_unix_socket
from ems.shm import layout
from ems.shm.liveness import Held, ServerLock
from ems.shm.segment import AllocationStopped, open_to_group
from ems_native._index import LAYOUT

__all__ = ["RefusedToStart", "run"]

_log = logging.getLogger("ems.server")

BEAT_S = 0.1
LATE_BEAT_S = 1.0
"""A beat that comes so late is worth a line in the log: clients take 2 s for a sign of death."""
RELIEVE_BUSY_S = 0.005
RELIEVE_IDLE_S = 0.05
SUSPECT_POLL_S = 0.004
SLOW_POLL_S = 1.0
DRAIN_S = 5.0
CLOSE_S = 1.0
MOST_SILENT_PEERS = 512
"""Connections of either socket that nobody has said anything useful on."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(config: ServerConfig) -> None:
    """Serve until a signal says otherwise. Blocking; owns the process (signals, umask, log).

    Raises:
        RefusedToStart: nothing was changed.
    """
    files.check_place(config)
    if not os.path.isdir(config.root):
        store.check_room(config)  # before a directory is made that would stay behind
    files.make_root(config)
    with _server_lock(config):
        try:
            log = LogThread(config.log_level, config.log_format, config.log_dir)
        except OSError as error:
            raise RefusedToStart(
                f"--log-dir {config.log_dir} cannot be used: {error.strerror or error}; choose "
                "another directory"
            ) from None
        try:
            os.umask(0o777 & ~config.file_mode)
            anyio.run(
                _Application(config).main,
                backend="asyncio",
                backend_options={"use_uvloop": sys.platform == "linux"},
            )
        except RefusedToStart:
            raise
        except Exception:
            _log.exception("failed while serving; the pool stays for the next server")
            raise SystemExit(1) from None
        finally:
            log.stop()


def _allow_many_connections() -> int:
    """Raise the soft limit of descriptors, often 1024: every session has a few connections.

    Returns:
        How many silent peers each socket may have, so that descriptors are left for all others.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return MOST_SILENT_PEERS
    return max(1, min(MOST_SILENT_PEERS, hard // 8))


@contextlib.contextmanager
def _server_lock(config: ServerConfig) -> Iterator[None]:
    path = os.path.join(config.root, layout.SERVER_LOCK)
    try:
        lock = ServerLock(path, config.file_mode)
    except Held as error:
        raise RefusedToStart(
            f"{error}: one server per root; stop that one, or choose another --root"
        ) from None
    except OSError as error:
        raise RefusedToStart(f"{path} cannot be opened: {error.strerror or error}") from None
    with lock:
        try:
            open_to_group(lock.fd, config.file_mode, config.gid)
        except OSError as error:
            raise RefusedToStart(
                f"{path} cannot be opened to group {config.gid}: {error.strerror}; mount "
                f"{config.root} with that group, "
                "or leave --group away"
            ) from None
        files.remove_sockets(config.root)  # those of a server that died: nobody listens there
        yield


class _Application:
    """One run of the server; everything in it belongs to one loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._stop = anyio.Event()
        self._stopping = False  # the same for worker threads

    async def main(self) -> None:
        """Start, serve, drain. A refusal leaves as it is, not as a group of exceptions."""
        refusal: RefusedToStart | None = None
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._watch_signals)
            try:
                await self._start_and_serve()
            except RefusedToStart as error:
                refusal = error
            except AllocationStopped:
                _log.info("stopped before the pool was made")
            tasks.cancel_scope.cancel()
        if refusal is not None:
            raise refusal

    async def _watch_signals(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(*SIGNALS) as signals:
            task_status.started()
            async for number in signals:
                name = signal.Signals(number).name
                if self._stopping:
                    os.write(2, f"{name} again: leaving at once\n".encode())
                    os._exit(128 + number)
                _log.info("%s: finishing what is under way, at most %g s", name, DRAIN_S)
                self._stopping = True
                self._stop.set()

    async def _start_and_serve(self) -> None:
        opened = await anyio.to_thread.run_sync(
            functools.partial(store.open_store, self._config, lambda: not self._stopping)
        )
        try:
            await _Serving(self._config, opened, self._stop).run()
        finally:
            opened.close()


class _Serving:
    """A pool while it is served."""

    def __init__(self, config: ServerConfig, opened: Store, stop: anyio.Event) -> None:
        self._config = config
        self._stop = stop
        self._pool = pool = opened.pool
        pool.set_server_state(ServerState.STARTING)
        pool.set_verify(config.verify)
        pages = CounterPages(opened.counters.address, LAYOUT["MAX_SESSIONS"])
        self._sessions = Sessions(
            pool, opened.locks.is_held, pages, self._drop_session, time.monotonic_ns
        )
        self._suspicion = anyio.Event()
        silent_peers = _allow_many_connections()
        self._writes = WriteServer(
            pool, opened.data.address, self._sessions.authorize, self._disconnected, silent_peers
        )
        self._service = PoolService(
            pool,
            opened.pool_id,
            self._sessions,
            pages,
            Authenticator(config.credentials, time.monotonic_ns),
            suspect=self._wake_suspect_poll,
            verify=config.verify,
        )
        self._control = ControlServer([self._service], silent_peers)
        self._preparation = Preparation(
            pool,
            opened.data.address,
            hugetlb=opened.hugetlb,
            ready_bytes=opened.ready_bytes,
            page_kind=opened.page_kind,
        )

    async def run(self) -> None:
        """Serve until the stop event, then drain."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._beat)
            await self._preparation.step()
            await self._open_sockets()
            for job in (self._relieve, self._poll_suspects, self._poll_all, self._prepare):
                tasks.start_soon(job)
            _log.info(
                "ems %s serves %s in %s, process %d",
                __version__,
                format_size(self._pool.geometry.capacity),
                self._config.root,
                os.getpid(),
            )
            await self._stop.wait()
            await self._drain()
            tasks.cancel_scope.cancel()
        self._pool.set_server_state(ServerState.STOPPED)
        self._pool.beat(0)  # so that clients need not wait for an old heartbeat to know
        _log.info(
            "stopped; the pool stays in %s (`ems purge` gives its memory back)", self._config.root
        )

    # ---- sockets ----

    async def _open_sockets(self) -> None:
        root = self._config.root
        write_path = os.path.join(root, layout.WRITE_SOCKET)
        await self._writes.start(bind_unix_socket(write_path, self._config.file_mode))
        self._give_to_group(write_path)
        self._set_state(ServerState.SERVING)
        # A socket that can be seen can be connected to, by everybody who may: it gets its name
        # last.
        path = os.path.join(root, layout.SOCKET)
        unnamed = os.path.join(root, layout.SOCKET_UNNAMED)
        await self._control.start(path=unnamed, backlog=BACKLOG)
        self._give_to_group(unnamed)
        os.rename(unnamed, path)

    def _give_to_group(self, path: str) -> None:
        if self._config.gid is not None and os.stat(path).st_gid != self._config.gid:
            os.chown(path, -1, self._config.gid)

    async def _drain(self) -> None:
        """Let saves that are under way finish; new ones find no room."""
        files.remove_sockets(self._config.root)
        self._set_state(ServerState.DRAINING)
        with anyio.move_on_after(DRAIN_S):
            while self._pool.stats().reserved:  # noqa: ASYNC110 - other processes end it
                await anyio.sleep(0.02)
        with anyio.move_on_after(CLOSE_S):
            await self._writes.close()
        self._control.close()
        with anyio.move_on_after(CLOSE_S):
            await self._control.wait_closed()

    def _set_state(self, state: ServerState) -> None:
        self._service.state = state
        self._pool.set_server_state(state)

    # ---- background tasks ----

    async def _beat(self) -> None:
        last = time.monotonic()
        while True:
            now = time.monotonic()
            if now - last > LATE_BEAT_S:
                _log.warning("the loop was busy or the process frozen for %.1f s", now - last)
            last = now
            self._pool.beat(time.monotonic_ns())
            await anyio.sleep(BEAT_S)

    async def _relieve(self) -> None:
        while True:
            more = self._pool.relieve()
            await anyio.sleep(RELIEVE_BUSY_S if more else RELIEVE_IDLE_S)

    async def _prepare(self) -> None:
        await self._preparation.run(pause=anyio.lowlevel.checkpoint)

    async def _poll_all(self) -> None:
        while True:
            await anyio.sleep(SLOW_POLL_S)
            self._sessions.poll_all()

    async def _poll_suspects(self) -> None:
        while True:
            await self._suspicion.wait()
            self._suspicion = anyio.Event()
            while self._sessions.poll_suspects():  # noqa: ASYNC110 - the kernel sends no event
                await anyio.sleep(SUSPECT_POLL_S)

    def _disconnected(self, session_id: int) -> None:
        self._sessions.suspect(session_id)
        self._wake_suspect_poll()

    def _wake_suspect_poll(self) -> None:
        self._suspicion.set()

    def _drop_session(self, session_id: int) -> None:
        self._writes.drop_session(session_id)
