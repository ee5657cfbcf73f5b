"""Opaque pages: blocks whose inside only the engine knows, named by keys that the engine makes.

For memory that is not `[num_blocks, block_size, heads, head_size]`: packed kernels, K and V in one
page, blocks outside layers. An addition of this implementation to the published calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ems.common.argument import check_int, shown, wrong_type
from ems.common.boundary import public, public_class
from ems.common.deadline import Deadline
from ems.common.exception import invalid_argument
from ems.common.key import DIGEST_BYTES, PageSpace
from ems.common.option import CcKvOption, check_option
from ems.common.result import CcResult
from ems.future import CcFuture, check_may_wait
from ems_native import _plan
from ems_native._copy import Arrivals, Spans

if TYPE_CHECKING:
    from ems.client.client import Client

__all__ = ["KvPages", "PageCaching", "PageLoad", "describe_pages"]

_LIMIT = 1 << 62
_INT_MAX = 2**31 - 1
_plan.set_argument_error(invalid_argument)


@public_class
@dataclasses.dataclass(frozen=True)
class KvPages:
    """Pages of one size in one piece of memory: page `i` is at `address + i * block_stride`.

    Args:
        address: of page 0.
        num_blocks: pages, >= 1.
        block_stride: bytes from one page to the next, >= `page_bytes`.
        page_bytes: size of a page, >= 1.
        device: where the memory is, as tensors name it: "cpu", "cuda:0", "npu:3".
        owner: whatever keeps the memory alive; held as long as the pages are registered.
    """

    address: int
    num_blocks: int
    block_stride: int
    page_bytes: int
    device: str = "cpu"
    owner: object = dataclasses.field(default=None, compare=False, repr=False)


def describe_pages(pages: object) -> tuple[_plan.Pages, str]:
    """Return what the planner needs of pages, and their device.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` naming the index and the field.
    """
    if not isinstance(pages, (list, tuple)):
        raise wrong_type("pages", pages, "a list of KvPages")
    if not pages:
        raise invalid_argument("pages is empty; give at least one KvPages, or None to only ask")
    first = pages[0]
    components: list[tuple[int, int, int]] = []
    for index, one in enumerate(pages):
        name = f"pages[{index}]"
        if not isinstance(one, KvPages):
            raise wrong_type(name, one, "a KvPages")
        address = check_int(f"{name}.address", one.address, 1, _LIMIT)
        blocks = check_int(f"{name}.num_blocks", one.num_blocks, 1, _INT_MAX)
        nbytes = check_int(f"{name}.page_bytes", one.page_bytes, 1, 1 << 40)
        stride = check_int(f"{name}.block_stride", one.block_stride, nbytes, 1 << 48)
        if address + blocks * stride >= _LIMIT:
            raise invalid_argument(f"{name} ends beyond 2**62")
        for field in ("num_blocks", "device"):
            if getattr(one, field) != getattr(first, field):
                raise invalid_argument(
                    f"{name}.{field} is {shown(getattr(one, field))}, pages[0] has "
                    f"{shown(getattr(first, field))}; a block has a page in each of them"
                )
        components.append((address, stride, nbytes))
    if not isinstance(first.device, str) or not first.device:
        raise wrong_type("pages[0].device", first.device, 'a str such as "cpu"')
    return _plan.Pages(first.num_blocks, 1, components), first.device


class PageLoad:
    """A load that brings the first page of all blocks, then the second, and so on.

    So that whoever computes layer by layer need not wait for the last one. Made by
    `PageCaching.load_by_page`.

    Args:
        future: of the load. What it says holds for what was computed meanwhile: a block that it
            does not count may have had wrong bytes, whatever was waited for.
        arrivals: of its pages.
    """

    def __init__(self, future: CcFuture, arrivals: Arrivals) -> None:
        self.future = future
        self._arrivals = arrivals
        future.add_done_callback(self._end)

    @public
    def wait(self, page: int) -> None:
        """Return when page `page` of all blocks is in its place, or the load has ended.

        Args:
            page: index in the list that was given to `register_pages`.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT`, also in the thread of the home loop, which would
                wait for ever; in a forked child as `CcFuture.result`.
        """
        number = check_int("page", page, 0, _INT_MAX)
        check_may_wait(self.future)
        self._arrivals.wait(number)

    def _end(self, future: CcFuture) -> None:
        self._arrivals.end()


class PageCaching:
    """Saves and loads blocks of opaque pages; made by `ContextCaching.register_pages`.

    Block `i` is page `i` of each registered `KvPages`, in their order; all of it is one entry of
    the pool. Keys are `bytes` (the 32-byte block hashes of vLLM, or others of 1 to 64 bytes) or
    ints of any size. A block that is there keeps its first copy, and counts as saved. What is wrong
    with arguments is raised at the call, everything else as `ContextCaching` does it. Any number of
    threads may use it, and any number of these objects, at the same time.
    """

    def __init__(
        self,
        client: Client,
        space: PageSpace,
        pages: _plan.Pages | None = None,
        owner: object = None,
    ) -> None:
        self._client = client
        self._space = space
        self._pages = pages
        self._owner = owner

    @public
    def save(self, block_ids: Any, keys: Any, option: CcKvOption | None = None) -> CcResult:
        """Copy blocks into the pool, and return when that is done.

        Args:
            block_ids: which blocks, each an int below `num_blocks`.
            keys: as many, in the order of the prefix.
            option: None means the defaults.

        Returns:
            How many blocks in a row from the head are in the pool.

        Raises:
            EmsException: as `ContextCaching.save`.
        """
        digests, spans, deadline = self._planned(block_ids, keys, option)
        return self._client.save(digests, spans, deadline, replace=False)

    @public
    def async_save(self, block_ids: Any, keys: Any, option: CcKvOption | None = None) -> CcFuture:
        """Start a save and return at once; the blocks must keep their content until it is done.

        Work that was submitted to the device's current stream before this call is waited for by the
        copy, not by the caller.
        """
        digests, spans, deadline = self._planned(block_ids, keys, option)
        return self._client.save_later(digests, spans, deadline, replace=False)

    @public
    def load(self, block_ids: Any, keys: Any, option: CcKvOption | None = None) -> CcResult:
        """Copy blocks from the pool, and return when that is done; costs no message.

        Args:
            block_ids: where to, each an int below `num_blocks`.
            keys: as many, in the order of the prefix.
            option: None means the defaults.

        Returns:
            How many blocks in a row from the head were loaded; later ones may have been written.

        Raises:
            EmsException: as `ContextCaching.load`. Not one byte is written after that.
        """
        digests, spans, deadline = self._planned(block_ids, keys, option)
        return self._client.load(digests, spans, deadline)

    @public
    def async_load(self, block_ids: Any, keys: Any, option: CcKvOption | None = None) -> CcFuture:
        """Start a load and return at once; the blocks belong to it until the future is done."""
        digests, spans, deadline = self._planned(block_ids, keys, option)
        return self._client.load_later(digests, spans, deadline)

    @public
    def load_by_page(self, block_ids: Any, keys: Any, option: CcKvOption | None = None) -> PageLoad:
        """Start a load that brings page after page, each of all blocks; see `PageLoad`.

        In pages of whole 4 KiB of the CPU's memory; otherwise all of them come at the end.
        """
        digests, spans, deadline = self._planned(block_ids, keys, option)
        arrivals = Arrivals()
        return PageLoad(
            self._client.load_later(digests, spans, deadline, arrivals=arrivals), arrivals
        )

    @public
    def exists(self, keys: Any, option: CcKvOption | None = None) -> CcResult:
        """Return how many keys in a row from the head are in the pool; a microsecond, no message.

        Needs no registered memory. 0 instead of an error when the pool is away.
        """
        self._client.check_usable()
        check_option(option)
        names = _key_list(keys)
        return CcResult(self._client.exists(self._space.digests(names)), len(names))

    def _planned(
        self, block_ids: Any, keys: Any, option: CcKvOption | None
    ) -> tuple[bytes, Spans, Deadline]:
        self._client.check_usable()
        deadline = Deadline.after_ms(check_option(option).timeout)
        if self._pages is None:
            raise invalid_argument(
                "no pages are registered here, only `exists` works; give them to register_pages"
            )
        names = _key_list(keys)
        blocks = _plan.int64s(block_ids, "block_ids")
        if len(blocks) != 8 * len(names):
            raise invalid_argument(
                f"block_ids has {len(blocks) // 8} entries and keys {len(names)}; they must be "
                "equal"
            )
        digests = self._space.digests(names)
        ones = (1).to_bytes(8, "little") * len(names)
        columns = _plan.plan_slots(self._pages, blocks, ones, 0, "block_ids")
        assert len(digests) == DIGEST_BYTES * len(names)
        return digests, Spans.from_columns(*columns, self._owner), deadline


def _key_list(keys: object) -> Sequence[object]:
    if not isinstance(keys, (list, tuple)):
        raise wrong_type("keys", keys, "a list of bytes or ints")
    if not keys:
        raise invalid_argument("keys is empty; give at least one key")
    return keys
