"""`Ems`: one client per process, made, asked and ended here.

    OUT ──init──▶ IN ──close──▶ OUT
                  └──fork──▶ (in the child) FORKED ──init──▶ IN

A failed `init` leaves OUT; the root it tried is remembered for `check_health`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from typing import TYPE_CHECKING

from ems.cc.context_caching import ContextCaching
from ems.common.boundary import public
from ems.common.config import ClientSettings, EmsConfig, check_config, default_root
from ems.common.environment import warn_of_misspelt
from ems.common.exception import EmsException, invalid_argument
from ems.common.metrics import as_dict
from ems.home import HomeLoop, forked_error

if TYPE_CHECKING:
    from ems.client.client import Client

__all__ = ["Ems"]


class _Process:
    """What this process has of EMS."""

    def __init__(self, forked: bool = False) -> None:
        self.lock = threading.Lock()
        self.forked = forked
        self.settings: ClientSettings | None = None
        self.client: Client | None = None
        self.context_caching: ContextCaching | None = None
        self.tried_root: str | None = None

    def check_not_forked(self) -> None:
        if self.forked:
            raise forked_error()


_process = _Process()


class Ems:
    """The entry to EMS: one client, and one context-caching object, per process (page 0007).

    All calls may be used by any thread at any time. In a forked child `init`, `get_cc` and `stats`
    are about the child itself: the last two raise `EMS_INTERNAL_ERROR` until it calls `init`.
    """

    @staticmethod
    @public
    def init(config: EmsConfig) -> None:
        """Attach to the node's pool (pages 0007, 0601a). Blocks up to `config.init_timeout_ms`.

        Calling it again with the same configuration does nothing.

        Args:
            config: is copied; later changes to it mean nothing.

        Raises:
            EmsException: `EMS_RECOVERD_ERROR` when there is no server, or not yet: call it again
                once `check_health` is True. `EMS_INVALID_ARGUMENT` for a wrong configuration, wrong
                credentials, or another configuration than that of the running client.
        """
        settings = check_config(config)
        warn_of_misspelt(os.environ)
        process = _process
        process.tried_root = settings.root
        with process.lock:
            if process.settings is not None:
                if process.settings != settings:
                    raise invalid_argument(
                        "Ems.init was called before with another configuration; "
                        "a process has one: call Ems.close() first"
                    )
                return
            if settings.instance is not None:
                # Here, so that `import ems` stays light.
                from ems import __version__
                from ems.client.client import Client

                process.client = Client.open(settings, __version__)
                process.context_caching = ContextCaching(
                    process.client, settings.access_id, settings.instance
                )
            process.settings = settings
            process.forked = False

    @staticmethod
    @public
    def get_cc() -> ContextCaching | None:
        """Return the context-caching object, always the same one (page 0010).

        None until an `init` succeeded, and when its configuration had no context caching.
        """
        _process.check_not_forked()
        return _process.context_caching

    @staticmethod
    @public
    def check_health() -> bool:
        """Return whether data calls work now, or whether `init` would find a server (page 0011).

        Never raises; takes about 1 s at most, mostly microseconds. Works before `init` and after a
        failed one: then it is about the root of the last configuration, else the default one. False
        means a confirmed fault, not one slow answer. In a forked child it is False until `init`.
        """
        process = _process
        if process.forked:
            return False
        try:
            client = process.client
            if client is not None:
                return client.healthy()
            return _probe(process.tried_root or default_root())
        except Exception:
            return False

    @staticmethod
    @public
    def stats() -> dict[str, int]:
        """Return what this process's client counted since `init`: calls, keys, bytes, misses, ...

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT` without an `init` that succeeded.
        """
        _process.check_not_forked()
        if _process.settings is None:
            raise invalid_argument("there are no counters; call Ems.init first")
        client = _process.client
        return as_dict(client.counters() if client is not None else ())

    @staticmethod
    @public
    def close() -> None:
        """End the client: operations that run are joined, those that wait end with an error.

        An addition of this implementation. Idempotent; also called at interpreter exit. Afterwards
        `init` may be called again.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT` inside a callback of a `CcFuture`.
        """
        process = _process
        if process.forked:
            return
        with process.lock:
            client = process.client
            if client is not None:
                client.close()
            process.client = process.context_caching = process.settings = None


def _probe(root: str) -> bool:
    from ems.client.session import probe_root

    home = HomeLoop("ems-probe")
    home.start()
    try:
        return probe_root(home, root)
    finally:
        home.stop()


def _after_fork_in_child() -> None:
    global _process
    # A new object, with a new lock: a thread that the child does not have may hold the old one.
    _process = _Process(forked=_process.forked or _process.settings is not None)


def _at_exit() -> None:
    with contextlib.suppress(EmsException):
        Ems.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
