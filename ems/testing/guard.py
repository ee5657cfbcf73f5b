"""Cleans up after a process that could not: ends a pool's server and removes its root.

Run as a script by `LocalPool`, with nothing but the standard library. Its standard input is a pipe
from the owner that carries nothing; its end means that the owner is gone, however it went.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys


def main() -> None:
    """Wait for the owner's end, then end what serves the root and remove it."""
    root = sys.argv[1]
    sys.stdin.read()
    # Found by its command line, not told: the owner may have been interrupted while it started it.
    # The server may still make files until the kernel has ended it, so look again.
    for _ in range(10):
        for pid in _servers(os.fsencode(root)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not os.path.isdir(root):
            break
        shutil.rmtree(root, ignore_errors=True)


def _servers(root: bytes) -> list[int]:
    found: list[int] = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(name)
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            if b"serve" in words and root in words:
                found.append(pid)
    return found


if __name__ == "__main__":
    main()
