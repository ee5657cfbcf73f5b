from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems import EmsErrorCode, EmsException, PrimaryKey
from ems.common.key import DIGEST_BYTES, KeySpace

SPACE = KeySpace.v0("tenant", "model")
parts = st.text(min_size=1, max_size=127)
keys = st.one_of(
    parts, st.builds(PrimaryKey, distribute_key=parts, attribute_key=st.text(max_size=127))
)


def digest(space: KeySpace, key: object) -> bytes:
    return space.digests([key])


def refusal(key_list: Any) -> str:
    with pytest.raises(EmsException) as caught:
        SPACE.digests(key_list)
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
    return caught.value.message()


def test_digests_follow_the_order_of_the_list() -> None:
    both = SPACE.digests(["a", "b"])
    assert both == digest(SPACE, "a") + digest(SPACE, "b")
    assert len(both) == 2 * DIGEST_BYTES


def test_a_digest_never_changes() -> None:
    # Every node and every later version must name a block the same way.
    assert digest(SPACE, "block@1").hex() == "eecc93ae42090ed846f6027804078f25"
    assert digest(SPACE, PrimaryKey("d", "a")).hex() == "e95945fdf51eac3b924cf1b96b2442bb"
    assert digest(KeySpace.v0(None, "model"), "block@1").hex() == "1e7bde23a3e42501c46aa786b5ae954a"


def test_a_digest_does_not_depend_on_the_process() -> None:
    code = (
        "from ems.common.key import KeySpace;"
        "print(KeySpace.v0('tenant', 'model').digests(['block@1']).hex())"
    )
    for seed in ("0", "12345"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        )
        assert run.stdout.strip() == digest(SPACE, "block@1").hex()


def test_every_part_of_the_namespace_counts() -> None:
    spaces = [
        KeySpace.v0(tenant, model)
        for tenant, model in itertools.product([None, "", "t", "tm"], ["m", "mm", "tm"])
    ]
    assert len({digest(space, "k") for space in spaces}) == len(spaces)


def test_a_plain_string_is_a_primary_key_without_attribute() -> None:
    assert digest(SPACE, "k") == digest(SPACE, PrimaryKey("k", ""))


@given(st.lists(keys, min_size=2, max_size=2))
def test_different_keys_have_different_digests(pair: list[Any]) -> None:
    def named(key: Any) -> tuple[str, str]:
        return (key, "") if isinstance(key, str) else (key.distribute_key, key.attribute_key)

    same = named(pair[0]) == named(pair[1])
    assert (digest(SPACE, pair[0]) == digest(SPACE, pair[1])) is same


def test_the_border_between_the_parts_counts() -> None:
    cuts = [PrimaryKey("abc"[:i], "abc"[i:]) for i in (1, 2, 3)]
    assert len({digest(SPACE, cut) for cut in cuts}) == 3


def test_the_longest_key_and_any_character_are_accepted() -> None:
    for key in ("\U0001f600" * 127, "\ud800", "a\0b", " "):
        assert len(digest(SPACE, key)) == DIGEST_BYTES


def test_a_subclass_of_str_is_a_key() -> None:
    class Name(str):
        pass

    assert digest(SPACE, Name("k")) == digest(SPACE, "k")


@pytest.mark.parametrize(
    ("key_list", "text"),
    [
        ([], "key_list is empty"),
        (None, "key_list is None of type NoneType"),
        ("abc", "key_list is 'abc' of type str"),
        (["a", "b", "c", "d" * 130], "key_list[3] is 130 characters long, the limit is 127"),
        (["a", ""], "key_list[1] is empty"),
        (["a", 5], "key_list[1] is 5 of type int; give a str or a PrimaryKey"),
        (["a", b"b"], "key_list[1] is b'b' of type bytes"),
        (["a", "b", "a"], "key_list[2] is 'a', the same key as key_list[0]"),
        (["a", PrimaryKey("a", "")], "the same key as key_list[0]"),
        ([PrimaryKey("", "x")], "key_list[0].distribute_key is empty"),
        ([PrimaryKey("x", "y" * 128)], "key_list[0].attribute_key is 128 characters long"),
        ([PrimaryKey("x", None)], "key_list[0].attribute_key is None"),  # type: ignore[arg-type]
        ([PrimaryKey(7, "y")], "key_list[0].distribute_key is 7"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_key_is_named(key_list: Any, text: str) -> None:
    assert text in refusal(key_list)


def test_a_string_that_lies_about_itself_is_taken_at_its_bytes() -> None:
    class Liar(str):
        def __len__(self) -> int:
            return 1

        def encode(self, *_: Any) -> bytes:
            raise KeyError("no")

    assert "is 200 characters long" in refusal([Liar("x" * 200)])
    assert digest(SPACE, Liar("k")) == digest(SPACE, "k")
