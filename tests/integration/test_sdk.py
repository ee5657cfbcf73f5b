"""The public calls against a real server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from client_bench import Buffers, pattern
from fix_pool import wait_until

from ems import (
    CcConfig,
    CcConfig_v1,
    CcKvOption,
    CcResult,
    ContextCaching,
    Ems,
    EmsConfig,
    EmsErrorCode,
    EmsException,
    KVCacheType,
)
from ems.testing import LocalPool
from ems.testing.child import child_environment

KEYS = ["a", "b", "c", "d"]
SIZES = [4096, 10_000, 1 << 20, 1]


def values_of(generation: str) -> list[bytes]:
    return [pattern((generation, key), nbytes) for key, nbytes in zip(KEYS, SIZES)]


def save(cc: ContextCaching, generation: str = "old") -> CcResult:
    return cc.save(CcKvOption(), KEYS, Buffers(values_of(generation)).value_list)


def load(cc: ContextCaching) -> tuple[CcResult, list[bytes]]:
    target = Buffers.empty(SIZES, pieces=1)
    result = cc.load(CcKvOption(), KEYS, target.value_list)
    assert target.guards_intact()
    return result, [target.value(key) for key in range(result.success)]


def code_of(call: object) -> EmsErrorCode:
    with pytest.raises(EmsException) as caught:
        call()  # type: ignore[operator]
    return caught.value.status_code()


@pytest.fixture
def no_server(tmp_path: Path) -> EmsConfig:
    return EmsConfig(
        cc_config=CcConfig(rank_id=0, device_id=0, model_id="m"), root=str(tmp_path / "nowhere")
    )


@pytest.fixture
def closed_in_the_end() -> Iterator[None]:
    yield
    Ems.close()


# ---- the life of a client ----


def test_save_then_load(cc: ContextCaching) -> None:
    assert load(cc) == (CcResult(0, 4), [])
    assert save(cc) == CcResult(4, 4)
    assert load(cc) == (CcResult(4, 4), values_of("old"))
    assert save(cc, "new") == CcResult(4, 4)
    assert load(cc) == (CcResult(4, 4), values_of("new"))
    assert Ems.check_health() is True


def test_local_hits_send_no_message(cc: ContextCaching) -> None:
    save(cc)
    sent = Ems.stats()["messages"]
    channel = cc._client._session.context.channel  # type: ignore[union-attr]
    frames = channel.messages  # type: ignore[attr-defined]
    for _ in range(500):
        assert load(cc)[0].success == 4
        assert cc.async_load(None, KEYS, Buffers.empty(SIZES).value_list).result().success == 4
    stats = Ems.stats()
    assert stats["messages"] == sent
    assert channel.messages == frames  # type: ignore[attr-defined]
    assert stats["load_messages"] == 0
    assert stats["load_hits"] == 4000


def test_the_counters_tell_what_was_done(cc: ContextCaching) -> None:
    save(cc)
    load(cc)
    cc.load(None, ["nobody", "a"], Buffers.empty([1, 4096]).value_list)
    stats = Ems.stats()
    expected = {
        "load_calls": 2,
        "load_keys": 6,
        "load_hits": 4,
        "load_bytes": sum(SIZES),
        "miss_absent": 1,
        "miss_behind": 1,
        "save_calls": 1,
        "save_keys": 4,
        "save_committed": 4,
        "save_bytes": sum(SIZES),
        "messages": 2,
        "attaches": 1,
    }
    assert {name: stats[name] for name in expected} == expected
    assert stats["load_ns"] > 0


def test_init_again_with_the_same_configuration_does_nothing(
    cc: ContextCaching, local_pool: LocalPool
) -> None:
    Ems.init(local_pool.config)
    assert Ems.get_cc() is cc
    other = local_pool.config_for(model_id="other")
    assert code_of(lambda: Ems.init(other)) is EmsErrorCode.EMS_INVALID_ARGUMENT
    assert Ems.get_cc() is cc


def test_close_ends_the_object_and_allows_a_new_init(
    cc: ContextCaching, local_pool: LocalPool
) -> None:
    save(cc)
    Ems.close()
    Ems.close()
    assert Ems.get_cc() is None
    assert code_of(lambda: load(cc)) is EmsErrorCode.EMS_INVALID_ARGUMENT
    assert code_of(lambda: cc.async_save(None, ["a"], Buffers([b"x"]).value_list)) is (
        EmsErrorCode.EMS_INVALID_ARGUMENT
    )
    assert code_of(Ems.stats) is EmsErrorCode.EMS_INVALID_ARGUMENT
    assert Ems.check_health() is True  # of the root that was tried last
    Ems.init(local_pool.config)
    again = Ems.get_cc()
    assert again is not None and again is not cc
    assert load(again) == (CcResult(4, 4), values_of("old"))


def test_threads_share_the_object(cc: ContextCaching) -> None:
    save(cc)
    # What others overwrite again and again may be missed after three tries, never be wrong.
    loaded: list[int] = []

    def work() -> None:
        for _ in range(50):
            result, values = load(cc)
            assert values == values_of("old")[: result.success]
            loaded.append(result.success)
            save(cc)
            Ems.check_health()

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work) for _ in range(4)]:
            done.result()
    assert len(loaded) == 200
    assert sum(loaded) > 0.98 * 4 * len(loaded)


def test_another_tenant_or_model_never_hits(cc: ContextCaching, local_pool: LocalPool) -> None:
    save(cc)
    for config in (local_pool.config_for(access_id="t"), local_pool.config_for(model_id="n")):
        Ems.close()
        Ems.init(config)
        other = Ems.get_cc()
        assert other is not None
        assert load(other)[0] == CcResult(0, 4)


@pytest.mark.parametrize("field", ["cc_config", "cc_config_v1"])
@pytest.mark.parametrize("generation", [0, 1])
def test_either_class_in_either_field_initialises(
    local_pool: LocalPool, closed_in_the_end: None, field: str, generation: int
) -> None:
    instance: CcConfig | CcConfig_v1
    if generation:
        instance = CcConfig_v1(
            rank_id=3, device_id=1, model_id="m@1", llm_engine="vllm@svc", tp_world_size=8
        )
        instance.kvcache_type = KVCacheType.MLA
    else:
        instance = CcConfig(rank_id=0, device_id=0, model_id="M_@x")
    config = EmsConfig(access_id="cc_kvstore@_@ds", access_key="", root=local_pool.root)
    setattr(config, field, instance)
    Ems.init(config)
    found = Ems.get_cc()
    assert found is not None
    assert save(found) == CcResult(4, 4)
    assert load(found) == (CcResult(4, 4), values_of("old"))


def test_without_a_configuration_of_context_caching_there_is_no_object(
    local_pool: LocalPool, closed_in_the_end: None
) -> None:
    Ems.init(EmsConfig(root=local_pool.root))
    assert Ems.get_cc() is None
    assert Ems.check_health() is True
    assert set(Ems.stats().values()) == {0}
    Ems.init(EmsConfig(root=local_pool.root))
    assert code_of(lambda: Ems.init(local_pool.config)) is EmsErrorCode.EMS_INVALID_ARGUMENT


@pytest.mark.parametrize("config", [None, 1, "config", CcConfig(0, 0, "m"), EmsConfig])
def test_a_wrong_configuration_is_an_argument_error(config: object) -> None:
    assert code_of(lambda: Ems.init(config)) is EmsErrorCode.EMS_INVALID_ARGUMENT  # type: ignore[arg-type]
    assert code_of(lambda: Ems.init()) is EmsErrorCode.EMS_INVALID_ARGUMENT  # type: ignore[call-arg]
    assert code_of(lambda: Ems.get_cc(1)) is EmsErrorCode.EMS_INVALID_ARGUMENT  # type: ignore[call-arg]
    assert Ems.get_cc() is None


# ---- without a server ----


def test_init_without_a_server_can_heal(no_server: EmsConfig) -> None:
    started = time.monotonic()
    assert code_of(lambda: Ems.init(no_server)) is EmsErrorCode.EMS_RECOVERD_ERROR
    assert time.monotonic() - started < 2
    assert Ems.get_cc() is None
    assert Ems.check_health() is False


def test_a_server_that_does_not_answer_ends_init_in_time(
    no_server: EmsConfig, tmp_path: Path
) -> None:
    (tmp_path / "nowhere").mkdir()
    no_server.init_timeout_ms = 300
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "nowhere/ems.sock"))
        deaf.listen()
        started = time.monotonic()
        assert code_of(lambda: Ems.init(no_server)) is EmsErrorCode.EMS_RECOVERD_ERROR
        assert time.monotonic() - started < 1.5
        started = time.monotonic()
        assert Ems.check_health() is False
        assert time.monotonic() - started < 1.5


def test_health_before_init_is_about_the_default_root(
    local_pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "from ems import Ems; print(Ems.check_health(), Ems.get_cc())"
    for root, expected in ((local_pool.root, "True None"), ("/dev/shm/none", "False None")):
        environment = {**child_environment(), "EMS_ROOT": root}
        out = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        assert out.stdout.strip() == expected, out.stderr


def test_init_succeeds_on_another_thread_once_the_server_is_there(
    closed_in_the_end: None,
) -> None:
    with LocalPool(capacity="64MiB") as pool:
        config = pool.config
        pool.kill()
        assert code_of(lambda: Ems.init(config)) is EmsErrorCode.EMS_RECOVERD_ERROR
        assert Ems.check_health() is False
        pool.start()
        wait_until(Ems.check_health)
        thread = threading.Thread(target=Ems.init, args=(config,))
        thread.start()
        thread.join()
        found = Ems.get_cc()
        assert found is not None
        assert save(found) == CcResult(4, 4)
        Ems.close()


def test_a_root_that_may_not_be_entered_can_heal(no_server: EmsConfig) -> None:
    no_server.root = "/proc/self/mem/root"
    assert code_of(lambda: Ems.init(no_server)) is EmsErrorCode.EMS_RECOVERD_ERROR


def test_importing_ems_is_light() -> None:
    program = (
        "import sys, ems, ems.common.exception, ems.cc_v1.cc_config\n"
        "print([name for name in ('torch', 'grpclib', 'betterproto') if name in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], env=child_environment(), capture_output=True, text=True
    )
    assert out.stdout.strip() == "[]", out.stderr


def test_two_processes_share_blocks(cc: ContextCaching, local_pool: LocalPool) -> None:
    save(cc)
    program = (
        "import sys; from ems import *\n"
        "Ems.init(EmsConfig(cc_config=CcConfig(0, 0, 'local'), root=sys.argv[1]))\n"
        "b = bytearray(4096)\n"
        "print(Ems.get_cc().load(None, ['a'], [[KvBufferWrapper.from_buffer(b)]]).success)\n"
        "print(b.hex())\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program, local_pool.root],
        env=child_environment(),
        capture_output=True,
        text=True,
    )
    assert out.stderr == ""
    assert out.stdout.split() == ["1", values_of("old")[0].hex()]
    assert os.path.exists(local_pool.root)
