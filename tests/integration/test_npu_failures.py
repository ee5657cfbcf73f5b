"""What is left of an operation when the NPU hangs or fails (emulated, through the real path)."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fix_pool import wait_until
from npu_bench import (
    KIB,
    OPTION,
    Block,
    failed,
    nothing_reserved,
    opened,
    pattern,
)

from ems import (
    CcKvOption,
    ContextCaching,
    Ems,
    EmsErrorCode,
    EmsException,
    KvBufferWrapper,
)
from ems.testing import LocalPool
from ems.testing.child import child_environment
from ems.testing.emulated_npu import EmulatedNpu

# ---- a device that hangs ----


@pytest.fixture
def saved(npu_cc: ContextCaching, blocks: Callable[..., Block]) -> Block:
    block = blocks(1, 256 * KIB, 4, b"\1" * 256 * KIB)
    assert npu_cc.save(OPTION, ["x"], [block.wrappers]).success == 1
    assert npu_cc.load(OPTION, ["x"], [block.wrappers]).success == 1
    return block


@pytest.mark.parametrize("name", ["load", "async_load"])
def test_after_the_exception_of_a_load_no_byte_is_written(
    npu_cc: ContextCaching, npu: EmulatedNpu, saved: Block, name: str
) -> None:
    npu.set("hang", 1)
    started = time.monotonic()

    def call() -> object:
        done = getattr(npu_cc, name)(CcKvOption(timeout=200), ["x"], [saved.wrappers])
        return done.result() if name == "async_load" else done

    failed(EmsErrorCode.EMS_IO_TIMEOUT, call)
    assert 0.2 <= time.monotonic() - started < 3
    saved.write(b"\7" * saved.nbytes)
    npu.set("hang", 0)
    time.sleep(0.2)  # nothing is to happen: there is no event to wait for
    assert saved.read() == b"\7" * saved.nbytes
    assert npu_cc.load(OPTION, ["x"], [saved.wrappers]).success == 1
    assert saved.read() == b"\1" * saved.nbytes


def test_a_cancelled_load_writes_nothing_more(
    npu_cc: ContextCaching, npu: EmulatedNpu, saved: Block
) -> None:
    npu.set("hang", 1)
    future = npu_cc.async_load(OPTION, ["x"], [saved.wrappers])
    wait_until(lambda: npu.count("aclrtMemcpyBatchAsync") > 2)
    future.cancel()
    failed(EmsErrorCode.EMS_INVALID_ARGUMENT, future.result)
    saved.write(b"\7" * saved.nbytes)
    npu.set("hang", 0)
    time.sleep(0.1)
    assert saved.read() == b"\7" * saved.nbytes
    assert npu_cc.load(OPTION, ["x"], [saved.wrappers]).success == 1


def test_a_load_without_a_way_to_abort_returns_when_its_stream_is_done(
    npu_variant: Callable[..., str], npu_pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = npu_variant("aclrtStreamAbort")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(Path(folder).parent))
    monkeypatch.setenv("EMS_DEVICE", "acl")
    npu = EmulatedNpu(str(Path(folder, "libascendcl.so")))
    block = Block(npu, 1, 4096, 1, b"\1" * 4096)
    cc = opened(npu_pool)
    try:
        cc.save(OPTION, ["x"], [block.wrappers])
        npu.set("hang", 1)
        release = threading.Timer(0.5, npu.set, ("hang", 0))
        release.start()
        started = time.monotonic()
        failed(
            EmsErrorCode.EMS_IO_TIMEOUT, cc.load, CcKvOption(timeout=100), ["x"], [block.wrappers]
        )
        assert time.monotonic() - started >= 0.5
        release.join()
        block.write(b"\7" * 4096)
        time.sleep(0.1)
        assert block.read() == b"\7" * 4096
    finally:
        Ems.close()
        block.free()


@pytest.mark.parametrize("name", ["save", "async_save"])
def test_a_save_returns_at_its_deadline_and_its_staging_is_set_aside(
    npu_cc: ContextCaching,
    npu: EmulatedNpu,
    saved: Block,
    npu_pool: LocalPool,
    blocks: Callable[..., Block],
    name: str,
) -> None:
    staging = npu_cc._client._device.unit(1).staging  # type: ignore[attr-defined]
    npu.set("hang", 1)
    started = time.monotonic()

    def call() -> object:
        done = getattr(npu_cc, name)(CcKvOption(timeout=200), ["y"], [saved.wrappers])
        return done.result() if name == "async_save" else done

    failed(EmsErrorCode.EMS_IO_TIMEOUT, call)
    assert 0.2 <= time.monotonic() - started < 3
    assert staging.quarantined == 1
    nothing_reserved(npu_pool)
    npu.set("hang", 0)
    assert npu_cc.load(OPTION, ["y"], [saved.wrappers]).success == 0
    assert npu_cc.save(OPTION, ["y"], [saved.wrappers]).success == 1
    wait_until(lambda: npu_cc.save(OPTION, ["y"], [saved.wrappers]) and staging.quarantined == 0)


# ---- failures ----


@pytest.mark.parametrize("name", ["save", "load"])
def test_a_failure_of_each_call_of_the_runtime(
    npu_cc: ContextCaching,
    npu: EmulatedNpu,
    npu_pool: LocalPool,
    blocks: Callable[..., Block],
    name: str,
) -> None:
    data = pattern("x", 100_000)
    block = blocks(1, len(data), 5, data)
    npu_cc.save(OPTION, ["there"], [block.wrappers])
    failures = 0
    for step in range(1, 40):
        key = "there" if name == "load" else f"new {step}"
        npu.set("fail_call", step)
        try:
            getattr(npu_cc, name)(OPTION, [key], [block.wrappers])
        except EmsException as error:
            failures += 1
            assert error.status_code() is EmsErrorCode.EMS_INTERNAL_ERROR
            assert "injected failure" in error.message()
        npu.set("fail_call", 0)
        nothing_reserved(npu_pool)
        block.write(data)
        if name == "save":
            assert npu_cc.save(OPTION, [key], [block.wrappers]).success == 1
        block.write(b"\0" * len(data))
        assert npu_cc.load(OPTION, [key], [block.wrappers]).success == 1
        assert block.read() == data
    assert failures >= 4


@pytest.mark.parametrize("piece", [1, 3, 5])
@pytest.mark.parametrize("name", ["save", "load"])
def test_a_copy_that_fails_at_a_piece(
    npu_cc: ContextCaching,
    npu: EmulatedNpu,
    npu_pool: LocalPool,
    blocks: Callable[..., Block],
    name: str,
    piece: int,
) -> None:
    data = pattern("x", 100_000)
    block = blocks(1, len(data), 5, data)
    npu_cc.save(OPTION, ["there"], [block.wrappers])
    npu.set("fail_copy", piece)
    key = "there" if name == "load" else "new"
    text = failed(
        EmsErrorCode.EMS_INTERNAL_ERROR, getattr(npu_cc, name), OPTION, [key], [block.wrappers]
    )
    assert "507013" in text
    assert "a task of the stream failed" in text
    nothing_reserved(npu_pool)
    assert npu_cc.load(OPTION, ["new"], [block.wrappers]).success == 0
    assert npu_cc.load(OPTION, ["there"], [block.wrappers]).success == 1
    assert block.read() == data
    assert npu_cc.save(OPTION, ["new"], [block.wrappers]).success == 1


def test_no_pinned_memory(
    npu_cc: ContextCaching, npu: EmulatedNpu, npu_pool: LocalPool, blocks: Callable[..., Block]
) -> None:
    block = blocks(1, 4096, 1, b"\1" * 4096)
    npu.set("fail_name", "aclrtMallocHost")
    npu.set("fail_code", 207001)
    npu.set("fail_call", 1)
    text = failed(EmsErrorCode.EMS_INTERNAL_ERROR, npu_cc.save, OPTION, ["x"], [block.wrappers])
    assert "207001" in text
    assert "pinned memory" in text
    nothing_reserved(npu_pool)
    assert npu_cc.save(OPTION, ["x"], [block.wrappers]).success == 1


def test_memory_that_ends_before_the_buffer_does(
    npu_cc: ContextCaching, npu_pool: LocalPool, blocks: Callable[..., Block]
) -> None:
    block = blocks(1, 4096)
    wrapper = KvBufferWrapper(block.places[0], 64 * KIB)
    text = failed(EmsErrorCode.EMS_INTERNAL_ERROR, npu_cc.save, OPTION, ["x"], [[wrapper]])
    assert "at copy 0 of 1" in text
    assert "not allocated on device 1" in text
    nothing_reserved(npu_pool)
    assert npu_cc.save(OPTION, ["x"], [block.wrappers]).success == 1


# ---- fork ----

FORKED = """
import gc, os
from ems import CcKvOption, Ems, EmsException, KvBufferWrapper
from ems.common.config import CcConfig, EmsConfig
from ems.testing.emulated_npu import EmulatedNpu

npu, option = EmulatedNpu(), CcKvOption()
config = EmsConfig(cc_config=CcConfig(rank_id=0, device_id=0, model_id="m"))
Ems.init(config)
address = npu.allocate(1, 4096)
npu.write(address, b"1" * 4096)
cc = Ems.get_cc()
wrapper = KvBufferWrapper(address, 4096)
assert cc.save(option, ["a"], [[wrapper]]).success == 1
assert cc.load(option, ["a"], [[wrapper]]).success == 1
npu.reset_counts()
child = os.fork()
if child == 0:
    try:
        cc.load(option, ["a"], [[wrapper]])
    except EmsException as error:
        assert "fork" in error.message()
    else:
        os._exit(3)
    os.environ["EMS_DEVICE"] = "cpu"
    Ems.init(config)
    del cc
    gc.collect()
    memory = bytearray(4096)
    assert Ems.get_cc().load(option, ["a"], [[KvBufferWrapper.from_buffer(memory)]]).success == 1
    assert memory == b"1" * 4096
    Ems.close()
    os._exit(4 if npu.count() else 0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert cc.load(option, ["a"], [[wrapper]]).success == 1
print("done")
"""


def test_a_forked_child_leaves_the_parents_device_alone(
    npu_environment: dict[str, str], npu_pool: LocalPool
) -> None:
    environment = {**child_environment(), "LD_LIBRARY_PATH": npu_environment["LD_LIBRARY_PATH"]}
    environment |= {"EMS_ROOT": npu_pool.root, "EMS_DEVICE": "acl"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
