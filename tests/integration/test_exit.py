"""The end of the interpreter, with work of every kind pending."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from fix_pool import status_of, wait_until

from ems.testing import LocalPool
from ems.testing.child import child_environment

PREPARED = """
import sys, threading
from ems import *
Ems.init(EmsConfig(cc_config=CcConfig(0, 0, 'local'), root=sys.argv[1]))
cc = Ems.get_cc()
keys = [f'k{n}' for n in range(16)]
memory = [bytearray(1 << 20) for _ in keys]
values = [[KvBufferWrapper.from_buffer(one)] for one in memory]
cc.save(None, keys, values)
"""

PROGRAMS = {
    "nothing": "",
    "loads": "futures = [cc.async_load(None, keys, values) for _ in range(100)]",
    "forgotten saves": "[cc.async_save(None, keys, values) for _ in range(100)]",
    "an unhandled error": "cc.async_load(None, keys, values); raise SystemExit(0)",
    "a daemon thread that loads": """
def work():
    try:
        while True:
            cc.load(None, keys, values)
    except EmsException:
        pass  # closed
threading.Thread(target=work, daemon=True).start()
""",
    "a daemon thread that waits": """
future = cc.async_load(None, keys, values)
threading.Thread(target=future.result, daemon=True).start()
""",
    "a thread that ends later": """
import time
def work():
    time.sleep(0.2)
    assert cc.load(None, keys, values).success == 16
threading.Thread(target=work).start()
""",
    "a loop that is not finished": """
import asyncio
async def main():
    task = asyncio.ensure_future(cc.async_load(None, keys, values))
    await asyncio.sleep(0)
asyncio.run(main())
""",
    "a callback": """
cc.async_load(None, keys, values).add_done_callback(lambda future: future.result())
""",
    "closed by hand": "cc.async_save(None, keys, values); Ems.close(); Ems.close()",
    "init again": """
Ems.close()
Ems.init(EmsConfig(cc_config=CcConfig(0, 0, 'x'), root=sys.argv[1]))
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_interpreter_ends_cleanly(local_pool: LocalPool, name: str) -> None:
    started = time.monotonic()
    program = PREPARED + PROGRAMS[name]
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", program, local_pool.root],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - started < 30
    wait_until(lambda: not status_of(local_pool).session_ids)
