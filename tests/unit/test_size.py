from __future__ import annotations

from typing import Any

import pytest

from ems import EmsException
from ems.common.size import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1048576", 1 << 20),
        (4096, 4096),
        ("8GiB", 8 << 30),
        ("8g", 8 << 30),
        (" 256 KiB ", 256 << 10),
        ("1.5MiB", 3 << 19),
        ("1000MB", 10**9),
        ("2T", 2 << 40),
        ("0.5k", 512),
    ],
)
def test_sizes_as_people_write_them(text: Any, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "0", 0, -5, "1e9", "8 GiBs", "1..5G", "٣", None, 1.5, True, "9" * 50]
)
def test_what_is_no_size_is_named(text: Any) -> None:
    with pytest.raises(EmsException, match="capacity is"):
        parse_size(text, "capacity")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (700, "700 B"), (1 << 20, "1 MiB"), (3 << 29, "1.5 GiB"), (5 << 50, "5120 TiB")],
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text
