"""Stand-in for `torch_npu` over the emulated NPU: importing it gives torch the device `npu`."""

from __future__ import annotations

from ems.testing.emulated_npu import torch_backend

npu = torch_backend.install()
__version__ = "0+emulated"
