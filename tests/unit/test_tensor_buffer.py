"""`KvBufferWrapper.from_tensor`, and the same keys described as they lie in staging memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from npu_bench import FakeTensor

from ems import EmsErrorCode, EmsException, KvBufferWrapper
from ems_native._copy import Spans


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(EmsException) as caught:
        call()
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
    return caught.value.message()


def test_a_tensor_is_wrapped_and_kept() -> None:
    tensor = FakeTensor(4096, 96)
    wrapper = KvBufferWrapper.from_tensor(tensor)
    assert (wrapper.data_ptr, wrapper.length, wrapper.device) == (4096, 96, "npu:1")
    there = weakref.ref(tensor)
    spans = Spans.from_buffers([[wrapper]])
    del tensor, wrapper
    gc.collect()
    assert there() is not None
    assert spans.foreign
    assert spans.first_foreign() == (0, 0, "npu:1")
    del spans
    gc.collect()
    assert there() is None


def test_real_tensors() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(3, 4, dtype=torch.float16)
    wrapper = KvBufferWrapper.from_tensor(tensor)
    assert (wrapper.data_ptr, wrapper.length, wrapper.device) == (tensor.data_ptr(), 24, None)
    assert not Spans.from_buffers([[wrapper]]).foreign
    assert KvBufferWrapper.from_tensor(tensor[1]).data_ptr == tensor.data_ptr() + 8
    assert "not contiguous" in refused(lambda: KvBufferWrapper.from_tensor(tensor.t()))
    assert "empty" in refused(lambda: KvBufferWrapper.from_tensor(torch.zeros(0)))
    meta = torch.zeros(3, device="meta")
    assert "data_ptr()" in refused(lambda: KvBufferWrapper.from_tensor(meta))
    sparse = torch.zeros(3).to_sparse()
    refused(lambda: KvBufferWrapper.from_tensor(sparse))
    bound = KvBufferWrapper(tensor.data_ptr, 24)
    assert bound.device is None


@pytest.mark.parametrize("thing", [None, 5, "x", b"abc", object(), len])
def test_what_is_no_tensor(thing: object) -> None:
    assert "must be a torch.Tensor" in refused(lambda: KvBufferWrapper.from_tensor(thing))


def test_staged_keys() -> None:
    buffers = [[KvBufferWrapper(1 << 20, n), KvBufferWrapper(1 << 21, 10)] for n in (6, 54, 55, 1)]
    spans = Spans.from_buffers(buffers)
    staged = spans.staged(1, 3, 1 << 30)
    assert [staged.pieces_of(k) for k in (1, 2, 3)] == [
        [(1 << 30, 64)],
        [((1 << 30) + 64, 65)],
        [((1 << 30) + 192, 11)],
    ]
    masked = spans.staged(0, 4, 4096, b"\1\0\0\1")
    assert masked.pieces_of(0) == [(4096, 16)]
    assert masked.pieces_of(3) == [(4096 + 64, 11)]
    assert masked.lengths == spans.lengths
    for first, count, mask in ((0, 5, None), (-1, 2, None), (0, 4, b"\1")):
        with pytest.raises(ValueError):
            spans.staged(first, count, 4096, mask)


def test_where_a_piece_is() -> None:
    spans = Spans.from_buffers([[KvBufferWrapper(4096, 1)] * n for n in (2, 1, 3)])
    assert [spans.where(n) for n in range(6)] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    for n in (-1, 6):
        with pytest.raises(IndexError):
            spans.where(n)


def test_a_wrapper_in_a_cycle_ends_its_export(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(200):
        view = memoryview(bytearray(10))
        cycle: list[object] = [view, KvBufferWrapper.from_buffer(view), view[2:]]
        cycle.append(cycle)
        del cycle, view
    gc.collect()
    assert capfd.readouterr().err == ""
