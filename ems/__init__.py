"""EMS, elastic memory service: KV blocks of LLM inference in memory that processes share."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from ems.cc.context_caching import ContextCaching
from ems.cc_v1.cc_config import CcConfig_v1, KVCacheType
from ems.cc_v1.pages import KvPages, PageCaching, PageLoad
from ems.common.buffer import KvBufferWrapper
from ems.common.config import CcConfig, EmsConfig
from ems.common.exception import EmsErrorCode, EmsException
from ems.common.key import PrimaryKey
from ems.common.option import CcKvOption
from ems.common.result import CcResult
from ems.facade import Ems
from ems.future import CcFuture

if TYPE_CHECKING:
    from ems import testing

__version__ = "0.1.0"

ContextCache_v1 = ContextCaching
"""The name under which V1 clients import the class: one object offers both call shapes."""

__all__ = [
    "CcConfig",
    "CcConfig_v1",
    "CcFuture",
    "CcKvOption",
    "CcResult",
    "ContextCache_v1",
    "ContextCaching",
    "Ems",
    "EmsConfig",
    "EmsErrorCode",
    "EmsException",
    "KVCacheType",
    "KvBufferWrapper",
    "KvPages",
    "PageCaching",
    "PageLoad",
    "PrimaryKey",
    "__version__",
    "testing",
]

# Silent unless the application asks for it.
logging.getLogger("ems").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    # `ems.testing` without an import of its own, and without its cost for everybody else.
    if name == "testing":
        return importlib.import_module("ems.testing")
    raise AttributeError(f"module 'ems' has no attribute {name!r}")
