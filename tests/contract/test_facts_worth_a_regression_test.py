"""Section 7 of the contract, "facts worth a regression test each", item by item, on a real server.

Item 6 (restart of the server) is with the faults, item 8 (stream order) with the devices.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fix_pool import status_of, wait_until
from mla_ranks import save_together
from v1_bench import Cache, filled, right, whole

from ems import (
    CcConfig_v1,
    CcFuture,
    CcKvOption,
    CcResult,
    ContextCaching,
    Ems,
    EmsConfig,
    EmsErrorCode,
    EmsException,
    KvBufferWrapper,
    KVCacheType,
)
from ems.testing import LocalPool
from ems.testing.child import child_environment

LONG = CcKvOption(timeout=60_000)


def config(root: str, **fields: Any) -> EmsConfig:
    v1 = CcConfig_v1(**{"rank_id": 0, "device_id": 0, "model_id": "m", **fields})
    return EmsConfig(cc_config_v1=v1, access_id="access_id", access_key="", root=root)


@pytest.fixture
def connect(local_pool: LocalPool) -> Iterator[Callable[..., ContextCaching]]:
    """Makes this process a client with some configuration; again and again, if asked."""

    def init(**fields: Any) -> ContextCaching:
        Ems.close()
        Ems.init(config(local_pool.root, **fields))
        found = Ems.get_cc()
        assert found is not None
        return found

    yield init
    Ems.close()


@pytest.fixture
def v1_cc(connect: Callable[..., ContextCaching], cache: Cache) -> ContextCaching:
    found = connect()
    found.register_kvcache(cache.tensors)
    return found


def code_of(call: Callable[[], object]) -> EmsErrorCode:
    with pytest.raises(EmsException) as caught:
        call()
    return caught.value.status_code()


def test_item_01_import_without_an_accelerator() -> None:
    program = (
        "import sys; import ems; from ems.cc_v1.cc_config import KVCacheType, CcConfig_v1;"
        "from ems import ContextCache_v1; assert KVCacheType.MLA == 'MLA';"
        "assert not {'torch', 'torch_npu', 'numpy', 'grpclib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], env=child_environment(), check=True)


def test_item_02_negative_hashes_round_trip(v1_cc: ContextCaching, cache: Cache) -> None:
    hashes = [-1, 2**63, -(2**63)]
    assert v1_cc.save(**filled(cache, [0, 1, 2], hashes)) == CcResult(3, 3)
    assert v1_cc.load(**whole(cache, [5, 6, 7], hashes)) == CcResult(3, 3)
    assert right(cache, [5, 6, 7], hashes) == [True] * 3


@pytest.mark.parametrize("hole", range(5))
def test_item_03_a_hole_ends_the_row(v1_cc: ContextCaching, cache: Cache, hole: int) -> None:
    kept = [k for k in range(5) if k != hole]
    v1_cc.save(**filled(cache, kept, kept))
    assert v1_cc.load(**whole(cache, range(8, 13), range(5))) == CcResult(hole, 5)


def test_item_04_a_failed_future_is_ready(
    v1_cc: ContextCaching, cache: Cache, local_pool: LocalPool
) -> None:
    process = local_pool.process
    assert process is not None
    process.kill()
    process.wait(20)
    future = v1_cc.async_save(**filled(cache, [0], [1]))
    assert future
    wait_until(lambda: v1_cc.is_ready(future))
    for _ in range(3):
        assert v1_cc.is_ready(future) is True
        assert code_of(lambda: v1_cc.get_result(future)) is EmsErrorCode.EMS_IO_ERROR
        assert code_of(future.result) is EmsErrorCode.EMS_IO_ERROR


def test_item_05_init_before_the_server(root: str, serve: Any, cache: Cache) -> None:
    wanted = config(root)
    assert code_of(lambda: Ems.init(wanted)) is EmsErrorCode.EMS_RECOVERD_ERROR
    assert Ems.get_cc() is None
    assert Ems.check_health() is False
    serve().wait_until_serving()
    wait_until(Ems.check_health)
    failed: list[BaseException] = []

    def init_and_register() -> None:  # the engine's health thread
        try:
            Ems.init(wanted)
            cc = Ems.get_cc()
            assert cc is not None
            cc.register_kvcache(cache.tensors)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=init_and_register)
    thread.start()
    thread.join()
    assert not failed
    cc = Ems.get_cc()
    assert cc is not None
    assert cc.save(**filled(cache, [0], [1])) == CcResult(1, 1)
    Ems.close()


def test_item_07_nothing_is_written_after_a_time_out(
    connect: Callable[..., ContextCaching],
) -> None:
    big = Cache(head_sizes=((256, 256),) * 4, num_blocks=64, block_size=64)
    cc = connect()
    cc.register_kvcache(big.tensors)
    blocks = range(24)
    memories = [tensor._memory for row in big.tensors for tensor in row]
    assert cc.save(option=LONG, **whole(big, blocks, blocks)).success == 24
    timed_out = 0
    for _ in range(10):
        futures = [
            cc.async_load(option=CcKvOption(timeout=1), **whole(big, range(24, 48), blocks))
            for _ in range(40)
        ]
        for future in futures:
            try:
                future.result()
            except EmsException as error:
                assert error.status_code() is EmsErrorCode.EMS_IO_TIMEOUT
                timed_out += 1
        # All are reported, so all of this memory is ours again.
        for memory in memories:
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0x5A, len(memory))
        threading.Event().wait(0.02)
        assert all(memory.tobytes().count(0x5A) == len(memory) for memory in memories)
    assert timed_out > 0


def test_item_09_mla_ranks_hold_one_copy(local_pool: LocalPool) -> None:
    answers = save_together(local_pool.root, 2, 8)
    assert [(one["saved"], one["loaded"], one["right"]) for one in answers] == [(8, 8, True)] * 2
    assert status_of(local_pool).entries == 8


def _cc_in_cc_config(root: str) -> EmsConfig:
    return EmsConfig(cc_config=CcConfig_v1(0, 0, "m"), root=root)


def _kind_set_later(root: str) -> EmsConfig:
    v1 = CcConfig_v1(rank_id=8, device_id=0, model_id="DeepSeek@V3", llm_engine="vllm@svc")
    v1.kvcache_type = KVCacheType.MLA
    return EmsConfig(
        cc_config_v1=v1, access_id="cc_kvstore@_@ds_default_ns_001", access_key="", root=root
    )


def _kind_as_string(root: str) -> EmsConfig:
    v1 = CcConfig_v1(rank_id=0, device_id=0, model_id="m", kvcache_type="GQA")
    return EmsConfig(cc_config_v1=v1, root=root)


@pytest.mark.parametrize("make", [_cc_in_cc_config, _kind_set_later, _kind_as_string])
def test_item_10_real_configurations(
    local_pool: LocalPool, cache: Cache, make: Callable[[str], EmsConfig]
) -> None:
    wanted = make(local_pool.root)
    Ems.init(wanted)
    try:
        Ems.init(wanted)
        cc = Ems.get_cc()
        assert cc is not None
        cc.register_kvcache(cache.tensors)
        assert cc.save(**filled(cache, [0], [1])) == CcResult(1, 1)
        value = [[KvBufferWrapper.from_buffer(bytearray(8))]]
        assert cc.save(CcKvOption(), ["k"], value) == CcResult(1, 1)
    finally:
        Ems.close()


def test_item_11_a_thousand_futures(v1_cc: ContextCaching, cache: Cache) -> None:
    hashes = list(range(16))
    v1_cc.save(**filled(cache, range(8), range(8)))
    futures: list[CcFuture] = []
    for at in range(500):
        futures.append(v1_cc.async_load(option=LONG, **whole(cache, [at % 8], [at % 8])))
        futures.append(v1_cc.async_save(option=LONG, **whole(cache, [8 + at % 8], [at % 16])))
    assert all(v1_cc.get_result(future) == CcResult(1, 1) for future in futures)
    assert all(map(bool, futures))
    assert v1_cc.exists(hashes) == CcResult(16, 16)


def test_item_11_the_time_out_counts_from_submission(v1_cc: ContextCaching, cache: Cache) -> None:
    big = Cache(head_sizes=((1024, 1024),) * 8, num_blocks=32, block_size=16)
    v1_cc.register_kvcache(big.tensors)
    v1_cc.save(option=LONG, **whole(big, range(16), range(16)))
    ahead = [v1_cc.async_load(option=LONG, **whole(big, range(16), range(16))) for _ in range(200)]
    late = v1_cc.async_load(option=CcKvOption(timeout=1), **whole(big, [0], [0]))
    assert code_of(late.result) is EmsErrorCode.EMS_IO_TIMEOUT
    assert not v1_cc.is_ready(ahead[-1])  # it did not wait for its turn
    for future in ahead:
        assert future.result() == CcResult(16, 16)


def test_item_12_only_ems_exceptions_leave(v1_cc: ContextCaching) -> None:
    """A few by hand; `tests/unit/test_v1_arguments.py` and `test_cc_arguments.py` try thousands."""
    calls: list[Callable[[], object]] = [
        lambda: v1_cc.save(),
        lambda: v1_cc.load(object(), object(), object(), object()),
        lambda: v1_cc.async_load(1, 2, 3, 4, 5, 6),  # type: ignore[call-overload]
        lambda: v1_cc.exists(),
        lambda: v1_cc.exists(5, 6, 7),  # type: ignore[call-arg]
        lambda: v1_cc.register_kvcache(),
        lambda: v1_cc.register_kvcache([[None]], object()),
        lambda: v1_cc.is_ready(None),
        lambda: v1_cc.get_result(5),  # type: ignore[arg-type]
        lambda: Ems.init(None),  # type: ignore[arg-type]
        lambda: KvBufferWrapper(len, len),
    ]
    for call in calls:
        assert code_of(call) is EmsErrorCode.EMS_INVALID_ARGUMENT
