"""Every misuse of the V1 calls is an argument error that names argument, index, value and rule."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from strange import ANYTHING, Strange
from v1_bench import Cache, V1Bench, whole

from ems import CcKvOption, ContextCaching, EmsErrorCode, EmsException
from ems.future import CcFuture

CALLS = ["save", "load", "async_save", "async_load"]


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(EmsException) as caught:
        call(*args, **kwargs)
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT, caught.value
    return caught.value.message()


OK: dict[str, Any] = {"slot_mapping": [0, 1, 2, 3], "hashes": [5], "offsets": [4]}
TOKENS: dict[str, Any] = {
    "slot_mapping": [0, 1, 2, 3],
    "token_ids": [5, 6, 7, 8],
    "mask": [0, 0, 1, 1],
}
CHUNKS: dict[str, Any] = {"hashes": [5], "chunk_descs": [[(0, 4)]]}


@pytest.mark.parametrize(
    ("base", "changes", "text"),
    [
        # hash
        (OK, {"hashes": [5, 6]}, "offsets has 1 entries and hashes 2"),
        (OK, {"offsets": [4, 4]}, "offsets has 2 entries and hashes 1"),
        (OK, {"slot_mapping": [0, 1, 2]}, "sum(offsets) is 4 and slot_mapping has 3 entries"),
        (OK, {"slot_mapping": []}, "sum(offsets) is 4 and slot_mapping has 0 entries"),
        (OK, {"hashes": [], "offsets": []}, "hashes is empty"),
        (OK, {"offsets": []}, "offsets has 0 entries"),
        (OK, {"slot_mapping": [0, 1, 2, 64]}, "slot_mapping[3] is 64, the registered blocks have"),
        (OK, {"slot_mapping": [0, -1, 2, 3]}, "slot_mapping[1] is -1, the registered blocks have"),
        (OK, {"slot_mapping": [0, 1, 2, 2**70]}, "slot_mapping[3] has 71 bits"),
        (OK, {"slot_mapping": [0, 1, True, 3]}, "slot_mapping[2] is True, a bool"),
        (OK, {"slot_mapping": [0, 1, 2.0, 3]}, "slot_mapping[2] is 2.0 of type float"),
        (OK, {"slot_mapping": "0123"}, "slot_mapping is of type str"),
        (OK, {"slot_mapping": None}, "slot_mapping is missing"),
        (OK, {"hashes": None}, "hashes is missing"),
        (OK, {"offsets": None}, "offsets is missing"),
        (OK, {"hashes": [True]}, "hashes[0] is True of type bool; give an int"),
        (OK, {"hashes": [5.0]}, "hashes[0] is 5.0 of type float"),
        (OK, {"hashes": ["5"]}, "hashes[0] is '5' of type str"),
        (OK, {"hashes": [b"5"]}, "hashes[0] is b'5' of type bytes"),
        (OK, {"hashes": 5}, "hashes is of type int"),
        (OK, {"hashes": "5"}, "hashes is of type str"),
        (OK, {"hashes": b"5"}, "hashes is of type bytes"),
        (OK, {"offsets": [0]}, "offsets[0] is 0; a block has 1 to 4 tokens"),
        (OK, {"offsets": [5]}, "offsets[0] is 5; a block has 1 to 4 tokens"),
        (OK, {"offsets": [-4]}, "offsets[0] is -4; a block has 1 to 4 tokens"),
        (OK, {"option": "fast"}, "option is 'fast' of type str"),
        (OK, {"option": CcKvOption(timeout=-1)}, "option.timeout is -1"),
        # no mode, several modes
        ({}, {"slot_mapping": [0]}, "slot_mapping alone says not which blocks"),
        ({}, {}, "the arguments say not which blocks"),
        ({}, {"option": None}, "the arguments say not which blocks"),
        (OK, {"token_ids": [1] * 4, "mask": [1] * 4}, "token_ids and hashes are given"),
        (OK, {"mask": [1] * 4}, "mask and hashes are given"),
        (TOKENS, {"offsets": [4]}, "token_ids and offsets are given"),
        (OK, {"chunk_descs": [[(0, 4)]]}, "chunk_descs and slot_mapping are given"),
        (CHUNKS, {"offsets": [4]}, "chunk_descs and offsets are given"),
        (CHUNKS, {"token_ids": [4]}, "chunk_descs and token_ids are given"),
        (CHUNKS, {"mask": [1]}, "chunk_descs and mask are given"),
        (OK, {"colour": 1}, "unexpected keyword argument 'colour'"),
        # token
        (TOKENS, {"token_ids": [1, 2, 3]}, "slot_mapping has 4 entries and token_ids 3"),
        (TOKENS, {"mask": [1, 1, 1]}, "mask has 3 entries and token_ids 4"),
        (TOKENS, {"mask": [0, 1, 0, 1]}, "mask[2] is 0 behind 1 zeros; it must be zeros, then"),
        (TOKENS, {"mask": [0, 0, 2, 1]}, "mask[2] is 2 behind 2 zeros"),
        (TOKENS, {"mask": [0, 0, 1.0, 1]}, "mask[2] is 1.0 of type float"),
        (TOKENS, {"mask": None}, "mask is missing"),
        (TOKENS, {"token_ids": None}, "token_ids is missing"),
        (TOKENS, {"slot_mapping": None}, "slot_mapping is missing"),
        (TOKENS, {"token_ids": []}, "token_ids is empty"),
        (TOKENS, {"token_ids": [1, 2, 3, False]}, "token_ids[3] is False, a bool"),
        (TOKENS, {"slot_mapping": [0, 1, 2, 64]}, "slot_mapping[3] is 64"),
        (TOKENS, {"slot_mapping": [-1, 1, 2, 3]}, "slot_mapping[0] is -1"),
        # chunk_descs
        (CHUNKS, {"hashes": None}, "hashes is missing"),
        (CHUNKS, {"hashes": []}, "hashes is empty"),
        (CHUNKS, {"hashes": [1, 2]}, "chunk_descs[0] has 1 entries and hashes 2"),
        (CHUNKS, {"chunk_descs": []}, "chunk_descs has 0 entries; give one for each layer group"),
        (CHUNKS, {"chunk_descs": [[(0, 4)]] * 2}, "chunk_descs has 2 entries"),
        (CHUNKS, {"chunk_descs": 5}, "chunk_descs is of type int"),
        (CHUNKS, {"chunk_descs": [5]}, "chunk_descs[0] is of type int"),
        (CHUNKS, {"chunk_descs": [[5]]}, "chunk_descs[0][0] is 5; give (start_slot, length)"),
        (CHUNKS, {"chunk_descs": [[(0, 4, 1)]]}, "chunk_descs[0][0] is (0, 4, 1)"),
        (CHUNKS, {"chunk_descs": [[{"start_slot": 0}]]}, "chunk_descs[0][0] is {'start_slot': 0}"),
        (CHUNKS, {"chunk_descs": [[(0, 65)]]}, "chunk_descs[0][0] is slots 0 to 64"),
        (CHUNKS, {"chunk_descs": [[(64, 1)]]}, "chunk_descs[0][0] is slots 64 to 64"),
        (CHUNKS, {"chunk_descs": [[(-1, 4)]]}, "chunk_descs[0][0] is slots -1 to 2"),
        (CHUNKS, {"chunk_descs": [[(0, -4)]]}, "chunk_descs[0][0] has length -4"),
        (CHUNKS, {"chunk_descs": [[(0, "4")]]}, "chunk_descs[0][...].length[0] is '4'"),
        (CHUNKS, {"chunk_descs": [[(True, 4)]]}, "chunk_descs[0][...].start_slot[0] is True"),
    ],
)
def test_what_is_wrong_is_named(
    v1: V1Bench,
    registered: ContextCaching,
    cache: Cache,
    base: dict[str, Any],
    changes: dict[str, Any],
    text: str,
) -> None:
    for name in CALLS:
        assert text in refusal(getattr(registered, name), **{**base, **changes})
    assert v1.bench.faults.steps == []
    assert cache.untouched(range(64))


@pytest.mark.parametrize("name", CALLS)
def test_data_calls_before_the_registration(v1: V1Bench, name: str) -> None:
    cc = v1.cc()
    for given in (OK, TOKENS, CHUNKS):
        assert "call register_kvcache(kvcache) before" in refusal(getattr(cc, name), **given)
    assert "call register_kvcache(kvcache) before" in refusal(cc.exists, [1])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "hashes is None"),
        ({"hashes": []}, "hashes is empty"),
        ({"hashes": [1, True]}, "hashes[1] is True of type bool"),
        ({"hashes": [1, None]}, "hashes[1] is None"),
        ({"hashes": 7}, "hashes is of type int"),
        ({"hashes": [1], "option": 5}, "option is 5"),
        ({"hashes": [1], "chunk_descs": [[(0, 1)], [(0, 1)]]}, "chunk_descs has 2 entries"),
        ({"hashes": [1], "slots": [1]}, "'slots'"),
    ],
)
def test_exists_names_what_is_wrong(
    registered: ContextCaching, arguments: dict[str, Any], text: str
) -> None:
    assert text in refusal(registered.exists, **arguments)


def test_slots_name_no_blocks_of_several_groups(v1: V1Bench) -> None:
    cc, cache = v1.cc(), Cache()
    cc.register_kvcache(cache.tensors, [[0], [1]])
    for given in (OK, TOKENS):
        assert "2 layer groups" in refusal(cc.save, **given)


def test_a_call_is_v0_or_v1_by_its_arguments(registered: ContextCaching) -> None:
    for args in (
        (CcKvOption(), ["k"], []),
        (None, ["k"], []),
        ("fast", ["k"], [[]]),
        (CcKvOption(),),
    ):
        text = refusal(registered.load, *args)
        assert "value_list" in text or "key_list" in text or "option is 'fast'" in text
    assert "value_list" in refusal(registered.load, key_list=["k"])
    for v1_args in (([0], [1]), ([0], [1], [4]), (None, [1], None, CcKvOption())):
        text = refusal(registered.load, *v1_args)
        assert "offsets" in text or "slot_mapping" in text
    assert "chunk_descs[0]" in refusal(registered.load, None, [1], None, chunk_descs=[5])


# ---- whatever is passed, only EmsException leaves ----

NUMBERS = st.one_of(
    st.lists(st.integers(-2, 70), max_size=6),
    st.lists(st.one_of(st.integers(), st.booleans(), st.floats(), st.builds(Strange)), max_size=4),
    ANYTHING,
)
PAIR = st.one_of(st.tuples(st.integers(-1, 66), st.integers(-1, 66)), ANYTHING)
DESCS = st.one_of(st.lists(st.lists(PAIR, max_size=3), max_size=2), ANYTHING)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "slot_mapping": NUMBERS,
        "hashes": NUMBERS,
        "offsets": NUMBERS,
        "token_ids": NUMBERS,
        "mask": NUMBERS,
        "chunk_descs": DESCS,
        "option": st.one_of(st.none(), st.builds(CcKvOption), ANYTHING),
    },
)
FUZZ = hypothesis.settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@FUZZ
@hypothesis.given(name=st.sampled_from([*CALLS, "exists"]), arguments=ARGUMENTS)
def test_only_ems_exceptions_leave_the_calls(
    registered: ContextCaching, name: str, arguments: dict[str, Any]
) -> None:
    try:
        outcome = getattr(registered, name)(**arguments)
        if isinstance(outcome, CcFuture):
            outcome = registered.get_result(outcome)
    except EmsException as error:
        assert isinstance(error.status_code(), EmsErrorCode)
        assert str(error)
    else:
        assert 0 <= outcome.success <= outcome.total


@FUZZ
@hypothesis.given(kvcache=ANYTHING, description=ANYTHING)
def test_only_ems_exceptions_leave_the_registration(
    registered: ContextCaching, cache: Cache, kvcache: Any, description: Any
) -> None:
    for first in (kvcache, cache.tensors):
        try:
            registered.register_kvcache(first, description)
        except EmsException as error:
            assert str(error)
    registered.register_kvcache(cache.tensors)
    registered.exists([1])


def test_a_refused_registration_leaves_the_old_one(
    registered: ContextCaching, cache: Cache
) -> None:
    refusal(registered.register_kvcache, [])
    assert registered.save(**whole(cache, [0], [1])).success == 1
