"""File systems and memory that run out: refused with figures, or harmless; never SIGBUS."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fix_serve import ServeProcess

from ems.shm import layout
from ems.shm.segment import Segment
from ems.testing.child import child_environment

Serve = Callable[..., ServeProcess]

# Fills the file system behind the pool, then uses all of the pool, twice over.
FULL_TMPFS = """
import os, subprocess, sys
from client_bench import Buffers, pattern
from ems import CcKvOption, Ems
from ems.testing import LocalPool
place, long = sys.argv[1], CcKvOption(timeout=20000)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "none", place], check=True)
with LocalPool("32MiB", directory=place) as pool:
    with open(os.path.join(place, "filler"), "wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError as error:
            assert error.errno == 28, error
    Ems.init(pool.config)
    cc = Ems.get_cc()
    for key in range(64):
        value = pattern(key, 1 << 20)
        assert cc.save(long, [f"k{key}"], Buffers([value]).value_list).success == 1
        target = Buffers.empty([1 << 20])
        assert cc.load(long, [f"k{key}"], target.value_list).success == 1
        assert target.value(0) == value
    pool.kill()
    pool.start()  # needs no room of its own
    Ems.close()
    os.unlink(os.path.join(place, "filler"))
"""


def test_a_tmpfs_that_fills_up_behind_the_pool(tmp_path: Path) -> None:
    inside = ["unshare", "--mount", "--propagation", "private"]
    try:
        probe = [*inside, "mount", "-t", "tmpfs", "none", str(tmp_path)]
        subprocess.run(probe, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no private tmpfs can be mounted here: {error}")
    environment = child_environment()
    environment["PYTHONPATH"] += os.pathsep + os.path.dirname(os.path.dirname(__file__))
    done = subprocess.run(
        [*inside, sys.executable, "-c", FULL_TMPFS, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["recency", "counters", "data.0", "index.new"])
def test_no_space_for_one_of_the_files(root: str, serve: Serve, name: str) -> None:
    """The check of room was wrong, or somebody was quicker: nothing is left behind."""
    fail = (
        "import errno, os, ems.shm.segment\n"
        "real = os.posix_fallocate\n"
        "def full(fd, at, n):\n"
        f"    if os.readlink(f'/proc/self/fd/{{fd}}').endswith({name!r}):\n"
        "        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
        "    real(fd, at, n)\n"
        "os.posix_fallocate = full\n"
    )
    server = serve("--capacity", "16MiB", before=fail)
    assert server.process.wait(30) == 2
    text = re.sub(r"\s+", " ", server.text())
    assert "cannot be allocated" in text
    assert "No space left on device; there are" in text
    assert "Traceback" not in text
    assert os.listdir(root) == [layout.SERVER_LOCK]
    serve("--capacity", "16MiB").wait_until_serving()


def test_all_of_a_file_is_allocated_before_it_is_used() -> None:
    with Segment.create("/dev/shm/ems-test-allocated", 8 << 20) as segment:
        status = os.stat(segment.path)
        os.unlink(segment.path)
    assert status.st_blocks * 512 >= status.st_size == 8 << 20
