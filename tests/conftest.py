from __future__ import annotations

from hypothesis import HealthCheck, settings

# One topic a plug-in; they lie beside this file (`pythonpath` in pyproject.toml).
pytest_plugins = ("fix_leaks", "fix_npu", "fix_pool", "fix_serve", "fix_v1")

# A busy machine makes an example slow, not wrong; the time limit of each test holds all the same.
settings.register_profile("ems", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ems")
