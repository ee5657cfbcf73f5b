"""Several CPUs take on what a device brought: one copies slower than the device does."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from typing import TYPE_CHECKING

from ems_native import _copy

if TYPE_CHECKING:
    from ems_native._copy import CancelFlag, Spans

__all__ = ["ParallelCopy", "default_threads"]

PART_BYTES = 1 << 20
"""Less than this is not worth a thread."""


def default_threads() -> int:
    """Return how many CPUs copy at a time: a quarter of those that this process has, up to 4."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cpus = os.cpu_count() or 1
    return max(1, min(4, cpus // 4))


class ParallelCopy:
    """Copies into the pool by several threads, the caller's among them. Thread-safe.

    Args:
        threads: how many copy at a time.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    def copy_in(
        self,
        spans: Spans,
        first: int,
        count: int,
        base: int,
        places: bytearray,
        cancel: CancelFlag | None,
        deadline_ns: int,
        mask: bytes | None,
    ) -> tuple[int, int]:
        """See `Copier.copy_in`; keys are dealt out in runs of about the same size."""
        end = first + count
        cuts = self._cuts(spans, first, end)
        if len(cuts) == 2:
            return _copy.copy_in(spans, first, count, base, places, cancel, deadline_ns, mask)

        def part(at: int, to: int) -> tuple[int, int]:
            return _copy.copy_in(spans, at, to - at, base, places, cancel, deadline_ns, mask)

        pool = self._helpers()
        others = [pool.submit(part, at, to) for at, to in zip(cuts[1:], cuts[2:])]
        try:
            answers = [part(cuts[0], cuts[1])]
        finally:
            # Whatever happens here: when this returns nobody copies any more.
            concurrent.futures.wait(others)
        answers += [other.result() for other in others]
        return next((answer for answer in answers if answer[1]), (end, 0))

    def close(self) -> None:
        """End the threads; idempotent."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _cuts(self, spans: Spans, first: int, end: int) -> list[int]:
        if self._threads == 1:
            return [first, end]
        lengths = memoryview(spans.lengths).cast("Q")[first:end]
        each = max(PART_BYTES, -(-sum(lengths) // self._threads))
        cuts, done = [first], 0
        for key, length in enumerate(lengths, first):
            if done >= each:
                cuts.append(key)
                done = 0
            done += length
        return [*cuts, end]

    def _helpers(self) -> concurrent.futures.ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = concurrent.futures.ThreadPoolExecutor(self._threads - 1, "ems-device")
            return self._pool
