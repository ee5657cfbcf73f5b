"""The configuration of a client, and its check.

The objects that users fill are plain and mutable, because real clients assign fields after
construction; everything is checked in one place, when `Ems.init` turns them into `ClientSettings`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from typing import ClassVar, TypeVar

from ems.common.argument import check_bool, check_int, shown, wrong_type
from ems.common.boundary import public_class
from ems.common.exception import invalid_argument
from ems.common.size import format_size, parse_size

__all__ = [
    "DEFAULT_ROOT",
    "CcConfig",
    "ClientSettings",
    "EmsConfig",
    "InstanceConfig",
    "check_config",
    "check_name",
    "check_root",
    "default_root",
    "format_size",
    "parse_size",
]

DEFAULT_ROOT = "/dev/shm/ems"
DEFAULT_INIT_TIMEOUT_MS = 2000
MAX_INIT_TIMEOUT_MS = 600_000
MAX_NAME_CHARACTERS = 512
# A unix socket's path has at most 107 bytes, and the sockets' names are added to the root.
MAX_ROOT_BYTES = 90
_INT_MAX = 2**31 - 1
_DOCUMENTED_NAME = re.compile(r"[0-9a-z._-]+", re.ASCII)
_ACCESS_KEY = re.compile(r"[0-9A-Za-z+/=]+", re.ASCII)
_log = logging.getLogger("ems.config")

_Self = TypeVar("_Self", bound="InstanceConfig")


@dataclasses.dataclass
class InstanceConfig:
    """What both generations of the context-caching configuration share."""

    rank_id: int
    device_id: int
    model_id: str
    tp_world_size: int = 1
    pp_world_size: int = 1

    generation: ClassVar[int] = 0

    def checked(self: _Self, name: str) -> _Self:
        """Return a private copy with every field checked; error texts call the object `name`."""
        return dataclasses.replace(
            self,
            rank_id=check_int(f"{name}.rank_id", self.rank_id, 0, _INT_MAX),
            device_id=check_int(f"{name}.device_id", self.device_id, 0, _INT_MAX),
            model_id=check_name(f"{name}.model_id", self.model_id, MAX_NAME_CHARACTERS),
            tp_world_size=check_int(f"{name}.tp_world_size", self.tp_world_size, 1, _INT_MAX),
            pp_world_size=check_int(f"{name}.pp_world_size", self.pp_world_size, 1, _INT_MAX),
        )


@public_class
@dataclasses.dataclass
class CcConfig(InstanceConfig):
    """Context caching by string keys and buffers, "V0" (pages 0601a, 0007c).

    Args:
        rank_id: global rank of this process's device, >= 0.
        device_id: rank of the device on its node, >= 0; an identity and a hint, the device of a
            buffer is the buffer's.
        model_id: names the model, 1 to 512 printable characters; blocks of different models never
            meet.
        tp_world_size: ranks of tensor parallelism, >= 1.
        pp_world_size: ranks of pipeline parallelism, >= 1.

    Checked by `Ems.init`, not here: fields may be assigned later.
    """


@public_class
@dataclasses.dataclass
class EmsConfig:
    """The configuration of EMS in one process (page 0007).

    Args:
        cc_config: `CcConfig` or `CcConfig_v1`; the class decides which generation is meant.
        cc_config_v1: the same, the newer field. If both are given V1 wins, and they must agree on
            rank and device. If none is given `Ems.init` succeeds and `Ems.get_cc()` is None.
        access_id: tenant whose blocks are meant, 1 to 512 printable characters. A namespace, no
            security boundary.
        access_key: 32 to 256 characters of digits, letters, `+`, `/`, `=`; None or "" for none.
        root: directory of the node server; None means `EMS_ROOT`, else `/dev/shm/ems`.
        init_timeout_ms: how long `Ems.init` may take to reach the server.
        verify: whether loads compare checksums; None leaves it to the server (`ems serve --verify`,
            on by default).

    The last three are additions of this implementation. Checked by `Ems.init`, which takes a copy.
    """

    cc_config: InstanceConfig | None = None
    cc_config_v1: InstanceConfig | None = None
    access_id: str | None = None
    access_key: str | None = dataclasses.field(default=None, repr=False)
    root: str | os.PathLike[str] | None = None
    init_timeout_ms: int = DEFAULT_INIT_TIMEOUT_MS
    verify: bool | None = None


@dataclasses.dataclass(frozen=True)
class ClientSettings:
    """A checked configuration; two that are equal mean the same client."""

    root: str
    access_id: str | None
    access_key: str | None = dataclasses.field(repr=False)
    instance: InstanceConfig | None
    init_timeout_ms: int
    verify: bool | None = None


def default_root() -> str:
    """Return the root that is meant when none is named: `EMS_ROOT`, else `/dev/shm/ems`."""
    return os.environ.get("EMS_ROOT") or DEFAULT_ROOT


def check_root(name: str, root: object) -> str:
    """Return the absolute path of a server's root directory (None means the default root).

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` when it is no path, or too long for a unix socket below
            it.
    """
    if root is None:
        root = default_root()
    try:
        path = os.fspath(root)  # type: ignore[call-overload]  # its TypeError is the check
    except Exception:
        path = None
    if not isinstance(path, str) or not path or "\0" in path:
        raise invalid_argument(f"{name} is {shown(root)}; give the path of the server's directory")
    try:
        path = os.path.abspath(path)
        nbytes = len(os.fsencode(path))
    except (OSError, ValueError):  # no working directory; a character that no path can have
        raise invalid_argument(f"{name} is {shown(root)}; give an absolute path") from None
    if nbytes > MAX_ROOT_BYTES:
        raise invalid_argument(
            f"{name} is {path}, {nbytes} bytes long; the limit is {MAX_ROOT_BYTES}, "
            "because unix sockets lie below it"
        )
    return path


def check_name(name: str, value: object, limit: int) -> str:
    """Return an identifier of 1..`limit` printable characters, or raise `EMS_INVALID_ARGUMENT`.

    More is accepted than documented (`@`, upper case), because shipped clients use it; that is
    logged.
    """
    if not isinstance(value, str):
        raise wrong_type(name, value, "a str")
    value = str(value)
    if not 1 <= len(value) <= limit:
        raise invalid_argument(
            f"{name} is {len(value)} characters long; the limits are 1 and {limit}"
        )
    if not value.isprintable():
        raise invalid_argument(f"{name} is {shown(value)}; it must have printable characters only")
    if not _DOCUMENTED_NAME.fullmatch(value):
        _log.warning(
            "%s is %r; documented are digits, lower-case letters, '.', '-' and '_'", name, value
        )
    return value


def check_config(config: object) -> ClientSettings:
    """Check an `EmsConfig` and return what it means, independent of later changes to it.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT`; the text names the field, its value and the limit.
    """
    if not isinstance(config, EmsConfig):
        raise wrong_type("config", config, "an EmsConfig")
    access_id = config.access_id
    if access_id is not None:
        access_id = check_name("config.access_id", access_id, MAX_NAME_CHARACTERS)
    access_key = _check_access_key(config.access_key)
    if access_key is not None and access_id is None:
        raise invalid_argument(
            "config.access_key is given without config.access_id; give both or none"
        )
    return ClientSettings(
        root=check_root("config.root", config.root),
        access_id=access_id,
        access_key=access_key,
        instance=_choose_instance(config),
        init_timeout_ms=check_int(
            "config.init_timeout_ms", config.init_timeout_ms, 1, MAX_INIT_TIMEOUT_MS
        ),
        verify=None if config.verify is None else check_bool("config.verify", config.verify),
    )


def _choose_instance(config: EmsConfig) -> InstanceConfig | None:
    found: list[tuple[str, InstanceConfig]] = []
    for field in ("cc_config", "cc_config_v1"):
        value: object = getattr(config, field)
        if value is None:
            continue
        if not isinstance(value, InstanceConfig):
            raise wrong_type(f"config.{field}", value, "a CcConfig or a CcConfig_v1")
        found.append((field, value.checked(f"config.{field}")))
    if len(found) == 2:
        first, second = found[0][1], found[1][1]
        for part in ("rank_id", "device_id"):
            one, other = getattr(first, part), getattr(second, part)
            if one != other:
                raise invalid_argument(
                    f"config.cc_config.{part} is {one} and config.cc_config_v1.{part} is {other}; "
                    "a process has one rank and one device: give one config, or the same values"
                )
    if not found:
        return None
    # The later field first: it wins among two of the same generation.
    return max((one for _, one in reversed(found)), key=lambda one: one.generation)


def _check_access_key(value: object) -> str | None:
    # The value never goes into a text: it is a secret.
    if value is None:
        return None
    if not isinstance(value, str):
        raise invalid_argument(
            f"config.access_key is of type {type(value).__name__}; give a str, or None for none"
        )
    if not value:
        return None
    if not 32 <= len(value) <= 256:
        raise invalid_argument(
            f"config.access_key is {len(value)} characters long; the limits are 32 and 256"
        )
    if not _ACCESS_KEY.fullmatch(value):
        raise invalid_argument(
            "config.access_key has other characters than digits, letters, '+', '/' and '='"
        )
    return str(value)
