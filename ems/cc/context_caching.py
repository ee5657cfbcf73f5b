"""The key/value calls ("V0") of context caching, and the calls on futures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ems.common.argument import wrong_type
from ems.common.boundary import public
from ems.common.config import InstanceConfig
from ems.common.deadline import Deadline
from ems.common.exception import invalid_argument
from ems.common.key import DIGEST_BYTES, Key, KeySpace
from ems.common.option import MAX_TIMEOUT_MS, CcKvOption, check_option
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

    Keys are strings or `PrimaryKey`s, values lists of `KvBufferWrapper`: a value is what lies in
    its buffers, one after the other, and may be loaded into other pieces of the same total length.
    All calls may be used by any number of threads at the same time. What is wrong with arguments is
    raised at the call (`EMS_INVALID_ARGUMENT`, before anything is copied), everything else by sync
    calls at their end and by futures through the future.
    """

    def __init__(self, client: Client, access_id: str | None, instance: InstanceConfig) -> None:
        self._client = client
        self._keys = KeySpace.v0(access_id, instance.model_id)

    @public
    def save(
        self,
        option: CcKvOption | None = None,
        key_list: Sequence[Key] | None = None,
        value_list: Sequence[Sequence[KvBufferWrapper]] | None = None,
    ) -> CcResult:
        """Copy values into the pool under their keys, and return when that is done (page 0014c).

        A key that is there gets the new value, at once: readers see all of the old or all of the
        new one.

        Args:
            option: None means the defaults.
            key_list: unique in the call; each part of a key has at most 127 characters.
            value_list: for each key its buffers, at least one.

        Returns:
            How many keys in a row from the head are in the pool. Fewer than all is no error: there
            was no room for the rest, they will miss.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT`; `EMS_IO_TIMEOUT` when `option.timeout` passed;
                `EMS_IO_ERROR` when the server is away; `EMS_INTERNAL_ERROR`. After any of the last
                three nothing of the call remains in the pool but keys that were complete.
        """
        digests, spans, deadline = self._request(option, key_list, value_list)
        return self._client.save(digests, spans, deadline, replace=True)

    @public
    def load(
        self,
        option: CcKvOption | None = None,
        key_list: Sequence[Key] | None = None,
        value_list: Sequence[Sequence[KvBufferWrapper]] | None = None,
    ) -> CcResult:
        """Copy values from the pool into the buffers, and return when that is done (page 0016c).

        Needs no server: a hit is served by this process alone.

        Args:
            option: None means the defaults.
            key_list: unique in the call.
            value_list: for each key the buffers that its value goes to; their total length must be
                that of the value, or the key is a miss.

        Returns:
            How many keys in a row from the head were loaded. Buffers of later keys may have been
            written.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT`, also for a read-only buffer; `EMS_IO_TIMEOUT` when
                `option.timeout` passed; `EMS_INTERNAL_ERROR`. Not one byte of the buffers is
                written after that.
        """
        digests, spans, deadline = self._request(option, key_list, value_list)
        if spans.readonly:
            raise _readonly(spans)
        return self._client.load(digests, spans, deadline)

    @public
    def async_save(
        self,
        option: CcKvOption | None = None,
        key_list: Sequence[Key] | None = None,
        value_list: Sequence[Sequence[KvBufferWrapper]] | None = None,
    ) -> CcFuture:
        """Start a save and return at once; arguments as for `save` (page 0015c).

        The buffers must keep their content until the future is done. `option.timeout` counts from
        this call, waiting for a turn included.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT`; everything else comes through the future.
        """
        digests, spans, deadline = self._request(option, key_list, value_list)
        return self._client.save_later(digests, spans, deadline, replace=True)

    @public
    def async_load(
        self,
        option: CcKvOption | None = None,
        key_list: Sequence[Key] | None = None,
        value_list: Sequence[Sequence[KvBufferWrapper]] | None = None,
    ) -> CcFuture:
        """Start a load and return at once; arguments as for `load` (page 0017c).

        The buffers belong to the load until the future is done, and not a moment longer, however it
        ends. `option.timeout` counts from this call, waiting for a turn included.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT`; everything else comes through the future.
        """
        digests, spans, deadline = self._request(option, key_list, value_list)
        if spans.readonly:
            raise _readonly(spans)
        return self._client.load_later(digests, spans, deadline)

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

    def _request(
        self, option: object, key_list: object, value_list: object
    ) -> tuple[bytes, Spans, Deadline]:
        """Turn the arguments of a call into one internal request."""
        self._client.check_usable()
        deadline = Deadline.after_ms(_timeout_ms(option))
        digests = self._keys.digests(key_list)
        spans = Spans.from_buffers(value_list)  # type: ignore[arg-type]  # it checks
        if len(digests) != DIGEST_BYTES * spans.nkeys:
            raise invalid_argument(
                f"value_list has {spans.nkeys} entries, key_list {len(digests) // DIGEST_BYTES}; "
                "give a list of buffers for each key"
            )
        return digests, spans, deadline


def _timeout_ms(option: object) -> int:
    # The usual option is recognised at a third of what its full check costs: a small load takes a
    # few microseconds altogether.
    if type(option) is CcKvOption:
        timeout = option.timeout
        if (
            type(timeout) is int
            and 0 < timeout <= MAX_TIMEOUT_MS
            and type(option.write_rcache) is bool
            and type(option.read_local_only) is bool
        ):
            return timeout
    return check_option(option).timeout


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
