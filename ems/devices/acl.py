"""Memory of Ascend NPUs, through the Ascend runtime (`libascendcl.so` of CANN) found at run time.

Calls, constants and limits are those of the vendor's public API reference;
`ems_native/csrc/acl_api.h` names a page for each. What matters most here:

- aclrtMemcpyBatchAsync (page aclcppdevg_03_1957): A2, A3 and 350 only, from CANN 8.3, "for trial
  use". Without it each piece is a call of aclrtMemcpyAsync (page aclcppdevg_03_0106).
- Both are asynchronous only where the host memory is page-locked: aclrtMallocHost (staging), or
  aclrtHostRegisterV2 with ACL_HOST_REG_PINNED (the pool; page aclcppdevg_03_2128, CANN 8.5). After
  aclrtHostRegister (page aclcppdevg_03_1804) or without either, a call returns when its copy has
  ended.
- aclrtPointerGetAttributes (page aclcppdevg_03_1803) tells the device of an address. A runtime
  without it leaves the device of the tensor: give tensors to it (`KvBufferWrapper.from_tensor`).
- aclrtStreamAbort (page aclcppdevg_03_1777) ends a load that was cancelled or ran out of time;
  without it the load ends when its copies have.
- Older editions of page 0106 ask for addresses on 64 bytes. Extents of the pool and the staging
  memory are; whether the caller's pieces are, is for him to see.
"""

from __future__ import annotations

import os
import sys

from ems.devices.base import Device, DeviceError, NoContextError
from ems.devices.streams import StreamDevice
from ems_native import _acl

__all__ = ["candidates", "find_runtime", "make_device", "make_stream_device"]

LIBRARY = "libascendcl.so"
_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
"""Where CANN's `set_env.sh` says it is."""
SLICE_BYTES = 64 << 20
"""One submission for a batch of the usual size: calls are what a batch costs."""

_acl.set_fault_types(DeviceError, NoContextError)


def candidates() -> list[str]:
    """Return where the library may be, in the order in which it is looked for."""
    homes = [os.environ.get(name) for name in _HOMES]
    return [LIBRARY, *(os.path.join(home, "lib64", LIBRARY) for home in homes if home)]


def find_runtime() -> _acl.Runtime:
    """Open the library.

    Raises:
        OSError: there is none that can be loaded, or it lacks a call that is needed.
    """
    failure: OSError | None = None
    for path in candidates():
        try:
            return _acl.Runtime(path)
        except OSError as error:
            # A library that was found and does not work says more than one that was not found.
            if failure is None or "No such file" in str(failure):
                failure = error
    assert failure is not None
    raise failure


def make_stream_device(runtime: _acl.Runtime) -> StreamDevice:
    """Return the back end over an opened runtime."""
    return StreamDevice("acl", runtime, "npu", _current_stream, SLICE_BYTES)


def make_device() -> Device:
    """Return the back end.

    Raises:
        OSError: no runtime that works.
        DeviceError: no device.
    """
    runtime = find_runtime()
    runtime.init()
    if not runtime.device_count():
        raise DeviceError("the Ascend runtime is there, but no NPU; see `npu-smi info`")
    return make_stream_device(runtime)


def _current_stream(device: int) -> int | None:
    torch_npu = sys.modules.get("torch_npu")
    if torch_npu is None:
        return None
    try:
        # The property waits until torch_npu's own queue has put everything on the stream.
        return int(torch_npu.npu.current_stream(device).npu_stream)
    except Exception as error:
        raise DeviceError(f"torch_npu has no current stream: {error}") from error
