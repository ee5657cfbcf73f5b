"""Copy workers: the threads in which operations of the asynchronous calls run.

A job holds what it works on (buffer descriptions, mapping of the pool) by reference until its
native call has ended, so nothing is unmapped or freed below a copy.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

from ems_native import _copy

__all__ = ["CopyWorkers", "default_parallelism", "share_big_copies"]

THREADS_VARIABLE = "EMS_COPY_THREADS"
_MOST = 64
_MOST_BY_DEFAULT = 4


def default_parallelism() -> int:
    """Return how many operations of one kind run, and how many threads copy one, at a time.

    It is `EMS_COPY_THREADS`, else 2 to 4, by the CPUs there are.
    """
    text = os.environ.get(THREADS_VARIABLE, "")
    if text.isdigit() and 1 <= int(text) <= _MOST:
        return int(text)
    return max(2, min(_MOST_BY_DEFAULT, _cpus()))


def share_big_copies(parallelism: int) -> None:
    """Let as many threads copy one big batch, the one that runs it among them.

    On processors that are all busy it gains nothing and costs next to nothing: whoever runs the
    operation waits for no helper that has not begun. A single processor gets no helper.
    """
    _copy.set_threads(min(parallelism, _cpus()))


def _cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


class CopyWorkers:
    """A fixed number of daemon threads, started at the first job. Thread-safe.

    Args:
        count: threads.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    @property
    def owns_current_thread(self) -> bool:
        """Whether the caller is one of the workers."""
        return threading.current_thread() in self._threads

    def run(self, job: Callable[[], None]) -> None:
        """Run `job` in a worker, as soon as one is free. It must not raise."""
        if not self._threads:
            self._start()
        self._jobs.put(job)

    def close(self) -> None:
        """Let the workers finish what they were given, and join them; idempotent."""
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join()

    def _start(self) -> None:
        with self._lock:
            if self._threads:
                return
            threads = [
                threading.Thread(target=self._work, name=f"ems-copy-{n}", daemon=True)
                for n in range(self.count)
            ]
            for thread in threads:
                thread.start()
            self._threads = threads

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            job()
            # Or this frame would keep the job's memory alive until the next one comes.
            del job
