"""Whatever is passed: it is taken, or `EMS_INVALID_ARGUMENT` says what is wrong, nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ems import CcConfig, CcConfig_v1, CcKvOption, EmsConfig, EmsErrorCode, EmsException, PrimaryKey
from ems.common.config import check_config
from ems.common.key import KeySpace
from ems.common.option import check_option
from ems.common.size import format_size, parse_size


class Hostile:
    """Raises whatever is asked of it."""

    def _fail(self, *_: object) -> Any:
        raise ZeroDivisionError

    __repr__ = __str__ = __len__ = __iter__ = __bool__ = __fspath__ = __index__ = _fail
    __eq__ = __lt__ = _fail
    __hash__ = None  # type: ignore[assignment]


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(exclude_categories=[])),
    st.binary(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.builds(Hostile),
    st.just(len),
)
cc = st.one_of(
    anything,
    st.builds(CcConfig, anything, anything, anything, anything, anything),
    st.builds(CcConfig_v1, *[anything] * 9),
)
keys = st.one_of(anything, st.builds(PrimaryKey, anything, anything))


@contextlib.contextmanager
def only_invalid_argument() -> Iterator[None]:
    try:
        yield
    except EmsException as error:
        assert error.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
        assert error.message()


@given(st.one_of(anything, st.builds(EmsConfig, cc, cc, *[anything] * 4)))
def test_configurations(config: Any) -> None:
    with only_invalid_argument():
        check_config(config)


@given(st.one_of(anything, st.builds(CcKvOption, anything, anything, anything)))
def test_options(option: Any) -> None:
    with only_invalid_argument():
        check_option(option)


@given(st.one_of(anything, st.lists(keys, max_size=4)))
def test_keys(key_list: Any) -> None:
    with only_invalid_argument():
        digests = KeySpace.v0("t", "m").digests(key_list)
        assert len(digests) == 16 * len(key_list)


@given(st.one_of(anything, st.from_regex(r"\A\d{1,4}(\.\d{1,3})? ?([KMGT](i?B)?)?\Z")))
def test_sizes(text: Any) -> None:
    with only_invalid_argument():
        assert format_size(parse_size(text))
