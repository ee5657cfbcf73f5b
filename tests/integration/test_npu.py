"""Saves and loads of NPU memory through the real path; only `libascendcl.so` is emulated."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from npu_bench import (
    KIB,
    OPTION,
    Block,
    FakeTensor,
    failed,
    fewest_calls,
    opened,
    pattern,
)

from ems import (
    ContextCaching,
    Ems,
    EmsErrorCode,
    KvBufferWrapper,
)
from ems.testing import LocalPool
from ems.testing.emulated_npu import EmulatedNpu
from ems_native._index import LAYOUT

# ---- bytes ----


@pytest.mark.parametrize(("pieces", "others"), [(1, 1), (7, 1), (1, 5), (122, 3)])
def test_bytes_come_back_on_another_device(
    npu_cc: ContextCaching, blocks: Callable[..., Block], pieces: int, others: int
) -> None:
    data = {"a": pattern("a", 100_001), "b": pattern("b", 3), "c": pattern("c", 1_000_000)}
    sources = [blocks(1, len(one), min(pieces, len(one)), one) for one in data.values()]
    targets = [blocks(2, len(one), min(others, len(one))) for one in data.values()]
    keys = list(data)
    assert npu_cc.save(OPTION, keys, [one.wrappers for one in sources]).success == 3
    assert npu_cc.load(OPTION, keys, [one.wrappers for one in targets]).success == 3
    assert [one.read() for one in targets] == list(data.values())
    for one in targets:
        one.write(b"\0" * one.nbytes)
    assert npu_cc.async_load(OPTION, keys, [one.wrappers for one in targets]).result().success == 3
    assert [one.read() for one in targets] == list(data.values())


def test_a_value_larger_than_a_slice_and_many_slices(
    npu_cc: ContextCaching, blocks: Callable[..., Block], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ems.devices.streams import StreamDevice

    device = npu_cc._client._device  # type: ignore[attr-defined]
    assert isinstance(device, StreamDevice)
    device.slice_bytes = 100_000
    data = [pattern(f"v{n}", 30_000 + 17 * n) for n in range(20)] + [pattern("large", 900_000)]
    keys = [str(n) for n in range(len(data))]
    sources = [blocks(1, len(one), 3, one) for one in data]
    assert npu_cc.save(OPTION, keys, [one.wrappers for one in sources]).success == len(data)
    targets = [blocks(1, len(one), 2) for one in data]
    assert npu_cc.load(OPTION, keys, [one.wrappers for one in targets]).success == len(data)
    assert [one.read() for one in targets] == data


# ---- calls of the runtime ----


@pytest.mark.parametrize(
    ("nblocks", "pieces", "nbytes"),
    [(32, 122, 16 * KIB), (32, 3904, 2 * KIB), (32, 122, 512 * KIB)],
)
def test_a_batch_is_one_submission(
    npu_cc: ContextCaching,
    npu: EmulatedNpu,
    blocks: Callable[..., Block],
    nblocks: int,
    pieces: int,
    nbytes: int,
) -> None:
    each = [pieces // nblocks + (n < pieces % nblocks) for n in range(nblocks)]
    batch = [blocks(1, n * nbytes, n, pattern(str(at), n * nbytes)) for at, n in enumerate(each)]
    assert sum(len(one.places) for one in batch) == pieces
    keys = [f"key {n}" for n in range(nblocks)]
    values = [one.wrappers for one in batch]
    for call, direction in (
        (lambda: npu_cc.async_save(OPTION, keys, values).result(), "bytes_to_host"),
        (lambda: npu_cc.async_load(OPTION, keys, values).result(), "bytes_to_device"),
        (lambda: npu_cc.save(OPTION, keys, values), "bytes_to_host"),
        (lambda: npu_cc.load(OPTION, keys, values), "bytes_to_device"),
    ):
        assert fewest_calls(npu, call) <= 4
        assert npu.count("aclrtMemcpyBatchAsync") == 1
        assert npu.count(direction) == pieces * nbytes


def test_the_pool_is_registered_with_the_device_and_let_go(
    npu_home: None, npu: EmulatedNpu, npu_pool: LocalPool, blocks: Callable[..., Block]
) -> None:
    cc = opened(npu_pool)
    block = blocks(3, 4096, 1, pattern("x", 4096))
    cc.save(OPTION, ["x"], [block.wrappers])
    assert npu.count("aclrtHostRegisterV2") == 0
    cc.load(OPTION, ["x"], [block.wrappers])
    assert npu.count("aclrtHostRegisterV2") == 1
    Ems.close()
    assert npu.count("aclrtHostUnregister") == 1
    assert npu.count("aclrtCreateStream") == npu.count("aclrtDestroyStream")
    assert npu.count("aclrtMallocHost") == npu.count("aclrtFreeHost")
    assert npu.count("aclrtCreateEvent") == npu.count("aclrtDestroyEvent")


def test_a_product_that_registers_nothing_loads_all_the_same(
    npu_cc: ContextCaching, npu: EmulatedNpu, blocks: Callable[..., Block]
) -> None:
    npu.set("unregistered", 1)
    block = blocks(0, 70_000, 3, pattern("x", 70_000))
    npu_cc.save(OPTION, ["x"], [block.wrappers])
    block.write(b"\0" * 70_000)
    assert npu_cc.load(OPTION, ["x"], [block.wrappers]).success == 1
    assert block.read() == pattern("x", 70_000)


def test_the_callers_thread_keeps_its_device(
    npu_cc: ContextCaching, npu: EmulatedNpu, blocks: Callable[..., Block]
) -> None:
    block = blocks(1, 4096, 1, pattern("x", 4096))
    npu.set_device(0)
    for call in (npu_cc.save, npu_cc.load, npu_cc.async_save, npu_cc.async_load):
        done = call(OPTION, ["x"], [block.wrappers])
        assert npu.device() == 0
        if hasattr(done, "result"):
            done.result()
    assert npu.device() == 0


LACKING = {
    "batch": ["aclrtMemcpyBatchAsync"],
    "timeout": ["aclrtSynchronizeStreamWithTimeout"],
    "timeout and query": ["aclrtSynchronizeStreamWithTimeout", "aclrtStreamQuery"],
    "second registration": ["aclrtHostRegisterV2"],
    "registration": ["aclrtHostRegisterV2", "aclrtHostRegister", "aclrtHostUnregister"],
    "attributes": ["aclrtPointerGetAttributes"],
    "default stream": ["aclrtCtxGetCurrentDefaultStream"],
    "text and version": ["aclGetRecentErrMsg", "aclrtGetVersion"],
}


@pytest.mark.parametrize("lacking", LACKING)
def test_an_older_runtime(
    lacking: str,
    npu_variant: Callable[..., str],
    npu_pool: LocalPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = npu_variant(*LACKING[lacking])
    monkeypatch.setenv("ASCEND_HOME_PATH", str(Path(folder).parent))
    monkeypatch.setenv("EMS_DEVICE", "acl")
    npu = EmulatedNpu(str(Path(folder, "libascendcl.so")))
    block = Block(npu, 1, 122 * KIB, 122, pattern("x", 122 * KIB))
    cc = opened(npu_pool)

    tensors = [FakeTensor(at, n) for at, n in zip(block.places, block.sizes)]
    values = [[KvBufferWrapper.from_tensor(tensor) for tensor in tensors]]
    try:
        fewest = fewest_calls(npu, lambda: cc.async_save(OPTION, ["x"], values).result())
        if lacking == "batch":
            assert npu.count("aclrtMemcpyAsync") == 122
            assert fewest <= 122 + 4
        block.write(b"\0" * block.nbytes)
        assert cc.load(OPTION, ["x"], values).success == 1
        assert block.read() == pattern("x", block.nbytes)
    finally:
        Ems.close()
        block.free()


# ---- order ----


def test_a_save_right_behind_a_kernel_stores_what_it_writes(
    npu_cc: ContextCaching, npu: EmulatedNpu, blocks: Callable[..., Block]
) -> None:
    block = blocks(1, 256 * KIB, 4, b"\1" * 256 * KIB)
    for place, size in zip(block.places, block.sizes):
        npu.launch_fill(place, size, 2, delay_us=40_000)
    future = npu_cc.async_save(OPTION, ["x"], [block.wrappers])
    assert not future.done()
    assert future.result().success == 1
    target = blocks(1, 256 * KIB)
    npu_cc.load(OPTION, ["x"], [target.wrappers])
    assert target.read() == b"\2" * 256 * KIB


@pytest.mark.parametrize("device", [0, 1])
def test_the_current_stream_is_that_of_torch_npu(
    npu_cc: ContextCaching,
    npu: EmulatedNpu,
    blocks: Callable[..., Block],
    monkeypatch: pytest.MonkeyPatch,
    device: int,
) -> None:
    block = blocks(device, 4096, 1, b"\1" * 4096)
    stream = npu.create_stream()
    asked = []

    def current_stream(index: int) -> object:
        asked.append(index)
        return types.SimpleNamespace(npu_stream=stream)

    module = types.ModuleType("torch_npu")
    module.npu = types.SimpleNamespace(current_stream=current_stream)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    npu.launch_fill(block.places[0], 4096, 2, delay_us=100_000, stream=stream)
    npu.set_device(0)
    assert npu_cc.save(OPTION, ["x"], [block.wrappers]).success == 1
    assert asked == [device]
    target = blocks(device, 4096)
    npu_cc.load(OPTION, ["x"], [target.wrappers])
    assert target.read() == b"\2" * 4096
    npu.set_device(device)
    npu.destroy_stream(stream)


def test_a_load_writes_nothing_before_what_was_submitted_before_it(
    npu_cc: ContextCaching, npu: EmulatedNpu, blocks: Callable[..., Block]
) -> None:
    block = blocks(1, 4096, 1, b"\1" * 4096)
    npu_cc.save(OPTION, ["x"], [block.wrappers])
    npu.launch_fill(block.places[0], 4096, 2, delay_us=50_000)
    assert npu_cc.async_load(OPTION, ["x"], [block.wrappers]).result().success == 1
    assert block.read() == b"\1" * 4096  # and not the kernel's bytes after it


# ---- whose memory ----


def test_a_mixture_is_refused_before_anything_moves(
    npu_cc: ContextCaching, npu: EmulatedNpu, blocks: Callable[..., Block]
) -> None:
    one, two = blocks(1, 4096, 2), blocks(2, 4096)
    host = KvBufferWrapper.from_buffer(bytearray(4096))
    npu.reset_counts()
    for values in ([one.wrappers, two.wrappers], [one.wrappers, [host]]):
        for call in (npu_cc.save, npu_cc.load, npu_cc.async_save, npu_cc.async_load):
            text = failed(EmsErrorCode.EMS_INVALID_ARGUMENT, call, OPTION, ["a", "b"], values)
            assert "value_list[1][0] lies on another device" in text
    assert npu.count("copies") == 0
    assert npu.count("aclrtRecordEvent") == 0


def test_memory_of_the_host_is_refused_by_acl_and_taken_by_auto(
    npu_home: None,
    npu: EmulatedNpu,
    npu_pool: LocalPool,
    blocks: Callable[..., Block],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = bytearray(b"\3" * 4096)
    host = [[KvBufferWrapper.from_buffer(memory)]]
    cc = opened(npu_pool)
    text = failed(EmsErrorCode.EMS_INVALID_ARGUMENT, cc.save, OPTION, ["h"], host)
    assert "value_list[0][0] is no memory of a device of kind npu" in text
    Ems.close()
    monkeypatch.setenv("EMS_DEVICE", "auto")
    cc = opened(npu_pool)
    block = blocks(1, 4096)
    assert cc.save(OPTION, ["h"], host).success == 1
    assert cc.load(OPTION, ["h"], [block.wrappers]).success == 1
    assert block.read() == memory
    assert cc.save(OPTION, ["d"], [block.wrappers]).success == 1
    memory[:] = bytes(4096)
    assert cc.async_load(OPTION, ["d"], host).result().success == 1
    assert memory == b"\3" * 4096
    Ems.close()


def test_an_address_that_nobody_owns(
    npu_home: None, npu: EmulatedNpu, npu_pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMS_DEVICE", "auto")
    cc = opened(npu_pool)
    freed = npu.allocate(1, 4096)
    npu.free(freed)
    for address in (4096, freed):
        wild = [[KvBufferWrapper(address, 4096)]]
        for call in (cc.save, cc.load, cc.async_save, cc.async_load):
            text = failed(EmsErrorCode.EMS_INVALID_ARGUMENT, call, OPTION, ["x"], wild)
            assert "value_list[0][0] is memory of no device" in text
    Ems.close()


def test_a_tensor_of_another_device_where_there_is_only_the_cpu(
    npu_pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMS_DEVICE", "cpu")
    cc = opened(npu_pool)
    values = [[KvBufferWrapper.from_tensor(FakeTensor(4096, 100))]]
    text = failed(EmsErrorCode.EMS_INVALID_ARGUMENT, cc.save, OPTION, ["x"], values)
    assert "value_list[0][0] is a tensor on npu:1" in text
    tensor = FakeTensor(4096, 100)
    values = [[KvBufferWrapper(tensor.data_ptr, 100)]]
    failed(EmsErrorCode.EMS_INVALID_ARGUMENT, cc.load, OPTION, ["x"], values)
    Ems.close()


# ---- no runtime ----


@pytest.mark.parametrize("name", ["acl", "cuda"])
def test_no_runtime(
    name: str, npu_pool: LocalPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "cuda":
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            pass
        else:
            pytest.skip("this machine has a CUDA driver")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setenv("EMS_DEVICE", name)
    text = failed(EmsErrorCode.EMS_INTERNAL_ERROR, Ems.init, npu_pool.config)
    assert f"the device back end '{name}' does not work here" in text
    monkeypatch.setenv("EMS_DEVICE", "cpu")
    opened(npu_pool)
    Ems.close()


def test_a_runtime_without_a_call_that_is_needed(
    npu_variant: Callable[..., str], npu_pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = npu_variant("aclrtMallocHost")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(Path(folder).parent))
    monkeypatch.setenv("EMS_DEVICE", "acl")
    text = failed(EmsErrorCode.EMS_INTERNAL_ERROR, Ems.init, npu_pool.config)
    assert "has no aclrtMallocHost" in text


def test_a_runtime_without_a_device(npu_home: None, npu: EmulatedNpu, npu_pool: LocalPool) -> None:
    npu.set("devices", 0)
    try:
        text = failed(EmsErrorCode.EMS_INTERNAL_ERROR, Ems.init, npu_pool.config)
    finally:
        npu.set("devices", 8)
    assert "no NPU" in text


def test_a_device_that_does_not_exist(npu_pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMS_DEVICE", "tpu")
    text = failed(EmsErrorCode.EMS_INVALID_ARGUMENT, Ems.init, npu_pool.config)
    assert "EMS_DEVICE is 'tpu'; there are: acl, auto, cpu, cuda" in text


# ---- checksums ----


@pytest.mark.parametrize("verify", [None, True])
def test_checksums_are_compared_if_the_client_asks_for_it(
    npu_home: None, blocks: Callable[..., Block], verify: bool | None
) -> None:
    with LocalPool("16MiB") as pool:
        Ems.init(dataclasses.replace(pool.config, verify=verify))
        cc = Ems.get_cc()
        assert cc is not None
        block = blocks(1, 8192, 1, b"\1" * 8192)
        cc.save(OPTION, ["x"], [block.wrappers])
        with open(Path(pool.root, "data.0"), "r+b") as data:
            data.seek(LAYOUT["DATA_START"])
            assert data.read(8192) == b"\1" * 8192
            data.seek(-1, os.SEEK_CUR)
            data.write(b"\2")
        assert cc.load(OPTION, ["x"], [block.wrappers]).success == (0 if verify else 1)
        Ems.close()
