"""Other stores of KV blocks, each real and run as its users run it, to be measured beside EMS.

One adapter a peer, run as a child process by `ems.bench.comparison`, in the interpreter of the
peer's own environment: adapters and `child` import nothing of EMS but each other (`ems_pool`, the
adapter of EMS itself, apart).
"""

from __future__ import annotations
