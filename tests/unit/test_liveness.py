from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ems.shm.liveness import Held, LivenessLock, LockTable, ServerLock, server_pid
from ems.testing.child import child_environment

HOLDER = """
import sys
from ems.shm.liveness import LivenessLock
lock = LivenessLock(sys.argv[1], int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def table(tmp_path: Path) -> Iterator[LockTable]:
    with closing(LockTable(str(tmp_path / "locks"), 64, create=True)) as table:
        yield table


def test_a_lock_is_seen_and_given_up(table: LockTable, tmp_path: Path) -> None:
    lock = LivenessLock(str(tmp_path / "locks"), 7)
    assert lock.held
    assert table.is_held(7)
    assert not table.is_held(6)
    assert table.holders() == [7]
    lock.close()
    lock.close()
    assert not lock.held
    assert table.holders() == []


def test_a_byte_stays_held_until_the_last_holder_is_gone(table: LockTable, tmp_path: Path) -> None:
    one, other = (LivenessLock(str(tmp_path / "locks"), 3) for _ in range(2))
    one.close()
    assert table.is_held(3)
    other.close()
    assert not table.is_held(3)


def test_closing_another_descriptor_does_not_drop_the_lock(
    table: LockTable, tmp_path: Path
) -> None:
    # What the classic kind of lock does, and why it is not used.
    with closing(LivenessLock(str(tmp_path / "locks"), 3)):
        (tmp_path / "locks").read_bytes()
        assert table.is_held(3)


def test_a_forked_child_does_not_keep_the_lock(table: LockTable, tmp_path: Path) -> None:
    lock = LivenessLock(str(tmp_path / "locks"), 5)
    there, here = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(there[1])
        os.write(here[1], b"x")
        os.read(there[0], 1)  # lives on until the parent has looked
        os._exit(1 if lock.held else 0)
    os.read(here[0], 1)
    lock.close()
    assert not table.is_held(5)
    for fd in (*there, *here):
        os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_lock_ends_with_its_process(table: LockTable, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "locks"), "9"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert table.is_held(9)
        process.kill()
        process.wait()
        assert not table.is_held(9)


def test_one_server_a_root(tmp_path: Path) -> None:
    path = str(tmp_path / "server.lock")
    assert server_pid(path) is None
    with ServerLock(path):
        assert server_pid(path) == os.getpid()
        with pytest.raises(Held, match=f"belongs to process {os.getpid()}"):
            ServerLock(path)
    assert server_pid(path) is None
    with ServerLock(path):
        pass
    assert os.path.exists(path)


def test_a_missing_lock_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LivenessLock(str(tmp_path / "locks"), 1)
