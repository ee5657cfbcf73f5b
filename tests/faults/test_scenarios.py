"""Faults that users of comparable systems met, with no better place; see docs/failures.md."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from client_bench import AdmittingDevice, Buffers, pattern
from fix_pool import status_of, wait_until

from ems import CcKvOption, CcResult, ContextCaching, Ems
from ems.testing import LocalPool
from ems.testing.child import child_environment
from ems.testing.memory_pool import UNIT, MemoryPool

NBYTES = 1 << 20
LONG = CcKvOption(timeout=20_000)

LOADER = """
import sys, time
from client_bench import Buffers, pattern
from ems import *
Ems.init(EmsConfig(cc_config=CcConfig(0, 0, 'local'), root=sys.argv[1]))
cc, long = Ems.get_cc(), CcKvOption(timeout=20000)
keys = [f'k{n}' for n in range(8)]
target = Buffers.empty([1 << 20] * 8)
print('now', flush=True)
while True:
    started = time.monotonic()
    assert cc.load(long, keys, target.value_list) == CcResult(8, 8)
    assert time.monotonic() - started < 2, "a load stalled"
    assert [target.value(n) for n in range(8)] == [pattern(key, 1 << 20) for key in keys]
"""


def test_one_of_eight_clients_is_killed_during_its_load(
    cc: ContextCaching, local_pool: LocalPool
) -> None:
    keys = [f"k{n}" for n in range(8)]
    values = [pattern(key, NBYTES) for key in keys]
    assert cc.save(LONG, keys, Buffers(values).value_list) == CcResult(8, 8)
    environment = child_environment()
    environment["PYTHONPATH"] += os.pathsep + os.path.dirname(os.path.dirname(__file__))
    children = [
        subprocess.Popen(
            [sys.executable, "-c", LOADER, local_pool.root],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(8)
    ]  # fmt: skip
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "now\n"
        assert len(status_of(local_pool).session_ids) == 9
        pids = set(status_of(local_pool).session_pids)
        children[3].send_signal(signal.SIGKILL)
        wait_until(lambda: len(status_of(local_pool).session_ids) == 8)
        assert set(status_of(local_pool).session_pids) == pids - {children[3].pid}
        time.sleep(0.3)
        assert [child.poll() for child in children].count(None) == 7
        target = Buffers.empty([NBYTES] * 8)
        assert cc.load(LONG, keys, target.value_list) == CcResult(8, 8)
    finally:
        for child in children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


@pytest.mark.parametrize("later", [False, True])
def test_a_buffer_may_be_overwritten_as_soon_as_its_save_is_done(
    cc: ContextCaching, later: bool
) -> None:
    for turn in range(20):
        value = pattern(turn, NBYTES)
        source, target = Buffers([value]), Buffers.empty([NBYTES])
        if later:
            future = cc.async_save(LONG, [f"{turn}"], source.value_list)
            while not cc.is_ready(future):
                time.sleep(0.0002)
        else:
            cc.save(LONG, [f"{turn}"], source.value_list)
        source.memory[:] = bytes(len(source.memory))
        assert cc.load(LONG, [f"{turn}"], target.value_list) == CcResult(1, 1)
        assert target.value(0) == value


def test_a_block_is_old_or_new_and_never_a_mix(cc: ContextCaching) -> None:
    """Loads while the same key is saved over and over."""
    old, new = pattern("old", NBYTES), pattern("new", NBYTES)
    sources = [Buffers([old]), Buffers([new])]
    cc.save(LONG, ["k"], sources[0].value_list)
    stop = threading.Event()

    def save() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            cc.save(LONG, ["k"], sources[turn % 2].value_list)

    thread = threading.Thread(target=save)
    thread.start()
    try:
        target, seen = Buffers.empty([NBYTES]), set()
        for _ in range(400):
            if cc.load(LONG, ["k"], target.value_list).success:
                value = target.value(0)
                assert value in (old, new)
                seen.add(value)
    finally:
        stop.set()
        thread.join()
    assert len(seen) == 2


IDLER = """
import sys
from client_bench import Buffers, pattern
from ems import *
Ems.init(EmsConfig(cc_config=CcConfig(0, 0, 'local'), root=sys.argv[1]))
cc, value = Ems.get_cc(), Buffers([pattern('idle', 1 << 20)])
assert cc.save(None, ['idle'], value.value_list).success == 1
print('now', flush=True)
sys.stdin.read()
assert Ems.check_health()
assert cc.save(None, ['idle'], value.value_list).success == 1
assert cc.load(None, ['idle'], value.value_list).success == 1
assert Ems.stats()['attaches'] == 1 and Ems.stats()['connections_lost'] == 0
"""


def test_liveness_does_not_hang_on_a_long_copy_or_an_idle_client(
    cc: ContextCaching, local_pool: LocalPool
) -> None:
    real = cc._client._device

    class SlowDevice:
        chunk_bytes = real.chunk_bytes

        def copy_in(self, *arguments: object) -> tuple[int, int]:
            time.sleep(4)  # more than any polling of the server
            return real.copy_in(*arguments)  # type: ignore[arg-type]

    environment = child_environment()
    environment["PYTHONPATH"] += os.pathsep + os.path.dirname(os.path.dirname(__file__))
    idle = subprocess.Popen(
        [sys.executable, "-c", IDLER, local_pool.root],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with idle:
        assert idle.stdout is not None
        assert idle.stdout.readline() == "now\n"
        cc._client._device = AdmittingDevice(real, SlowDevice())  # type: ignore[assignment]
        source = Buffers([pattern("k", NBYTES)])
        assert cc.save(LONG, ["k"], source.value_list) == CcResult(1, 1)
        assert len(status_of(local_pool).session_ids) == 2
        idle.communicate(timeout=10)
    assert idle.returncode == 0
    assert Ems.stats()["attaches"] == 1
    assert Ems.stats()["connections_lost"] == 0


def test_tiny_keys_take_bounded_memory() -> None:
    memory = MemoryPool(64 << 20, entries=1024)
    session = memory.session()
    before = memory.geometry.index_bytes
    for request in range(40):
        memory.save(session, request, dict.fromkeys(range(request * 500, request * 500 + 500), 1))
    stats = memory.pool.stats()
    assert stats.entries <= stats.slots == 1024
    assert stats.used == stats.entries * UNIT
    assert stats.evictions > 18_000
    assert memory.geometry.index_bytes == before
    memory.check()
