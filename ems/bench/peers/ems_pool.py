"""EMS itself, by the calls that an engine makes; the only adapter that needs EMS installed."""

from __future__ import annotations

from collections.abc import Sequence

from ems import CcKvOption, CcResult, Ems, KvBufferWrapper, __version__
from ems.bench.peers.child import Peer, serve
from ems.testing import LocalPool
from ems.testing.figures import wait_until_prepared

__all__ = ["EmsPeer"]

_OPTION = CcKvOption(timeout=60_000)


class EmsPeer(Peer):
    """A server of its own, and the key-value calls. Saves overwrite: there is no call to forget."""

    def open(self) -> str:
        """Start a server and wait until all its memory is prepared."""
        self._pool = LocalPool(self.pool_bytes).start()
        page_kind = wait_until_prepared(self._pool.root).page_kind
        Ems.init(self._pool.config)
        cc = Ems.get_cc()
        assert cc is not None
        self._cc = cc
        return f"ems {__version__}, pool on {page_kind} pages"

    def places(self, views: list[memoryview], addresses: list[int]) -> list[list[KvBufferWrapper]]:
        """A buffer for each key."""
        return [[KvBufferWrapper(at, len(view))] for at, view in zip(addresses, views)]

    def save(self, names: list[str], places: list[list[KvBufferWrapper]]) -> None:
        """`save`."""
        _check(self._cc.save(_OPTION, names, places), len(names))

    def load(self, names: list[str], places: list[list[KvBufferWrapper]]) -> None:
        """`load`, every checksum compared."""
        _check(self._cc.load(_OPTION, names, places), len(names))

    def drop(self, names: list[str]) -> None:
        """Nothing: a save takes new room before the old is free, and that is timed with it."""

    def clear(self, batches: Sequence[list[str]]) -> None:
        """Begin with an empty pool: what is left would make the pool evict."""
        self.close()
        self.open()

    def close(self) -> None:
        """Leave the server, then end it."""
        if hasattr(self, "_pool"):
            Ems.close()
            self._pool.stop()


def _check(result: CcResult, wanted: int) -> None:
    if result.success != wanted:
        raise RuntimeError(f"the pool did {result}")


if __name__ == "__main__":
    serve(EmsPeer)
