from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from fix_serve import BareClient, ServeProcess, run_ems, status_json

import ems
from ems.common.metrics import PAGE_COUNTERS, Count
from ems.shm import layout
from ems.shm.segment import Segment
from ems.testing.child import child_environment, python_command
from ems_native._index import LAYOUT
from ems_native._shm import Counters

Serve = Callable[..., ServeProcess]
Connect = Callable[[], BareClient]


def count(client: BareClient, **numbers: int) -> None:
    path = os.path.join(client.root, layout.COUNTERS)
    with Segment.open(path, writable=True) as segment:
        start = segment.address + client.reply.session_id * LAYOUT["COUNTERS_PAGE"]
        page = Counters(start, PAGE_COUNTERS)
        for name, number in numbers.items():
            page.add(Count[name.upper()], number)


def test_all_figures(root: str, serve: Serve, client: Connect) -> None:
    server = serve().wait_until_serving()
    one, other = client(), client()
    one.save("a", "b", "c")
    other.reserve("d")
    count(one, load_keys=10, load_hits=4)
    count(other, load_keys=5, load_hits=3)
    found = status_json(root)
    assert found["state"] == "serving"
    assert found["server"]["pid"] == server.pid
    assert found["server"]["version"] == ems.__version__
    assert (found["capacity"], found["entries"], found["slots"]) == (16 << 20, 3, 1024)
    assert (found["used"], found["reserved"]) == (4 * 4096, 4096)
    assert (found["hits"], found["misses"]) == (7, 8)
    assert found["page_kind"] in ("4 KiB", "2 MiB", "4 KiB and 2 MiB")
    sessions = {each["id"]: each for each in found["sessions"]}
    assert sessions[other.reply.session_id] == {"id": 2, "pid": os.getpid(), "reserved": 4096}
    other.close()
    server.wait_until(lambda: len(status_json(root)["sessions"]) == 1, "without the session")
    assert (status_json(root)["hits"], status_json(root)["misses"]) == (
        7,
        8,
    )  # of the ended one too


def test_counters_outlive_the_server(root: str, serve: Serve) -> None:
    server = serve().wait_until_serving()
    leaving = BareClient(root)
    count(leaving, load_keys=2, load_hits=2)
    server.end(signal.SIGKILL)
    leaving.close()
    serve().wait_until_serving()
    assert status_json(root)["hits"] == 2


def test_people_get_a_table(root: str, serve: Serve) -> None:
    serve().wait_until_serving()
    result = run_ems("status", "--root", root)
    assert result.returncode == 0
    for word in ("serving", "16 MiB", "entries", "evictions", "hits", "pages"):
        assert word in result.stdout
    assert run_ems("status", env={"EMS_ROOT": root}).returncode == 0


def test_waiting_for_a_server(root: str, serve: Serve) -> None:
    with subprocess.Popen(
        python_command("ems", "status", "--root", root, "--wait", "30", "--json"),
        env=child_environment(),
        stdout=subprocess.PIPE,
    ) as waiting:
        serve()
        assert waiting.wait(30) == 0
        assert waiting.stdout is not None
        assert b'"state": "serving"' in waiting.stdout.read()


def test_waiting_in_vain(root: str) -> None:
    started = time.monotonic()
    result = run_ems("status", "--root", root, "--wait", "0.2")
    assert result.returncode == 1
    assert "there is no pool" in result.stderr
    assert time.monotonic() - started < 10


def test_a_pool_without_a_server(root: str, serve: Serve, client: Connect) -> None:
    server = serve().wait_until_serving()
    client().save("a", "b")
    server.end()
    result = run_ems("status", "--root", root)
    assert result.returncode == 1
    assert "there is a pool" in result.stderr
    assert "16 MiB, 8 KiB used by 2 blocks of at most 1024" in result.stderr
    found = status_json(root)
    assert (found["state"], found["server"], found["capacity"]) == ("stopped", None, 16 << 20)
    assert (found["entries"], found["used"]) == (2, 2 * 4096)
    # Where only the head of the index can be believed, no figure is told.
    with open(os.path.join(root, layout.INDEX), "r+b") as index:
        index.seek(LAYOUT["HEADER_OFFSET"] + 24)
        index.write(bytes([255] * 8))  # the capacity
    found = status_json(root)
    assert (found["state"], "used" in found) == ("stopped", False)


def test_a_frozen_server(root: str, serve: Serve) -> None:
    server = serve().wait_until_serving()
    server.process.send_signal(signal.SIGSTOP)
    try:
        result = run_ems("status", "--root", root)
        assert result.returncode == 1
        assert f"process {server.pid} holds {root} and does not answer" in result.stderr
        assert "last sign of life" in result.stderr
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert status_json(root)["state"] == "serving"


def test_purge_gives_the_memory_back(root: str, serve: Serve) -> None:
    serve().wait_until_serving().end()
    declined = run_ems("purge", "--root", root, stdin="n\n")
    assert (declined.returncode, declined.stderr) == (1, "Error: nothing was removed\n")
    unasked = run_ems("purge", "--root", root)
    assert (unasked.returncode, "--yes does not ask" in unasked.stderr) == (1, True)
    assert os.path.exists(os.path.join(root, layout.INDEX))
    result = run_ems("purge", "--root", root, stdin="y\n")
    assert result.returncode == 0
    assert "gave back" in result.stdout
    assert os.listdir(root) == [layout.SERVER_LOCK]
    again = run_ems("purge", "--root", root, "--yes")
    assert (again.returncode, "nothing to do" in again.stdout) == (0, True)


def test_purge_refuses_while_a_server_runs(root: str, serve: Serve) -> None:
    server = serve().wait_until_serving()
    for options in ((), ("--force",)):
        result = run_ems("purge", "--root", root, "--yes", *options)
        assert result.returncode == 1
        assert f"process {server.pid}" in result.stderr
    assert status_json(root)["state"] == "serving"


def test_purge_refuses_while_clients_use_the_pool(root: str, serve: Serve, client: Connect) -> None:
    server = serve().wait_until_serving()
    user = client()
    user.save("a")
    server.end()
    result = run_ems("purge", "--root", root, "--yes")
    assert result.returncode == 1
    assert f"process {os.getpid()} (session {user.reply.session_id})" in result.stderr
    assert user.has("a")
    forced = run_ems("purge", "--root", root, "--yes", "--force")
    assert forced.returncode == 0
    assert not user.has("a")
    assert os.listdir(root) == [layout.SERVER_LOCK]


def test_purge_of_nothing(root: str) -> None:
    result = run_ems("purge", "--root", root)
    assert (result.returncode, "does not exist" in result.stdout) == (0, True)


def test_the_program_explains_itself() -> None:
    assert run_ems("--version").stdout == f"ems {ems.__version__}\n"
    text = run_ems("--help").stdout
    for name in ("serve", "status", "purge", "demo", "replay", "bench"):
        assert name in text
    assert "EMS_CAPACITY" in run_ems("serve", "--help").stdout
    assert run_ems("nonsense").returncode == 2


def test_a_reader_that_leaves_early(root: str) -> None:
    command = f"{sys.executable} -m ems --help | true"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env=child_environment(),
        capture_output=True,
        check=False,
    )
    assert b"Traceback" not in result.stderr


def test_a_misspelt_variable_is_told() -> None:
    done = run_ems("--version", env={"EMS_CAPCITY": "1GiB"})
    assert done.returncode == 0
    assert done.stderr == (
        "ems: the environment variable EMS_CAPCITY means nothing: did you mean EMS_CAPACITY?\n"
    )
