"""The connector, loading the few blocks of a tiny model layer by layer, like the many of others.

`kv_connector_module_path` names this file.
"""

from __future__ import annotations

from ems.integrations import vllm_worker
from ems.integrations.vllm import EmsConnector

__all__ = ["EmsConnector"]

vllm_worker.LAYERED_BYTES = 1
