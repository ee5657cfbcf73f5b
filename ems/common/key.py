"""The identity of a block: one builder of digests, used by save, load and exists alike.

A key becomes a 128-bit keyed BLAKE2b digest over a length-prefixed encoding of everything that
changes the bytes or their meaning. Two keys that differ in anything get different digests; a
mismatch is a miss, never wrong bytes. The digest's key is the same everywhere (never per pool or
process), so that every node names a block the same way.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Union

from ems.common.argument import shown, wrong_type
from ems.common.boundary import public_class
from ems.common.exception import EmsException, invalid_argument
from ems_native._digest import BlockNames, has_duplicates

__all__ = [
    "DIGEST_BYTES",
    "MAX_KEY_CHARACTERS",
    "BlockIdentity",
    "BlockSpace",
    "ComponentShape",
    "Key",
    "KeySpace",
    "PageSpace",
    "PrimaryKey",
]

DIGEST_BYTES = 16
MAX_KEY_CHARACTERS = 127
_CLUSTER_KEY = b"ems block identity 1"


@public_class
@dataclasses.dataclass(frozen=True)
class PrimaryKey:
    """A key of two parts (pages 0014c, 0016c, 0017c).

    Args:
        distribute_key: 1 to 127 characters; decides which node of a cluster holds the value.
        attribute_key: 0 to 127 characters; tells values with the same `distribute_key` apart.

    The plain string `"k"` names the same value as `PrimaryKey("k", "")`.
    """

    distribute_key: str
    attribute_key: str


Key = Union[str, PrimaryKey]


def _frame(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _tenant(tenant: str | None) -> bytes:
    return b"" if tenant is None else b"\x01" + _text(tenant)


def _number(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _space_name(*parts: bytes) -> bytes:
    # The namespace goes in as its own digest, of fixed size: then the keyed first block is already
    # compressed in the state that is copied, and a short key costs one more compression.
    return hashlib.blake2b(_frame(*parts), digest_size=32, key=_CLUSTER_KEY).digest()


class KeySpace:
    """The digests of one namespace: same tenant, same model, same meaning of a key."""

    __slots__ = ("_names",)

    def __init__(self, *parts: bytes) -> None:
        self._names = BlockNames(_CLUSTER_KEY, _space_name(*parts))

    @classmethod
    def v0(cls, tenant: str | None, model_id: str) -> KeySpace:
        """Make the space of the key/value calls of a tenant (`access_id` or None) and a model."""
        return cls(b"v0", _tenant(tenant), _text(model_id))

    def digests(self, key_list: object) -> bytes:
        """Return the digests of all keys, 16 bytes each, in the order of the list.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT` when the list is empty or no list, an element is no
                key, a part is too long or empty, or a key is there twice; the text names the index.
        """
        if not isinstance(key_list, (list, tuple)):
            raise wrong_type("key_list", key_list, "a list of keys")
        if not key_list:
            raise invalid_argument("key_list is empty; give at least one key")
        keys = tuple(key_list)
        digests = self._names.of_keys(keys, MAX_KEY_CHARACTERS, _encode)
        if has_duplicates(digests):
            raise _duplicate(keys, digests)
        return digests


@dataclasses.dataclass(frozen=True)
class ComponentShape:
    """What of a registered tensor decides what its bytes mean (not where, or how many, they are).

    Args:
        block_size: tokens of a block.
        heads: of a token.
        head_size: elements of a head.
        dtype: name of the element type.
    """

    block_size: int
    heads: int
    head_size: int
    dtype: str

    def encoded(self) -> bytes:
        """Return the shape as bytes that no other shape has."""
        numbers = (self.block_size, self.heads, self.head_size)
        return _frame(*map(_number, numbers), _text(self.dtype))


@dataclasses.dataclass(frozen=True)
class BlockIdentity:
    """Everything beside its hash that tells a V1 block from another: differ in one, never meet.

    Args:
        tenant: `access_id`, or None.
        model_id: the model.
        llm_engine: whose layout the bytes have.
        kvcache_type: "MHA", "GQA", "MQA" or "MLA".
        tp_world_size: ranks of tensor parallelism.
        pp_world_size: ranks of pipeline parallelism.
        rank_in_tp_group: which of them holds the bytes; None when all hold the same (MLA).
        rank_in_pp_group: which of them.
        layers: the shapes of every registered layer's components.
        group: the layers whose bytes one entry has.
        naming: who made the hashes: "hash" the engine, "token" this library.
    """

    tenant: str | None
    model_id: str
    llm_engine: str
    kvcache_type: str
    tp_world_size: int
    pp_world_size: int
    rank_in_tp_group: int | None
    rank_in_pp_group: int
    layers: tuple[tuple[ComponentShape, ...], ...]
    group: tuple[int, ...]
    naming: str = "hash"

    def encoded(self) -> bytes:
        """Return the identity as bytes that no other identity has."""
        rank = self.rank_in_tp_group
        layers = [_frame(*(one.encoded() for one in layer)) for layer in self.layers]
        return _frame(
            b"v1",
            _tenant(self.tenant),
            _text(self.model_id),
            _text(self.llm_engine),
            _text(self.kvcache_type),
            _number(self.tp_world_size),
            _number(self.pp_world_size),
            b"" if rank is None else _number(rank),
            _number(self.rank_in_pp_group),
            _frame(*layers),
            _frame(*map(_number, self.group)),
            _text(self.naming),
        )


class BlockSpace:
    """The digests of the blocks of one identity."""

    __slots__ = ("_names", "_whole")

    def __init__(self, identity: BlockIdentity) -> None:
        self._whole = identity.layers[identity.group[0]][0].block_size
        self._names = BlockNames(_CLUSTER_KEY, _space_name(identity.encoded()))

    def digests(self, hashes: Sequence[object], counts: bytes | None = None) -> bytes:
        """Return the digests of block hashes, 16 bytes each, in the order of the list.

        Args:
            hashes: ints of any size and sign, or 1 to 64 bytes each.
            counts: tokens of each block (int64); those of another size than a whole block are other
                blocks. None for whole blocks.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT` when one is neither; the text names the index.
        """
        try:
            return self._names.digests(hashes, counts, self._whole)
        except TypeError as error:
            failure = error
        raise _no_hash("hashes", hashes, failure)


class PageSpace:
    """The digests of opaque pages of one meaning.

    Args:
        tenant: `access_id`, or None.
        model_id: of the configuration.
        layout: whatever else changes what the bytes of a page are.
    """

    __slots__ = ("_names",)

    def __init__(self, tenant: str | None, model_id: str, layout: str) -> None:
        space = _space_name(b"pages", _tenant(tenant), _text(model_id), _text(layout))
        self._names = BlockNames(_CLUSTER_KEY, space)

    def digests(self, keys: Sequence[object]) -> bytes:
        """Return the digests of keys, 16 bytes each, in the order of the list.

        Args:
            keys: ints of any size and sign, or 1 to 64 bytes each.

        Raises:
            EmsException: `EMS_INVALID_ARGUMENT` when one is neither; the text names the index.
        """
        try:
            return self._names.digests(keys, texts=True)
        except TypeError as error:
            failure = error
        raise _no_hash("keys", keys, failure, " or 1 to 64 bytes")


def _no_hash(name: str, hashes: Sequence[object], error: TypeError, also: str = "") -> Exception:
    index = error.args[0]
    if not isinstance(index, int):
        return error
    return wrong_type(f"{name}[{index}]", hashes[index], f"an int (a bool is none){also}")


def _encode(index: int, key: object) -> bytes:
    if isinstance(key, PrimaryKey):
        first = _part(f"key_list[{index}].distribute_key", key.distribute_key, 1)
        second = _part(f"key_list[{index}].attribute_key", key.attribute_key, 0)
    elif isinstance(key, str):
        first = _part(f"key_list[{index}]", key, 1)
        second = b""
    else:
        raise wrong_type(f"key_list[{index}]", key, "a str or a PrimaryKey")
    return b"".join(
        [len(first).to_bytes(2, "little"), first, len(second).to_bytes(2, "little"), second]
    )


def _part(name: str, part: object, low: int) -> bytes:
    if not isinstance(part, str):
        raise wrong_type(name, part, "a str")
    count = str.__len__(part)
    if count > MAX_KEY_CHARACTERS:
        raise invalid_argument(
            f"{name} is {count} characters long, the limit is {MAX_KEY_CHARACTERS}"
        )
    if count < low:
        raise invalid_argument(f"{name} is empty; give 1 to {MAX_KEY_CHARACTERS} characters")
    return str.encode(part, "utf-8", "surrogatepass")


def _duplicate(key_list: Sequence[object], digests: bytes) -> EmsException:
    first: dict[bytes, int] = {}
    for index in range(len(key_list)):
        digest = digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]
        earlier = first.setdefault(digest, index)
        if earlier != index:
            return invalid_argument(
                f"key_list[{index}] is {shown(key_list[index])}, the same key as "
                f"key_list[{earlier}]; keys must be unique in a call"
            )
    raise AssertionError("called without a duplicate")
