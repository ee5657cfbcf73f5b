"""The client over the deaths of servers and the replacement of pools."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
import time

import pytest
from client_bench import AdmittingDevice, Buffers, pattern
from fix_pool import status_of, wait_until

from ems import CcKvOption, CcResult, ContextCaching, Ems, EmsErrorCode, EmsException
from ems.testing import LocalPool
from ems.testing.child import child_environment, python_command

NBYTES = 1 << 20
KEYS = [f"k{n}" for n in range(8)]
LONG = CcKvOption(timeout=30_000)


def values_of(generation: str) -> list[bytes]:
    return [pattern((generation, key), NBYTES) for key in KEYS]


def save(cc: ContextCaching, generation: str = "old", option: CcKvOption = LONG) -> CcResult:
    return cc.save(option, KEYS, Buffers(values_of(generation)).value_list)


def loads(cc: ContextCaching, generation: str = "old") -> bool:
    target = Buffers.empty([NBYTES] * len(KEYS))
    result = cc.load(LONG, KEYS, target.value_list)
    found = [target.value(n) for n in range(result.success)]
    assert found == values_of(generation)[: len(found)]
    return result.success == len(KEYS)


def can_save(cc: ContextCaching, generation: str = "old") -> bool:
    try:
        return save(cc, generation) == CcResult(len(KEYS), len(KEYS))
    except EmsException as error:
        assert error.status_code() is EmsErrorCode.EMS_IO_ERROR
        return False


def mapped(root: str) -> list[str]:
    """Which of the pool's files this process has mapped, by the kernel's account."""
    with open("/proc/self/maps") as file:
        return sorted({line.split()[-1] for line in file if root in line and "deleted" not in line})


def mapped_deleted(root: str) -> bool:
    with open("/proc/self/maps") as file:
        return any(root in line and "(deleted)" in line for line in file)


@pytest.mark.timeout(120)
def test_a_server_that_was_killed(cc: ContextCaching, local_pool: LocalPool) -> None:
    assert save(cc) == CcResult(8, 8)
    local_pool.kill()

    # Hits go on; a save fails at once, and not at its deadline.
    assert loads(cc)
    started = time.monotonic()
    with pytest.raises(EmsException) as caught:
        save(cc, "new")
    assert caught.value.status_code() is EmsErrorCode.EMS_IO_ERROR
    assert time.monotonic() - started < 1
    wait_until(lambda: not Ems.check_health(), 4)
    assert loads(cc)
    future = cc.async_save(LONG, KEYS, Buffers(values_of("new")).value_list)
    error = future.exception(5)
    assert error is not None and error.status_code() is EmsErrorCode.EMS_IO_ERROR

    # The next server finds every block, and the client finds it by itself.
    local_pool.start()
    wait_until(Ems.check_health)
    assert loads(cc)
    assert can_save(cc, "new")
    assert loads(cc, "new")
    stats = Ems.stats()
    assert stats["attaches"] == 2
    assert stats["connections_lost"] >= 1


def test_a_restart_in_order_loses_nothing(cc: ContextCaching, local_pool: LocalPool) -> None:
    assert save(cc) == CcResult(8, 8)
    stop = threading.Event()
    misses: list[None] = []

    def read() -> None:
        while not stop.is_set():
            if not loads(cc):
                misses.append(None)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        local_pool.restart()
        wait_until(Ems.check_health)
        assert can_save(cc)
    finally:
        stop.set()
        thread.join()
    assert not misses


def test_saves_in_flight_when_the_server_dies(cc: ContextCaching, local_pool: LocalPool) -> None:
    sources = [Buffers(values_of("old")) for _ in range(40)]
    futures = [cc.async_save(LONG, KEYS, source.value_list) for source in sources]
    futures[0].result(10)
    local_pool.kill()
    started = time.monotonic()
    errors = [error for future in futures if (error := future.exception(10)) is not None]
    assert time.monotonic() - started < 1  # and not at their deadline
    assert {error.status_code() for error in errors} == {EmsErrorCode.EMS_IO_ERROR}
    local_pool.start()
    wait_until(lambda: can_save(cc, "new"))
    assert loads(cc, "new")


def test_a_save_that_copies_while_the_server_is_replaced(
    cc: ContextCaching, local_pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cc._client._device
    copying, go_on = threading.Event(), threading.Event()

    class SlowDevice:
        chunk_bytes = real.chunk_bytes

        def copy_in(self, *arguments: object) -> tuple[int, int]:
            copying.set()
            go_on.wait(20)
            return real.copy_in(*arguments)  # type: ignore[arg-type]

    cc._client._device = AdmittingDevice(real, SlowDevice())  # type: ignore[assignment]
    source = Buffers(values_of("slow"))
    future = cc.async_save(LONG, KEYS, source.value_list)
    assert copying.wait(10)
    local_pool.kill()
    local_pool.start()
    wait_until(Ems.check_health)
    # It has told the new server that it is still writing: others get other memory.
    cc._client._device = real
    others = [f"other{n}" for n in range(8)]
    other_values = [pattern(key, NBYTES) for key in others]
    assert cc.save(LONG, others, Buffers(other_values).value_list) == CcResult(8, 8)
    go_on.set()
    assert future.result(10) == CcResult(8, 8)
    assert loads(cc, "slow")
    target = Buffers.empty([NBYTES] * 8)
    assert cc.load(LONG, others, target.value_list) == CcResult(8, 8)
    assert [target.value(n) for n in range(8)] == other_values


def test_a_pool_that_is_replaced_is_unmapped_and_the_next_one_mapped(
    cc: ContextCaching, local_pool: LocalPool
) -> None:
    assert save(cc) == CcResult(8, 8)
    assert len(mapped(local_pool.root)) == 4
    inode = os.stat(f"{local_pool.root}/index").st_ino
    local_pool.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
    local_pool.process.wait(20)  # type: ignore[union-attr]
    server = subprocess.Popen(
        python_command(
            "ems", "serve", "--root", local_pool.root, "--capacity", "96MiB", "--recreate"
        ),
        env=child_environment(),
        stderr=subprocess.PIPE,
    )
    try:
        wait_until(lambda: not loads(cc) and Ems.check_health(), 20)
        assert os.stat(f"{local_pool.root}/index").st_ino != inode
        wait_until(lambda: can_save(cc, "new"))
        assert loads(cc, "new")
        gc.collect()
        assert not mapped_deleted(local_pool.root)
        assert len(mapped(local_pool.root)) == 4
        assert Ems.stats()["save_calls"] >= 2  # counts go on
    finally:
        server.terminate()
        server.wait(20)
        server.stderr.close()  # type: ignore[union-attr]


def test_an_error_that_is_kept_does_not_keep_the_pool_mapped(
    cc: ContextCaching, local_pool: LocalPool
) -> None:
    local_pool.kill()
    errors: list[BaseException] = []
    for _ in range(3):
        with pytest.raises(EmsException) as caught:
            save(cc)
        errors.append(caught.value)
    context = cc._client._session._context
    assert context is not None
    mapping = context.keep
    del context
    gc.collect()
    # The session's context and its own reference, this one, and the argument of the count.
    holders = [type(one).__name__ for one in gc.get_referrers(mapping)]
    assert "frame" not in holders or holders.count("frame") <= 1
    assert errors


def test_closing_without_a_server(local_pool: LocalPool) -> None:
    Ems.init(local_pool.config)
    local_pool.kill()
    started = time.monotonic()
    Ems.close()
    assert time.monotonic() - started < 3
    assert mapped(local_pool.root) == []


def test_closing_with_a_frozen_server(local_pool: LocalPool) -> None:
    Ems.init(local_pool.config)
    local_pool.process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
    started = time.monotonic()
    Ems.close()
    assert time.monotonic() - started < 3
    local_pool.process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]


def test_a_session_ends_with_its_client(local_pool: LocalPool) -> None:
    for _ in range(3):
        Ems.init(local_pool.config)
        assert len(status_of(local_pool).session_ids) == 1
        Ems.close()
        wait_until(lambda: not status_of(local_pool).session_ids)
