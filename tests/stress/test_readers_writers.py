"""Readers against writers on a pool that evicts all the time; every byte of a success verified."""

from __future__ import annotations

import dataclasses

import pytest

from ems.testing.stress_run import Growth, StressPlan, run_stress


@pytest.mark.timeout(90)
def test_four_readers_against_two_writers_on_a_pool_that_always_evicts() -> None:
    report = run_stress(
        StressPlan(
            seconds=20,
            readers=4,
            writers=2,
            keys=120,
            max_bytes=128 << 10,
            hurried=0.0,
            capacity=2 << 20,
            entries=64,
        )
    )
    assert report.faults == 0, report
    assert report.evictions > 1000
    assert report.tally.loaded > 1000
    assert report.tally.timeouts == 0
    assert len(report.growth) == 7
    assert all(growth.tasks[0] >= 1 for growth in report.growth)
    assert not report.grown, report.growth


@pytest.mark.timeout(60)
def test_two_processes_overwrite_one_key_with_other_bytes_and_sizes() -> None:
    report = run_stress(
        StressPlan(
            seconds=5,
            readers=1,
            writers=2,
            keys=1,
            batch=1,
            max_bytes=1 << 20,
            hurried=0.0,
            capacity=16 << 20,
            entries=16,
        )
    )
    assert report.faults == 0, report
    assert report.tally.saved > 100
    assert report.tally.loaded > 10


@pytest.mark.timeout(60)
def test_hurried_and_cancelled_calls_leave_memory_and_pool_alone() -> None:
    report = run_stress(
        StressPlan(
            seconds=10,
            readers=2,
            writers=2,
            keys=60,
            batch=8,
            max_bytes=16 << 20,
            hurried=0.6,
            capacity=64 << 20,
            entries=64,
        )
    )
    assert report.faults == 0, report
    assert report.tally.timeouts + report.tally.cancels > 20


@pytest.mark.timeout(120)
def test_values_from_one_byte_to_64_mib() -> None:
    report = run_stress(
        StressPlan(
            seconds=12,
            readers=2,
            writers=1,
            keys=40,
            batch=3,
            max_bytes=64 << 20,
            hurried=0.1,
            capacity=384 << 20,
            entries=256,
        )
    )
    assert report.faults == 0, report
    assert report.tally.saved > 20
    assert report.tally.loaded > 10
    assert report.tally.loaded_bytes > 64 << 20


def test_growth_is_told_from_chance() -> None:
    flat = Growth("flat", (100e6, 112e6), (20, 24), (5, 5), (3, 6))
    assert not flat.grew
    assert dataclasses.replace(flat, private_bytes=(100e6, 130e6)).grew
    assert dataclasses.replace(flat, descriptors=(20, 40)).grew
    assert dataclasses.replace(flat, threads=(5, 9)).grew
    assert dataclasses.replace(flat, tasks=(3, 9)).grew
