"""Memory of CUDA devices, through the driver (`libcuda.so.1`) found at run time.

Calls, constants and limits are those of https://docs.nvidia.com/cuda/cuda-driver-api/; see
`ems_native/csrc/cuda_api.h`. Work happens in the primary context of each device, which is the one
that torch uses. cuMemcpyBatchAsync is there from CUDA 12.8 on; before, each piece is a call. There
is no call that ends copies under way, so a load that was cancelled ends when its copies have.
"""

from __future__ import annotations

import sys

from ems.devices.base import Device, DeviceError, NoContextError
from ems.devices.streams import StreamDevice
from ems_native import _cuda

__all__ = ["candidates", "find_runtime", "make_device", "make_stream_device"]

LIBRARY = "libcuda.so.1"
SLICE_BYTES = 8 << 20
"""The CPU takes on one slice while the device brings the next."""

_cuda.set_fault_types(DeviceError, NoContextError)


def candidates() -> list[str]:
    """Return where the library may be, in the order in which it is looked for."""
    return [LIBRARY]


def find_runtime() -> _cuda.Runtime:
    """Open the library.

    Raises:
        OSError: there is none that can be loaded, or it lacks a call that is needed.
    """
    return _cuda.Runtime(LIBRARY)


def make_stream_device(runtime: _cuda.Runtime) -> StreamDevice:
    """Return the back end over an opened runtime."""
    return StreamDevice("cuda", runtime, "cuda", _current_stream, SLICE_BYTES)


def make_device() -> Device:
    """Return the back end.

    Raises:
        OSError: no driver that works.
        DeviceError: no device.
    """
    runtime = find_runtime()
    runtime.init()
    if not runtime.device_count():
        raise DeviceError("the CUDA driver is there, but no GPU; see `nvidia-smi`")
    return make_stream_device(runtime)


def _current_stream(device: int) -> int | None:
    torch = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return None
        return int(torch.cuda.current_stream(device).cuda_stream)
    except Exception as error:
        raise DeviceError(f"torch.cuda has no current stream: {error}") from error
