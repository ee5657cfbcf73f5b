"""Time-outs and cancellation of real operations."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import anyio
import pytest
from client_bench import AdmittingDevice, Buffers, pattern
from fix_pool import status_of, wait_until

from ems import CcKvOption, CcResult, ContextCaching, Ems, EmsErrorCode, EmsException
from ems.testing import LocalPool
from ems_native._copy import Arrivals, CancelFlag, Spans

NBYTES = 2 << 20
COUNT = 24
KEYS = [f"k{n}" for n in range(COUNT)]
LONG = CcKvOption(timeout=60_000)


@pytest.fixture
def slow_loads(monkeypatch: pytest.MonkeyPatch, cc: ContextCaching) -> Iterator[list[str]]:
    """Loads copy one key at a time, and take 20 ms for each, as from a slow device."""
    real = cc._client._device
    events: list[str] = []

    class SlowDevice:
        chunk_bytes = real.chunk_bytes
        copy_in = real.copy_in

        def copy_out(
            self,
            spans: Spans,
            first: int,
            count: int,
            base: int,
            places: bytearray,
            cancel: CancelFlag | None,
            deadline_ns: int,
            verify: bool,
            arrivals: Arrivals | None = None,
        ) -> tuple[int, int]:
            events.append("begin")
            try:
                for key in range(first, first + count):
                    time.sleep(0.02)
                    end, why = real.copy_out(
                        spans, key, 1, base, places, cancel, deadline_ns, verify
                    )
                    if why:
                        return end, why
                return first + count, 0
            finally:
                events.append("end")

    cc._client._device = AdmittingDevice(real, SlowDevice())  # type: ignore[assignment]
    yield events


@pytest.fixture
def saved(cc: ContextCaching) -> Buffers:
    source = Buffers([pattern(key, NBYTES) for key in KEYS])
    assert cc.save(LONG, KEYS, source.value_list) == CcResult(COUNT, COUNT)
    return source


def snapshot_stays(target: Buffers) -> bool:
    before = bytes(target.memory)
    time.sleep(0.1)
    return bytes(target.memory) == before


def test_a_time_out_during_the_copy_ends_every_write(
    cc: ContextCaching, saved: Buffers, slow_loads: list[str]
) -> None:
    for call in (cc.load, lambda *args: cc.async_load(*args).result()):
        target = Buffers.empty([NBYTES] * COUNT)
        started = time.monotonic()
        with pytest.raises(EmsException) as caught:
            call(CcKvOption(timeout=100), KEYS, target.value_list)  # type: ignore[operator]
        assert caught.value.status_code() is EmsErrorCode.EMS_IO_TIMEOUT
        assert 0.09 < time.monotonic() - started < 1
        assert snapshot_stays(target)
        assert target.guards_intact()
    assert Ems.stats()["load_timeouts"] == 2


def test_a_cancelled_task_gets_its_memory_back_untouched_from_then_on(
    cc: ContextCaching, saved: Buffers, slow_loads: list[str]
) -> None:
    target = Buffers.empty([NBYTES] * COUNT)

    async def main() -> None:
        future = cc.async_load(LONG, KEYS, target.value_list)
        task = asyncio.ensure_future(future)
        await asyncio.to_thread(wait_until, lambda: "begin" in slow_loads)
        await asyncio.sleep(0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert slow_loads == ["begin", "end"]
        assert future.cancelled()
        before = bytes(target.memory)
        await asyncio.sleep(0.1)
        assert bytes(target.memory) == before

    asyncio.run(main())
    assert Ems.stats()["load_cancelled"] == 1
    # The client goes on.
    again = Buffers.empty([NBYTES] * 2)
    assert cc.load(LONG, KEYS[:2], again.value_list) == CcResult(2, 2)


def test_a_cancel_scope_around_many_loads(
    cc: ContextCaching, saved: Buffers, slow_loads: list[str]
) -> None:
    target = Buffers.empty([NBYTES] * COUNT)

    async def main() -> None:
        with anyio.move_on_after(0.1) as scope:
            async with anyio.create_task_group() as group:
                for key, value in zip(KEYS, target.value_list):

                    async def one(key: str = key, value: object = value) -> None:
                        await cc.async_load(LONG, [key], [value])  # type: ignore[list-item]

                    group.start_soon(one)
        assert scope.cancelled_caught

    asyncio.run(main())
    assert slow_loads.count("begin") == slow_loads.count("end")
    assert snapshot_stays(target)


def test_cancelled_saves_leave_nothing_reserved(cc: ContextCaching, local_pool: LocalPool) -> None:
    source = Buffers([pattern(key, NBYTES) for key in KEYS])

    async def main() -> list[object]:
        futures = [
            cc.async_save(LONG, [key], [value]) for key, value in zip(KEYS, source.value_list)
        ]
        await futures[0]  # most wait for their turn still
        for future in futures:
            future.cancel()
        return await asyncio.gather(*futures, return_exceptions=True)

    outcomes = asyncio.run(main())
    assert any(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert status_of(local_pool).reserved == 0
    assert cc.save(LONG, KEYS, source.value_list) == CcResult(COUNT, COUNT)


def test_a_frozen_server_delays_nobody_beyond_his_deadline(
    cc: ContextCaching, saved: Buffers, local_pool: LocalPool
) -> None:
    assert local_pool.process is not None
    target = Buffers.empty([NBYTES] * COUNT)
    local_pool.process.send_signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(EmsException) as caught:
            cc.save(CcKvOption(timeout=200), KEYS, saved.value_list)
        assert caught.value.status_code() is EmsErrorCode.EMS_IO_TIMEOUT
        assert time.monotonic() - started < 0.5
        futures = [
            cc.async_save(CcKvOption(timeout=300), KEYS, saved.value_list) for _ in range(10)
        ]
        # Hits need no server, and no save that waits for one is in their way.
        assert cc.load(CcKvOption(timeout=300), KEYS, target.value_list).success == COUNT
        assert cc.async_load(LONG, KEYS, target.value_list).result(1).success == COUNT
        for future in futures:
            error = future.exception(2)
            assert error is not None
            assert error.status_code() is EmsErrorCode.EMS_IO_TIMEOUT
        assert time.monotonic() - started < 2
        # Two seconds of silence, and an unanswered probe, are a fault.
        deadline = started + 3.5
        while Ems.check_health():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        asked = time.monotonic()
        assert Ems.check_health() is False
        assert time.monotonic() - asked < 1.5
    finally:
        local_pool.process.send_signal(signal.SIGCONT)
    wait_until(Ems.check_health)
    # What timed out meanwhile was given back: the pool has room for it all again.
    wait_until(lambda: not status_of(local_pool).reserved)
    assert cc.save(LONG, KEYS, saved.value_list) == CcResult(COUNT, COUNT)


def test_a_stall_below_two_seconds_is_no_fault(cc: ContextCaching, local_pool: LocalPool) -> None:
    assert local_pool.process is not None
    local_pool.process.send_signal(signal.SIGSTOP)
    try:
        end = time.monotonic() + 1.9
        while time.monotonic() < end:
            assert Ems.check_health() is True
            time.sleep(0.05)
    finally:
        local_pool.process.send_signal(signal.SIGCONT)
    assert Ems.check_health() is True
