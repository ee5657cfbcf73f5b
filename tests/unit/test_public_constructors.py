"""A constructor called wrongly raises what every public call raises, and says what was wrong."""

from __future__ import annotations

from typing import Any

import pytest

from ems import CcConfig, CcConfig_v1, CcKvOption, EmsConfig, EmsErrorCode, EmsException, PrimaryKey


@pytest.mark.parametrize(
    ("cls", "arguments", "named", "words"),
    [
        (CcConfig, (), {}, "rank_id"),
        (CcConfig, (0, 0), {}, "model_id"),
        (CcConfig_v1, (), {"rank_id": 0}, "device_id"),
        (EmsConfig, (), {"rooot": "/"}, "rooot"),
        (CcKvOption, (True, True, 1, 1), {}, "positional arguments"),
        (PrimaryKey, ("a",), {}, "attribute_key"),
    ],
)
def test_wrong_arguments_are_invalid_arguments(
    cls: Any, arguments: tuple[object, ...], named: dict[str, object], words: str
) -> None:
    with pytest.raises(EmsException, match=words) as caught:
        cls(*arguments, **named)
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
