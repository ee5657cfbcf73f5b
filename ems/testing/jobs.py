"""Work for child processes: a pickled job goes in, a pickled answer comes out.

The child ends when its parent does: the job's pipe stays open, and its end means that the parent is
gone, however it went.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Generic, TypeVar

from ems.common.exception import EmsException, internal_error
from ems.testing.child import child_environment, python_command

__all__ = ["ChildJob", "answer_job", "started"]

_STDERR_CHARACTERS = 8000

_Job = TypeVar("_Job")
_Answer = TypeVar("_Answer")


class ChildJob(Generic[_Answer]):
    """A child process and the thread that reads its answer (which can be larger than a pipe)."""

    def __init__(
        self, process: subprocess.Popen[bytes], stderr: IO[bytes], kind: type[_Answer]
    ) -> None:
        self.process = process
        self._kind = kind
        self._stderr = stderr
        self._answer = b""
        self._reader = threading.Thread(target=self._read, name="ems-job-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self._answer = self.process.stdout.read()

    @property
    def running(self) -> bool:
        """Whether the child has not ended yet."""
        return self.process.poll() is None

    def answer(self) -> _Answer:
        """Wait for the child's answer.

        Raises:
            EmsException: what the child failed with; `EMS_INTERNAL_ERROR` when it died.
        """
        self._reader.join()
        if not self._answer:
            self._stderr.seek(0)
            text = self._stderr.read().decode("utf-8", "replace").strip()[-_STDERR_CHARACTERS:]
            code = self.process.wait()
            raise internal_error(f"a worker ended with exit code {code}: {text or 'no word'}")
        answer: object = pickle.loads(self._answer)
        if isinstance(answer, EmsException):
            raise answer
        if not isinstance(answer, self._kind):
            raise internal_error(f"a worker answered {answer!r}, not a {self._kind.__name__}")
        return answer


@contextlib.contextmanager
def started(
    module: str, job: object, kind: type[_Answer], pass_fds: Sequence[int] = ()
) -> Iterator[ChildJob[_Answer]]:
    """Run `python -m module` on a job that it answers with a `kind`; the block's end ends it."""
    with tempfile.TemporaryFile(prefix="ems-worker-") as stderr:
        process = subprocess.Popen(
            python_command(module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            pass_fds=pass_fds,
            env=child_environment(),
            cwd="/",
            start_new_session=True,  # a Ctrl-C in the terminal is ours to handle
        )
        with process:
            try:
                child = ChildJob(process, stderr, kind)
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # answer() says why it is gone
                    pickle.dump(job, process.stdin)
                    process.stdin.flush()  # and stays open
                yield child
            finally:
                # Before the pipes are closed, wherever a Ctrl-C came: to close one waits for the
                # thread that reads it, which reads until the child has ended.
                process.kill()
                process.wait()


def answer_job(work: Callable[[_Job, Callable[[], bool]], _Answer]) -> None:
    """Do the job on the standard input and write the answer to the standard output.

    Args:
        work: given the job and a function that tells whether the parent is gone.
    """
    stdin = sys.stdin.buffer
    job: _Job = pickle.load(stdin)  # from our own parent, over a private pipe

    def parent_is_gone() -> bool:
        return bool(select.select([stdin], [], [], 0)[0])

    # Nothing else may write where the answer goes.
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answer: _Answer | EmsException
    try:
        answer = work(job, parent_is_gone)
    except EmsException as error:
        answer = error
    except Exception as error:
        answer = internal_error(f"a worker failed: {type(error).__name__}: {error}")
    with stdout:
        pickle.dump(answer, stdout)
