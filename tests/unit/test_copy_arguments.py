"""What a buffer and a batch of buffers may be, and what the refusals say."""

from __future__ import annotations

import array
import copy
import gc
import mmap
import os
import pickle
import subprocess
import sys
import weakref
from typing import Any, Callable

import pytest

from ems.common.exception import EmsException
from ems.testing.child import child_environment
from ems_native._copy import KvBufferWrapper, Spans


def refused(call: Callable[[], Any]) -> str:
    """The text of a refusal: a ValueError, or an EmsException once `ems` has set its factory."""
    with pytest.raises((ValueError, EmsException)) as caught:
        call()
    error = caught.value
    return error.message() if isinstance(error, EmsException) else str(error)


class Tensor:
    """As much of a torch tensor as matters here."""

    def __init__(self, address: Any = 4096) -> None:
        self.address = address

    def data_ptr(self) -> Any:
        if isinstance(self.address, Exception):
            raise self.address
        return self.address


def test_an_address_and_a_length() -> None:
    wrapper = KvBufferWrapper(4096, 10)
    assert (wrapper.data_ptr, wrapper.length, wrapper.readonly) == (4096, 10, False)
    assert repr(wrapper) == "KvBufferWrapper(data_ptr=0x1000, length=10)"
    wrapper = KvBufferWrapper(length=2**62, data_ptr=1)
    assert (wrapper.data_ptr, wrapper.length) == (1, 2**62)


def test_the_bound_method_is_called_and_its_tensor_kept() -> None:
    tensor = Tensor()
    wrapper = KvBufferWrapper(tensor.data_ptr, 10)
    assert wrapper.data_ptr == 4096
    there = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert there() is not None
    spans = Spans.from_buffers([[wrapper]])
    del wrapper
    gc.collect()
    assert there() is not None
    del spans
    gc.collect()
    assert there() is None


@pytest.mark.parametrize(
    ("data_ptr", "length", "text"),
    [
        (0, 1, "data_ptr is 0, must be above 0"),
        (-1, 1, "data_ptr is -1, must be above 0"),
        (-(2**200), 1, "data_ptr is negative, must be above 0"),
        (2**63, 1, "data_ptr has 64 bits, the limit is 2**63 - 1"),
        pytest.param(10**5000, 1, "data_ptr has 16610 bits, the limit is 2**63 - 1", id="huge"),
        (True, 1, "data_ptr is True of type bool, must be an int"),
        (None, 1, "data_ptr is None, must be an int"),
        ("4096", 1, "data_ptr is '4096' of type str, must be an int"),
        (4096.0, 1, "data_ptr is 4096.0 of type float, must be an int"),
        (1, 0, "length is 0, must be above 0"),
        (1, -5, "length is -5, must be above 0"),
        (1, False, "length is False of type bool, must be an int"),
        (1, 1.5, "length is 1.5 of type float, must be an int"),
        (1, len, "length is the builtin function len itself, pass a number of bytes"),
        (len, 1, "data_ptr is the builtin function len itself, pass a number of bytes"),
        (1, Tensor().data_ptr, "length is of type method, pass the int that it returns: call it"),
        (Tensor("x").data_ptr, 1, "data_ptr() is 'x' of type str, must be an int"),
        (Tensor(0).data_ptr, 1, "data_ptr() is 0, must be above 0"),
        (Tensor(OSError()).data_ptr, 1, "data_ptr() failed with OSError"),
        (2**63 - 10, 11, "data_ptr 0x7ffffffffffffff6 plus length 11 is beyond 2**63"),
    ],
)
def test_a_bad_argument_is_named(data_ptr: Any, length: Any, text: str) -> None:
    assert refused(lambda: KvBufferWrapper(data_ptr, length)) == text


def test_arguments_that_do_not_fit_the_signature() -> None:
    wrapper: Any = KvBufferWrapper
    two = "KvBufferWrapper takes two arguments, data_ptr and length"
    assert refused(lambda: wrapper()) == two
    assert refused(lambda: wrapper(1)) == two
    assert refused(lambda: wrapper(1, 2, 3)) == two
    assert refused(lambda: wrapper(1, 2, size=3)) == two
    assert refused(lambda: wrapper(length=1)) == two
    for call in (wrapper.from_buffer, wrapper.from_tensor):
        for arguments in ((), (b"a", b"b")):
            text = refused(lambda call=call, arguments=arguments: call(*arguments))
            assert f"{call.__name__} takes one argument" in text


def test_a_wrapper_does_not_change_or_travel() -> None:
    wrapper = KvBufferWrapper(4096, 10)
    assert "cannot be changed" in refused(lambda: wrapper.__init__(1, 1))  # type: ignore[misc]
    with pytest.raises(AttributeError):
        wrapper.length = 5  # type: ignore[misc]
    for travel in (pickle.dumps, copy.copy):
        assert "cannot be pickled or copied" in refused(lambda travel=travel: travel(wrapper))


def test_from_buffer_takes_what_has_a_buffer() -> None:
    with mmap.mmap(-1, 100) as mapped:
        for obj, nbytes, readonly in [
            (b"abc", 3, True),
            (bytearray(5), 5, False),
            (array.array("d", [1, 2]), 16, False),
            (memoryview(bytearray(12)).cast("B", (3, 4)), 12, False),
            (memoryview(b"abcd").toreadonly(), 4, True),
            (mapped, 100, False),
        ]:
            wrapper = KvBufferWrapper.from_buffer(obj)
            assert (wrapper.length, wrapper.readonly) == (nbytes, readonly)
        del wrapper, obj


def test_from_buffer_holds_the_buffer() -> None:
    data = bytearray(b"abc")
    wrapper = KvBufferWrapper.from_buffer(data)
    with pytest.raises(BufferError):
        data.append(1)
    del wrapper
    data.append(1)


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        (5, "obj is of type int, must give a contiguous buffer"),
        (None, "obj is None, must give a contiguous buffer"),
        ("abc", "obj is 'abc' of type str, must give a contiguous buffer"),
        (b"", "obj is an empty buffer (b'' of type bytes), must have at least one byte"),
        (memoryview(b"abcd")[::2], "obj is of type memoryview, must give a contiguous buffer"),
    ],
)
def test_from_buffer_refuses(obj: Any, text: str) -> None:
    assert refused(lambda: KvBufferWrapper.from_buffer(obj)).startswith(text)


def test_a_batch_is_described() -> None:
    wrappers = [KvBufferWrapper(4096 * k, k) for k in range(1, 7)]
    spans = Spans.from_buffers([wrappers[:1], wrappers[1:3], tuple(wrappers[3:])])
    assert (spans.nkeys, spans.npieces, spans.nbytes, spans.readonly) == (3, 6, 21, False)
    assert list(memoryview(spans.lengths).cast("Q")) == [1, 5, 15]
    assert [spans.length_of(k) for k in range(3)] == [1, 5, 15]
    assert spans.pieces_of(1) == [(8192, 2), (12288, 3)]
    assert spans.first_readonly() is None
    for k in (-1, 3):
        with pytest.raises(IndexError):
            spans.length_of(k)
    assert Spans.from_buffers([]).nkeys == 0
    for call in (Spans, lambda: pickle.dumps(spans)):
        with pytest.raises(TypeError):
            call()


def test_the_first_read_only_piece_is_named() -> None:
    writable, constant = KvBufferWrapper(4096, 1), KvBufferWrapper.from_buffer(b"x")
    spans = Spans.from_buffers([[writable], [writable, writable, constant], [constant]])
    assert spans.readonly
    assert spans.first_readonly() == (1, 2)


GOOD = KvBufferWrapper(4096, 1)


@pytest.mark.parametrize(
    ("value_list", "text"),
    [
        (None, "value_list is None, must be a list of lists of KvBufferWrapper"),
        ({"a": [GOOD]}, "value_list is of type dict, must be a list of lists of KvBufferWrapper"),
        ([[GOOD], GOOD], "value_list[1] is of type KvBufferWrapper, must be a list of"),
        ([[GOOD], []], "value_list[1] is empty, must have at least one KvBufferWrapper"),
        ([[GOOD, (4096, 1)]], "value_list[0][1] is of type tuple, must be a KvBufferWrapper"),
        ([[GOOD], [GOOD, None]], "value_list[1][1] is None, must be a KvBufferWrapper"),
        (
            [[KvBufferWrapper.__new__(KvBufferWrapper)]],
            "value_list[0][0] was never initialised: call KvBufferWrapper.__init__",
        ),
        ([[KvBufferWrapper(1, 2**62)] * 2], "value_list[0] is 2**63 bytes or longer"),
        ([[KvBufferWrapper(1, 2**62)]] * 2, "value_list[:2] is 2**63 bytes or longer"),
    ],
)
def test_a_bad_batch_is_named(value_list: Any, text: str) -> None:
    assert refused(lambda: Spans.from_buffers(value_list)).startswith(text)


def test_a_forced_implementation_that_does_not_exist_is_an_error() -> None:
    command = [sys.executable, "-c", "import ems_native._copy as c; print(c.implementation())"]

    def run(name: str) -> subprocess.CompletedProcess[str]:
        environment = {**child_environment(), "EMS_COPY_IMPL": name}
        return subprocess.run(
            command, env=environment, cwd=os.sep, capture_output=True, text=True, check=False
        )

    assert run("portable").stdout.strip() == "portable"
    failed = run("abacus")
    assert failed.returncode == 1
    assert "EMS_COPY_IMPL: copy implementation 'abacus' does not exist" in failed.stderr
