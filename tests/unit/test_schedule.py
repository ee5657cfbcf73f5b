from __future__ import annotations

import dataclasses

from ems.client.schedule import Kind, Schedule

MIB = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    kind: Kind
    nbytes: int = MIB


def loads(count: int, nbytes: int = MIB) -> list[Job]:
    return [Job(Kind.LOAD, nbytes) for _ in range(count)]


def saves(count: int, nbytes: int = MIB) -> list[Job]:
    return [Job(Kind.SAVE, nbytes) for _ in range(count)]


def run_one_by_one(schedule: Schedule[Job], count: int) -> list[Job]:
    """What a single worker gets to do, in order."""
    order: list[Job] = []
    running = schedule.due()
    while running and len(order) < count:
        order += running
        for job in running:
            schedule.finished(job)
        running = schedule.due()
    return order


def test_loads_go_first_and_saves_get_a_quarter() -> None:
    schedule: Schedule[Job] = Schedule(1, 1, 1 << 30)
    for job in saves(100) + loads(100):
        schedule.add(job)
    order = run_one_by_one(schedule, 80)
    assert order[0].kind is Kind.LOAD
    assert 19 <= sum(job.kind is Kind.SAVE for job in order) <= 21


def test_the_shares_are_of_bytes_not_of_operations() -> None:
    schedule: Schedule[Job] = Schedule(1, 1, 1 << 30)
    for job in saves(100, 8 * MIB) + loads(400, MIB):
        schedule.add(job)
    order = run_one_by_one(schedule, 200)
    saved = sum(job.nbytes for job in order if job.kind is Kind.SAVE)
    assert 0.2 < saved / sum(job.nbytes for job in order) < 0.3


def test_a_kind_that_was_idle_claims_nothing_for_it() -> None:
    schedule: Schedule[Job] = Schedule(1, 1, 1 << 30)
    for job in loads(100):
        schedule.add(job)
    run_one_by_one(schedule, 90)
    for job in saves(50) + loads(50):
        schedule.add(job)
    order = run_one_by_one(schedule, 12)
    assert sum(job.kind is Kind.SAVE for job in order) <= 4


def test_one_kind_alone_gets_everything_but_the_last_thread() -> None:
    schedule: Schedule[Job] = Schedule(2, 3, 1 << 30)
    for job in saves(10):
        schedule.add(job)
    assert len(schedule.due()) == 2
    load = loads(1)[0]
    schedule.add(load)
    assert schedule.due() == [load]


def test_bytes_under_way_are_bounded_for_each_kind() -> None:
    schedule: Schedule[Job] = Schedule(8, 9, 10 * MIB)
    first, second, third = saves(3, 4 * MIB)
    for job in (first, second, third):
        schedule.add(job)
    assert schedule.due() == [first, second]
    load = loads(1, 10 * MIB)[0]
    schedule.add(load)
    assert schedule.due() == [load]
    schedule.finished(first)
    assert schedule.due() == [third]


def test_an_operation_larger_than_the_bound_runs_alone() -> None:
    schedule: Schedule[Job] = Schedule(8, 9, 10 * MIB)
    small, large, behind = *loads(1, MIB), *loads(1, 50 * MIB), *loads(1, MIB)
    for job in (small, large, behind):
        schedule.add(job)
    assert schedule.due() == [small]
    schedule.finished(small)
    assert schedule.due() == [large]
    assert schedule.due() == []
    schedule.finished(large)
    assert schedule.due() == [behind]


def test_what_waits_can_be_taken_out_and_what_runs_cannot() -> None:
    schedule: Schedule[Job] = Schedule(1, 2, 1 << 30)
    first, second, third = loads(3)
    for job in (first, second, third):
        schedule.add(job)
    assert schedule.due() == [first]
    assert not schedule.remove(first)
    assert schedule.remove(second)
    assert not schedule.remove(second)
    schedule.finished(first)
    assert schedule.due() == [third]
    assert (schedule.queued, schedule.running) == (0, 1)


def test_draining_returns_what_waits() -> None:
    schedule: Schedule[Job] = Schedule(1, 1, 1 << 30)
    jobs = loads(2) + saves(2)
    for job in jobs:
        schedule.add(job)
    started = schedule.due()
    assert set(schedule.drain()) == set(jobs) - set(started)
    assert schedule.queued == 0
