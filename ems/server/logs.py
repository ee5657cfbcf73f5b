"""The server's log: lines for people or JSON objects, to standard error or to a file.

Records are written by a thread of their own: a log that nobody reads (a full pipe, a slow disk)
must not stop the event loop, which proves the server's life every 100 ms.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import queue
import threading
import time

__all__ = ["LogThread"]

FILE_NAME = "ems-server.log"
FILE_BYTES = 64 << 20
FILES = 5
QUEUED_RECORDS = 10_000


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),  # the queue put the traceback, if any, into it
        }
        return json.dumps(line, ensure_ascii=False)


class _HumanFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{_timestamp(record)} {record.levelname:<7} {record.getMessage()}"


def _timestamp(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


class _StandardError(logging.Handler):
    """Writes to the descriptor itself, and holds no lock meanwhile.

    A write that never ends must not keep the interpreter from ending: at its exit, `logging` wants
    the lock of each handler, and `sys.stderr` its own.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        with contextlib.suppress(OSError):
            left = memoryview((self.format(record) + "\n").encode("utf-8", "replace"))
            while left:
                left = left[os.write(2, left) :]
        return True


class _DroppingQueueHandler(logging.handlers.QueueHandler):
    """Loses records rather than wait for whoever reads them."""

    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


class LogThread:
    """Takes the records of the logger `ems` from its start to `stop`.

    Args:
        level: name of the least level that is written.
        form: `human` or `json`.
        directory: of the log files; None: standard error.

    Raises:
        OSError: the directory cannot be made or written.
    """

    def __init__(self, level: str, form: str, directory: str | None) -> None:
        target: logging.Handler
        if directory is None:
            target = _StandardError()
        else:
            os.makedirs(directory, exist_ok=True)
            target = logging.handlers.RotatingFileHandler(
                os.path.join(directory, FILE_NAME), maxBytes=FILE_BYTES, backupCount=FILES
            )
        target.setFormatter(_JsonFormatter() if form == "json" else _HumanFormatter())
        records: queue.Queue[logging.LogRecord] = queue.Queue(QUEUED_RECORDS)
        self._target = target
        self._handler = _DroppingQueueHandler(records)
        self._listener = logging.handlers.QueueListener(records, target)
        self._logger = logging.getLogger("ems")
        self._logger.addHandler(self._handler)
        self._logger.setLevel(level.upper())
        self._listener.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Write what is queued and end the thread; give up when nobody takes the lines."""
        self._logger.removeHandler(self._handler)
        stopper = threading.Thread(target=self._listener.stop, name="ems-log-stop", daemon=True)
        stopper.start()
        stopper.join(timeout_s)
        if not stopper.is_alive():
            self._target.close()
