"""Save and load of 32 x 2 MiB beside pinned torch copies: `python benchmarks/bench_cuda.py`.

Skips, with a reason, where there is no GPU. What it measures lives in `ems.testing.cuda_copy`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ems.testing.cuda_copy import main

if __name__ == "__main__":
    sys.exit(main())
