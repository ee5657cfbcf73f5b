"""The connector, noting what every block had in it that was saved or loaded.

`kv_connector_module_path` names this file, `CHECKED_EMS` a folder for the notes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layered_ems import EmsConnector

from ems import CcFuture, CcResult, ContextCaching, KvPages, PageCaching, PageLoad

__all__ = ["EmsConnector"]

_register, _save, _load, _load_by_page, _result = (
    ContextCaching.register_pages,
    PageCaching.async_save,
    PageCaching.load,
    PageCaching.load_by_page,
    CcFuture.result,
)
_under_way: dict[CcFuture, tuple[PageCaching, Sequence[int], Sequence[bytes]]] = {}


def _note(what: str, pages: PageCaching, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
    described: list[KvPages] = pages.described  # type: ignore[attr-defined]
    with Path(os.environ["CHECKED_EMS"], f"{what}-{os.getpid()}").open("a") as notes:
        for block, key in zip(blocks, keys):
            seen = hashlib.blake2b(digest_size=16)
            for one in described:
                page = one.address + block * one.block_stride
                seen.update(ctypes.string_at(page, one.page_bytes))
            notes.write(f"{pages.layout}/{key.hex()}/{seen.hexdigest()}\n")  # type: ignore[attr-defined]


def _registered(self: ContextCaching, pages: Any, layout: str) -> PageCaching:
    made = _register(self, pages, layout)
    made.described = pages  # type: ignore[attr-defined]
    made.layout = hashlib.blake2b(layout.encode(), digest_size=8).hexdigest()  # type: ignore[attr-defined]
    return made


def _saved(self: PageCaching, block_ids: Any, keys: Any, option: Any = None) -> CcFuture:
    _note("saved", self, block_ids, keys)
    return _save(self, block_ids, keys, option)


def _loaded(self: PageCaching, block_ids: Any, keys: Any, option: Any = None) -> CcResult:
    result = _load(self, block_ids, keys, option)
    _note("loaded", self, block_ids[: result.success], keys)
    return result


def _loaded_by_page(self: PageCaching, block_ids: Any, keys: Any, option: Any = None) -> PageLoad:
    started = _load_by_page(self, block_ids, keys, option)
    _under_way[started.future] = (self, block_ids, keys)
    return started


def _resulted(self: CcFuture, timeout: float | None = None) -> CcResult:
    found = _result(self, timeout)
    if self in _under_way:
        pages, block_ids, keys = _under_way.pop(self)
        _note("loaded", pages, block_ids[: found.success], keys)
    return found


ContextCaching.register_pages = _registered  # type: ignore[method-assign]
PageCaching.async_save = _saved  # type: ignore[method-assign]
PageCaching.load = _loaded  # type: ignore[method-assign]
PageCaching.load_by_page = _loaded_by_page  # type: ignore[method-assign]
CcFuture.result = _resulted  # type: ignore[method-assign]
