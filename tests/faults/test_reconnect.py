"""The way back to a server, taken by the SDK alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from client_bench import Buffers, pattern
from fix_pool import status_of, wait_until
from v1_bench import Cache, filled, right, whole

from ems import (
    CcConfig_v1,
    CcKvOption,
    CcResult,
    ContextCaching,
    Ems,
    EmsConfig,
)
from ems.testing import LocalPool
from ems.testing.child import child_environment

NBYTES = 1 << 20
KEYS = [f"k{n}" for n in range(8)]
LONG = CcKvOption(timeout=30_000)


def test_waiting_for_a_server_costs_little(cc: ContextCaching, local_pool: LocalPool) -> None:
    """It asks less and less often, and is there soon after the server is."""
    local_pool.kill()
    wait_until(lambda: not Ems.check_health(), 4)
    before = time.process_time()
    time.sleep(2)
    assert time.process_time() - before < 0.2
    local_pool.start()
    started = time.monotonic()
    wait_until(Ems.check_health, 3)
    assert Ems.stats()["attaches"] == 2
    assert time.monotonic() - started < 1.5  # a rest of a second at most
    source = Buffers([pattern(key, NBYTES) for key in KEYS])
    assert cc.save(LONG, KEYS, source.value_list) == CcResult(8, 8)


@pytest.mark.parametrize("how", ["killed", "replaced"])
def test_a_registered_cache_needs_no_second_registration(local_pool: LocalPool, how: str) -> None:
    cache = Cache()
    config = CcConfig_v1(rank_id=0, device_id=0, model_id="m")
    Ems.init(EmsConfig(cc_config_v1=config, root=local_pool.root))
    try:
        cc = Ems.get_cc()
        assert cc is not None
        cc.register_kvcache(cache.tensors)
        assert cc.save(**filled(cache, [0, 1], [10, 11])) == CcResult(2, 2)
        local_pool.kill()
        if how == "replaced":
            for name in ("index", "recency", "counters", "data.0"):
                os.unlink(os.path.join(local_pool.root, name))
        local_pool.start()
        # A new pool begins with the epoch that the old one had: it is another one all the same.
        wait_until(lambda: Ems.check_health() and Ems.stats()["attaches"] == 2)
        kept = CcResult(2, 2) if how == "killed" else CcResult(0, 2)
        assert cc.exists([10, 11]) == kept
        assert cc.load(**whole(cache, [4, 5], [10, 11])) == kept
        assert right(cache, [4, 5], [10, 11]) == [how == "killed"] * 2
        assert cc.save(**filled(cache, [2], [12])) == CcResult(1, 1)
        assert cc.load(**whole(cache, [6], [12])) == CcResult(1, 1)
        assert right(cache, [6], [12]) == [True]
    finally:
        Ems.close()


# Opens whatever it may, so that nothing more can be opened.
EXHAUSTED = """
import os, resource, sys, time
from client_bench import Buffers, pattern
from ems import *
Ems.init(EmsConfig(cc_config=CcConfig(0, 0, 'local'), root=sys.argv[1]))
cc, long = Ems.get_cc(), CcKvOption(timeout=2000)
source = Buffers([pattern('k', 1 << 20)])
assert cc.save(long, ['k'], source.value_list) == CcResult(1, 1)
usual, opened = resource.getrlimit(resource.RLIMIT_NOFILE), []
resource.setrlimit(resource.RLIMIT_NOFILE, (100, usual[1]))
try:
    while True:
        opened.append(os.dup(0))
except OSError as error:
    assert error.errno == 24
assert cc.save(long, ['k'], source.value_list) == CcResult(1, 1)
print('exhausted', flush=True)
sys.stdin.readline()
# The server is another one now, which cannot be reached.
assert cc.load(long, ['k'], source.value_list) == CcResult(1, 1)
try:
    cc.save(long, ['k'], source.value_list)
except EmsException as error:
    assert error.status_code() in (EmsErrorCode.EMS_IO_ERROR, EmsErrorCode.EMS_IO_TIMEOUT), error
else:
    raise AssertionError('saved')
until = time.monotonic() + 5
while Ems.check_health():
    assert time.monotonic() < until
    time.sleep(0.01)
for fd in opened:
    os.close(fd)
while not Ems.check_health():
    assert time.monotonic() < until
    time.sleep(0.01)
assert cc.save(long, ['k'], source.value_list) == CcResult(1, 1)
assert cc.load(long, ['k'], source.value_list) == CcResult(1, 1)
Ems.close()
print('fine', flush=True)
"""


def test_a_client_without_descriptors_heals(local_pool: LocalPool) -> None:
    environment = child_environment()
    environment["PYTHONPATH"] += os.pathsep + os.path.dirname(os.path.dirname(__file__))
    child = subprocess.Popen(
        [sys.executable, "-c", EXHAUSTED, local_pool.root],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "exhausted\n"
        local_pool.kill()
        local_pool.start()
        text, _ = child.communicate("go\n", timeout=20)
    assert (text, child.returncode) == ("fine\n", 0)
    wait_until(lambda: not status_of(local_pool).session_ids)
