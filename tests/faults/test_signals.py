"""Ctrl-C in the middle of a call, and hundreds of calls pending at the end of the interpreter."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from fix_pool import status_of, wait_until

from ems.testing import LocalPool
from ems.testing.child import child_environment

# The interpreter drops an interrupt that comes while it collects what has a weak reference to it,
# as the connection of `init` has.
PREPARED = """
import gc, sys, time
from ems import *
Ems.init(EmsConfig(cc_config=CcConfig(0, 0, 'local'), root=sys.argv[1]))
cc, long = Ems.get_cc(), CcKvOption(timeout=20000)
keys = [f'k{n}' for n in range(16)]
memory = [bytearray(1 << 20) for _ in keys]
values = [[KvBufferWrapper.from_buffer(one)] for one in memory]
assert cc.save(long, keys, values).success == 16
gc.collect()
"""

INTERRUPTED = {
    "load": "call = lambda: cc.load(long, keys, values)",
    "save": "call = lambda: cc.save(long, keys, values)",
    "result": "call = lambda: cc.async_save(long, keys, values).result()",
    "get_result": "call = lambda: cc.get_result(cc.async_load(long, keys, values))",
}

# The interpreter raises at the end of a loop's body too, which is outside of a `try` in it.
LOOP = """
interrupts = 0
print('now', flush=True)
while interrupts < 5:
    try:
        while True:
            call()
    except KeyboardInterrupt:
        interrupts += 1
        print(interrupts, flush=True)
assert cc.save(long, keys, values).success == 16
assert cc.load(long, keys, values).success == 16
print('fine', flush=True)
"""


@pytest.mark.parametrize("name", INTERRUPTED)
def test_ctrl_c_in_a_call(local_pool: LocalPool, name: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PREPARED + INTERRUPTED[name] + LOOP, local_pool.root],
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            lines = [child.stdout.readline()]
            for number in range(1, 6):
                time.sleep(0.02 + 0.007 * number)
                child.send_signal(signal.SIGINT)
                lines.append(child.stdout.readline())
            # Not `communicate`: it does not see what `readline` has read already.
            lines += child.stdout
            errors = child.stderr.read()
        finally:
            child.kill()  # one that does not end would be waited for
    assert (lines, errors) == (["now\n", "1\n", "2\n", "3\n", "4\n", "5\n", "fine\n"], "")
    assert child.returncode == 0
    wait_until(lambda: not status_of(local_pool).session_ids)
    assert status_of(local_pool).reserved == 0


def test_hundreds_of_futures_at_the_end_of_the_interpreter(local_pool: LocalPool) -> None:
    program = """
import logging
logging.getLogger("asyncio").setLevel(logging.ERROR)  # a slow callback is none
futures = [cc.async_load(long, keys, values) for _ in range(400)]
futures += [cc.async_save(long, keys, values) for _ in range(400)]
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", PREPARED + program, local_pool.root],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: not status_of(local_pool).session_ids)
    assert status_of(local_pool).reserved == 0
