from __future__ import annotations

import grp
import os
from pathlib import Path

import pytest

from ems.server.config import SETTINGS, ConfigError, ServerConfig, load_config

KEY = "k" * 32


def load(
    options: dict[str, object] | None = None,
    environ: dict[str, str] | None = None,
    file: Path | None = None,
) -> ServerConfig:
    return load_config(options or {}, environ or {}, None if file is None else str(file))


def test_defaults() -> None:
    config = load()
    assert config == ServerConfig(root="/dev/shm/ems")
    assert (config.file_mode, config.root_mode) == (0o600, 0o700)


def test_option_wins_over_variable_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "ems.toml"
    file.write_text('capacity = "1GiB"\nentries = 3000\nlog-level = "error"\nverify = false\n')
    environ = {"EMS_CAPACITY": "2GiB", "EMS_ENTRIES": "2000"}
    config = load({"capacity": "3GiB", "entries": None}, environ, file)
    assert config.capacity == 3 << 30
    assert config.entries == 2000
    assert config.log_level == "error"
    assert config.verify is False
    assert config.log_format == "human"


def test_the_file_can_come_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "ems.toml"
    file.write_text("capacity = 1048576\n")
    assert load(environ={"EMS_CONFIG": str(file)}).capacity == 1 << 20


def test_a_bad_value_in_the_file_is_told_though_something_wins_over_it(tmp_path: Path) -> None:
    file = tmp_path / "ems.toml"
    file.write_text('capacity = "a lot"\n')
    with pytest.raises(ConfigError, match=r"capacity in .*ems\.toml"):
        load({"capacity": "1GiB"}, {}, file)
    with pytest.raises(ConfigError, match=r"capacity in .*ems\.toml"):
        load({}, {"EMS_CAPACITY": "1GiB"}, file)


def test_an_empty_variable_is_none() -> None:
    assert load(environ={"EMS_CAPACITY": ""}).capacity is None


def test_variables_of_clients_are_not_the_servers() -> None:
    names = {setting.variable for setting in SETTINGS}
    assert "EMS_TIMEOUT" not in names
    assert not any(name.startswith(("EMS_ENABLE_", "EMS_NUM_")) for name in names)


def test_a_group_by_name_and_by_number() -> None:
    known = grp.getgrgid(os.getgid())
    for name in (known.gr_name, str(known.gr_gid)):
        config = load({"group": name})
        assert config.gid == known.gr_gid
        assert (config.file_mode, config.root_mode) == (0o660, 0o770)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("capacity", "8XiB", "--capacity is '8XiB'.*8GiB"),
        ("capacity", "0", "--capacity"),
        ("capacity", "-1", "--capacity"),
        ("entries", "many", "--entries is 'many': give a whole number from 8"),
        ("entries", "7", "--entries"),
        ("entries", "1" * 30, "--entries"),
        ("log-level", "loud", "--log-level is 'loud': give one of debug"),
        ("log-format", "xml", "human, json"),
        ("root", "x" * 200, "--root.*the limit is"),
        ("group", "no-such-group-here", "--group.*no such group"),
        ("data-dir", "", None),
        ("recreate", "maybe", "true or false"),
        ("credentials", "/no/such/file", "cannot read it: No such file"),
    ],
)
def test_a_bad_value_is_named(name: str, value: str, text: str | None) -> None:
    if text is None:
        value, text = "\0", "give a path"
    with pytest.raises(ConfigError, match=text):
        load({name: value})


def test_the_source_of_a_bad_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="EMS_CAPACITY is 'x'"):
        load(environ={"EMS_CAPACITY": "x"})
    file = tmp_path / "ems.toml"
    file.write_text("entries = true\n")
    with pytest.raises(ConfigError, match=f"entries in {file} is True"):
        load(file=file)


def test_bad_files(tmp_path: Path) -> None:
    file = tmp_path / "ems.toml"
    with pytest.raises(ConfigError, match="cannot read it"):
        load(file=file)
    file.write_text("capacity = \n")
    with pytest.raises(ConfigError, match="no TOML"):
        load(file=file)
    file.write_text("capacty = 1\n")
    with pytest.raises(ConfigError, match=r"capacty in .* is no setting; did you mean capacity"):
        load(file=file)


def test_credentials(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[credentials]\n"tenant@a.b" = "{KEY}"\nother = "{KEY}"\n')
    config = load({"credentials": str(file)})
    assert config.credentials == {"tenant@a.b": KEY, "other": KEY}
    assert KEY not in repr(config)


@pytest.mark.parametrize(
    "text",
    ["", "[credentials]\n", "[credentials]\na = 'short'\n", f"a = '{KEY}'\n", "credentials = 1"],
)
def test_bad_credentials(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="credentials") as caught:
        load({"credentials": str(file)})
    assert "short" not in str(caught.value)
