"""Futures of real operations: awaited, joined in threads, polled; the loop of the caller."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from client_bench import Buffers, pattern
from fix_pool import wait_until

from ems import CcFuture, CcKvOption, CcResult, ContextCaching, Ems, EmsErrorCode, EmsException
from ems.home import HomeLoop

NBYTES = 64 << 10
LONG = CcKvOption(timeout=30_000)


def one(key: object) -> Buffers:
    return Buffers([pattern(key, NBYTES)])


def test_await_thread_and_poll_on_the_same_future(cc: ContextCaching) -> None:
    assert cc.async_save(LONG, ["k"], one("k").value_list).result() == CcResult(1, 1)
    target = Buffers.empty([NBYTES])
    in_thread: list[CcResult] = []

    async def main() -> CcResult:
        future = cc.async_load(LONG, ["k"], target.value_list)
        thread = threading.Thread(target=lambda: in_thread.append(future.result()))
        thread.start()
        await asyncio.to_thread(wait_until, lambda: cc.is_ready(future))
        assert cc.get_result(future) == CcResult(1, 1)
        result = await future
        await asyncio.to_thread(thread.join)
        return result

    assert asyncio.run(main()) == CcResult(1, 1)
    assert in_thread == [CcResult(1, 1)]
    assert target.value(0) == pattern("k", NBYTES)


def test_submission_returns_at_once_without_a_loop(cc: ContextCaching) -> None:
    futures: list[CcFuture] = []
    sources = [one(n) for n in range(50)]
    for n, source in enumerate(sources):
        futures.append(cc.async_save(LONG, [f"k{n}"], source.value_list))
    assert [future.result() for future in futures] == [CcResult(1, 1)] * 50
    targets = [Buffers.empty([NBYTES]) for _ in range(50)]
    futures = [
        cc.async_load(LONG, [f"k{n}"], target.value_list) for n, target in enumerate(targets)
    ]
    while not all(cc.is_ready(future) for future in futures):
        time.sleep(0.001)
    assert [target.value(0) for target in targets] == [pattern(n, NBYTES) for n in range(50)]


def test_a_thousand_outstanding_futures(cc: ContextCaching) -> None:
    source = Buffers([pattern(n, 4096) for n in range(1000)])
    keys = [f"k{n}" for n in range(1000)]
    assert cc.save(LONG, keys, source.value_list) == CcResult(1000, 1000)
    target = Buffers.empty([4096] * 1000)
    futures = [cc.async_load(LONG, [key], [value]) for key, value in zip(keys, target.value_list)]
    assert all(future.result() == CcResult(1, 1) for future in futures)
    assert [target.value(n) for n in range(1000)] == [pattern(n, 4096) for n in range(1000)]
    again = [future.result() for future in futures]  # long after they were done
    assert again == [CcResult(1, 1)] * 1000


def test_results_may_be_taken_in_any_order(cc: ContextCaching) -> None:
    async def main() -> list[CcResult]:
        sources = [one(n) for n in range(20)]
        saves = [cc.async_save(LONG, [f"k{n}"], s.value_list) for n, s in enumerate(sources)]
        await asyncio.gather(*reversed(saves))
        loads = [
            cc.async_load(LONG, [f"k{n}"], Buffers.empty([NBYTES]).value_list) for n in range(20)
        ]
        return [await future for future in asyncio.as_completed(loads)]

    assert asyncio.run(main()) == [CcResult(1, 1)] * 20


def test_a_callback_may_use_the_sdk(cc: ContextCaching) -> None:
    results: list[CcResult] = []
    refused: list[EmsErrorCode] = []
    done = threading.Event()

    def load_it(future: CcFuture) -> None:
        results.append(future.result())
        results.append(cc.load(LONG, ["k"], Buffers.empty([NBYTES]).value_list))
        try:
            Ems.close()  # would wait for the thread that it is called in
        except EmsException as error:
            refused.append(error.status_code())
        done.set()

    cc.async_save(LONG, ["k"], one("k").value_list).add_done_callback(load_it)
    assert done.wait(10)
    assert results == [CcResult(1, 1)] * 2
    assert refused in ([EmsErrorCode.EMS_INVALID_ARGUMENT], [])


def test_the_result_is_refused_in_the_home_loop(cc: ContextCaching) -> None:
    home: HomeLoop = cc._client._home
    waiting = threading.Event()
    future = cc.async_save(LONG, ["k"], one("k").value_list)

    async def wait() -> Any:
        waiting.set()
        pending = cc.async_save(LONG, ["l"], one("l").value_list)
        with pytest.raises(EmsException, match="home loop"):
            pending.result()
        return await pending

    assert home.run(wait) == CcResult(1, 1)
    assert future.result() == CcResult(1, 1)


def lag_of(seconds: float, work: Any) -> list[float]:
    """How late each wake-up of the caller's loop was, sorted, while `work()` goes on."""

    async def main() -> list[float]:
        late: list[float] = []
        task = asyncio.ensure_future(work())
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            due = time.monotonic() + 0.002
            await asyncio.sleep(0.002)
            late.append(time.monotonic() - due)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return sorted(late)

    return asyncio.run(main())


def test_the_callers_loop_is_not_held_up(cc: ContextCaching) -> None:
    nbytes = 1 << 20
    source = Buffers([pattern(n, nbytes) for n in range(32)])
    keys = [f"k{n}" for n in range(32)]
    cc.save(LONG, keys, source.value_list)
    target = Buffers.empty([nbytes] * 32)

    async def work() -> None:
        while True:
            await asyncio.gather(
                *(cc.async_load(LONG, [k], [v]) for k, v in zip(keys, target.value_list))
            )

    async def idle() -> None:
        await asyncio.sleep(60)

    # The machine's own noise is measured in the same way and taken off; the limit is generous,
    # since other things run on it: a copy under the GIL would hold the loop up for 50 ms.
    noise = lag_of(0.5, idle)
    late = lag_of(1.5, work)
    assert late[len(late) * 95 // 100] - noise[len(noise) * 95 // 100] < 0.02
