"""An emulated NPU: a test double of the hardware, for tests and for people without one.

A C library with the calls of the Ascend runtime that EMS uses, built on the spot by the C compiler.
EMS does not know that it is emulated: `libascendcl.so` is found and called as the real one is. With
`site_folder()` in PYTHONPATH there is a `torch_npu` too, so that programs written for NPUs run.

    folder = build(tmp_path)                  # LD_LIBRARY_PATH=folder for other processes
    npu = EmulatedNpu(os.path.join(folder, LIBRARY))
    address = npu.allocate(1, 4096)           # nobody but the runtime can touch what lies there
    npu.set("copy_delay_us", 1000)            # see control.c for everything that can be set
"""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
import subprocess
from collections.abc import Iterable

from ems.common.exception import internal_error

__all__ = ["LIBRARY", "EmulatedNpu", "build", "find_compiler", "site_folder"]

LIBRARY = "libascendcl.so"
_HERE = os.path.dirname(os.path.abspath(__file__))


def find_compiler() -> str | None:
    """Return the C compiler, None if there is none."""
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")


def site_folder() -> str:
    """Return the folder that makes `import torch_npu` find the stand-in."""
    return os.path.join(_HERE, "site")


def build(folder: str | os.PathLike[str], without: Iterable[str] = ()) -> str:
    """Build the library into a folder and return the folder.

    Args:
        folder: must exist.
        without: names of calls that the library is to lack, as older runtimes do.

    Raises:
        EmsException: `EMS_INTERNAL_ERROR`: no compiler, or it failed.
    """
    compiler = find_compiler()
    if compiler is None:
        raise internal_error("the emulated NPU needs a C compiler: cc, gcc, or what CC names")
    renamed = [f"-D{name}=emulated_npu_lacks_{name}" for name in without]
    target = os.path.join(os.fspath(folder), LIBRARY)
    command = [compiler, "-std=gnu11", "-O1", "-g", "-shared", "-fPIC", "-pthread", *renamed]
    command += ["-o", target, *sorted(glob.glob(os.path.join(_HERE, "*.c")))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise internal_error(f"the emulated NPU cannot be built: {done.stderr[-2000:]}")
    return os.fspath(folder)


class EmulatedNpu:
    """The library from the outside: device memory, and what tests turn and count.

    Args:
        path: of the library; the same one that EMS opens.
    """

    def __init__(self, path: str = LIBRARY) -> None:
        self._library = library = ctypes.CDLL(path)
        library.emulated_npu_count.restype = ctypes.c_uint64
        library.aclInit(None)

    def set(self, name: str, value: object) -> None:
        """Turn a setting; see `control.c`."""
        self._library.emulated_npu_set(name.encode(), str(value).encode())

    def count(self, name: str = "calls") -> int:
        """Return a counter: a call by its name, `calls`, `copies`, `bytes_to_host`, ..."""
        return int(self._library.emulated_npu_count(name.encode()))

    def reset_counts(self) -> None:
        """Begin all counters at 0."""
        self._library.emulated_npu_reset_counts()

    def set_device(self, device: int) -> None:
        """Make a device current in this thread."""
        self._check(self._library.aclrtSetDevice(device))

    def device(self) -> int:
        """Return the current device of this thread, -1 if it has none."""
        device = ctypes.c_int32(-1)
        self._library.aclrtGetDevice(ctypes.byref(device))
        return device.value

    def allocate(self, device: int, nbytes: int) -> int:
        """Return the address of new memory of a device, which becomes the current one."""
        self.set_device(device)
        address = ctypes.c_void_p()
        self._check(self._library.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes), 0))
        assert address.value is not None
        return address.value

    def free(self, address: int) -> None:
        """Free memory of a device."""
        self._check(self._library.aclrtFree(ctypes.c_void_p(address)))

    def read(self, address: int, nbytes: int) -> bytes:
        """Return what lies in device memory now, past all streams."""
        target = ctypes.create_string_buffer(nbytes)
        self._move(address, target, nbytes, 1)
        return target.raw

    def write(self, address: int, data: bytes) -> None:
        """Write to device memory now, past all streams."""
        self._move(address, ctypes.create_string_buffer(data, len(data)), len(data), 0)

    def create_stream(self) -> int:
        """Return a new stream of the current device."""
        stream = ctypes.c_void_p()
        self._check(self._library.aclrtCreateStream(ctypes.byref(stream)))
        assert stream.value is not None
        return stream.value

    def destroy_stream(self, stream: int) -> None:
        """Give a stream back."""
        self._check(self._library.aclrtDestroyStream(ctypes.c_void_p(stream)))

    def default_stream(self) -> int:
        """Return the default stream of the current device."""
        stream = ctypes.c_void_p()
        self._check(self._library.aclrtCtxGetCurrentDefaultStream(ctypes.byref(stream)))
        assert stream.value is not None
        return stream.value

    def synchronize(self, stream: int = 0) -> None:
        """Wait for a stream."""
        self._check(self._library.aclrtSynchronizeStream(ctypes.c_void_p(stream)))

    def copy_to_device(self, address: int, data: bytes, stream: int = 0) -> None:
        """Copy to device memory on a stream; returns when it has ended (the host's is pageable)."""
        nbytes = ctypes.c_size_t(len(data))
        source = ctypes.create_string_buffer(data, len(data))
        self._check(
            self._library.aclrtMemcpyAsync(
                ctypes.c_void_p(address), nbytes, source, nbytes, 1, ctypes.c_void_p(stream)
            )
        )

    def copy_to_host(self, address: int, nbytes: int, stream: int = 0) -> bytes:
        """Copy from device memory on a stream; returns when it has ended."""
        size = ctypes.c_size_t(nbytes)
        target = ctypes.create_string_buffer(nbytes)
        self._check(
            self._library.aclrtMemcpyAsync(
                target, size, ctypes.c_void_p(address), size, 2, ctypes.c_void_p(stream)
            )
        )
        return target.raw

    def launch_fill(
        self, address: int, nbytes: int, value: int, delay_us: int = 0, stream: int = 0
    ) -> None:
        """Launch a kernel: after a while it fills memory with a byte."""
        self._check(
            self._library.emulated_npu_launch_fill(
                ctypes.c_void_p(stream),
                ctypes.c_void_p(address),
                ctypes.c_size_t(nbytes),
                value,
                ctypes.c_long(delay_us),
            )
        )

    def _move(self, address: int, host: ctypes.Array[ctypes.c_char], nbytes: int, way: int) -> None:
        self._check(
            self._library.emulated_npu_move(
                ctypes.c_void_p(address), host, ctypes.c_size_t(nbytes), way
            )
        )

    def _check(self, code: int) -> None:
        if code:
            self._library.aclGetRecentErrMsg.restype = ctypes.c_char_p
            text = self._library.aclGetRecentErrMsg() or b""
            raise internal_error(f"ACL error {code}: {text.decode()}")
