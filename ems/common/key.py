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
from ems.common.exception import EmsException, invalid_argument

__all__ = ["DIGEST_BYTES", "MAX_KEY_CHARACTERS", "Key", "KeySpace", "PrimaryKey"]

DIGEST_BYTES = 16
MAX_KEY_CHARACTERS = 127
_CLUSTER_KEY = b"ems block identity 1"
_MAX_ENCODED = 4 * MAX_KEY_CHARACTERS
_PREFIX = tuple(n.to_bytes(2, "little") for n in range(_MAX_ENCODED + 1))
_NO_ATTRIBUTE = _PREFIX[0]


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


class KeySpace:
    """The digests of one namespace: same tenant, same model, same meaning of a key."""

    __slots__ = ("_state",)

    def __init__(self, *parts: bytes) -> None:
        # The namespace goes in as its own digest, of fixed size: then the keyed first block is
        # already compressed in the state that is copied, and a short key costs one more
        # compression.
        name = hashlib.blake2b(_frame(*parts), digest_size=32, key=_CLUSTER_KEY).digest()
        self._state = hashlib.blake2b(name, digest_size=DIGEST_BYTES, key=_CLUSTER_KEY)

    @classmethod
    def v0(cls, tenant: str | None, model_id: str) -> KeySpace:
        """Make the space of the key/value calls of a tenant (`access_id` or None) and a model."""
        who = b"" if tenant is None else b"\x01" + tenant.encode("utf-8", "surrogatepass")
        return cls(b"v0", who, model_id.encode("utf-8", "surrogatepass"))

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
        copy = self._state.copy
        prefix = _PREFIX
        out: list[bytes] = []
        add = out.append
        for index, key in enumerate(key_list):
            if type(key) is str and 0 < len(key) <= MAX_KEY_CHARACTERS:
                raw = key.encode("utf-8", "surrogatepass")
                encoded = prefix[len(raw)] + raw + _NO_ATTRIBUTE
            else:
                encoded = _encode(index, key)
            state = copy()
            state.update(encoded)
            add(state.digest())
        if len(set(out)) != len(out):
            raise _duplicate(key_list, out)
        return b"".join(out)


def _encode(index: int, key: object) -> bytes:
    if isinstance(key, PrimaryKey):
        first = _part(f"key_list[{index}].distribute_key", key.distribute_key, 1)
        second = _part(f"key_list[{index}].attribute_key", key.attribute_key, 0)
    elif isinstance(key, str):
        first = _part(f"key_list[{index}]", key, 1)
        second = b""
    else:
        raise wrong_type(f"key_list[{index}]", key, "a str or a PrimaryKey")
    return _PREFIX[len(first)] + first + _PREFIX[len(second)] + second


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


def _duplicate(key_list: Sequence[object], digests: Sequence[bytes]) -> EmsException:
    first: dict[bytes, int] = {}
    for index, digest in enumerate(digests):
        earlier = first.setdefault(digest, index)
        if earlier != index:
            return invalid_argument(
                f"key_list[{index}] is {shown(key_list[index])}, the same key as "
                f"key_list[{earlier}]; keys must be unique in a call"
            )
    raise AssertionError("called without a duplicate")
