from __future__ import annotations

import json
import os
import random
import signal
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fix_serve import BareClient, ServeProcess, attach, run_ems, soon, status_of

from ems.client.writer import ChannelBroken
from ems.rpc.channel import Credentials, Reason, Refused, Resumed
from ems.rpc.frames import COMMITTED, GRANTED, NO_ROOM
from ems.shm import layout

Serve = Callable[..., ServeProcess]
Connect = Callable[[], BareClient]

NO_CHMOD = """
import errno, os
def forbidden(*args, **kwargs):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
os.chmod = os.fchmod = os.chown = os.fchown = os.lchown = forbidden
"""


def mode_of(*parts: str) -> int:
    return stat.S_IMODE(os.stat(os.path.join(*parts)).st_mode)


def test_a_server_serves_until_sigterm_and_its_pool_stays(root: str, serve: Serve) -> None:
    server = serve().wait_until_serving()
    assert mode_of(root) == 0o700
    assert {mode_of(root, name) for name in os.listdir(root)} == {0o600}
    status = status_of(root)
    assert (status.state, status.server_pid, status.epoch) == ("serving", server.pid, 1)
    assert (status.capacity, status.ready) == (16 << 20, 16 << 20)
    assert status.slots == 1024
    assert server.end() == 0
    assert sorted(os.listdir(root)) == sorted(
        [layout.SERVER_LOCK, layout.SESSIONS_LOCK, layout.INDEX, layout.RECENCY, layout.COUNTERS,
         layout.DATA]
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_next_server_serves_every_block(
    root: str, serve: Serve, client: Connect, number: signal.Signals
) -> None:
    server = serve().wait_until_serving()
    first = client()
    assert list(first.save("a", "b")) == [COMMITTED] * 2
    server.end(number)
    assert first.has("a")  # while no server runs
    serve("--entries", "1024").wait_until_serving()
    assert (status_of(root).epoch, status_of(root).entries) == (2, 2)
    assert status_of(root).pool_id == first.reply.pool_id
    assert client().has("b")


def test_a_session_outlives_its_server(root: str, serve: Serve, client: Connect) -> None:
    server = serve().wait_until_serving()
    living = client()
    kept, _, places = living.reserve("kept")
    lost, _, _ = living.reserve("lost")
    server.end(signal.SIGKILL)
    with pytest.raises(ChannelBroken):
        living.channel.echo(b"", soon())
    serve().wait_until_serving()
    session = (living.reply.session_id, living.reply.secret, living.reply.pool_id)
    assert status_of(root).reserved == 2 * 4096
    again = attach(root, resumed=Resumed(*session, live_requests=[kept]))
    assert (again.session_id, again.secret, again.epoch) == (*session[:2], 2)
    assert status_of(root).reserved == 4096
    assert list(living.channel.commit(kept, None, places, False, soon())) == [COMMITTED]
    assert living.has("kept")
    living.channel.abort(lost, soon())
    for wrong in (
        Resumed(session[0], bytes(16), session[2]),
        Resumed(session[0] + 1, *session[1:]),
        Resumed(*session[:2], "0" * 32),
    ):
        with pytest.raises(Refused, match="attach anew") as caught:
            attach(root, resumed=wrong)
        assert caught.value.reason is Reason.SESSION


def test_reservations_of_a_dead_client_come_back(root: str, serve: Serve, client: Connect) -> None:
    serve().wait_until_serving()
    client()
    leaving = BareClient(root)
    leaving.reserve("a", "b")
    session = leaving.reply.session_id
    leaving.channel.close()
    status = status_of(root)
    assert (status.reserved, list(status.session_ids)) == (2 * 4096, [1, session])
    leaving.close()
    until = time.monotonic() + 5
    while status_of(root).reserved:
        assert time.monotonic() < until
    assert list(status_of(root).session_ids) == [1]


def test_sigterm_lets_a_save_finish(root: str, serve: Serve, client: Connect) -> None:
    server = serve().wait_until_serving()
    saver = client()
    request, statuses, places = saver.reserve("a")
    assert list(statuses) == [GRANTED]
    server.process.send_signal(signal.SIGTERM)
    server.wait_until(lambda: "finishing what is under way" in server.text(), "draining")
    server.wait_until(lambda: not os.path.exists(os.path.join(root, layout.SOCKET)), "draining")
    assert list(saver.reserve("b")[1]) == [NO_ROOM]
    assert list(saver.channel.commit(request, None, places, False, soon())) == [COMMITTED]
    assert server.process.wait(5) == 0
    assert saver.has("a")


def test_the_second_signal_does_not_wait(root: str, serve: Serve, client: Connect) -> None:
    server = serve().wait_until_serving()
    client().reserve("a")
    server.process.send_signal(signal.SIGTERM)
    server.wait_until(lambda: "finishing" in server.text(), "draining")
    started = time.monotonic()
    assert server.end(signal.SIGINT) == 128 + signal.SIGINT
    assert time.monotonic() - started < 2


def test_draining_is_bounded(root: str, serve: Serve, client: Connect) -> None:
    server = serve(
        "--capacity", "16MiB", before="import ems.server.app; ems.server.app.DRAIN_S = 0.2"
    ).wait_until_serving()
    client().reserve("a")
    assert server.end() == 0


def test_one_server_a_root(root: str, serve: Serve) -> None:
    server = serve().wait_until_serving()
    second = run_ems("serve", "--root", root)
    assert second.returncode == 2
    assert f"belongs to process {server.pid}" in second.stderr
    assert "Traceback" not in second.stderr
    assert status_of(root).server_pid == server.pid


def test_a_server_that_dies_leaves_nothing_that_grows(root: str, serve: Serve) -> None:
    for _ in range(5):
        server = serve("--capacity", "64MiB")
        server.wait_until_serving()
        server.end(signal.SIGKILL)
        total = sum(os.stat(os.path.join(root, name)).st_blocks for name in os.listdir(root))
        assert total * 512 < 1.2 * (64 << 20)
    serve("--capacity", "64MiB").wait_until_serving()
    assert status_of(root).epoch == 6


def test_the_debris_of_a_half_made_pool_is_removed(root: str, serve: Serve) -> None:
    os.mkdir(root)
    elsewhere = Path(root).parent / "elsewhere"
    elsewhere.write_bytes(b"x")
    for name in (layout.INDEX_UNFINISHED, layout.RECENCY, layout.COUNTERS):
        Path(root, name).write_bytes(b"debris")
    os.symlink(elsewhere, os.path.join(root, layout.DATA))
    Path(root, layout.SOCKET).write_bytes(b"")
    Path(root, layout.SOCKET).unlink()
    serve().wait_until_serving()
    assert not elsewhere.exists()
    assert not os.path.exists(os.path.join(root, layout.INDEX_UNFINISHED))


def test_sigterm_while_the_pool_is_made(root: str, serve: Serve) -> None:
    slow = (
        "import time, ems.shm.segment as s; s.ALLOCATE_STEP_BYTES = 1 << 20\n"
        "import os; real = os.posix_fallocate\n"
        "os.posix_fallocate = lambda *a: (real(*a), time.sleep(0.02))"
    )
    server = serve("--capacity", "1GiB", before=slow)
    server.wait_until(lambda: os.path.exists(os.path.join(root, layout.DATA)), "allocating")
    assert server.end() == 0
    assert os.listdir(root) == [layout.SERVER_LOCK]


def test_a_group_may_use_the_pool(root: str, serve: Serve) -> None:
    gid = os.getgid()
    serve("--capacity", "16MiB", "--group", str(gid)).wait_until_serving()
    assert mode_of(root) == 0o770
    for name in os.listdir(root):
        assert (mode_of(root, name), os.stat(os.path.join(root, name)).st_gid) == (0o660, gid)


def test_a_root_that_allows_no_chmod(root: str, serve: Serve) -> None:
    os.mkdir(root, 0o755)
    server = serve("--capacity", "16MiB", before=NO_CHMOD).wait_until_serving()
    assert mode_of(root) == 0o755
    assert status_of(root).state == "serving"
    assert server.end() == 0
    again = serve("--capacity", "16MiB", before=NO_CHMOD).wait_until_serving()
    assert again.end() == 0


def test_data_can_lie_elsewhere(root: str, serve: Serve, client: Connect) -> None:
    data_dir = Path(root).parent / "data"
    data_dir.mkdir()
    options = ("--capacity", "16MiB", "--data-dir", str(data_dir))
    server = serve(*options).wait_until_serving()
    (data,) = data_dir.iterdir()
    assert os.path.realpath(os.path.join(root, layout.DATA)) == str(data)
    user = client()
    user.save("a")
    user.lock.close()
    server.end()
    serve(*options).wait_until_serving().end()
    moved = run_ems("serve", "--root", root, "--data-dir", root)
    assert moved.returncode == 2
    assert f"lies in {data_dir}" in moved.stderr
    assert run_ems("purge", "--root", root, "--yes").returncode == 0
    assert list(data_dir.iterdir()) == []


def test_recreate_retires_the_old_pool(root: str, serve: Serve, client: Connect) -> None:
    server = serve().wait_until_serving()
    old = client()
    old.save("a")
    server.end()
    assert old.has("a")
    serve("--capacity", "8MiB", "--recreate").wait_until_serving()
    assert not old.has("a")
    assert old.reader.header()["state"] == layout.PoolState.RETIRED
    status = status_of(root)
    assert (status.capacity, status.epoch, status.entries) == (8 << 20, 1, 0)
    assert status.pool_id != old.reply.pool_id
    fresh = client()
    assert list(fresh.save("a")) == [COMMITTED]


def test_credentials_are_checked(root: str, serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    key = "0123456789abcdef0123456789abcdef"
    file.write_text(f'[credentials]\n"tenant@_@a" = "{key}"\n')
    serve("--capacity", "16MiB", "--credentials", str(file)).wait_until_serving()
    assert attach(root, Credentials("tenant@_@a", key)).session_id == 1
    for wrong in (None, Credentials("tenant@_@a", key[::-1]), Credentials("other", key)):
        with pytest.raises(Refused, match=r"access_(id|key)") as caught:
            attach(root, wrong)
        assert caught.value.reason is Reason.CREDENTIALS
    assert key not in status_of(root).to_json()


def test_a_client_of_another_version_is_told_so(root: str, serve: Serve) -> None:
    serve().wait_until_serving()
    with pytest.raises(Refused, match="install the same version of ems") as caught:
        attach(root, abi_version=999)
    assert caught.value.reason is Reason.VERSION
    assert list(status_of(root).session_ids) == []


def test_garbage_on_the_control_socket(root: str, serve: Serve) -> None:
    serve().wait_until_serving()
    dice = random.Random(5)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for size in (0, 1, 24, 4000, 100_000):
        for start in (b"", preface):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(5)
                sock.connect(os.path.join(root, layout.SOCKET))
                try:
                    sock.sendall(start + dice.randbytes(size))
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(65536):
                        pass
                except (BrokenPipeError, ConnectionResetError):
                    pass
    assert status_of(root).state == "serving"


def test_json_logs_in_a_directory(root: str, serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    server = serve("--capacity", "16MiB", "--log-format", "json", "--log-dir", str(folder))
    server.wait_until_serving().end()
    (file,) = folder.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(set(line) == {"time", "level", "logger", "message"} for line in lines)
    assert any(f"serves 16 MiB in {root}" in line["message"] for line in lines)
    assert server.text() == ""


def test_a_log_that_nobody_reads_does_not_stop_the_server(root: str, serve: Serve) -> None:
    fill = "import os, fcntl; r, w = os.pipe(); fcntl.fcntl(w, 1031, 4096); os.dup2(w, 2)\n"
    loud = "import logging; [logging.getLogger('ems').error('x' * 1000) for _ in range(100)]\n"
    patch = (
        "import ems.server.app as app; real = app._Serving._open_sockets\n"
        f"async def loud(self):\n    {loud}    await real(self)\n"
        "app._Serving._open_sockets = loud\n"
    )
    server = serve("--capacity", "16MiB", before=fill + patch).wait_until_serving()
    assert status_of(root).state == "serving"
    assert server.end() == 0


def test_settings_from_environment_and_file(root: str, serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "ems.toml"
    file.write_text('capacity = "64MiB"\nentries = 2048\n')
    serve("--config", str(file), env={"EMS_CAPACITY": "8MiB"}).wait_until_serving()
    assert (status_of(root).capacity, status_of(root).slots) == (8 << 20, 2048)


def test_more_entries_than_a_million_start_and_restart_quickly(root: str, serve: Serve) -> None:
    options = ("--capacity", "16MiB", "--entries", "4000000")
    serve(*options).wait_until_serving().end()
    started = time.monotonic()
    serve(*options).wait_until_serving()
    assert time.monotonic() - started < 10
    assert status_of(root).slots == 4_000_000
