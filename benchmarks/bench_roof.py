"""A thin way to `ems bench roof`: `python benchmarks/bench_roof.py [options]`.

What it measures lives in `ems.bench.roof`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ems.cli.bench import roof

if __name__ == "__main__":
    roof()
