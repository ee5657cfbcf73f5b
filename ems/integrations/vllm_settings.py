"""What `kv_connector_extra_config` may say; everything has a default that works."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["Settings"]

_LOADS = ("sync", "async")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the connector.

    Args:
        root: directory of the EMS server; None: `EMS_ROOT`, else /dev/shm/ems.
        model_id: names the weights. None: the path or name in vLLM's configuration with, for a
            local folder, a fingerprint of its files.
        tenant: `access_id`; blocks of different tenants never meet.
        access_key: proves the tenant, where the server wants it.
        verify: whether loads compare checksums; None: as the server says.
        load: "sync": a request's blocks are loaded in the step that schedules it, which gives the
            shortest time to its first token. "async": others go on meanwhile, it waits a step more.
        min_hit_tokens: hits of fewer tokens are computed instead; None: one block.
        save: whether to save at all.
        save_decoded: whether blocks of generated tokens are saved as well.
        load_timeout_ms: for the load of one request.
        save_timeout_ms: for one save; blocks of a request that ended are held that long at most.
        init_timeout_ms: how long the start may wait for a server.
        probe_interval_s: between two looks at a server that failed, or is not there.
        allow_fail_policy: accept `kv_load_failure_policy` "fail".
    """

    root: str | None = None
    model_id: str | None = None
    tenant: str | None = None
    access_key: str | None = None
    verify: bool | None = None
    load: str = "sync"
    min_hit_tokens: int | None = None
    save: bool = True
    save_decoded: bool = True
    load_timeout_ms: int = 1000
    save_timeout_ms: int = 2000
    init_timeout_ms: int = 2000
    probe_interval_s: float = 1.0
    allow_fail_policy: bool = False

    @classmethod
    def read(cls, extra: Mapping[str, Any], failure_policy: str) -> Settings:
        """Return checked settings.

        Args:
            extra: `kv_connector_extra_config`.
            failure_policy: `kv_load_failure_policy` of the engine.

        Raises:
            ValueError: an unknown name, a wrong value, or a policy that would end requests.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for name in extra:
            if name not in known:
                raise ValueError(
                    f"kv_connector_extra_config has {name!r}, which EmsConnector does not know; "
                    f"it knows {', '.join(sorted(known))}"
                )
        found = cls(**extra)
        found._check()
        if failure_policy != "recompute" and not found.allow_fail_policy:
            raise ValueError(
                f"kv_load_failure_policy is {failure_policy!r} (vLLM's default): a block that is "
                "evicted between lookup and load would end a user's request with an error. Set "
                '"kv_load_failure_policy": "recompute" in kv_transfer_config, which computes such '
                "blocks instead. To have requests fail all the same, set "
                '"allow_fail_policy": true in kv_connector_extra_config'
            )
        return found

    def _check(self) -> None:
        for name in ("root", "model_id", "tenant", "access_key"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise _wrong(name, value, "a text or null")
        for name in ("save", "save_decoded", "allow_fail_policy"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "true or false")
        if self.verify is not None and not isinstance(self.verify, bool):
            raise _wrong("verify", self.verify, "true, false or null")
        for name in ("load_timeout_ms", "save_timeout_ms", "init_timeout_ms"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise _wrong(name, value, "milliseconds, 1 or more")
        least = self.min_hit_tokens
        if least is not None and (isinstance(least, bool) or not isinstance(least, int)):
            raise _wrong("min_hit_tokens", least, "a number of tokens or null")
        interval = self.probe_interval_s
        if isinstance(interval, bool) or not isinstance(interval, (int, float)) or interval <= 0:
            raise _wrong("probe_interval_s", interval, "seconds, more than 0")
        if self.load not in _LOADS:
            raise _wrong("load", self.load, "one of " + ", ".join(map(repr, _LOADS)))


def _wrong(name: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"kv_connector_extra_config[{name!r}] is {value!r}; give {wanted}")
