from __future__ import annotations

import os
from pathlib import Path

import pytest

from ems.shm.space import Space, file_system, read_space

MIB = 1 << 20


class System:
    """A machine's `proc` and `sys`, as far as they are read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 100 kB\nMemAvailable:  1048576 kB\n")

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def mount(self, kind: str, point: str, inside: str = "/", options: str = "rw") -> None:
        target = self.root / "proc/self/mountinfo"
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a") as file:
            file.write(
                f"30 23 0:26 {inside} {point} rw,nosuid shared:4 - {kind} cgroup {options}\n"
            )

    def left(self) -> int | None:
        return read_space("/dev/shm", system_root=str(self.root)).cgroup_left


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_the_least_figure_limits() -> None:
    assert Space(5, 3, 9).least == 3
    assert Space(5, None, 2).least == 2
    assert Space(5, None, None).least == 5
    assert Space(5, -1, None).least == 0
    assert Space(1, 2, 3).plus(10, 100) == Space(11, 102, 103)
    text = str(Space(5 * MIB, 3 * MIB, 2 * MIB))
    assert all(size in text for size in ("5 MiB free", "3 MiB of memory", "2 MiB left"))


def test_no_cgroup_no_limit(system: System) -> None:
    assert read_space("/dev/shm", system_root=str(system.root)).mem_available == 1 << 30
    assert system.left() is None


def test_v2_counts_every_enclosing_group(system: System) -> None:
    system.mount("cgroup2", "/sys/fs/cgroup")
    system.write("proc/self/cgroup", "0::/pod/box\n")
    system.write("sys/fs/cgroup/pod/box/memory.max", "max\n")
    system.write("sys/fs/cgroup/pod/box/memory.current", "0\n")
    assert system.left() is None
    system.write("sys/fs/cgroup/pod/memory.max", f"{100 * MIB}\n")
    system.write("sys/fs/cgroup/pod/memory.current", f"{60 * MIB}\n")
    system.write("sys/fs/cgroup/pod/memory.stat", f"anon 1\ninactive_file {10 * MIB}\n")
    assert system.left() == 50 * MIB
    system.write("sys/fs/cgroup/pod/box/memory.high", f"{20 * MIB}\n")
    assert system.left() == 20 * MIB


def test_v1_beside_v2(system: System) -> None:
    system.mount("cgroup", "/sys/fs/cgroup/memory", options="rw,memory")
    system.mount("cgroup2", "/sys/fs/cgroup/unified")
    system.write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n")
    system.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    system.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "5\n")
    assert system.left() is None
    system.write("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", f"{10 * MIB}\n")
    system.write("sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", f"{4 * MIB}\n")
    system.write("sys/fs/cgroup/memory/a/b/memory.stat", f"total_inactive_file {MIB}\n")
    assert system.left() == 7 * MIB
    system.write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", f"{2 * MIB}\n")
    system.write("sys/fs/cgroup/memory/a/memory.usage_in_bytes", f"{4 * MIB}\n")
    assert system.left() == 0


def test_a_container_that_sees_only_its_own_group(system: System) -> None:
    system.mount("cgroup", "/sys/fs/cgroup/memory", inside="/docker/abc", options="rw,memory")
    system.write("proc/self/cgroup", "4:memory:/docker/abc\n")
    system.write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{10 * MIB}\n")
    system.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "0\n")
    assert system.left() == 10 * MIB


@pytest.mark.parametrize("group", ["/../..", "/docker/abcdef", "/gone"])
def test_a_group_that_cannot_be_seen(system: System, group: str) -> None:
    system.mount("cgroup2", "/sys/fs/cgroup", inside="/docker/abc")
    system.write("proc/self/cgroup", f"0::{group}\n")
    system.write("sys/fs/cgroup/memory.max", f"{10 * MIB}\n")
    system.write("sys/fs/cgroup/memory.current", "0\n")
    assert system.left() == 10 * MIB


def test_this_machine() -> None:
    space = read_space("/dev/shm")
    assert 0 < space.least <= space.fs_free
    assert file_system("/dev/shm").in_memory
    assert not file_system("/proc").in_memory
    assert not file_system("/dev/shm").hugetlb
    with pytest.raises(OSError, match="No such file"):
        read_space(os.path.join("/dev/shm", "ems-not-there"))
