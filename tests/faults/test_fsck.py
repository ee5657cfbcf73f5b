"""`ems fsck`: what it says of pools that are sound, left by a dead server, or damaged."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fix_serve import BareClient, ServeProcess, run_ems, soon, status_of

from ems.shm import layout
from ems.testing.memory_pool import UNIT
from ems_native._copy import checksum
from ems_native._index import LAYOUT

Serve = Callable[..., ServeProcess]
Connect = Callable[[], BareClient]


def fsck(root: str, *options: str) -> tuple[int, str]:
    done = run_ems("fsck", "--root", root, *options)
    assert "Traceback" not in done.stderr
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@contextlib.contextmanager
def opened(root: str, name: str) -> Iterator[int]:
    fd = os.open(os.path.join(root, name), os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


def save_blocks(client: BareClient, *names: str) -> list[int]:
    """Save blocks of zeros, with the checksum that zeros have; where they lie in the data."""
    request, _, places = client.reserve(*names)
    words = memoryview(places).cast("Q")
    zeros = (ctypes.c_char * UNIT)()
    sums = checksum(ctypes.addressof(zeros), UNIT).to_bytes(8, "little") * len(names)
    words[4::5] = memoryview(sums).cast("Q")
    client.channel.commit(request, None, places, False, soon())
    return list(words[2::5])


def test_a_sound_pool_served_or_not(root: str, serve: Serve, client: Connect) -> None:
    server = serve().wait_until_serving()
    save_blocks(client(), "a", "b")
    code, text = fsck(root)
    assert (code, text.endswith("the pool is sound")) == (0, True), text
    assert f"served by {server.pid}" in text
    assert "2 blocks and 0 reservations, 8 KiB used, 0 B of it reserved, 1 sessions" in text
    server.end()
    code, text = fsck(root)
    assert (code, "nobody serves it" in text, "last state stopped" in text) == (0, True, True)


def test_what_a_dead_server_leaves_is_no_damage(root: str, serve: Serve, client: Connect) -> None:
    server = serve().wait_until_serving()
    leaving = BareClient(root)
    save_blocks(leaving, "a")
    leaving.reserve("half")
    server.end(signal.SIGKILL)
    leaving.close()
    code, text = fsck(root)
    assert code == 0, text
    assert "reservation of a process that is gone" in text
    code, text = fsck(root, "--repair")
    assert (code, text.endswith("the pool is sound")) == (0, True)
    assert "1 blocks and 0 reservations" not in text.split("repaired:")[0]
    assert "gone" not in fsck(root)[1]
    assert not os.path.exists(os.path.join(root, layout.WRITE_SOCKET))
    serve().wait_until_serving()
    assert status_of(root).entries == 1


@pytest.mark.parametrize("served", [True, False])
def test_a_wrong_byte_is_found_and_the_block_dropped(
    root: str, serve: Serve, client: Connect, served: bool
) -> None:
    server = serve().wait_until_serving()
    offsets = save_blocks(client(), "a", "b", "c")
    if not served:
        server.end()
    with opened(root, layout.DATA) as fd:
        os.pwrite(fd, b"x", offsets[1] + 77)
    code, text = fsck(root)
    assert code == 1
    assert "block that does not match its checksum" in text
    assert "--repair mends it" in text
    assert fsck(root, "--no-read")[0] == 0
    code, text = fsck(root, "--repair")
    assert (code, text.endswith("the pool is sound")) == (0, True), text
    if not served:
        serve().wait_until_serving()
    assert status_of(root).entries == 2


def test_entries_that_cannot_be(root: str, serve: Serve, client: Connect) -> None:
    server = serve().wait_until_serving()
    offsets = save_blocks(client(), "a", "b", "c", "d")
    server.end()
    start = LAYOUT["BUCKETS_OFFSET"]
    with opened(root, layout.INDEX) as fd:
        for offset, word, value in (
            (offsets[0], 0, offsets[1].to_bytes(8, "little")),  # in each other's memory
            (offsets[2], 1, (1 << 62).to_bytes(8, "little")),  # longer than the data
            (offsets[3], -2, bytes(8)),  # another digest
        ):
            text = os.pread(fd, os.fstat(fd).st_size - start, start)
            at = text.index(offset.to_bytes(8, "little"))
            os.pwrite(fd, value, start + at + 8 * word)
    code, text = fsck(root, "--no-read")
    assert code == 1
    assert "memory claimed twice" in text
    assert "entry beyond the data" in text
    assert "entry where it cannot be" in text
    code, text = fsck(root, "--no-read", "--repair")
    assert (code, text.endswith("the pool is sound")) == (0, True)
    assert "2 half-written or impossible entries and 2 overlapping ones emptied" in text
    again = serve().wait_until_serving()
    assert status_of(root).entries == 0
    assert "mended" not in again.text()


def test_files_that_do_not_belong_together(root: str, serve: Serve) -> None:
    serve().wait_until_serving().end()
    with opened(root, layout.COUNTERS) as fd:
        os.pwrite(fd, bytes(16), 8)
    with opened(root, layout.RECENCY) as fd:
        os.pwrite(fd, b"x", 0)
    Path(root, layout.INDEX_UNFINISHED).write_bytes(b"")
    code, text = fsck(root)
    assert code == 1
    assert "the files belong to different pools" in text
    assert "recency does not begin like a file of a pool" in text
    assert "index.new was left by a server that died" in text


def test_what_cannot_be_checked(root: str, serve: Serve) -> None:
    assert fsck(root) == (2, f"there is no pool in {root}")
    serve().wait_until_serving().end()
    with opened(root, layout.INDEX) as fd:
        os.pwrite(fd, (7).to_bytes(8, "little"), 24)
    assert "has memory layout 7.0, this version reads 1.0" in fsck(root)[1]
    with opened(root, layout.INDEX) as fd:
        os.pwrite(fd, (1).to_bytes(8, "little"), 24)
        os.pwrite(fd, bytes([255] * 8), LAYOUT["HEADER_OFFSET"] + 24)  # its capacity
    code, text = fsck(root)
    assert code == 2
    assert "cannot be read" in text
