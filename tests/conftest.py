from __future__ import annotations

# One topic a plug-in; they lie beside this file (`pythonpath` in pyproject.toml).
pytest_plugins = ("fix_leaks", "fix_npu", "fix_pool", "fix_serve", "fix_v1")
