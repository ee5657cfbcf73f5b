"""The naive floor: a segment of `multiprocessing.shared_memory` for each key."""

from __future__ import annotations

import os
import platform
from multiprocessing.shared_memory import SharedMemory

from ems.bench.peers.child import Peer, serve

__all__ = ["SharedDict"]


class SharedDict(Peer):
    """Other processes find a block by its name; whoever saved it keeps it."""

    def open(self) -> str:
        """Nothing to start."""
        self._segments: dict[str, SharedMemory] = {}
        return f"Python {platform.python_version()}"

    def names(self, keys: list[str]) -> list[str]:
        """Names of segments."""
        return [f"ems-bench-{os.getpid()}-{key}" for key in keys]

    def save(self, names: list[str], places: list[memoryview]) -> None:
        """Make a segment for each value."""
        for name, view in zip(names, places):
            segment = self._segments[name] = SharedMemory(name, create=True, size=len(view))
            buffer = segment.buf
            assert buffer is not None
            buffer[: len(view)] = view

    def load(self, names: list[str], places: list[memoryview]) -> None:
        """Find each segment by its name, as another process would."""
        for name, view in zip(names, places):
            segment = SharedMemory(name)
            buffer = segment.buf
            assert buffer is not None
            view[:] = buffer[: len(view)]
            segment.close()

    def drop(self, names: list[str]) -> None:
        """Remove segments."""
        for name in names:
            segment = self._segments.pop(name, None)
            if segment is not None:
                segment.close()
                segment.unlink()

    def close(self) -> None:
        """Remove all segments."""
        self.drop(list(self._segments))


if __name__ == "__main__":
    serve(SharedDict)
