"""A thin way to `ems.bench.comparison`: `python benchmarks/bench_peers.py [options]`.

What it measures lives in `ems.bench.comparison`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ems.cli.bench_peers import peers

if __name__ == "__main__":
    peers()
