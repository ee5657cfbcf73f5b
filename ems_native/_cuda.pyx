# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
"""The CUDA driver (``libcuda.so.1``), found at run time; see ``csrc/cuda_api.h`` for its pages.

Nothing of the vendor is needed to build or to import this module. Addresses, streams and events are
numbers; who owns them is the business of ``ems.devices``.
"""

from __future__ import annotations

include "_device.pxi"
