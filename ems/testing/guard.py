"""Cleans up after a process that could not: ends a pool's server and removes its root.

Run as a script by `LocalPool` with nothing but the standard library. Its standard input is a pipe
from the owner, which writes the process id of each server it starts. The end of the pipe means that
the owner is gone, however it went.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys


def main() -> None:
    """Wait for the owner's end, then end the last server it named and remove the root."""
    root = sys.argv[1]
    pid = 0
    for line in sys.stdin:
        pid = int(line)
    if pid and _serves(pid, root):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    # The server may still be creating files until the kernel has ended it.
    for _ in range(10):
        if not os.path.isdir(root):
            break
        shutil.rmtree(root, ignore_errors=True)


def _serves(pid: int, root: str) -> bool:
    # The number may belong to another process by now.
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return os.fsencode(root) in file.read().split(b"\0")
    except OSError:
        return False


if __name__ == "__main__":
    main()
