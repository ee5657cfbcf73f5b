"""What comparing checksums costs a load: `python benchmarks/bench_verify.py`.

What it measures lives in `ems.testing.verify_cost`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ems.testing.verify_cost import main

if __name__ == "__main__":
    sys.exit(main())
