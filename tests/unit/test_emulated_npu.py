"""The test double itself: it is worth something only if it is as strict as the real thing."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from ems import EmsException
from ems.testing.child import child_environment
from ems.testing.emulated_npu import EmulatedNpu


def refused(npu: EmulatedNpu, address: int, data: bytes, stream: int = 0) -> str:
    with pytest.raises(EmsException) as caught:
        npu.copy_to_device(address, data, stream)
    return caught.value.message()


@pytest.mark.parametrize("touch", ["read", "write"])
def test_who_touches_device_memory_dies(npu_folder: str, touch: str) -> None:
    program = f"""
import ctypes
from ems.testing.emulated_npu import EmulatedNpu
address = EmulatedNpu().allocate(1, 4096)
print("allocated", flush=True)
if {touch!r} == "read":
    ctypes.string_at(address, 1)
else:
    ctypes.memset(address, 0, 1)
print("touched", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**child_environment(), "LD_LIBRARY_PATH": npu_folder},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "allocated\n")


def test_memory_is_rounded_to_512_bytes_and_no_further(npu: EmulatedNpu) -> None:
    address = npu.allocate(1, 8)
    npu.copy_to_device(address, b"x" * 512)
    assert npu.copy_to_host(address + 500, 12) == b"x" * 12
    assert "not allocated" in refused(npu, address, b"x" * 513)
    npu.free(address)
    assert "not allocated" in refused(npu, address, b"x")


def test_a_stream_is_of_its_device(npu: EmulatedNpu) -> None:
    address = npu.allocate(1, 512)
    stream = npu.create_stream()
    npu.set_device(2)
    assert "107003" in refused(npu, address, b"x", stream)
    errors: list[str] = []
    thread = threading.Thread(target=lambda: errors.append(refused(npu, address, b"x", stream)))
    thread.start()
    thread.join()
    assert "107002" in errors[0]  # a thread without a context
    npu.set_device(1)
    npu.destroy_stream(stream)
    npu.free(address)


def test_streams_do_not_wait_for_each_other(npu: EmulatedNpu) -> None:
    address = npu.allocate(1, 512)
    npu.write(address, b"\1" * 512)
    slow, fast = npu.create_stream(), npu.create_stream()
    npu.launch_fill(address, 512, 2, delay_us=200_000, stream=slow)
    begin = time.monotonic()
    assert npu.copy_to_host(address, 1, fast) == b"\1"
    assert time.monotonic() - begin < 0.2
    assert npu.copy_to_host(address, 1, slow) == b"\2"
    npu.destroy_stream(slow)
    npu.destroy_stream(fast)
    npu.free(address)


def test_devices_run_out_of_memory(npu: EmulatedNpu) -> None:
    with pytest.raises(EmsException, match="207001"):
        npu.allocate(1, 1 << 40)
