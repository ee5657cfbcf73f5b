"""The native buffer description, with our exception for wrong arguments."""

from __future__ import annotations

from ems.common.exception import invalid_argument
from ems_native._copy import KvBufferWrapper, set_argument_error

__all__ = ["KvBufferWrapper"]

set_argument_error(invalid_argument)
