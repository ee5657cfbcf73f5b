"""A thin way to `ems bench replay`: `python benchmarks/bench_replay.py [options]`.

What it measures lives in `ems.bench.replay`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ems.cli.bench_replay import replay

if __name__ == "__main__":
    replay()
