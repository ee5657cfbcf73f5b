"""What tests and trials of EMS need: a private server, and blocks whose bytes prove themselves."""

from __future__ import annotations

from ems.testing.host_tensor import HostTensor
from ems.testing.local_pool import LocalPool
from ems.testing.workload import BlockPattern

__all__ = ["BlockPattern", "HostTensor", "LocalPool"]
