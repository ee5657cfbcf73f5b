"""Makes the data file fast to touch: huge pages where the kernel gives them.

The file is allocated when the server starts (so nothing can fail later), but in 4 KiB pages, which
cost every process a page fault each. Collapsing them into huge pages takes seconds per GiB and
stalls whoever uses the range: it happens in steps, in a worker thread, and only ahead of what the
pool hands out.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio.to_thread

from ems.common.size import format_size
from ems.pool import Pool
from ems_native import _shm
from ems_native._index import LAYOUT

__all__ = ["PAGE_NAMES", "Preparation"]

_log = logging.getLogger("ems.server.prepare")

STEP_BYTES = 64 << 20
GIVE_UP_AFTER = 2
"""Steps without a single huge page, one after the other, that prove that this kernel gives none."""

PAGE_NAMES = {
    LAYOUT["PAGE_UNKNOWN"]: "unknown",
    LAYOUT["PAGE_4K"]: "4 KiB",
    LAYOUT["PAGE_HUGE"]: "2 MiB",
    LAYOUT["PAGE_HUGETLB"]: "hugetlb",
    LAYOUT["PAGE_MIXED"]: "4 KiB and 2 MiB",
}
"""For people, by the number in the header."""


class Preparation:
    """Prepares the data file of one pool from where a former server stopped.

    Args:
        pool: told how far it is; only from the loop.
        data: address of the mapped data file.
        hugetlb: the file lies on hugetlbfs: there is nothing to do.
        ready_bytes: how far it is already.
        page_kind: what the pool's header says of that part.
        collapse: the native call; tests give their own.
    """

    def __init__(
        self,
        pool: Pool,
        data: int,
        *,
        hugetlb: bool,
        ready_bytes: int,
        page_kind: int,
        collapse: Callable[[int, int], bool] = _shm.collapse,
    ) -> None:
        self._pool = pool
        self._base = data + LAYOUT["DATA_START"]
        # The file is rounded up to whole huge pages; the pool itself clips what it is told.
        self._nbytes = pool.geometry.data_bytes - LAYOUT["DATA_START"]
        self._ready = min(ready_bytes, self._nbytes)
        self._collapse = collapse
        self._failures = 0
        self._kinds = {page_kind} - {LAYOUT["PAGE_UNKNOWN"]} if self._ready else set()
        if hugetlb:
            self._note(LAYOUT["PAGE_HUGETLB"])
            self._advance(self._nbytes)

    @property
    def done(self) -> bool:
        """Whether all of the file is ready."""
        return self._ready >= self._nbytes

    async def step(self) -> bool:
        """Prepare the next range, some 0.2 s in a worker thread; True while there is more."""
        if self.done:
            return False
        nbytes = min(STEP_BYTES, self._nbytes - self._ready)
        huge = await anyio.to_thread.run_sync(self._collapse, self._base + self._ready, nbytes)
        self._note(LAYOUT["PAGE_HUGE"] if huge else LAYOUT["PAGE_4K"])
        self._failures = 0 if huge else self._failures + 1
        if self._failures >= GIVE_UP_AFTER:
            self._advance(self._nbytes)
        else:
            self._advance(self._ready + nbytes)
        return not self.done

    async def run(self, pause: Callable[[], Awaitable[object]]) -> None:
        """Prepare all that is left, with a pause between two steps."""
        while await self.step():
            await pause()
        _log.info("%s are ready, pages: %s", format_size(self._ready), PAGE_NAMES[self._kind()])

    def _kind(self) -> int:
        if len(self._kinds) > 1:
            return int(LAYOUT["PAGE_MIXED"])
        return next(iter(self._kinds), int(LAYOUT["PAGE_UNKNOWN"]))

    def _note(self, kind: int) -> None:
        self._kinds.add(kind)
        self._pool.set_page_kind(self._kind())

    def _advance(self, ready_bytes: int) -> None:
        self._ready = ready_bytes
        self._pool.extend_ready(ready_bytes)
