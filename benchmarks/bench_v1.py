"""V1 loads of 32 blocks beside the copy engine alone: `python benchmarks/bench_v1.py [options]`.

A thin way to `ems bench v1` from a checkout; what it measures lives in `ems.bench.v1`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ems.cli.bench_v1 import v1

if __name__ == "__main__":
    v1()
