"""Clients that die where the server cannot see them, take all they can, or write nonsense."""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from client_bench import Buffers, pattern
from fix_pool import status_of, wait_until
from fix_serve import BareClient, ServeProcess, soon
from fix_serve import status_of as status_at

from ems import CcKvOption, CcResult, ContextCaching, Ems
from ems.common.deadline import DeadlineExpired
from ems.rpc.frames import GRANTED, NO_ROOM
from ems.shm import layout
from ems.shm.segment import Segment
from ems.testing import LocalPool
from ems.testing.child import child_environment
from ems.testing.memory_pool import UNIT, digest_of, u64s
from ems_native._index import LAYOUT

Serve = Callable[..., ServeProcess]
Connect = Callable[[], BareClient]
NBYTES = 1 << 20
KEYS = ["a", "b", "c"]
LONG = CcKvOption(timeout=10_000)

# Reserves and then does nothing any more, in the middle of a save.
HOLDER = """
import os, sys, time
from fix_serve import BareClient
client = BareClient(sys.argv[1])
client.reserve("a", "b", "c")
if "fork" in sys.argv:
    reader, writer = os.pipe()
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
print("now", flush=True)
time.sleep(60)
"""

# Saves one small value after another, so that it has room for the next one.
IN_A_ROW = """
import sys, time
from client_bench import Buffers, pattern
from ems import *
Ems.init(EmsConfig(cc_config=CcConfig(0, 0, 'local'), root=sys.argv[1]))
cc = Ems.get_cc()
for key in range(20):
    source = Buffers([pattern(key, 4096)])
    assert cc.save(CcKvOption(), [str(key)], source.value_list) == CcResult(1, 1)
assert Ems.stats()["save_messages"] < 30
print("now", flush=True)
time.sleep(60)
"""


def start(*command: str) -> subprocess.Popen[str]:
    environment = child_environment()
    environment["PYTHONPATH"] += os.pathsep + os.path.dirname(os.path.dirname(__file__))
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "now\n"
    return child


@pytest.fixture
def groups() -> Iterator[list[subprocess.Popen[str]]]:
    """Children whose whole process group is ended."""
    made: list[subprocess.Popen[str]] = []
    yield made
    for child in made:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def reserved(pool: LocalPool) -> int:
    return status_of(pool).reserved


def test_a_client_in_another_pid_namespace(
    local_pool: LocalPool, cc: ContextCaching, groups: list[subprocess.Popen[str]]
) -> None:
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no pid namespace can be made here: {error}")
    child = start(*unshare, sys.executable, "-c", HOLDER, local_pool.root)
    groups.append(child)
    # Its pid there is 1 or 2, which lives here too, and proves nothing.
    record = status_of(local_pool)
    assert min(record.session_pids) < 10
    assert record.reserved == 3 * UNIT
    time.sleep(1.5)  # the slow poll has looked
    assert reserved(local_pool) == 3 * UNIT
    os.killpg(child.pid, signal.SIGKILL)
    wait_until(lambda: reserved(local_pool) == 0)
    assert cc.save(LONG, KEYS, Buffers([pattern(k, 10) for k in KEYS]).value_list) == CcResult(3, 3)


def test_a_client_whose_forked_child_lives_on(
    local_pool: LocalPool, cc: ContextCaching, groups: list[subprocess.Popen[str]]
) -> None:
    child = start(sys.executable, "-c", HOLDER, local_pool.root, "fork")
    groups.append(child)
    assert reserved(local_pool) == 3 * UNIT
    child.kill()  # the parent alone
    wait_until(lambda: reserved(local_pool) == 0)
    assert len(status_of(local_pool).session_ids) == 1


def test_a_client_that_reserves_everything_leaves_room_for_others(
    root: str, serve: Serve, client: Connect
) -> None:
    serve().wait_until_serving()
    hog, other = client(), client()
    names = [f"hog {n}" for n in range(4096)]
    _, statuses, _ = hog.reserve(*names)
    assert statuses.count(GRANTED) < 4096
    assert statuses[-1] == NO_ROOM
    _, again, _ = hog.reserve("more")
    assert list(again) == [NO_ROOM]
    for n in range(100):
        assert list(other.save(f"other {n}")) == [0]
    assert other.has("other 99")
    hog.close()
    until = time.monotonic() + 5
    while status_at(root).reserved:
        assert time.monotonic() < until


def test_a_full_pool_where_everything_is_being_written(
    root: str, serve: Serve, client: Connect
) -> None:
    serve("--capacity", "2MiB").wait_until_serving()
    for _ in range(6):
        hog = client()
        hog.reserve(*[f"{id(hog)} {n}" for n in range(512)])
    last = client()
    units = status_at(root).free // UNIT
    assert units < 8
    sizes = u64s([(units + 1) * UNIT])
    started = time.monotonic()
    try:
        statuses, _ = last.channel.reserve(
            last.channel.next_request(), digest_of("x"), sizes, False, False, soon(200)
        )
        assert list(statuses) == [NO_ROOM]
    except DeadlineExpired:
        pytest.fail("no answer")
    assert time.monotonic() - started < 0.2


@pytest.mark.parametrize("name", [layout.WRITE_SOCKET, layout.SOCKET])
def test_ten_thousand_connections_that_say_nothing(
    cc: ContextCaching, local_pool: LocalPool, name: str
) -> None:
    count = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 500)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft[1], soft[1]))
    path = os.path.join(local_pool.root, name)
    peers: list[socket.socket] = []
    source = Buffers([pattern(key, NBYTES) for key in KEYS])
    try:
        for number in range(count):
            peer = socket.socket(socket.AF_UNIX)
            peers.append(peer)
            peer.connect(path)
            if number % 1000 == 0:
                assert cc.save(LONG, KEYS, source.value_list) == CcResult(3, 3)
                assert Ems.check_health()
        assert status_of(local_pool).state == "serving"
        assert local_pool.process is not None
        # What is not served is not kept: descriptors and memory are bounded.
        wait_until(lambda: len(os.listdir(f"/proc/{local_pool.process.pid}/fd")) < 1200)
        with open(f"/proc/{local_pool.process.pid}/statm") as file:
            _, resident, shared = (int(word) for word in file.read().split()[:3])
        assert (resident - shared) * 4096 < 300 << 20
    finally:
        for peer in peers:
            peer.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, soft)
    assert cc.save(LONG, KEYS, source.value_list) == CcResult(3, 3)


def test_a_server_without_descriptors_lives(local_pool: LocalPool, cc: ContextCaching) -> None:
    assert local_pool.process is not None
    pid = local_pool.process.pid
    source = Buffers([pattern(key, NBYTES) for key in KEYS])
    assert cc.save(LONG, KEYS, source.value_list) == CcResult(3, 3)
    used = len(os.listdir(f"/proc/{pid}/fd"))
    soft = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 2, soft[1]))
    peers = []
    for _ in range(20):
        peer = socket.socket(socket.AF_UNIX)
        peers.append(peer)
        peer.connect(os.path.join(local_pool.root, layout.WRITE_SOCKET))
    # Who is connected goes on; new ones come in again when there are descriptors.
    assert cc.save(LONG, KEYS, source.value_list) == CcResult(3, 3)
    for peer in peers:
        peer.close()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, soft)
    wait_until(Ems.check_health)
    assert status_of(local_pool).state == "serving"
    assert cc.save(LONG, KEYS, source.value_list) == CcResult(3, 3)


def test_a_server_without_memory_lives_or_is_replaced(
    local_pool: LocalPool, cc: ContextCaching
) -> None:
    assert local_pool.process is not None
    pid = local_pool.process.pid
    source = Buffers([pattern(key, NBYTES) for key in KEYS])
    assert cc.save(LONG, KEYS, source.value_list) == CcResult(3, 3)
    with open(f"/proc/{pid}/statm") as file:
        pages = int(file.read().split()[0])
    limit = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * 4096, limit[1]))
    many = Buffers([bytes(64)] * 5000)
    for turn in range(5):
        try:
            cc.save(CcKvOption(timeout=500), [f"{turn} {n}" for n in range(5000)], many.value_list)
        except Exception as error:
            assert "EMS_IO" in str(error)
    target = Buffers.empty([NBYTES] * 3)
    assert cc.load(LONG, KEYS, target.value_list).success in (0, 3)
    if local_pool.process.poll() is None:
        resource.prlimit(pid, resource.RLIMIT_AS, limit)
    else:
        local_pool.start()
    wait_until(Ems.check_health)
    assert cc.save(LONG, KEYS, source.value_list) == CcResult(3, 3)
    assert cc.load(LONG, KEYS, target.value_list) == CcResult(3, 3)


def test_nonsense_in_recency_and_in_own_extents(cc: ContextCaching, local_pool: LocalPool) -> None:
    chance = random.Random(2)
    keys = [f"k{n}" for n in range(90)]
    with Segment.open(os.path.join(local_pool.root, layout.RECENCY), True) as recency:
        nbytes = recency.nbytes - LAYOUT["RECENCY_OFFSET"]
        marks = (ctypes.c_char * nbytes).from_address(recency.address + LAYOUT["RECENCY_OFFSET"])
        for _ in range(5):  # more than the pool holds: it evicts by what it finds there
            for n in range(0, len(keys), 5):
                batch = keys[n : n + 5]
                ctypes.memmove(marks, chance.randbytes(nbytes), nbytes)
                values = Buffers([pattern(key, NBYTES) for key in batch])
                assert cc.save(LONG, batch, values.value_list) == CcResult(5, 5)
    # A client may write what it likes where it was told to write: that is what it saved.
    target = Buffers.empty([NBYTES])
    hits = 0
    for key in keys:
        if cc.load(LONG, [key], target.value_list).success:
            hits += 1
            assert target.value(0) == pattern(key, NBYTES)
    assert hits > 20
    assert Ems.check_health()


def test_nonsense_in_the_counters(cc: ContextCaching, local_pool: LocalPool) -> None:
    """They are figures, and nothing but figures: no call fails for them, neither does a server."""
    chance = random.Random(3)
    source = Buffers([pattern(key, NBYTES) for key in KEYS])
    target = Buffers.empty([NBYTES] * 3)
    path = os.path.join(local_pool.root, layout.COUNTERS)
    for turn in range(6):
        with open(path, "r+b") as file:
            file.seek(64)  # what begins the file says whose it is
            left = os.fstat(file.fileno()).st_size - 64
            file.write(b"\xff" * left if turn % 2 else chance.randbytes(left))
        assert cc.save(LONG, KEYS, source.value_list) == CcResult(3, 3)
        assert cc.load(LONG, KEYS, target.value_list) == CcResult(3, 3)
        assert [target.value(n) for n in range(3)] == [pattern(key, NBYTES) for key in KEYS]
        assert all(isinstance(value, int) for value in Ems.stats().values())
        assert status_of(local_pool).state == "serving"
        Ems.close()  # its counts are folded into those of the pool
        wait_until(lambda: not status_of(local_pool).session_ids)
        Ems.init(local_pool.config)
        cc = Ems.get_cc()  # type: ignore[assignment]


def test_bytes_written_after_the_commit_are_a_miss(root: str, serve: Serve) -> None:
    """A broken client that goes on writing where it saved harms its own blocks only."""
    serve().wait_until_serving()
    from ems import CcConfig, EmsConfig

    Ems.init(EmsConfig(cc_config=CcConfig(0, 0, "m"), root=root))
    try:
        cc = Ems.get_cc()
        assert cc is not None
        values = {key: pattern(key, NBYTES) for key in KEYS}
        assert cc.save(LONG, KEYS, Buffers(list(values.values())).value_list).success == 3
        with Segment.open(os.path.join(root, layout.DATA), True) as data:
            view = memoryview((ctypes.c_char * data.nbytes).from_address(data.address)).cast("B")
            at = bytes(view).index(values["b"][:64])
            view[at : at + 100] = bytes(100)
        target = Buffers.empty([NBYTES] * 3)
        assert cc.load(LONG, KEYS, target.value_list) == CcResult(1, 3)
        assert cc.load(LONG, ["c"], Buffers.empty([NBYTES]).value_list) == CcResult(1, 1)
    finally:
        Ems.close()


@pytest.mark.parametrize("name", [layout.WRITE_SOCKET, layout.SOCKET])
def test_pickles_and_noise_run_no_code(
    cc: ContextCaching, local_pool: LocalPool, name: str, tmp_path: object
) -> None:
    proof = f"{tmp_path}/ran"

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (proof,)

    noise = random.Random(4)
    for text in (pickle.dumps(Bomb()), noise.randbytes(5000), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(5)
            peer.connect(os.path.join(local_pool.root, name))
            try:
                peer.sendall(text)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(65536):
                    pass
            except (BrokenPipeError, ConnectionResetError):
                pass
    assert not os.path.exists(proof)
    source = Buffers([pattern(key, NBYTES) for key in KEYS])
    assert cc.save(LONG, KEYS, source.value_list) == CcResult(3, 3)


@pytest.mark.parametrize("fault", ["idle", "killed", "server killed"])
def test_room_that_was_granted_ahead_comes_back(
    fault: str, local_pool: LocalPool, groups: list[subprocess.Popen[str]]
) -> None:
    client = start(sys.executable, "-c", IN_A_ROW, local_pool.root)
    groups.append(client)
    if fault == "killed":
        client.kill()
    elif fault == "server killed":
        local_pool.kill()
        local_pool.start()
    wait_until(lambda: status_of(local_pool).reserved == 0)
    found = status_of(local_pool)
    assert found.entries == 20
    assert len(found.session_ids) == (fault != "killed")


def test_saves_in_a_row_go_on_with_another_server(local_pool: LocalPool) -> None:
    Ems.init(local_pool.config)
    try:
        cc = Ems.get_cc()
        assert cc is not None
        for key in range(60):
            source = Buffers([pattern(key, 4096)])
            assert cc.save(LONG, [str(key)], source.value_list) == CcResult(1, 1)
            if key % 20 == 10:
                local_pool.kill()
                local_pool.start()
                wait_until(Ems.check_health)
        for key in range(60):
            target = Buffers.empty([4096])
            assert cc.load(LONG, [str(key)], target.value_list) == CcResult(1, 1)
            assert target.value(0) == pattern(key, 4096)
    finally:
        Ems.close()
    wait_until(lambda: not status_of(local_pool).session_ids)
    assert status_of(local_pool).reserved == 0
