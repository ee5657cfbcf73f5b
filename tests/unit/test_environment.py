from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from ems.common.environment import VARIABLES, misspelt, warn_of_misspelt
from ems.server.config import CONFIG_VARIABLE, SETTINGS

PACKAGE = Path(__file__).resolve().parents[2] / "ems"


def test_every_variable_is_known() -> None:
    assert {setting.variable for setting in SETTINGS} <= {*VARIABLES}
    assert CONFIG_VARIABLE in VARIABLES
    read = set()
    for path in PACKAGE.rglob("*.py"):
        if "testing" not in path.parts and "bench" not in path.parts:
            read |= set(re.findall(r"""["'](EMS_[A-Z_]+)["']""", path.read_text(encoding="utf-8")))
    assert {name for name in read if not name.endswith("_")} <= {*VARIABLES}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("EMS_RROT", "EMS_ROOT"),
        ("EMS_CAPACTIY", "EMS_CAPACITY"),
        ("EMS_LOGLEVEL", "EMS_LOG_LEVEL"),
        ("EMS_DEVICES", "EMS_DEVICE"),
    ],
)
def test_a_misspelt_variable(name: str, near: str) -> None:
    assert misspelt({name: "1", "HOME": "/"}) == [(name, near)]


@pytest.mark.parametrize(
    "name",
    [
        *VARIABLES,
        "EMS_ENABLE_WRITE_RCACHE",
        "EMS_NUM_MIN_LOAD_BLOCKS",
        "EMS_TIMEOUT",
        "EMS_PORT",
        "EMS_PORT_50051_TCP_ADDR",
        "EMS_SERVICE_HOST",
        "EMS_",
        "ems_root",
    ],
)
def test_what_is_somebody_elses_is_left_alone(name: str) -> None:
    assert misspelt({name: "1"}) == []


def test_it_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ems"):
        for _ in range(3):
            warn_of_misspelt({"EMS_DEVIEC": "cpu"})
    text = "the environment variable EMS_DEVIEC means nothing: did you mean EMS_DEVICE?"
    assert [record.getMessage() for record in caplog.records] == [text]
