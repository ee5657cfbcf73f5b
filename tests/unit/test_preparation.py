from __future__ import annotations

import anyio
import pytest

from ems.server import prepare
from ems.server.prepare import GIVE_UP_AFTER, Preparation
from ems.testing.memory_pool import MemoryPool
from ems_native._index import LAYOUT

MIB = 1 << 20
STEP = 4 * MIB
BASE = 1 << 40


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "STEP_BYTES", STEP)


class Kernel:
    """Collapses what it is told to, and notes it."""

    def __init__(self, *answers: bool) -> None:
        self.ranges: list[tuple[int, int]] = []
        self._answers = list(answers)

    def collapse(self, address: int, nbytes: int) -> bool:
        self.ranges.append((address - BASE - LAYOUT["DATA_START"], nbytes))
        return self._answers.pop(0) if self._answers else True


def preparation(
    memory: MemoryPool, kernel: Kernel, hugetlb: bool = False, ready: int = 0, kind: int = 0
) -> Preparation:
    return Preparation(
        memory.pool,
        BASE,
        hugetlb=hugetlb,
        ready_bytes=ready,
        page_kind=kind,
        collapse=kernel.collapse,
    )


async def rest() -> None:
    pass


def test_only_what_is_prepared_is_handed_out() -> None:
    memory, kernel = MemoryPool(10 * MIB, ready=0), Kernel()
    job = preparation(memory, kernel)
    assert anyio.run(job.step)
    assert memory.pool.stats().ready == STEP
    anyio.run(job.run, rest)
    assert job.done
    assert memory.pool.stats().ready == 10 * MIB
    assert memory.pool.stats().page_kind == LAYOUT["PAGE_HUGE"]
    assert kernel.ranges == [(0, STEP), (STEP, STEP), (2 * STEP, 2 * MIB)]


def test_a_kernel_without_huge_pages_is_not_asked_for_ever() -> None:
    memory, kernel = MemoryPool(64 * MIB, ready=0), Kernel(*[False] * 16)
    anyio.run(preparation(memory, kernel).run, rest)
    assert len(kernel.ranges) == GIVE_UP_AFTER
    assert memory.pool.stats().ready == 64 * MIB
    assert memory.pool.stats().page_kind == LAYOUT["PAGE_4K"]


def test_some_huge_pages() -> None:
    memory, kernel = MemoryPool(16 * MIB, ready=0), Kernel(True, False, True, False)
    anyio.run(preparation(memory, kernel).run, rest)
    assert memory.pool.stats().page_kind == LAYOUT["PAGE_MIXED"]
    assert len(kernel.ranges) == 4


def test_what_a_former_server_prepared_is_left_alone() -> None:
    memory, kernel = MemoryPool(16 * MIB, ready=8 * MIB), Kernel()
    anyio.run(preparation(memory, kernel, ready=8 * MIB, kind=LAYOUT["PAGE_4K"]).run, rest)
    assert kernel.ranges == [(8 * MIB, STEP), (12 * MIB, STEP)]
    assert memory.pool.stats().page_kind == LAYOUT["PAGE_MIXED"]


def test_hugetlbfs_needs_nothing() -> None:
    memory, kernel = MemoryPool(16 * MIB, ready=0), Kernel()
    job = preparation(memory, kernel, hugetlb=True)
    assert not anyio.run(job.step)
    assert memory.pool.stats().ready == 16 * MIB
    assert memory.pool.stats().page_kind == LAYOUT["PAGE_HUGETLB"]
    assert kernel.ranges == []
