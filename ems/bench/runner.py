"""Runs a workload from several processes against one pool and adds up what they found."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

from ems.bench.cursor import Cursor
from ems.bench.figures import read_server
from ems.bench.machine import read_machine
from ems.bench.report import Report, make_report
from ems.bench.worker import Job, Tally
from ems.bench.workload import Workload
from ems.common.config import EmsConfig, check_root
from ems.common.exception import EmsException, internal_error
from ems.testing.child import child_environment, python_command

__all__ = ["run_workload"]

_POLL_S = 0.05
_STDERR_CHARACTERS = 2000


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
        children = [stack.enter_context(_started(job)) for _ in range(processes)]
        while any(child.running for child in children):
            progress(min(cursor.value, len(workload.requests)))
            for child in children:
                if not child.running:
                    child.tally()  # one that failed ends the run now, not after the others
            time.sleep(_POLL_S)
        tallies = [child.tally() for child in children]
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


class _Child:
    """A worker process and the thread that reads its answer (a tally can be larger than a pipe)."""

    def __init__(self, process: subprocess.Popen[bytes], stderr: IO[bytes]) -> None:
        self._process = process
        self._stderr = stderr
        self._answer = b""
        self._reader = threading.Thread(target=self._read, name="ems-bench-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._answer = self._process.stdout.read()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def tally(self) -> Tally:
        self._reader.join()
        if not self._answer:
            self._stderr.seek(0)
            text = self._stderr.read().decode("utf-8", "replace").strip()[-_STDERR_CHARACTERS:]
            code = self._process.returncode
            raise internal_error(f"a worker ended with exit code {code}: {text or 'no word'}")
        answer: object = pickle.loads(self._answer)
        if isinstance(answer, EmsException):
            raise answer
        assert isinstance(answer, Tally)
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()


@contextlib.contextmanager
def _started(job: Job) -> Iterator[_Child]:
    with tempfile.TemporaryFile(prefix="ems-worker-") as stderr:
        process = subprocess.Popen(
            python_command("ems.bench.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            pass_fds=(job.cursor_fd,),
            env=child_environment(),
            cwd="/",
            start_new_session=True,  # a Ctrl-C in the terminal is ours to handle
        )
        with process:
            child = _Child(process, stderr)
            try:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # tally() says why it is gone
                    pickle.dump(job, process.stdin)
                    process.stdin.flush()  # and stays open: its end tells that we are gone
                yield child
            finally:
                child.end()
