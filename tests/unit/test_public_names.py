from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import ems
from ems import EmsErrorCode, EmsException, KvBufferWrapper

PUBLISHED = [
    "CcConfig", "CcConfig_v1", "CcFuture", "CcKvOption", "CcResult", "ContextCache_v1",
    "ContextCaching", "Ems", "EmsConfig", "EmsErrorCode", "EmsException", "KVCacheType",
    "KvBufferWrapper", "PrimaryKey",
]  # fmt: skip


def test_every_published_name_is_there() -> None:
    assert set(PUBLISHED) <= set(ems.__all__)
    for name in ems.__all__:
        assert getattr(ems, name) is not None


def test_homes_that_clients_import_from() -> None:
    import ems.cc_v1.cc_config as cc_config
    import ems.common.exception as exception

    assert exception.EmsException is ems.EmsException
    assert exception.EmsErrorCode is ems.EmsErrorCode
    assert cc_config.CcConfig_v1 is ems.CcConfig_v1
    assert cc_config.KVCacheType is ems.KVCacheType
    assert ems.ContextCache_v1 is ems.ContextCaching


def test_an_import_is_cheap() -> None:
    code = (
        "import json, sys, ems, ems.cc_v1.cc_config;"
        "names = ['torch', 'torch_npu', 'grpclib', 'betterproto', 'numpy', 'click', 'rich'];"
        "names += ['ems.testing', 'ems.client.client', 'ems.server'];"
        "print(json.dumps([name for name in names if name in sys.modules]));"
        "assert ems.testing.LocalPool"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout) == []


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'ems' has no attribute 'nothing'"):
        ems.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_a_buffer_takes_the_bound_method_of_a_tensor() -> None:
    class Tensor:
        calls = 0

        def data_ptr(self) -> int:
            self.calls += 1
            return 4096

    tensor = Tensor()
    wrapper = KvBufferWrapper(tensor.data_ptr, 64)
    assert (wrapper.data_ptr, wrapper.length, tensor.calls) == (4096, 64, 1)


@pytest.mark.parametrize(
    ("data_ptr", "length", "word"),
    [
        (4096, len, "length"),
        (4096, 0, "length"),
        (4096, True, "length"),
        (0, 64, "data_ptr"),
        (-1, 64, "data_ptr"),
        (2**63, 64, "data_ptr"),
        ("x", 64, "data_ptr"),
        (lambda: None, 64, "data_ptr"),
        (lambda: 1 // 0, 64, "data_ptr"),
    ],
)
def test_a_wrong_buffer_raises_what_clients_catch(data_ptr: Any, length: Any, word: str) -> None:
    with pytest.raises(EmsException, match=word) as caught:
        KvBufferWrapper(data_ptr, length)
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
