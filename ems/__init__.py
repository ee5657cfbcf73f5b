"""EMS, elastic memory service: KV blocks of LLM inference in memory that processes share."""

from __future__ import annotations

import logging

from ems.cc_v1.cc_config import CcConfig_v1, KVCacheType
from ems.common.buffer import KvBufferWrapper
from ems.common.config import CcConfig, EmsConfig
from ems.common.exception import EmsErrorCode, EmsException
from ems.common.key import PrimaryKey
from ems.common.option import CcKvOption
from ems.common.result import CcResult

__version__ = "0.1.0"

__all__ = [
    "CcConfig",
    "CcConfig_v1",
    "CcKvOption",
    "CcResult",
    "EmsConfig",
    "EmsErrorCode",
    "EmsException",
    "KVCacheType",
    "KvBufferWrapper",
    "PrimaryKey",
    "__version__",
]

logging.getLogger("ems").addHandler(
    logging.NullHandler()
)  # silent unless the application asks for it
