"""A client's session with the node server, over the server's deaths and the pool's replacement.

    NEW ──open──▶ ATTACHED ──▶ AWAY        the server left, died, or another one took over (epoch)
                     ▲           │
                     └─re-attach─┘         in the background, with back-off
    any ──close──▶ CLOSED

While AWAY the pool stays mapped and serves hits. A pool that was retired is unmapped as soon as
the operations on it have ended, and the next one is mapped when there is one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import os
import random
import threading
import time
from collections import deque

import anyio

from ems.client.ahead import Ahead
from ems.client.context import Context
from ems.client.mapping import Mapping, PoolChanged
from ems.client.requests import RequestBook
from ems.client.writer import WriteChannel
from ems.common.deadline import Deadline, DeadlineExpired
from ems.common.exception import (
    EmsErrorCode,
    EmsException,
    internal_error,
    invalid_argument,
    io_error,
)
from ems.common.metrics import PAGE_COUNTERS, Count
from ems.devices.base import Device
from ems.home import HomeLoop
from ems.rpc._pb.ems.v1 import ProbeReply
from ems.rpc.channel import Credentials, PoolChannel, Reason, Refused, Resumed, Unavailable
from ems.shm import layout
from ems_native._index import ABI_VERSION, LAYOUT

__all__ = ["Session", "probe_root"]

LOOK_S = 0.25
"""How often the header is looked at: a read of memory, no message."""
QUIET_NS = 500_000_000
"""A heartbeat this old makes the client ask whether there is a server at all."""
UNHEALTHY_NS = 2_000_000_000
"""Only a heartbeat this old, and a probe that failed too, make a server unhealthy."""
PROBE_MS = 900
DEBT_MS = 1000
DETACH_MS = 500
BACK_OFF_S = 0.05
LONGEST_BACK_OFF_S = 1.0
_MOST_SUSPECTS = 256
_ACTIVE, _RETIRED = LAYOUT["STATE_ACTIVE"], LAYOUT["STATE_RETIRED"]
# Everything that says that no server serves us now, and that later one may.
_AWAY = (DeadlineExpired, Unavailable, Refused, PoolChanged, OSError, ValueError)

_log = logging.getLogger("ems.client.session")


class Session:
    """Attached to one root.

    `open`, `watch` and `close` run on the home loop; everything else may be used by any thread.

    Args:
        home: the loop it lives on.
        root: directory of the server.
        credentials: to prove who the client is; None for nobody.
        device: each mapping of a pool is registered with it.
        client_version: told to the server.
        verify: whether loads compare checksums; None: as the server says.
    """

    def __init__(
        self,
        home: HomeLoop,
        root: str,
        credentials: Credentials | None,
        device: Device,
        client_version: str,
        verify: bool | None = None,
    ) -> None:
        self._home = home
        self._root = root
        self._credentials = credentials
        self._device = device
        self._client_version = client_version
        self._verify = verify
        self._context: Context | None = None
        self._mapping: Mapping | None = None
        self._channel: WriteChannel | None = None
        self._secret = b""
        self._epoch = 0
        self._attached = False
        self._doubted = False
        self._attach_lock: asyncio.Lock | None = None
        self._nudged: asyncio.Event | None = None
        self._watching: anyio.CancelScope | None = None
        self._watch_ended: asyncio.Event | None = None
        self._closed = False
        self._suspects: deque[tuple[bytes, int]] = deque(maxlen=_MOST_SUSPECTS)
        self._past = [0] * PAGE_COUNTERS
        self._changed = threading.Condition()
        # For what blocks: debts to the server, and page tables.
        self._helper = concurrent.futures.ThreadPoolExecutor(1, "ems-session")

    # ---- any thread ----

    @property
    def context(self) -> Context | None:
        """What loads work on; None while there is no pool (one was retired, none came yet)."""
        return self._context

    def writable(self, deadline: Deadline) -> Context:
        """Return what saves work on. Waits for a re-attach only when a new server is there already.

        Raises:
            EmsException: `EMS_IO_ERROR`: no server.
        """
        context = self._context
        if self._is_current(context):
            assert context is not None
            return context
        self.nudge()
        if context is not None and self._has_new_server(context):
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_current(self._context), min(deadline.remaining_s(), 1.0)
                )
        context = self._context
        if context is None or not self._attached:
            raise io_error(
                f"no EMS server serves {self._root} now; the client goes on looking for one"
            )
        return context

    def healthy(self) -> bool:
        """Whether data calls work; bounded by about 1 s, a message only if the heartbeat is old."""
        context = self._context
        if self._is_current(context) and self._heartbeat_age_ns(context) < UNHEALTHY_NS:
            return True
        try:
            return self._home.run(self._confirm, timeout_s=PROBE_MS / 1000 + 0.3)
        except (TimeoutError, EmsException):
            return False

    def counters(self) -> list[int]:
        """Return what this client counted, over all its attachments."""
        now = self._mapping_counters()
        return [a + b for a, b in zip(self._past, now)] if now else list(self._past)

    def nudge(self) -> None:
        """Have the server looked at soon: something says that it is not what it was."""
        self._doubted = True
        self._home.call_soon(self._wake)

    def forget(self) -> None:
        """In a forked child: let go of the parent's connections (the lock does it by itself)."""
        self._attached = False
        if self._channel is not None:
            self._channel.forget()

    # ---- the home loop ----

    async def open(self, deadline: Deadline) -> None:
        """Attach for the first time.

        Raises:
            EmsException: `EMS_RECOVERD_ERROR` when it can heal, `EMS_INVALID_ARGUMENT` for bad
                credentials, `EMS_INTERNAL_ERROR` when versions do not fit.
        """
        self._attach_lock = asyncio.Lock()
        self._nudged = asyncio.Event()
        self._watch_ended = asyncio.Event()
        try:
            while True:
                try:
                    await self._attach(deadline)
                    return
                except PoolChanged:
                    await asyncio.sleep(BACK_OFF_S)
        except Refused as error:
            if error.reason is Reason.CREDENTIALS:
                raise invalid_argument(f"the EMS server refused the credentials: {error}") from None
            if error.reason is Reason.VERSION:
                raise internal_error(f"client and server do not fit together: {error}") from None
            raise _not_now(error) from None
        except _AWAY as error:
            raise _not_now(error) from None

    async def watch(self) -> None:
        """Keep the session alive until it is closed."""
        assert self._nudged is not None and self._watch_ended is not None
        if self._closed:
            return
        back_off_s = BACK_OFF_S
        try:
            with anyio.CancelScope() as self._watching:
                while True:
                    await self._rest(back_off_s)
                    if await self._look_once_more():
                        back_off_s = BACK_OFF_S
                    else:
                        back_off_s = min(2 * back_off_s, LONGEST_BACK_OFF_S)
        finally:
            self._watch_ended.set()

    async def close(self) -> None:
        """Say goodbye, unmap, give up the lock. No operation may be running."""
        self._closed = True
        if self._watching is not None:
            assert self._watch_ended is not None
            self._watching.cancel()
            await self._watch_ended.wait()
        if self._attached and self._mapping is not None:
            try:
                async with PoolChannel(self._root) as channel:
                    await channel.detach(
                        Deadline.after_ms(DETACH_MS), self._mapping.session_id, self._secret
                    )
            except _AWAY as error:
                _log.debug("detach: %s", error)
        self._helper.shutdown(wait=True)
        mapping = self._mapping
        self._leave()
        if mapping is not None:
            mapping.close()

    async def _rest(self, back_off_s: float) -> None:
        assert self._nudged is not None
        if self._attached:
            with anyio.move_on_after(LOOK_S):
                await self._nudged.wait()
        else:
            # Impatience does not make a server come: a failed attempt keeps its distance.
            await asyncio.sleep(back_off_s * random.uniform(0.5, 1.0))
        self._nudged.clear()

    async def _look_once_more(self) -> bool:
        try:
            return await self._look()
        except Exception:
            # Whatever it is, a session that nobody watches any more would never heal.
            _log.exception(
                "the session with the server of %s could not be looked after", self._root
            )
            return False

    async def _look(self) -> bool:
        """Compare what is with what should be, and mend it; whether we are attached now."""
        context = self._context
        if context is not None and _pulse(context)[0] == _RETIRED:
            _log.info("the pool was retired: unmapping it")
            self._leave()
            context = None
        if context is not None and self._attached:
            doubted, self._doubted = self._doubted, False
            same = self._is_current(context)
            if same and (doubted or self._heartbeat_age_ns(context) > QUIET_NS):
                same = await self._still_there()
            if same:
                context.ahead.expire()
                await self._pay(context)
                return True
            self._away()
        try:
            await self._attach(Deadline.after_ms(PROBE_MS))
        except _AWAY as error:
            _log.debug("no attachment: %s", error)
            return False
        return True

    async def _still_there(self) -> bool:
        """Whether the server we are attached to is there, as far as can be known."""
        try:
            async with PoolChannel(self._root) as channel:
                reply = await channel.probe(Deadline.after_ms(PROBE_MS))
        except DeadlineExpired:
            return True  # frozen or busy, not gone: its connections and grants still hold
        except (Unavailable, Refused):
            return False
        if self._channel is not None:
            self._channel.drop_idle()
        return self._is_ours(reply)

    def _is_ours(self, reply: ProbeReply) -> bool:
        """Whether the server that answered is that of our pool: a new pool may be of our epoch."""
        mapping = self._mapping
        return mapping is not None and (reply.pool_id, reply.epoch) == (
            mapping.pool_id,
            self._epoch,
        )

    async def _attach(self, deadline: Deadline) -> None:
        assert self._attach_lock is not None
        async with self._attach_lock:
            context, mapping = self._context, self._mapping
            if context is None or mapping is None:
                await self._attach_anew(deadline)
                return
            live = context.requests.pause()
            try:
                await self._resume(deadline, mapping, live)
            except BaseException as error:
                context.requests.down()
                if isinstance(error, Refused) and error.reason is Reason.SESSION:
                    # Another pool, or one that does not know us: the old mapping is of no use.
                    self._leave()
                    await self._attach_anew(deadline)
                    return
                raise

    async def _resume(self, deadline: Deadline, mapping: Mapping, live: list[int]) -> None:
        resumed = Resumed(mapping.session_id, self._secret, mapping.pool_id, live)
        async with PoolChannel(self._root) as channel:
            reply = await channel.attach(
                deadline,
                abi_version=ABI_VERSION,
                layout_version=LAYOUT["LAYOUT_VERSION"],
                client_version=self._client_version,
                credentials=self._credentials,
                resumed=resumed,
            )
        assert self._context is not None and self._channel is not None
        requests = self._context.requests
        self._channel.drop_idle()
        requests.forgive()
        self._context = dataclasses.replace(self._context, verify=self._verifies(reply.verify))
        self._arrived(reply.epoch)
        requests.resume()

    async def _attach_anew(self, deadline: Deadline) -> None:
        async with PoolChannel(self._root) as channel:
            reply = await channel.attach(
                deadline,
                abi_version=ABI_VERSION,
                layout_version=LAYOUT["LAYOUT_VERSION"],
                client_version=self._client_version,
                credentials=self._credentials,
            )
        mapping = Mapping(self._root, reply.pool_id, reply.session_id, self._device)
        write_channel = WriteChannel(
            os.path.join(self._root, layout.WRITE_SOCKET), reply.session_id, reply.secret
        )
        self._mapping, self._channel, self._secret = mapping, write_channel, reply.secret
        requests = RequestBook(write_channel.next_request, self._wake_soon)
        self._context = Context(
            reader=mapping.reader,
            data=mapping.data,
            counters=mapping.counters,
            device=self._device,
            verify=self._verifies(reply.verify),
            channel=write_channel,
            requests=requests,
            ahead=Ahead(requests),
            suspect=self._suspect,
            broken=self.nudge,
            keep=mapping,
        )

        def make_first_calls_warm() -> None:
            write_channel.connect(deadline)
            mapping.populate(quick=True)

        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._helper, make_first_calls_warm)
        self._arrived(reply.epoch)
        self._helper.submit(mapping.populate)

    def _arrived(self, epoch: int) -> None:
        assert self._context is not None
        self._context.counters.add(Count.ATTACHES, 1)
        with self._changed:
            self._epoch = epoch
            self._attached = True
            self._doubted = False
            self._changed.notify_all()
        _log.info("attached to %s, epoch %d", self._root, epoch)

    def _away(self) -> None:
        self._attached = False
        if self._context is not None:
            self._context.requests.down()
            self._context.counters.add(Count.CONNECTIONS_LOST, 1)
        _log.info("the server of %s is away", self._root)

    def _leave(self) -> None:
        """Let go of the mapping: it is unmapped when the last operation on it has ended."""
        self._attached = False
        self._past = self.counters()
        if self._context is not None:
            self._context.requests.down()
        if self._channel is not None:
            self._channel.close()
        self._context = self._mapping = self._channel = None

    async def _pay(self, context: Context) -> None:
        if not context.requests.owed() and not self._suspects:
            return
        if self._heartbeat_age_ns(context) > QUIET_NS:
            return  # it would not answer either
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._helper, self._pay_blocking, context)

    def _pay_blocking(self, context: Context) -> None:
        channel = self._channel
        if channel is None:
            return
        try:
            for request in context.requests.owed():
                channel.abort(request, Deadline.after_ms(DEBT_MS))
                context.requests.paid(request)
            while self._suspects:
                digest, version = self._suspects.popleft()
                channel.suspect(digest, version, Deadline.after_ms(DEBT_MS))
        except (DeadlineExpired, OSError) as error:
            _log.debug("what the server must still be told waits: %s", error)

    async def _confirm(self) -> bool:
        """Whether data calls work, asked until it is sure or the time is over."""
        deadline = Deadline.after_ms(PROBE_MS)
        while not deadline.expired:
            if self._is_current(self._context):
                try:
                    async with PoolChannel(self._root) as channel:
                        reply = await channel.probe(deadline)
                    if self._is_ours(reply):
                        return True
                except DeadlineExpired:
                    return False
                except (Unavailable, Refused):
                    pass
            self.nudge()
            await asyncio.sleep(0.02)
        return False

    # ---- small things ----

    def _verifies(self, server_says: bool) -> bool:
        return server_says if self._verify is None else self._verify

    def _is_current(self, context: Context | None) -> bool:
        if context is None or not self._attached:
            return False
        state, epoch, _ = _pulse(context)
        return state == _ACTIVE and epoch == self._epoch

    def _has_new_server(self, context: Context) -> bool:
        state, epoch, _ = _pulse(context)
        return (
            state == _ACTIVE
            and epoch != self._epoch
            and self._heartbeat_age_ns(context) < UNHEALTHY_NS
        )

    def _heartbeat_age_ns(self, context: Context | None) -> int:
        assert context is not None
        return time.monotonic_ns() - _pulse(context)[2]

    def _mapping_counters(self) -> list[int]:
        mapping = self._mapping
        return mapping.counters.snapshot() if mapping is not None else []

    def _suspect(self, digest: bytes, version: int) -> None:
        self._suspects.append((digest, version))
        self._wake_soon()

    def _wake_soon(self) -> None:
        self._home.call_soon(self._wake)

    def _wake(self) -> None:
        if self._nudged is not None:
            self._nudged.set()


def probe_root(home: HomeLoop, root: str, timeout_ms: float = PROBE_MS) -> bool:
    """Return whether a server serves `root`, without a session; never raises, bounded."""

    async def probe() -> bool:
        async with PoolChannel(root) as channel:
            reply = await channel.probe(Deadline.after_ms(timeout_ms))
        return reply.state == "serving"

    try:
        return home.run(probe, timeout_s=timeout_ms / 1000 + 0.3)
    except Exception as error:
        _log.debug("probe of %s: %s", root, error)
        return False


def _pulse(context: Context) -> tuple[int, int, int]:
    return context.reader.pulse()


def _not_now(error: Exception) -> EmsException:
    return EmsException(
        EmsErrorCode.EMS_RECOVERD_ERROR,
        f"{error}; start `ems serve` or wait for it, then call Ems.init again",
    )
