"""Runs a workload from several processes against one pool and adds up what they found."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from ems.bench.cursor import Cursor
from ems.bench.machine import read_machine
from ems.bench.report import Report, make_report
from ems.bench.worker import Job, Tally
from ems.bench.workload import Workload
from ems.common.config import EmsConfig, check_root
from ems.testing.figures import read_server
from ems.testing.jobs import started

__all__ = ["run_workload"]

_POLL_S = 0.05


def run_workload(
    workload: Workload,
    config: EmsConfig,
    *,
    processes: int,
    block_bytes: int,
    timeout_ms: int = 5000,
    progress: Callable[[int], None] = lambda _: None,
) -> Report:
    """Run a workload and return what it found.

    Args:
        workload: the requests; the processes take them in order from one shared cursor.
        config: reaches the pool.
        processes: how many processes serve requests at the same time.
        block_bytes: size of a block.
        timeout_ms: time-out of each call.
        progress: called now and then with the number of requests taken so far.

    Raises:
        EmsException: a worker failed; no child process is left behind, whatever is raised.
    """
    root = check_root("config.root", config.root)
    before = read_server(root)
    start = time.monotonic()
    with contextlib.closing(Cursor.create()) as cursor, contextlib.ExitStack() as stack:
        job = Job(config, workload, block_bytes, cursor.fd, timeout_ms)
        children = [
            stack.enter_context(started("ems.bench.worker", job, Tally, (job.cursor_fd,)))
            for _ in range(processes)
        ]
        while any(child.running for child in children):
            progress(min(cursor.value, len(workload.requests)))
            for child in children:
                if not child.running:
                    child.answer()  # one that failed ends the run now, not after the others
            time.sleep(_POLL_S)
        tallies = [child.answer() for child in children]
    progress(len(workload.requests))
    seconds = time.monotonic() - start
    return make_report(
        tallies,
        workload=workload.name,
        block_bytes=block_bytes,
        capacity_bytes=before.capacity,
        page_kind=before.page_kind,
        evictions=read_server(root).evictions - before.evictions,
        seconds=seconds,
        machine=read_machine(),
    )
