"""A thin way to `ems bench latency`: `python benchmarks/bench_latency.py [options]`.

What it measures lives in `ems.bench.latency`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ems.cli.bench import latency

if __name__ == "__main__":
    latency()
