from __future__ import annotations

from typing import Any

import pytest

from ems import CcKvOption, EmsErrorCode, EmsException
from ems.common.option import check_option


def test_the_documented_defaults() -> None:
    assert CcKvOption() == CcKvOption(write_rcache=True, read_local_only=False, timeout=5000)


def test_none_means_the_defaults_and_zero_the_default_timeout() -> None:
    assert check_option(None) == CcKvOption()
    assert check_option(CcKvOption(timeout=0)).timeout == 5000


def test_the_checked_option_is_a_private_copy() -> None:
    option = CcKvOption(timeout=7)
    checked = check_option(option)
    option.timeout = -1
    assert checked == CcKvOption(timeout=7)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (CcKvOption(timeout=-1), "option.timeout is -1; it must be from 0 to"),
        (
            CcKvOption(timeout=2**31),
            "option.timeout is 2147483648; it must be from 0 to 2147483647",
        ),
        (CcKvOption(timeout=True), "option.timeout is True, a bool"),
        (CcKvOption(timeout=1.5), "option.timeout is 1.5 of type float"),  # type: ignore[arg-type]
        (CcKvOption(timeout=None), "option.timeout is None"),  # type: ignore[arg-type]
        (CcKvOption(write_rcache=1), "option.write_rcache is 1"),  # type: ignore[arg-type]
        (CcKvOption(read_local_only="0"), "option.read_local_only is '0'"),  # type: ignore[arg-type]
        ({"timeout": 5}, "option is {'timeout': 5} of type dict; give a CcKvOption"),
    ],
)
def test_a_wrong_option_is_named(option: Any, text: str) -> None:
    with pytest.raises(EmsException) as caught:
        check_option(option)
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
    assert text in caught.value.message()


def test_a_value_without_a_usable_repr_is_named_too() -> None:
    class Nasty:
        def __repr__(self) -> str:
            raise RuntimeError("no")

        def __index__(self) -> int:
            raise KeyError("no")

    with pytest.raises(EmsException, match="Nasty without a usable repr"):
        check_option(CcKvOption(timeout=Nasty()))  # type: ignore[arg-type]
