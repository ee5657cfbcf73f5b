"""Context caching: what `Ems.get_cc` hands out. One object, both generations of calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from ems.cc.call_shape import (
    is_key_value_call,
    key_value_arguments,
    registered_arguments,
    timeout_ms,
)
from ems.cc_v1.pages import KvPages, PageCaching, describe_pages
from ems.cc_v1.planning import Request, plan, probe
from ems.cc_v1.registration import Registration, instance_of, register
from ems.client.stripes import Share
from ems.common.argument import wrong_type
from ems.common.boundary import public
from ems.common.config import InstanceConfig
from ems.common.deadline import Deadline
from ems.common.exception import invalid_argument
from ems.common.key import DIGEST_BYTES, Key, KeySpace, PageSpace
from ems.common.option import CcKvOption
from ems.common.result import CcResult
from ems.future import CcFuture
from ems_native._copy import Spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ems.client.client import Client
    from ems.common.buffer import KvBufferWrapper

__all__ = ["ContextCaching"]


class ContextCaching:
    """Saves and loads blocks of one model of one tenant; made by `Ems.init` (page 0010).

    There are two generations of calls under the same names, told apart by their arguments:

    - `save(option, key_list, value_list)`, "V0": keys are strings or `PrimaryKey`s, values lists of
      `KvBufferWrapper`. A value is what lies in its buffers, one after the other, and may be loaded
      into other pieces of the same total length.
    - `save(slot_mapping, hashes, offsets, option, **kwargs)`, "V1": blocks of memory that
      `register_kvcache` described, named by prefix hashes. A slot is
      `block_id * block_size + index_in_block`. Blocks are named in one of three ways:

      - by hash: `slot_mapping` (a slot for each token), `hashes` (an int for each block) and
        `offsets` (tokens of each block, 1 to the registered block size; their sum is the number of
        slots);
      - by token: `slot_mapping`, `token_ids` and `mask`, equally long. The mask is zeros, for
        tokens that the caller has, then ones. Hashes are made here; results count tokens;
      - by chunk: `hashes` and `chunk_descs[group][chunk]`, a (start_slot, length) for each layer
        group and hash; length 0: the group does not keep the chunk.

      Numbers may come as lists, numpy arrays or tensors of the CPU.

    All calls may be used by any number of threads at the same time. What is wrong with arguments is
    raised at the call (`EMS_INVALID_ARGUMENT`, before anything is copied), everything else by sync
    calls at their end and by futures through the future.
    """

    def __init__(self, client: Client, access_id: str | None, instance: InstanceConfig) -> None:
        self._client = client
        self._keys = KeySpace.v0(access_id, instance.model_id)
        self._instance = instance_of(access_id, instance)
        self._registered: Registration | None = None

    @public
    def register_kvcache(
        self,
        kvcache: Sequence[Sequence[Any]] | None = None,
        store_layer_group_desc: object = None,
    ) -> None:
        """Tell where the KV cache lies; needed once before V1 calls (pages 0013b, 0013c).

        Moves nothing. The tensors are kept alive until the next registration or `Ems.close`.
        Another call replaces the registration for later calls; what is saved under another geometry
        is never returned. May be called from any thread.

        Args:
            kvcache: `[layer][component]` tensors of shape
                `[num_blocks, block_size, heads, head_size]`, at least one component per layer, all
                on one device. Components may differ in head size and may be views; the elements of
                a block must be contiguous. Block size and number agree inside a layer group.
            store_layer_group_desc: None for one group of all layers; else for each group the list
                of its layer indices (or a mapping or an object with `layers`). Every layer is in
                exactly one group.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT`, naming layer and component.
        """
        self._client.check_usable()
        found = register(self._instance, kvcache, store_layer_group_desc)
        self._client.adopt_device(found.device)
        self._registered = found

    @public
    def register_pages(
        self, pages: Sequence[KvPages] | None = None, layout: str = ""
    ) -> PageCaching:
        """Tell where opaque pages lie, and get what saves and loads them by the engine's own keys.

        For layouts that `register_kvcache` cannot describe; an addition of this implementation.
        Moves nothing, leaves other registrations alone, may be called from any thread. EMS looks
        neither into a page nor behind a key, so `layout` must name everything that changes what
        the bytes are: model weights, element type, block size, order of heads and layers, packing,
        rank. Blocks of another layout, tenant or `model_id` never meet.

        Args:
            pages: one for each piece of memory that a block has a page in (a layer, say), all on
                one device and with as many blocks. None: the object only answers `exists`.
            layout: any text.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT`, naming index and field.
        """
        self._client.check_usable()
        if not isinstance(layout, str):
            raise wrong_type("layout", layout, "a str that names what the bytes mean")
        space = PageSpace(self._instance.tenant, self._instance.model_id, layout)
        if pages is None:
            return PageCaching(self._client, space)
        described, device = describe_pages(pages)
        self._client.adopt_device(device)
        return PageCaching(self._client, space, described, tuple(pages))

    @overload
    def save(
        self,
        option: CcKvOption | None = None,
        key_list: Sequence[Key] | None = None,
        value_list: Sequence[Sequence[KvBufferWrapper]] | None = None,
    ) -> CcResult: ...
    @overload
    def save(
        self,
        slot_mapping: Any = None,
        hashes: Any = None,
        offsets: Any = None,
        option: CcKvOption | None = None,
        *,
        token_ids: Any = None,
        mask: Any = None,
        chunk_descs: Any = None,
    ) -> CcResult: ...
    @public
    def save(self, *args: Any, **kwargs: Any) -> CcResult:
        """Copy values into the pool, and return when that is done (page 0014c).

        V0: a key that is there gets the new value, at once: readers see all of the old or all of
        the new one. V1: a block that is there keeps its first copy, and counts as saved.

        Args:
            *args: as the class describes; `option` None means the defaults.
            **kwargs: the same by name.

        Returns:
            How many keys, blocks or tokens in a row from the head are in the pool. Fewer than all
            is no error: there was no room for the rest, they will miss.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT`; `EMS_IO_TIMEOUT` when `option.timeout` passed;
                `EMS_IO_ERROR` when the server is away; `EMS_INTERNAL_ERROR`. After any of the last
                three nothing of the call remains in the pool but keys that were complete.
        """
        if is_key_value_call(args, kwargs):
            digests, spans, deadline = self._values("save", args, kwargs)
            return self._client.save(digests, spans, deadline, replace=True)
        request, share, deadline = self._blocks("save", args, kwargs)
        return self._client.save(
            request.digests,
            request.spans,
            deadline,
            replace=False,
            share=share,
            counted=request.result,
        )

    @overload
    def load(
        self,
        option: CcKvOption | None = None,
        key_list: Sequence[Key] | None = None,
        value_list: Sequence[Sequence[KvBufferWrapper]] | None = None,
    ) -> CcResult: ...
    @overload
    def load(
        self,
        slot_mapping: Any = None,
        hashes: Any = None,
        offsets: Any = None,
        option: CcKvOption | None = None,
        *,
        token_ids: Any = None,
        mask: Any = None,
        chunk_descs: Any = None,
    ) -> CcResult: ...
    @public
    def load(self, *args: Any, **kwargs: Any) -> CcResult:
        """Copy values from the pool to the caller, and return when that is done (page 0016c).

        Needs no server: a hit is served by this process alone. A value of another length than the
        caller's memory for it is a miss.

        Args:
            *args: as the class describes; `option` None means the defaults.
            **kwargs: the same by name.

        Returns:
            How many keys, blocks or tokens in a row from the head were loaded. Memory of later ones
            may have been written.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT`, also for a read-only buffer; `EMS_IO_TIMEOUT` when
                `option.timeout` passed; `EMS_INTERNAL_ERROR`. Not one byte of the caller's memory
                is written after that.
        """
        if is_key_value_call(args, kwargs):
            digests, spans, deadline = self._values("load", args, kwargs)
            if spans.readonly:
                raise _readonly(spans)
            return self._client.load(digests, spans, deadline)
        request, _, deadline = self._blocks("load", args, kwargs)
        return self._client.load(request.digests, request.spans, deadline, counted=request.result)

    @overload
    def async_save(
        self,
        option: CcKvOption | None = None,
        key_list: Sequence[Key] | None = None,
        value_list: Sequence[Sequence[KvBufferWrapper]] | None = None,
    ) -> CcFuture: ...
    @overload
    def async_save(
        self,
        slot_mapping: Any = None,
        hashes: Any = None,
        offsets: Any = None,
        option: CcKvOption | None = None,
        *,
        token_ids: Any = None,
        mask: Any = None,
        chunk_descs: Any = None,
    ) -> CcFuture: ...
    @public
    def async_save(self, *args: Any, **kwargs: Any) -> CcFuture:
        """Start a save and return at once; arguments as for `save` (page 0015c).

        The memory must keep its content until the future is done. `option.timeout` counts from this
        call, waiting for a turn included.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT`; everything else comes through the future.
        """
        if is_key_value_call(args, kwargs):
            digests, spans, deadline = self._values("async_save", args, kwargs)
            return self._client.save_later(digests, spans, deadline, replace=True)
        request, share, deadline = self._blocks("async_save", args, kwargs)
        return self._client.save_later(
            request.digests,
            request.spans,
            deadline,
            replace=False,
            share=share,
            counted=request.result,
        )

    @overload
    def async_load(
        self,
        option: CcKvOption | None = None,
        key_list: Sequence[Key] | None = None,
        value_list: Sequence[Sequence[KvBufferWrapper]] | None = None,
    ) -> CcFuture: ...
    @overload
    def async_load(
        self,
        slot_mapping: Any = None,
        hashes: Any = None,
        offsets: Any = None,
        option: CcKvOption | None = None,
        *,
        token_ids: Any = None,
        mask: Any = None,
        chunk_descs: Any = None,
    ) -> CcFuture: ...
    @public
    def async_load(self, *args: Any, **kwargs: Any) -> CcFuture:
        """Start a load and return at once; arguments as for `load` (page 0017c).

        The memory belongs to the load until the future is done, and not a moment longer, however it
        ends. `option.timeout` counts from this call, waiting for a turn included.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT`; everything else comes through the future.
        """
        if is_key_value_call(args, kwargs):
            digests, spans, deadline = self._values("async_load", args, kwargs)
            if spans.readonly:
                raise _readonly(spans)
            return self._client.load_later(digests, spans, deadline)
        request, _, deadline = self._blocks("async_load", args, kwargs)
        return self._client.load_later(
            request.digests, request.spans, deadline, counted=request.result
        )

    @public
    def exists(
        self, hashes: Any = None, option: CcKvOption | None = None, *, chunk_descs: Any = None
    ) -> CcResult:
        """Return how many blocks in a row from the head are in the pool; moves nothing (page 0027).

        Costs no message. With layer groups a block counts when every group has it.

        Args:
            hashes: of whole blocks, an int each.
            option: None means the defaults.
            chunk_descs: as for `load`, when some groups do not keep every chunk. An addition of
                this implementation.

        Returns:
            Hashes found in a row; 0 instead of an error when the pool is away.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT`.
        """
        self._client.check_usable()
        timeout_ms(option)
        wanted = probe(self._registration(), hashes, chunk_descs)
        return wanted.result(self._client.exists(wanted.digests))

    @public
    def is_ready(self, ccfuture: CcFuture | None = None) -> bool:
        """Return whether a future is done, with a result or an error; never blocks (page 0018).

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT`, only when it is no `CcFuture`.
        """
        return _future(ccfuture).done()

    @public
    def get_result(self, ccfuture: CcFuture | None = None) -> CcResult:
        """Wait for a future and return its result, as often as you like (page 0019).

        Raises:
            EmsException: what the operation failed with; `EMS_INVALID_ARGUMENT` when it was
                cancelled, or when the argument is no `CcFuture`.
        """
        return _future(ccfuture).result()

    def _values(
        self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bytes, Spans, Deadline]:
        """Turn the arguments of a V0 call into one internal request."""
        self._client.check_usable()
        option, key_list, value_list = key_value_arguments(call, args, kwargs)
        deadline = Deadline.after_ms(timeout_ms(option))
        digests = self._keys.digests(key_list)
        spans = Spans.from_buffers(value_list)
        if len(digests) != DIGEST_BYTES * spans.nkeys:
            raise invalid_argument(
                f"value_list has {spans.nkeys} entries, key_list {len(digests) // DIGEST_BYTES}; "
                "give a list of buffers for each key"
            )
        return digests, spans, deadline

    def _blocks(
        self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Request, Share | None, Deadline]:
        """Turn the arguments of a V1 call into one internal request."""
        self._client.check_usable()
        option, given = registered_arguments(call, args, kwargs)
        deadline = Deadline.after_ms(timeout_ms(option))
        registration = self._registration()
        return plan(registration, given), registration.share, deadline

    def _registration(self) -> Registration:
        if self._registered is None:
            raise invalid_argument(
                "no KV cache is registered; call register_kvcache(kvcache) before calls that name "
                "blocks by hash or token (calls with string keys need key_list and value_list)"
            )
        return self._registered


def _future(ccfuture: object) -> CcFuture:
    if not isinstance(ccfuture, CcFuture):
        raise wrong_type("ccfuture", ccfuture, "the CcFuture of an async_save or async_load")
    return ccfuture


def _readonly(spans: Spans) -> Exception:
    where = spans.first_readonly()
    assert where is not None
    return invalid_argument(
        f"value_list[{where[0]}][{where[1]}] is a read-only buffer; a load needs one to write to"
    )
