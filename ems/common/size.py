"""Numbers of bytes as people write them."""

from __future__ import annotations

import re

from ems.common.argument import shown
from ems.common.exception import invalid_argument

__all__ = ["format_size", "parse_size"]

_UNITS = {
    "": 1, "B": 1,
    "K": 1 << 10, "KIB": 1 << 10, "KB": 10**3,
    "M": 1 << 20, "MIB": 1 << 20, "MB": 10**6,
    "G": 1 << 30, "GIB": 1 << 30, "GB": 10**9,
    "T": 1 << 40, "TIB": 1 << 40, "TB": 10**12,
}  # fmt: skip
_PATTERN = re.compile(r"\s*(\d+)(?:\.(\d{1,9}))?\s*([A-Za-z]{0,3})\s*", re.ASCII)
_MAX_BYTES = 2**62


def parse_size(text: str | int, name: str = "size") -> int:
    """Return the bytes meant by `8GiB`, `1.5G`, `256 KiB`, `1000MB` (decimal) or a plain number.

    `K`, `M`, `G`, `T` alone mean the binary units, as `KiB` does.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` when the text is no size or out of range.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        nbytes = text
    else:
        match = _PATTERN.fullmatch(text) if isinstance(text, str) and len(text) < 40 else None
        unit = _UNITS.get(match[3].upper()) if match else None
        if match is None or unit is None:
            raise invalid_argument(
                f"{name} is {shown(text)}, which is no size; write 8GiB, 256KiB or 1048576"
            )
        fraction = match[2] or ""
        scaled = int(match[1] + fraction) * unit
        nbytes = scaled // 10 ** len(fraction)  # 1.1GiB is no whole number of bytes: round down
    if not 0 < nbytes <= _MAX_BYTES:
        raise invalid_argument(
            f"{name} is {shown(text)}; it must be from 1 byte to {format_size(_MAX_BYTES)}"
        )
    return nbytes


def format_size(nbytes: int) -> str:
    """Return a size for people, at most two decimals: `8 GiB`, `1.5 GiB`, `700 B`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{_short(size)} {unit}"
        size /= 1024
    return f"{_short(size)} TiB"


def _short(value: float) -> str:
    text = f"{value:.2f}"
    return text.rstrip("0").rstrip(".")
