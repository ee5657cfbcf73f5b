"""The environment variables of EMS, and those that look like one and are none."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping

__all__ = ["VARIABLES", "misspelt", "warn_of_misspelt"]

PREFIX = "EMS_"
VARIABLES = (
    # of clients and commands
    "EMS_COPY_IMPL",
    "EMS_COPY_THREADS",
    "EMS_DEVICE",
    "EMS_ROOT",
    "EMS_SDK_LOG",
    # of `ems serve`
    "EMS_CAPACITY",
    "EMS_CONFIG",
    "EMS_CREDENTIALS",
    "EMS_DATA_DIR",
    "EMS_ENTRIES",
    "EMS_GROUP",
    "EMS_LOG_DIR",
    "EMS_LOG_FORMAT",
    "EMS_LOG_LEVEL",
    "EMS_RECREATE",
    "EMS_VERIFY",
)
_NEAR = 0.75
# What Kubernetes tells every container of a service that is named `ems`.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT($|_\d)")

_log = logging.getLogger("ems")
_told: set[str] = set()


def misspelt(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return each variable that is none of ours and looks like one, and the one it looks like.

    Others that begin with `EMS_` are taken for somebody else's: engines have some.
    """
    ends = [name[len(PREFIX) :] for name in VARIABLES]
    found = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in VARIABLES or _SERVICE_LINK.search(name):
            continue
        near = difflib.get_close_matches(name[len(PREFIX) :], ends, n=1, cutoff=_NEAR)
        if near:
            found.append((name, PREFIX + near[0]))
    return found


def warn_of_misspelt(environ: Mapping[str, str]) -> None:
    """Log a warning for each of `misspelt`, once in the life of the process."""
    for name, near in misspelt(environ):
        if name not in _told:
            _told.add(name)
            _log.warning("the environment variable %s means nothing: did you mean %s?", name, near)
