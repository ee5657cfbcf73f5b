"""Load and save of 32 x 2 MiB beside memcpy: `python benchmarks/bench_copy.py [options]`.

A thin way to `ems bench copy` from a checkout; what it measures lives in `ems.bench.copy`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ems.cli.bench import copy

if __name__ == "__main__":
    copy()
