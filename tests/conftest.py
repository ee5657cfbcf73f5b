from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# One topic a plug-in; they lie beside this file (`pythonpath` in pyproject.toml).
pytest_plugins = ("fix_leaks", "fix_npu", "fix_pool", "fix_serve", "fix_v1")

# Who was started in the background ignores interrupts, and so do the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine makes an example slow, not wrong; the time limit of each test holds all the same.
settings.register_profile("ems", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ems")
