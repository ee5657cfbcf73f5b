"""The CUDA back end over a driver that `emulated_cuda.c` emulates: no word about real GPUs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from npu_bench import KIB, OPTION, Block, FakeTensor, failed, nothing_reserved, opened, pattern

from ems import CcKvOption, ContextCaching, Ems, EmsErrorCode, EmsException, KvBufferWrapper
from ems.devices import cuda
from ems.testing import LocalPool
from ems.testing.cuda_copy import why_not
from ems.testing.emulated_npu import EmulatedNpu


@pytest.fixture(scope="module", params=[13, 12, 0])
def driver(request: pytest.FixtureRequest, cuda_variant: Callable[[int], str]) -> EmulatedNpu:
    path = cuda_variant(request.param)
    one = EmulatedNpu(path)
    one.path = path  # type: ignore[attr-defined]
    return one


@pytest.fixture
def cc(
    driver: EmulatedNpu, npu_pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ContextCaching]:
    monkeypatch.setattr(cuda, "LIBRARY", driver.path)  # type: ignore[attr-defined]
    monkeypatch.setenv("EMS_DEVICE", "cuda")
    yield opened(npu_pool)
    for name in ("hang", "fail_call", "fail_copy"):
        driver.set(name, 0)
    Ems.close()


@pytest.fixture
def blocks(driver: EmulatedNpu) -> Iterator[Callable[..., Block]]:
    made: list[Block] = []

    def make(device: int, nbytes: int, pieces: int = 1, data: bytes | None = None) -> Block:
        made.append(Block(driver, device, nbytes, pieces, data))
        return made[-1]

    yield make
    for block in made:
        block.free()


def test_bytes_come_back(cc: ContextCaching, blocks: Callable[..., Block]) -> None:
    # Slices that overlap: one arrives while the CPU takes on the one before.
    cc._client._device.slice_bytes = 50_000  # type: ignore[attr-defined]
    data = [pattern(f"v{n}", 20_000 + 17 * n) for n in range(12)]
    keys = [str(n) for n in range(len(data))]
    sources = [blocks(1, len(one), 3, one) for one in data]
    targets = [blocks(0, len(one), 2) for one in data]
    for save, load in ((cc.save, cc.load), (_done(cc.async_save), _done(cc.async_load))):
        assert save(OPTION, keys, [one.wrappers for one in sources]).success == len(data)
        assert load(OPTION, keys, [one.wrappers for one in targets]).success == len(data)
        assert [one.read() for one in targets] == data
        for one in targets:
            one.write(bytes(one.nbytes))


def _done(call: Callable[..., object]) -> Callable[..., object]:
    return lambda *arguments: call(*arguments).result()  # type: ignore[attr-defined]


def test_order_behind_the_current_stream_of_torch(
    cc: ContextCaching,
    driver: EmulatedNpu,
    blocks: Callable[..., Block],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = blocks(1, 64 * KIB, 2, b"\1" * 64 * KIB)
    stream = driver.create_stream()
    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        is_initialized=lambda: True,
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=stream),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    for place, size in zip(block.places, block.sizes):
        driver.launch_fill(place, size, 2, delay_us=40_000, stream=stream)
    future = cc.async_save(OPTION, ["x"], [block.wrappers])
    assert future.result().success == 1
    target = blocks(1, 64 * KIB)
    cc.load(OPTION, ["x"], [target.wrappers])
    assert target.read() == b"\2" * 64 * KIB
    driver.set_device(1)
    driver.destroy_stream(stream)


@pytest.mark.parametrize("name", ["save", "load"])
def test_a_failure_of_each_call(
    cc: ContextCaching,
    driver: EmulatedNpu,
    npu_pool: LocalPool,
    blocks: Callable[..., Block],
    name: str,
) -> None:
    data = pattern("x", 100_000)
    block = blocks(1, len(data), 5, data)
    cc.save(OPTION, ["there"], [block.wrappers])
    failures = 0
    for step in range(1, 25):
        key = "there" if name == "load" else f"new {step}"
        driver.set("fail_call", step)
        try:
            getattr(cc, name)(OPTION, [key], [block.wrappers])
        except EmsException as error:
            failures += 1
            assert error.status_code() is EmsErrorCode.EMS_INTERNAL_ERROR
            assert "CUDA error 507000" in error.message()
        driver.set("fail_call", 0)
        nothing_reserved(npu_pool)
        block.write(data)
        if name == "save":
            assert cc.save(OPTION, [key], [block.wrappers]).success == 1
        block.write(bytes(len(data)))
        assert cc.load(OPTION, [key], [block.wrappers]).success == 1
        assert block.read() == data
    assert failures >= 3


def test_a_hang(
    cc: ContextCaching, driver: EmulatedNpu, npu_pool: LocalPool, blocks: Callable[..., Block]
) -> None:
    block = blocks(1, 4096, 1, b"\1" * 4096)
    cc.save(OPTION, ["x"], [block.wrappers])
    driver.set("hang", 1)
    option = CcKvOption(timeout=100)
    started = time.monotonic()
    failed(EmsErrorCode.EMS_IO_TIMEOUT, cc.save, option, ["y"], [block.wrappers])
    assert time.monotonic() - started < 1
    nothing_reserved(npu_pool)
    # The driver cannot end a copy: the load returns when it has ended.
    release = threading.Timer(0.4, driver.set, ("hang", 0))
    release.start()
    failed(EmsErrorCode.EMS_IO_TIMEOUT, cc.load, option, ["x"], [block.wrappers])
    assert time.monotonic() - started >= 0.4
    release.join()
    block.write(b"\7" * 4096)
    time.sleep(0.05)
    assert block.read() == b"\7" * 4096
    assert cc.save(OPTION, ["y"], [block.wrappers]).success == 1


def test_whose_memory(
    cc: ContextCaching, blocks: Callable[..., Block], npu_pool: LocalPool
) -> None:
    one, two = blocks(1, 4096), blocks(2, 4096)
    text = failed(
        EmsErrorCode.EMS_INVALID_ARGUMENT, cc.save, OPTION, ["a", "b"], [one.wrappers, two.wrappers]
    )
    assert "value_list[1][0] lies on another device" in text
    host = KvBufferWrapper.from_buffer(bytearray(4096))
    text = failed(EmsErrorCode.EMS_INVALID_ARGUMENT, cc.save, OPTION, ["a"], [[host]])
    assert "kind cuda" in text
    npu = KvBufferWrapper.from_tensor(FakeTensor(4096, 4096))
    failed(EmsErrorCode.EMS_INVALID_ARGUMENT, cc.load, OPTION, ["a"], [[npu]])


def test_the_benchmark_measures_or_says_why_not() -> None:
    script = Path(__file__).parent.parent.parent / "benchmarks" / "bench_cuda.py"
    reason = why_not()
    if reason is None:
        pytest.skip("there is a GPU: run benchmarks/bench_cuda.py by hand")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"skipped: {reason}\n")
