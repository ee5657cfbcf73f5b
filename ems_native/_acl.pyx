# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
"""The Ascend runtime (``libascendcl.so``), found at run time; see ``csrc/acl_api.h`` for its pages.

Nothing of the vendor is needed to build or to import this module. Addresses, streams and events are
numbers; who owns them is the business of ``ems.devices``.
"""

from __future__ import annotations

include "_device.pxi"
