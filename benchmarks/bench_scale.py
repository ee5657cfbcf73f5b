"""A thin way to `ems bench scale`: `python benchmarks/bench_scale.py [options]`.

What it measures lives in `ems.bench.scale`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ems.cli.bench import scale

if __name__ == "__main__":
    scale()
