from __future__ import annotations

import copy
import pickle

import ems
import ems.common.exception
from ems import EmsErrorCode, EmsException
from ems.common.exception import internal_error, invalid_argument, io_error


def test_the_published_codes_and_the_alias() -> None:
    assert [code.name for code in EmsErrorCode] == [
        "EMS_INVALID_ARGUMENT",
        "EMS_IO_ERROR",
        "EMS_IO_TIMEOUT",
        "EMS_INTERNAL_ERROR",
        "EMS_RECOVERD_ERROR",
    ]
    assert EmsErrorCode.EMS_RECOVERED_ERROR is EmsErrorCode.EMS_RECOVERD_ERROR
    assert ems.common.exception.EmsErrorCode is ems.EmsErrorCode


def test_an_exception_says_code_and_text() -> None:
    error = EmsException(EmsErrorCode.EMS_IO_TIMEOUT, "500 ms passed")
    assert error.status_code() == EmsErrorCode.EMS_IO_TIMEOUT
    assert error.status_code().name == "EMS_IO_TIMEOUT"
    assert error.message() == "500 ms passed"
    assert str(error) == "[EMS_IO_TIMEOUT] 500 ms passed"


def test_an_exception_survives_pickle_and_copy() -> None:
    error = EmsException(EmsErrorCode.EMS_IO_ERROR, "gone")
    for twin in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(twin) is EmsException
        assert (twin.status_code(), twin.message()) == (error.status_code(), error.message())


def test_each_helper_gives_its_code() -> None:
    assert invalid_argument("x").status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
    assert io_error("x").status_code() is EmsErrorCode.EMS_IO_ERROR
    assert internal_error("x").status_code() is EmsErrorCode.EMS_INTERNAL_ERROR
