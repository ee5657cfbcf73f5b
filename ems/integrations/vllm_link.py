"""The client of a process, kept in order behind the engine's back.

    AWAY --init succeeds--> USABLE      loads and saves, each as far as its breaker is closed

A thread looks after what is not in order (no client yet, an open breaker) and ends when everything
is; the engine's own thread never waits for a server.
"""

from __future__ import annotations

import logging
import threading
import time

from ems import CcConfig_v1, ContextCaching, Ems, EmsConfig
from ems.integrations.breaker import Breaker
from ems.integrations.vllm_settings import Settings

__all__ = ["Link"]

_MODEL_ID = "vllm"  # the model itself is part of each layout: one client serves several engines
_log = logging.getLogger("vllm.ems")  # below vLLM's own, which has handlers


class Link:
    """Thread-safe; its methods never raise.

    Args:
        settings: of the connector.
    """

    def __init__(self, settings: Settings) -> None:
        self._config = EmsConfig(
            cc_config_v1=CcConfig_v1(rank_id=0, device_id=0, model_id=_MODEL_ID),
            access_id=settings.tenant,
            access_key=settings.access_key,
            root=settings.root,
            init_timeout_ms=settings.init_timeout_ms,
            verify=settings.verify,
        )
        self.loads = Breaker(settings.probe_interval_s)
        self.saves = Breaker(settings.probe_interval_s)
        self._interval_s = settings.probe_interval_s
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._keeper: threading.Thread | None = None
        self._told: str | None = None
        self.caching: ContextCaching | None = None
        if not self._attach():
            self._look_after()

    def failed(self, breaker: Breaker, why: object) -> None:
        """Note that a call failed, and say why if it is news."""
        with self._lock:
            opened = breaker.fail(time.monotonic())
        if opened:
            what = "loads from" if breaker is self.loads else "saves to"
            _log.warning("%s EMS are off until it is well again: %s", what, why)
            self._look_after()

    def close(self) -> None:
        """End the thread. The client stays: it belongs to the process."""
        self._ended.set()

    def _attach(self) -> bool:
        try:
            Ems.init(self._config)
            self.caching = Ems.get_cc()
        except Exception as error:  # none of it may end the engine, or the thread that looks
            if str(error) != self._told:
                self._told = str(error)
                _log.warning("vLLM goes on without EMS, which is looked for meanwhile: %s", error)
            return False
        self._told = None
        _log.info("attached to EMS")
        return True

    def _look_after(self) -> None:
        with self._lock:
            if self._keeper is None and not self._ended.is_set():
                self._keeper = threading.Thread(target=self._keep, name="ems-vllm", daemon=True)
                self._keeper.start()

    def _keep(self) -> None:
        while not self._ended.wait(self._pause_s()):
            if self.caching is None or not self._is_client():
                self._attach()
            good = self.caching is not None and self._is_well()
            with self._lock:
                for breaker in (self.loads, self.saves):
                    if breaker.probed(good, time.monotonic()):
                        what = "loads" if breaker is self.loads else "saves"
                        _log.warning("EMS is well again: %s are on", what)
                if self.caching is not None and not (self.loads.is_open or self.saves.is_open):
                    self._keeper = None
                    return

    def _pause_s(self) -> float:
        opened = [one.interval_s for one in (self.loads, self.saves) if one.is_open]
        return max(opened, default=self._interval_s)

    def _is_client(self) -> bool:
        """Whether what we have is the process's client still (somebody may have closed it)."""
        try:
            return Ems.get_cc() is self.caching
        except Exception:
            return False

    @staticmethod
    def _is_well() -> bool:
        try:
            return Ems.check_health()
        except Exception:
            return False
