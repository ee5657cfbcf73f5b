"""A client that dies, or stands still, at each step of a save: the others notice nothing."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from client_bench import Buffers, pattern
from fix_pool import status_of, wait_until

from ems import CcKvOption, CcResult, ContextCaching
from ems.testing import LocalPool
from ems.testing.child import child_environment

NBYTES = 1 << 20
KEYS = ["a", "b", "c"]
OPTION = CcKvOption(timeout=10_000)

# At the step that it is told, the child raises the signal that it is told.
CHILD = """
import dataclasses, os, signal, sys
from client_bench import AdmittingDevice, Buffers, pattern
from ems import *
root, step, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
Ems.init(EmsConfig(cc_config=CcConfig(0, 0, 'local'), root=root))
cc = Ems.get_cc()
session = cc._client._session
context = session._context

def stop(name):
    if name == step:
        print("now", flush=True)
        os.kill(os.getpid(), number)

class Steps:
    def __init__(self, real):
        self.real = real
    def __getattr__(self, name):
        real = getattr(self.real, name)
        if not callable(real):
            return real
        def call(*arguments):
            stop(name)
            answer = real(*arguments)
            stop(name + " done")
            return answer
        return call

session._context = dataclasses.replace(context, channel=Steps(context.channel))
cc._client._device = AdmittingDevice(cc._client._device, Steps(context.device))
values = [pattern(("child", key), 1 << 20) for key in "abc"]
print(cc.save(CcKvOption(timeout=10000), list("abc"), Buffers(values).value_list))
"""

STEPS = ["reserve", "reserve done", "copy_in", "copy_in done", "commit", "commit done"]


def values_of(who: str) -> list[bytes]:
    return [pattern((who, key), NBYTES) for key in KEYS]


@contextlib.contextmanager
def child_at(pool: LocalPool, step: str, number: signal.Signals) -> Iterator[None]:
    """A process that got the signal at that step of its save."""
    environment = child_environment()
    environment["PYTHONPATH"] += ":" + sys.modules["client_bench"].__file__.rpartition("/")[0]  # type: ignore[union-attr]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, pool.root, step, str(int(number))],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "now\n"
        yield
    finally:
        child.kill()
        child.wait()
        child.stdout.close()  # type: ignore[union-attr]


def stored(cc: ContextCaching) -> list[bytes]:
    target = Buffers.empty([NBYTES] * len(KEYS))
    result = cc.load(OPTION, KEYS, target.value_list)
    return [target.value(n) for n in range(result.success)]


@pytest.mark.parametrize("step", STEPS)
def test_a_client_that_is_killed(cc: ContextCaching, local_pool: LocalPool, step: str) -> None:
    old = Buffers(values_of("old"))
    assert cc.save(OPTION, KEYS, old.value_list) == CcResult(3, 3)
    used = status_of(local_pool).used
    with child_at(local_pool, step, signal.SIGKILL):
        pass
    expected, new = values_of("child" if step == "commit done" else "old"), values_of("new")
    source, started = Buffers(new), time.monotonic()
    assert stored(cc) == expected
    # The same keys can be saved at once, and what it had reserved comes back.
    assert cc.save(OPTION, KEYS, source.value_list) == CcResult(3, 3)
    assert stored(cc) == new
    assert time.monotonic() - started < 1  # nobody waited for the dead
    wait_until(lambda: status_of(local_pool).reserved == 0)
    # The server may never have seen its lock: then it gives it five seconds.
    wait_until(lambda: len(status_of(local_pool).session_ids) == 1)
    assert status_of(local_pool).used == used


@pytest.mark.parametrize("step", ["reserve done", "copy_in done"])
def test_a_client_that_stands_still_holds_nobody_up(
    cc: ContextCaching, local_pool: LocalPool, step: str
) -> None:
    with child_at(local_pool, step, signal.SIGSTOP):
        new = Buffers(values_of("new"))
        assert cc.save(OPTION, KEYS, new.value_list) == CcResult(3, 3)
        assert stored(cc) == values_of("new")
        # No timer gives its memory to anybody: it may write there as long as it lives.
        assert status_of(local_pool).reserved == 3 * NBYTES
    wait_until(lambda: status_of(local_pool).reserved == 0)
    assert stored(cc) == values_of("new")
