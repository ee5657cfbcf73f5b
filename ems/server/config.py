"""What a node server is told: one table of settings, three sources, one frozen result.

A setting is an option of `ems serve`, an environment variable and a key of the TOML file; the
option wins over the environment, the environment over the file, the file over the default.
"""

from __future__ import annotations

import dataclasses
import difflib
import grp
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ems.common.config import check_root
from ems.common.exception import EmsException
from ems.common.size import parse_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["CONFIG_VARIABLE", "SETTINGS", "ConfigError", "ServerConfig", "Setting", "load_config"]

MIN_ENTRIES = 8
MAX_ENTRIES = 1 << 28
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("human", "json")
CONFIG_VARIABLE = "EMS_CONFIG"


class ConfigError(Exception):
    """A setting is wrong; the text says which, where it came from, and what would be right."""


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Everything `ems serve` was told, checked as far as it can be without touching the machine.

    Args:
        root: directory of the pool, absolute.
        capacity: bytes for blocks; None: what an existing pool has, else a share of the free
            memory.
        entries: slots of the index; None: what an existing pool has, else one per 16 KiB of
            capacity.
        log_level: one of `LOG_LEVELS`.
        log_format: one of `LOG_FORMATS`.
        log_dir: directory for log files; None: standard error.
        data_dir: directory of the data file; None: the root.
        gid: the group that may use the pool beside its owner.
        recreate: replace an existing pool.
        verify: whether clients compare checksums when they load, unless they decide themselves.
        credentials: access keys by access id; None: everybody who may open the socket is served.
    """

    root: str
    capacity: int | None = None
    entries: int | None = None
    log_level: str = "info"
    log_format: str = "human"
    log_dir: str | None = None
    data_dir: str | None = None
    gid: int | None = None
    recreate: bool = False
    verify: bool = True
    credentials: Mapping[str, str] | None = dataclasses.field(default=None, repr=False)

    @property
    def file_mode(self) -> int:
        """Permissions of the pool's files and sockets."""
        return 0o600 if self.gid is None else 0o660

    @property
    def root_mode(self) -> int:
        """Permissions of the root."""
        return 0o700 if self.gid is None else 0o770


@dataclasses.dataclass(frozen=True)
class Setting:
    """One thing to be told.

    Args:
        name: of the option (`--name`) and of the key in the file.
        field: of `ServerConfig`.
        parse: turns what was found (a string; from the file also a number or a bool) into the
            value, given the name of its source; `ValueError` says what would be right,
            `EmsException` the whole story.
        metavar: stands for the value in the help; None: a switch.
        help: for people, with the default.
    """

    name: str
    field: str
    parse: Callable[[str, Any], Any]
    metavar: str | None
    help: str

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return "EMS_" + self.name.upper().replace("-", "_")


def _size(source: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError("give a size, for example 8GiB")
    return parse_size(value, source)


def _entries(source: str, value: object) -> int:
    text = str(value).strip() if not isinstance(value, bool) else ""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
    if not MIN_ENTRIES <= number <= MAX_ENTRIES:
        raise ValueError(f"give a whole number from {MIN_ENTRIES} to {MAX_ENTRIES}")
    return number


def _choice(*allowed: str) -> Callable[[str, object], str]:
    def parse(source: str, value: object) -> str:
        text = str(value).strip().lower()
        if text not in allowed:
            raise ValueError(f"give one of {', '.join(allowed)}")
        return text

    return parse


def _switch(source: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError("give true or false")


def _path(source: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError("give a path")
    return os.path.abspath(value)


_LAST_GID = 2**32 - 2  # the next one means "leave as it is"


def _group(source: str, value: object) -> int:
    text = str(value).strip()
    if text.isascii() and text.isdigit():
        if len(text) > 10 or int(text) > _LAST_GID:
            raise ValueError(f"a group has a number of at most {_LAST_GID}")
        return int(text)
    try:
        return grp.getgrnam(text).gr_gid
    except (KeyError, ValueError):
        raise ValueError("there is no such group here; give its name or number") from None


def _credentials(source: str, value: object) -> Mapping[str, str]:
    table = _read_toml(_path(source, value))
    keys = table.get("credentials")
    if set(table) != {"credentials"} or not isinstance(keys, dict) or not keys:
        raise ValueError('write lines like "my-tenant" = "<access key>" below a line [credentials]')
    for access_id, access_key in keys.items():
        if not isinstance(access_key, str) or not 32 <= len(access_key) <= 256:
            # Which one, but never the key itself: errors end up in logs.
            raise ValueError(f"the access key of {access_id!r} is no text of 32 to 256 characters")
        if not 1 <= len(access_id) <= 512:
            raise ValueError(f"the access id {access_id[:20]!r} has not 1 to 512 characters")
    return dict(keys)


SETTINGS = (
    Setting("root", "root", check_root, "DIR",
            "Directory of the pool and its sockets, on a tmpfs. Default: /dev/shm/ems."),
    Setting("capacity", "capacity", _size, "SIZE",
            "Bytes for blocks, such as 8GiB. Default: what the pool there has, else a quarter of "
            "the free memory."),
    Setting("entries", "entries", _entries, "N",
            "How many blocks the index can hold, 80 bytes each. Default: one per 16 KiB of "
            "capacity, at least 1024."),
    Setting("log-level", "log_level", _choice(*LOG_LEVELS), "LEVEL",
            "debug, info (default), warning or error."),
    Setting("log-format", "log_format", _choice(*LOG_FORMATS), "FORMAT",
            "human (default), or json: an object a line."),
    Setting("log-dir", "log_dir", _path, "DIR",
            "Write logs there (/var/log/ems, say) instead of to standard error."),
    Setting("data-dir", "data_dir", _path, "DIR",
            "Keep the blocks there, on a hugetlbfs for example; the rest stays in the root."),
    Setting("group", "gid", _group, "NAME",
            "Open the pool to this group too: files 0660, root 0770."),
    Setting("recreate", "recreate", _switch, None,
            "Replace a pool that exists, and lose what is in it: the way to another capacity."),
    Setting("verify", "verify", _switch, None,
            "Whether loads compare checksums. Default: they do."),
    Setting("credentials", "credentials", _credentials, "FILE",
            'Serve only clients with these keys: a TOML file with "access-id" = "access-key" '
            "below [credentials]."),
)  # fmt: skip
"""In the order in which the help shows them."""


def load_config(
    options: Mapping[str, object], environ: Mapping[str, str], file: str | None = None
) -> ServerConfig:
    """Put a configuration together.

    Args:
        options: by `Setting.name`; None or missing where none was given.
        environ: the environment.
        file: path of the TOML file; None: the one `EMS_CONFIG` names, if any.

    Raises:
        ConfigError: a setting is wrong, or the file is.
    """
    file = file or environ.get(CONFIG_VARIABLE) or None
    in_file: Mapping[str, object] = {}
    if file is not None:
        try:
            in_file = _read_toml(file)
        except ValueError as error:
            raise ConfigError(f"--config {file}: {error}") from None
        _check_names(file, in_file)
    values: dict[str, object] = {"root": check_root("--root", "/dev/shm/ems")}
    for setting in SETTINGS:
        source, value = f"--{setting.name}", options.get(setting.name)
        if value is None:
            # An empty variable is how many launchers spell an unset one.
            source, value = setting.variable, environ.get(setting.variable) or None
        told = [(source, value)] if value is not None else []
        if setting.name in in_file:
            # Looked at even if something wins over it: else it is found out when that goes.
            told.insert(0, (f"{setting.name} in {file}", in_file[setting.name]))
        for source, value in told:
            try:
                values[setting.field] = setting.parse(source, value)
            except EmsException as error:
                raise ConfigError(error.message()) from None
            except ValueError as error:
                raise ConfigError(f"{source} is {value!r}: {error}") from None
    return ServerConfig(**values)  # type: ignore[arg-type]  # each parser returns its field's type


def _check_names(file: str, table: Mapping[str, object]) -> None:
    names = [setting.name for setting in SETTINGS]
    for name in table:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise ConfigError(f"{name} in {file} is no setting; {hint}")


def _read_toml(path: str) -> dict[str, Any]:
    """Return a TOML file as a table.

    Raises:
        ValueError: it cannot be read, or is no TOML.
    """
    try:
        with open(path, "rb") as file:
            return dict(tomllib.load(file))
    except OSError as error:
        raise ValueError(f"cannot read it: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no TOML: {error}") from None
