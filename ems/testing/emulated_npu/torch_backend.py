"""A minimal torch backend over the emulated NPU: PyTorch's PrivateUse1, renamed `npu`.

Enough of it that tensors live on `npu:N`, have addresses there, are filled, viewed and copied, and
that there are current streams. No arithmetic.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from ems.testing.emulated_npu import EmulatedNpu

__all__ = ["Stream", "current_stream", "install", "npu_module"]

_EXTENSION_DEVICE = 12
"""kDLExtDev: torch takes it for PrivateUse1."""

torch: Any = importlib.import_module("torch")
_npu = EmulatedNpu()
_thread = threading.local()


class _DLTensor(ctypes.Structure):
    """DLTensor of https://dmlc.github.io/dlpack/latest/c_api.html ."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Allocation:
    """Memory of a device, freed with the last tensor that lies in it."""

    def __init__(self, device: int, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self.address = _npu.allocate(device, max(1, nbytes))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the interpreter, or never allocated
            _npu.free(self.address)


_allocations: weakref.WeakValueDictionary[int, _Allocation] = weakref.WeakValueDictionary()
_tensors: dict[int, tuple[object, ...]] = {}


def _forget(managed: int) -> None:
    if _tensors is not None:  # the interpreter still stands
        _tensors.pop(managed, None)


_delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_forget)
# Tensors outlive modules, and their end calls this.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_delete))
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _type_code(dtype: Any) -> int:
    if dtype is torch.bfloat16:
        return 4
    if dtype is torch.bool:
        return 6
    if dtype.is_complex:
        return 5
    if dtype.is_floating_point:
        return 2
    return 0 if dtype.is_signed else 1


def _tensor(
    owner: _Allocation, address: int, size: Sequence[int], stride: Sequence[int], dtype: Any
) -> Any:
    ndim = len(size)
    shape, strides = (ctypes.c_int64 * ndim)(*size), (ctypes.c_int64 * ndim)(*stride)
    managed = _DLManagedTensor(
        _DLTensor(
            address,
            _EXTENSION_DEVICE,
            owner.device,
            ndim,
            _type_code(dtype),
            8 * dtype.itemsize,
            1,
            shape,
            strides,
            0,
        ),
        None,
        ctypes.cast(_delete, ctypes.c_void_p),
    )
    where = ctypes.addressof(managed)
    _tensors[where] = (managed, shape, strides, owner)
    return torch._C._from_dlpack(_new_capsule(where, b"dltensor", None))


def _dense(size: Sequence[int]) -> list[int]:
    tails = list(itertools.accumulate(reversed(size), lambda a, b: a * max(1, b), initial=1))
    return tails[-2::-1] if size else []


# ---- operators ----


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    dtype = dtype or torch.get_default_dtype()
    index = _device_index(device)
    span = 1 + sum((n - 1) * step for n, step in zip(size, stride)) if all(size) else 0
    owner = _Allocation(index, span * dtype.itemsize)
    _allocations[owner.address] = owner
    return _tensor(owner, owner.address, size, stride, dtype)


def _empty(
    size: Sequence[int],
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Any:
    return _empty_strided(size, _dense(size), dtype, layout, device)


def _as_strided(
    tensor: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    itemsize = tensor.dtype.itemsize
    base = tensor.data_ptr() - tensor.storage_offset() * itemsize
    offset = tensor.storage_offset() if storage_offset is None else storage_offset
    owner = next(
        one for one in _allocations.values() if 0 <= base - one.address < max(1, one.nbytes)
    )
    return _tensor(owner, base + offset * itemsize, size, stride, tensor.dtype)


def _view(tensor: Any, size: Sequence[int]) -> Any:
    size = list(size)
    if -1 in size:
        known = 1
        for n in size:
            known *= n if n != -1 else 1
        size[size.index(-1)] = tensor.numel() // max(1, known)
    if not tensor.is_contiguous():
        raise RuntimeError("the emulated NPU views contiguous tensors only")
    return _as_strided(tensor, size, _dense(size))


def _fill(tensor: Any, value: Any) -> Any:
    _put(tensor, torch.full(tuple(tensor.shape), value, dtype=tensor.dtype))
    return tensor


def _zero(tensor: Any) -> Any:
    return _fill(tensor, 0)


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    if source.device.type == "npu":
        host = torch.empty(tuple(source.shape), dtype=source.dtype)
        _get(source, host)
        if target.device.type == "npu":
            _put(target, host.to(target.dtype))
        else:
            target.copy_(host)
    else:
        _put(target, source.detach().to(target.dtype).expand(tuple(target.shape)))
    return target


def _put(target: Any, host: Any) -> None:
    if not target.numel():
        return
    _check_contiguous(target)
    host = host.contiguous()
    data = ctypes.string_at(host.data_ptr(), host.numel() * host.element_size())
    with _on(target.device.index):
        stream = current_stream(target.device.index)
        _npu.copy_to_device(target.data_ptr(), data, stream.npu_stream)


def _get(source: Any, host: Any) -> None:
    if not source.numel():
        return
    _check_contiguous(source)
    nbytes = source.numel() * source.element_size()
    with _on(source.device.index):
        stream = current_stream(source.device.index)
        data = _npu.copy_to_host(source.data_ptr(), nbytes, stream.npu_stream)
    ctypes.memmove(host.data_ptr(), data, nbytes)


def _check_contiguous(tensor: Any) -> None:
    if not tensor.is_contiguous():
        raise RuntimeError("the emulated NPU copies contiguous tensors only")


# ---- devices and streams: torch.npu ----


@contextlib.contextmanager
def _on(device: int) -> Iterator[None]:
    before = _npu.device()
    if before != device:
        _npu.set_device(device)
    try:
        yield
    finally:
        if before not in (device, -1):
            _npu.set_device(before)


def _device_index(device: Any = None) -> int:
    if device is None or (isinstance(device, str) and device == "npu"):
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else int(index)


def current_device() -> int:
    """Return the device of this thread, 0 if none was set."""
    return max(0, _npu.device())


def set_device(device: Any) -> None:
    """Make a device current in this thread."""
    _npu.set_device(_device_index(device))


class Stream:
    """A stream of a device; `npu_stream` is its handle.

    Args:
        device: None for the current one.
        handle: of a stream that exists.
    """

    def __init__(self, device: Any = None, *, handle: int = 0) -> None:
        self.device_index = _device_index(device)
        with _on(self.device_index):
            self.npu_stream = handle or _npu.create_stream()

    def synchronize(self) -> None:
        """Wait until it has done everything."""
        with _on(self.device_index):
            _npu.synchronize(self.npu_stream)


def default_stream(device: Any = None) -> Stream:
    """Return the stream of those who choose none."""
    index = _device_index(device)
    with _on(index):
        return Stream(index, handle=_npu.default_stream())


def _streams() -> dict[int, Stream]:
    if not hasattr(_thread, "streams"):
        _thread.streams = {}
    streams: dict[int, Stream] = _thread.streams
    return streams


def current_stream(device: Any = None) -> Stream:
    """Return the stream that this thread works on."""
    index = _device_index(device)
    return _streams().get(index) or default_stream(index)


@contextlib.contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    """Work on a stream (`torch.npu.stream`)."""
    streams = _streams()
    before = streams.get(stream.device_index)
    streams[stream.device_index] = stream
    try:
        yield
    finally:
        if before is None:
            del streams[stream.device_index]
        else:
            streams[stream.device_index] = before


def synchronize(device: Any = None) -> None:
    """Wait for the current stream of a device."""
    current_stream(device).synchronize()


def npu_module() -> types.ModuleType:
    """Return what `torch.npu` is."""
    module = types.ModuleType("torch_npu.npu", "Stand-in for torch_npu.npu.")
    module.__dict__.update(
        Stream=Stream,
        current_device=current_device,
        current_stream=current_stream,
        default_stream=default_stream,
        device_count=lambda: 8,
        is_available=lambda: True,
        is_initialized=lambda: True,
        set_device=set_device,
        stream=use_stream,
        synchronize=synchronize,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
    )
    return module


_library: Any = None


def install() -> types.ModuleType:
    """Give torch the device type `npu`; return `torch.npu`. Once in a process."""
    global _library
    backend = importlib.import_module("torch.utils.backend_registration")
    module = npu_module()
    backend._setup_privateuseone_for_python_backend("npu", module)
    _library = torch.library.Library("aten", "IMPL")
    for name, kernel in (
        ("empty.memory_format", _empty),
        ("empty_strided", _empty_strided),
        ("as_strided", _as_strided),
        ("view", _view),
        ("fill_.Scalar", _fill),
        ("zero_", _zero),
        ("_copy_from", _copy_from),
    ):
        _library.impl(name, kernel, "PrivateUse1")
    return module
