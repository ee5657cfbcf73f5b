from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ems import EmsErrorCode, EmsException
from ems.testing import LocalPool
from ems.testing.child import child_environment
from ems.testing.figures import read_server

CAPACITY = "16MiB"
OWNER = """
import sys
from ems.testing import LocalPool
pool = LocalPool("16MiB").start()
print(pool.root, pool.process.pid, pool._guard.pid, flush=True)
sys.stdin.read()
"""


def wait_for_end(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], 20)[0], f"process {pid} is still there"
    finally:
        os.close(fd)


def test_a_pool_serves_and_leaves_nothing() -> None:
    with LocalPool(CAPACITY, entries=1024) as pool:
        assert pool.process is not None
        pid = pool.process.pid
        assert read_server(pool.root).capacity == 16 << 20
        assert pool.config.root == pool.root
        other = pool.config_for(rank_id=3, model_id="other", access_id="tenant")
        assert other.cc_config is not None
        assert (other.cc_config.rank_id, other.access_id) == (3, "tenant")
        assert "serves 16 MiB" in pool.log_text()
        root = pool.root
    assert not Path(root).exists()
    wait_for_end(pid)
    pool.stop()


def test_an_exception_in_the_body_leaves_nothing() -> None:
    with pytest.raises(KeyError), LocalPool(CAPACITY) as pool:
        root = pool.root
        raise KeyError
    assert not Path(root).exists()


def test_a_server_that_does_not_start_tells_why() -> None:
    pool = LocalPool(CAPACITY, options=["--no-such-option"])
    with pytest.raises(EmsException, match="no-such-option") as caught:
        pool.start()
    assert caught.value.status_code() is EmsErrorCode.EMS_IO_ERROR
    assert not Path(pool.root).exists()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(EmsException, match=r"no directory for the pool in .*absent"):
        LocalPool(CAPACITY, directory=str(tmp_path / "absent")).start()


def test_the_life_of_a_server() -> None:
    with LocalPool(CAPACITY) as pool:
        assert pool.start() is pool  # it runs already
        first = pool.process
        assert first is not None
        pool.kill()
        assert first.returncode == -signal.SIGKILL
        with pytest.raises(EmsException, match="gives no status"):
            read_server(pool.root)
        root = pool.root
        pool.start()
        pool.restart()
        assert pool.root == root
        assert read_server(pool.root).capacity == 16 << 20
        assert pool.process is not None
        pool.process.send_signal(signal.SIGSTOP)
    assert not Path(root).exists()


def test_a_pool_out_of_turn_says_so() -> None:
    pool = LocalPool(CAPACITY)
    with pytest.raises(EmsException, match="was not started"):
        _ = pool.root
    pool.stop()
    with pytest.raises(EmsException, match="was stopped"):
        pool.start()
    with pytest.raises(EmsException, match="capacity is 'much'"):
        LocalPool("much")


def test_options_of_this_process_do_not_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMS_CAPACITY", "nonsense")
    with LocalPool(CAPACITY) as pool:
        assert read_server(pool.root).capacity == 16 << 20


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None])
def test_whatever_ends_the_owner_nothing_is_left(how: signal.Signals | None) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=child_environment(),
    ) as owner:
        assert owner.stdout is not None
        root, server, guard = owner.stdout.readline().split()
        assert Path(root.decode()).is_dir()
        if how is None:
            owner.communicate()  # an ordinary end that forgot to stop the pool
        else:
            owner.send_signal(how)
            owner.wait()
    wait_for_end(int(guard))
    wait_for_end(int(server))
    assert not Path(root.decode()).exists()
