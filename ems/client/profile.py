"""A line per call about where its time went: `ENABLE_CC_PROFILING=1` (page 0008b).

Lines are JSON, in `cc_profiling.<pid>.jsonl` below `EMS_SDK_LOG` (default `/var/log/ems`). Where
that cannot be written there is one warning and no file. Off, it costs one comparison a call.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from ems.client.context import Context
from ems.common.exception import EmsException
from ems.common.result import CcResult
from ems_native._shm import monotonic_ns

__all__ = ["Profiler", "Record"]

SWITCH = "ENABLE_CC_PROFILING"
FOLDER = "EMS_SDK_LOG"
DEFAULT_FOLDER = "/var/log/ems"
_log = logging.getLogger("ems.client.profile")


class _Stopwatch:
    """Stands before an object and adds up the time inside some of its methods."""

    def __init__(self, inner: Any, record: Record, field: str, names: frozenset[str]) -> None:
        self._inner = inner
        self._record = record
        self._field = field
        self._names = names

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._inner, name)
        if name not in self._names:
            return inner
        record, field = self._record, self._field

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = monotonic_ns()
            try:
                return inner(*args, **kwargs)
            finally:
                setattr(record, field, getattr(record, field) + monotonic_ns() - start)

        return timed


_COPIES = frozenset({"copy_in", "copy_out"})
_MESSAGES = frozenset({"reserve", "commit", "abort"})


class Record:
    """One call: made at submission, finished once."""

    def __init__(self, profiler: Profiler, operation: str, blocks: int, nbytes: int) -> None:
        self._profiler = profiler
        self._operation = operation
        self._blocks = blocks
        self._nbytes = nbytes
        self._submitted_ns = self._started_ns = monotonic_ns()
        self._ran = False
        self.copy_ns = 0
        self.message_ns = 0

    def started(self, context: Context) -> Context:
        """Note the end of queueing; return a context whose copies and messages are timed."""
        self._started_ns = monotonic_ns()
        self._ran = True
        return dataclasses.replace(
            context,
            device=_Stopwatch(context.device, self, "copy_ns", _COPIES),
            channel=_Stopwatch(context.channel, self, "message_ns", _MESSAGES),
        )

    def finished(self, outcome: CcResult | BaseException) -> None:
        """Write the line."""
        now_ns = monotonic_ns()
        queue_ns = (self._started_ns if self._ran else now_ns) - self._submitted_ns
        line: dict[str, object] = {
            "time": time.time(),
            "operation": self._operation,
            "blocks": self._blocks,
            "bytes": self._nbytes,
            "queue_ms": queue_ns / 1e6,
            "copy_ms": self.copy_ns / 1e6,
            "message_ms": self.message_ns / 1e6,
            "total_ms": (now_ns - self._submitted_ns) / 1e6,
        }
        if isinstance(outcome, CcResult):
            line.update(outcome="ok", success=outcome.success, total=outcome.total)
        elif isinstance(outcome, EmsException):
            line["outcome"] = outcome.status_code().name
        else:
            line["outcome"] = "cancelled"
        self._profiler.write(line)


class Profiler:
    """Writes the lines of a process. Thread-safe.

    Args:
        folder: where the file goes; made if it is not there.
    """

    def __init__(self, folder: str) -> None:
        self._fd = -1
        path = os.path.join(folder, f"cc_profiling.{os.getpid()}.jsonl")
        try:
            os.makedirs(folder, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o644)
        except (OSError, ValueError) as error:
            _log.warning("%s=1, but there is no profile: %s", SWITCH, error)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Profiler | None:
        """Return a profiler if the environment asks for one and it can write."""
        if environment.get(SWITCH) != "1":
            return None
        profiler = cls(environment.get(FOLDER) or DEFAULT_FOLDER)
        return profiler if profiler._fd >= 0 else None

    def record(self, operation: str, blocks: int, nbytes: int) -> Record:
        """Begin the record of a call that is being submitted."""
        return Record(self, operation, blocks, nbytes)

    def write(self, line: Mapping[str, object]) -> None:
        """Append a line; a full disk is not the caller's business."""
        try:
            os.write(self._fd, (json.dumps(line) + "\n").encode())
        except OSError as error:
            _log.debug("a line of the profile is lost: %s", error)

    def close(self) -> None:
        """Close the file; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
