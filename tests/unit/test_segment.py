from __future__ import annotations

import ctypes
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ems.shm import segment
from ems.shm.segment import AllocationStopped, Segment, open_to_group


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ems-test-", dir="/dev/shm") as name:
        yield Path(name)


def test_a_segment_is_allocated_aligned_and_shared(folder: Path) -> None:
    path = str(folder / "part")
    with Segment.create(path, 3 << 20) as made, Segment.open(path, writable=False) as seen:
        status = os.stat(path)
        assert status.st_size == 3 << 20
        assert status.st_blocks * 512 >= 3 << 20
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert made.address % (2 << 20) == 0
        ctypes.memset(made.address + (3 << 20) - 1, 0x5A, 1)
        assert ctypes.string_at(seen.address + (3 << 20) - 1, 1) == b"\x5a"


def test_the_mode_does_not_depend_on_the_umask(folder: Path) -> None:
    before = os.umask(0o777)
    try:
        Segment.create(str(folder / "part"), 4096, mode=0o660).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(folder / "part").st_mode) == 0o660


def test_a_file_that_is_there_is_left_alone(folder: Path) -> None:
    (folder / "part").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        Segment.create(str(folder / "part"), 4096)
    assert (folder / "part").read_bytes() == b"mine"


def test_a_stopped_allocation_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "ALLOCATE_STEP_BYTES", 4096)
    answers = iter([True, True, False])
    with pytest.raises(AllocationStopped):
        Segment.create(str(folder / "part"), 1 << 20, going=lambda: next(answers))
    assert os.listdir(folder) == []


def test_a_failed_allocation_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Segment.create(str(folder / "part"), 1 << 20)
    assert os.listdir(folder) == []


def test_closing_twice_is_harmless(folder: Path) -> None:
    made = Segment.create(str(folder / "part"), 4096)
    made.close()
    made.close()
    assert made.address == 0


def test_no_chmod_is_tolerated_where_the_mode_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*args: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    path = folder / "part"
    path.write_bytes(b"")
    path.chmod(0o600)
    monkeypatch.setattr(os, "fchmod", forbidden)
    monkeypatch.setattr(os, "fchown", forbidden)
    with path.open("rb") as file:
        open_to_group(file.fileno(), 0o600, None)
        with pytest.raises(PermissionError):  # the group could not use it
            open_to_group(file.fileno(), 0o660, os.getgid() + 1)
