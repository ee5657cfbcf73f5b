"""How much a fuzzed test tries: seconds' worth of examples, times `EMS_FUZZ` if that is set."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_TIMES = int(os.environ.get("EMS_FUZZ", "1"))


def bounded(examples: int) -> settings:
    return settings(
        max_examples=examples * _TIMES,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
