"""A thin way to `ems bench verify`: `python benchmarks/bench_verify.py [options]`.

What it measures lives in `ems.bench.verify`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ems.cli.bench import verify

if __name__ == "__main__":
    verify()
