"""`ems serve` says no with exit code 2 and a text that helps, and changes nothing."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fix_serve import BareClient, ServeProcess, run_ems, status_of

from ems.server import files, store
from ems.server.config import ServerConfig
from ems.server.files import RefusedToStart
from ems.shm import layout
from ems.shm.space import Space

Serve = Callable[..., ServeProcess]
Connect = Callable[[], BareClient]
MIB = 1 << 20


def refusal(*options: str, **env: str) -> str:
    result = run_ems("serve", *options, env=env)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    return re.sub(r"\s+", " ", result.stderr)


def test_more_than_there_is(root: str) -> None:
    text = refusal("--root", root, "--capacity", "1TiB")
    assert re.search(
        r"capacity 1 TiB is too much: it needs 1(\.\d+)? TiB in /dev/shm.*, but .*GiB free",
        text,
    )
    assert not os.path.exists(root)


def test_a_disk(tmp_path: Path) -> None:
    # Where the temporary directory lies in memory itself, /proc is no better place than a disk.
    place = Path("/proc") if files.file_system(str(tmp_path)).in_memory else tmp_path
    text = refusal("--root", str(place / "a" / "b"), "--capacity", "16MiB")
    assert "does not lie on a tmpfs" in text
    assert not (place / "a").exists()
    assert "does not lie in memory" in refusal(
        "--data-dir", str(place), "--root", "/dev/shm/ems-none"
    )


# Root may write anywhere; without this capability it is as bound by permissions as anybody.
BE_ORDINARY = """
import ctypes
libc = ctypes.CDLL(None)
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, data) == 0
data[0] &= ~0b110
data[1] &= ~0b110
assert libc.capset(header, data) == 0
"""


def test_a_root_that_is_not_writable(root: str, serve: Serve) -> None:
    os.mkdir(root, 0o555)
    server = serve("--capacity", "16MiB", before="" if os.geteuid() else BE_ORDINARY)
    assert server.process.wait(30) == 2
    assert "not writable" in server.text()
    assert "Traceback" not in server.text()
    assert os.listdir(root) == []


def test_a_root_that_is_a_file(root: str) -> None:
    Path(root).write_bytes(b"")
    assert "is no directory" in refusal("--root", root)


def test_bad_options(root: str) -> None:
    assert "--capacity is 'lots'" in refusal("--root", root, "--capacity", "lots")
    assert "EMS_ENTRIES is 'x'" in refusal("--root", root, EMS_ENTRIES="x")
    assert "--no-such" in refusal("--root", root, "--no-such", "1")
    assert "the limit is" in refusal("--root", "/dev/shm/" + "x" * 120)
    assert "--config" in refusal("--root", root, "--config", "/no/such/file")
    assert "--log-dir" in refusal(
        "--root", root, "--capacity", "16MiB", "--log-dir", "/proc/nothing"
    )


def test_an_existing_pool_keeps_its_size(root: str, serve: Serve) -> None:
    serve("--capacity", "16MiB", "--entries", "2048").wait_until_serving().end()
    text = refusal("--root", root, "--capacity", "32MiB")
    assert "has a capacity of 16 MiB, not 32 MiB" in text
    assert "--recreate" in text
    assert "room for 2048 blocks, not 4096" in refusal("--root", root, "--entries", "4096")
    # as a variable too
    assert "not 32 MiB" in refusal("--root", root, EMS_CAPACITY="32MiB")
    serve("--capacity", "16MiB", "--entries", "2048").wait_until_serving()
    assert status_of(root).epoch == 2


def test_what_is_no_pool(root: str, serve: Serve) -> None:
    os.mkdir(root)
    index = Path(root, layout.INDEX)
    index.write_bytes(b"x" * 8192)
    assert "is no pool" in refusal("--root", root, "--capacity", "16MiB")
    assert index.read_bytes() == b"x" * 8192
    serve("--capacity", "16MiB", "--recreate").wait_until_serving()


def test_a_pool_with_a_missing_file(root: str, serve: Serve) -> None:
    serve().wait_until_serving().end()
    os.unlink(os.path.join(root, layout.RECENCY))
    assert "cannot be served" in refusal("--root", root)
    serve("--capacity", "16MiB", "--recreate").wait_until_serving()


def test_replacing_a_pool_in_use_without_room_for_both(
    root: str, serve: Serve, client: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve().wait_until_serving()
    user = client()
    user.save("a")
    own = sum(files.own_bytes(root).values())
    free = own // 2
    monkeypatch.setattr(files, "read_space", lambda path: Space(free, free, None))
    monkeypatch.setattr(store, "LEAVE_S", 0.05)
    config = ServerConfig(root, capacity=16 * MIB, recreate=True)
    with pytest.raises(RefusedToStart, match=f"used by process {os.getpid()} "):
        store._take_down(config, lambda: True)
    assert user.has("a")  # nothing changed
    with pytest.raises(RefusedToStart, match="even without the pool that is there"):
        store._take_down(ServerConfig(root, capacity=64 * MIB, recreate=True), lambda: True)
    user.lock.close()
    store._take_down(config, lambda: True)
    assert not os.path.exists(os.path.join(root, layout.INDEX))
    assert not user.has("a")


def test_two_tmpfs_draw_on_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ems-test-") as one:
        demands = [files.Demand(one, 6 * MIB), files.Demand("/proc", 6 * MIB)]
        monkeypatch.setattr(files, "read_space", lambda path: Space(10 * MIB, 11 * MIB, None))
        assert files.shortage(demands) is not None
        monkeypatch.setattr(files, "read_space", lambda path: Space(10 * MIB, 12 * MIB, None))
        assert files.shortage(demands) is None
        monkeypatch.setattr(files, "read_space", lambda path: Space(10 * MIB, 12 * MIB, 5 * MIB))
        assert files.shortage(demands) is not None
