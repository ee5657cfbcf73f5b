from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems_native._digest import BlockNames, has_duplicates

KEY = b"a key"
SPACE = bytes(range(32))
HASHES = st.one_of(
    st.integers(), st.sampled_from([0, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64])
)


def defined(hash_: int, count: int | None, key: bytes = KEY, space: bytes = SPACE) -> bytes:
    """What the digest of a block is, in terms of the standard library."""
    nbytes = 8 if -(2**63) <= hash_ < 2**63 else hash_.bit_length() // 8 + 1
    text = space + nbytes.to_bytes(4, "little") + hash_.to_bytes(nbytes, "little", signed=True)
    if count is not None:
        text += count.to_bytes(8, "little")
    return hashlib.blake2b(text, digest_size=16, key=key).digest()


def column(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(8, "little", signed=True) for n in numbers)


@given(st.lists(HASHES, max_size=20))
def test_digests_are_those_of_the_standard_library(hashes: list[int]) -> None:
    assert BlockNames(KEY, SPACE).digests(hashes) == b"".join(defined(h, None) for h in hashes)


@given(st.integers(0, 300), st.integers(1, 64), HASHES, st.integers(-(2**2000), 2**2000))
def test_names_and_keys_of_any_length(space: int, key: int, one: int, huge: int) -> None:
    names = BlockNames(b"k" * key, b"s" * space)
    expected = [defined(h, None, b"k" * key, b"s" * space) for h in (one, huge)]
    assert names.digests((one, huge)) == b"".join(expected)


def test_only_counts_that_differ_from_a_whole_block_are_noted() -> None:
    names = BlockNames(KEY, SPACE)
    expected = defined(7, None) + defined(7, 3) + defined(7, None)
    assert names.digests([7, 7, 7], column(16, 3, 16), 16) == expected


def test_an_int_by_another_name() -> None:
    class Small(int):
        pass

    class Index:
        def __index__(self) -> int:
            return -5

    names = BlockNames(KEY, SPACE)
    assert names.digests([Small(3), Index()]) == names.digests([3, -5])


@pytest.mark.parametrize("wrong", [True, False, 1.0, "1", None, b"", [1], object()])
def test_what_is_no_int_is_told_by_its_index(wrong: Any) -> None:
    with pytest.raises(TypeError) as caught:
        BlockNames(KEY, SPACE).digests([1, 2, wrong, True])
    assert caught.value.args == (2,)


def test_misuse_by_our_own_code() -> None:
    for key in (b"", b"k" * 65):
        with pytest.raises(ValueError, match="key has"):
            BlockNames(key, SPACE)
    with pytest.raises(ValueError, match="counts has 8 bytes"):
        BlockNames(KEY, SPACE).digests([1, 2], column(1), 1)


@given(st.lists(st.binary(min_size=1, max_size=64), max_size=10))
def test_hashes_that_are_bytes(hashes: list[bytes]) -> None:
    expected = b"".join(
        hashlib.blake2b(
            SPACE + (len(h) | 1 << 31).to_bytes(4, "little") + h, digest_size=16, key=KEY
        ).digest()
        for h in hashes
    )
    assert BlockNames(KEY, SPACE).digests(hashes, texts=True) == expected


@pytest.mark.parametrize("wrong", [b"", bytes(65), bytearray(32), "0" * 32])
def test_what_is_no_hash(wrong: object) -> None:
    with pytest.raises(TypeError) as caught:
        BlockNames(KEY, SPACE).digests([b"fine", 1, wrong], texts=True)
    assert caught.value.args == (2,)


def test_bytes_are_hashes_only_where_they_are_asked_for() -> None:
    with pytest.raises(TypeError) as caught:
        BlockNames(KEY, SPACE).digests([1, b"text"])
    assert caught.value.args == (1,)


@given(st.lists(st.text(min_size=0, max_size=130), max_size=20))
def test_keys_are_what_hashlib_says(keys: list[str]) -> None:
    asked: list[int] = []

    def encode(index: int, key: object) -> bytes:
        asked.append(index)
        assert key == keys[index]
        return b"other" + bytes([index])

    def is_short(key: str) -> bool:
        return 1 <= len(key) <= 127

    out = BlockNames(KEY, SPACE).of_keys(keys, 127, encode)
    for index, key in enumerate(keys):
        raw = key.encode()
        text = len(raw).to_bytes(2, "little") + raw + b"\0\0" if is_short(key) else None
        encoded = SPACE + (text or b"other" + bytes([index]))
        wanted = hashlib.blake2b(encoded, digest_size=16, key=KEY).digest()
        assert out[16 * index : 16 * index + 16] == wanted
    assert asked == [index for index, key in enumerate(keys) if not is_short(key)]


@given(st.lists(st.binary(min_size=1, max_size=1), max_size=40))
def test_duplicates_are_found(parts: list[bytes]) -> None:
    digests = [part * 15 + b"x" for part in parts]
    assert has_duplicates(b"".join(digests)) == (len(set(digests)) < len(digests))


def test_digests_that_begin_alike_are_no_duplicates() -> None:
    assert not has_duplicates(b"".join(bytes(8) + n.to_bytes(8, "little") for n in range(100)))
