from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ems.client.batch import OperationCancelled
from ems.client.core import Core
from ems.client.schedule import Kind
from ems.common.deadline import Deadline
from ems.common.exception import EmsErrorCode, io_error
from ems.common.result import CcResult
from ems.future import CcFuture
from ems.home import HomeLoop
from ems_native._copy import CancelFlag

DONE = CcResult(1, 1)


def soon(ms: float = 20_000) -> Deadline:
    return Deadline.after_ms(ms)


@pytest.fixture
def home() -> Iterator[HomeLoop]:
    one = HomeLoop("test-home")
    one.start()
    yield one
    one.stop()


@pytest.fixture
def core(home: HomeLoop) -> Iterator[Core]:
    one = Core(home, parallelism=2, bytes_under_way=1 << 20)
    yield one
    one.close()


class Gate:
    """Operations that run until the gate is opened, as a copy that takes its time."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.started = threading.Semaphore(0)
        self.running = 0
        self.most = 0
        self._lock = threading.Lock()

    def run(self, cancel: CancelFlag) -> CcResult:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.started.release()
        try:
            while not self.open.wait(0.001):
                if cancel.is_set:
                    raise OperationCancelled
            return DONE
        finally:
            with self._lock:
                self.running -= 1


@pytest.fixture
def gate() -> Iterator[Gate]:
    one = Gate()
    yield one
    one.open.set()


def code_of(future: CcFuture) -> EmsErrorCode | None:
    error = future.exception(10)
    return error.status_code() if error is not None else None


def quick(cancel: CancelFlag) -> CcResult:
    return DONE


def test_an_operation_runs_in_a_worker_and_ends_its_future(core: Core) -> None:
    names: list[str] = []

    def run(cancel: CancelFlag) -> CcResult:
        names.append(threading.current_thread().name)
        assert core.owns_current_thread
        return DONE

    assert core.submit(Kind.LOAD, 10, run, soon()).result(10) == DONE
    assert names[0].startswith("ems-copy")
    assert not core.owns_current_thread


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (io_error("away"), EmsErrorCode.EMS_IO_ERROR),
        (ValueError("a bug"), EmsErrorCode.EMS_INTERNAL_ERROR),
        (SystemExit(1), EmsErrorCode.EMS_INTERNAL_ERROR),
    ],
)
def test_an_operation_that_fails_fails_its_future_only(
    core: Core, error: BaseException, code: EmsErrorCode
) -> None:
    def run(cancel: CancelFlag) -> CcResult:
        raise error

    assert code_of(core.submit(Kind.LOAD, 10, run, soon())) is code
    assert core.submit(Kind.LOAD, 10, quick, soon()).result(10) == DONE


def test_a_time_out_in_the_queue_ends_at_once(core: Core, gate: Gate) -> None:
    running = [core.submit(Kind.SAVE, 10, gate.run, soon()) for _ in range(2)]
    for _ in running:
        gate.started.acquire()
    started = time.monotonic()
    waiting = core.submit(Kind.SAVE, 10, quick, soon(50))
    assert code_of(waiting) is EmsErrorCode.EMS_IO_TIMEOUT
    assert 0.04 < time.monotonic() - started < 5
    assert not any(future.done() for future in running)
    gate.open.set()
    assert [future.result(10) for future in running] == [DONE, DONE]


def test_a_cancellation_in_the_queue_is_immediate(core: Core, gate: Gate) -> None:
    for _ in range(2):
        core.submit(Kind.SAVE, 10, gate.run, soon())
        gate.started.acquire()
    ran: list[None] = []

    def run(cancel: CancelFlag) -> CcResult:
        ran.append(None)
        return DONE

    waiting = core.submit(Kind.SAVE, 10, run, soon())
    assert waiting.cancel()
    assert code_of(waiting) is EmsErrorCode.EMS_INVALID_ARGUMENT
    assert waiting.cancelled()
    assert not gate.open.is_set()
    gate.open.set()
    core.submit(Kind.SAVE, 10, quick, soon()).result(10)
    assert not ran


def test_a_cancellation_of_a_copy_is_delivered_when_it_has_ended(core: Core) -> None:
    stopping = threading.Event()
    let_go = threading.Event()
    started = threading.Event()

    def run(cancel: CancelFlag) -> CcResult:
        started.set()
        while not cancel.is_set:
            time.sleep(0.001)
        stopping.set()
        let_go.wait(10)
        raise OperationCancelled

    future = core.submit(Kind.LOAD, 10, run, soon())
    assert started.wait(10)
    assert future.cancel()
    assert stopping.wait(10)
    assert not future.done()
    let_go.set()
    assert code_of(future) is EmsErrorCode.EMS_INVALID_ARGUMENT
    assert future.cancelled()


def test_saves_that_wait_for_a_frozen_server_leave_loads_alone(core: Core, gate: Gate) -> None:
    saves = [core.submit(Kind.SAVE, 1 << 20, gate.run, soon()) for _ in range(10)]
    gate.started.acquire()
    for _ in range(50):
        assert core.submit(Kind.LOAD, 1 << 20, quick, soon()).result(10) == DONE
    assert not any(future.done() for future in saves)


def test_bytes_under_way_are_bounded(core: Core, gate: Gate) -> None:
    futures = [core.submit(Kind.LOAD, 700 << 10, gate.run, soon()) for _ in range(4)]
    futures.append(core.submit(Kind.LOAD, 5 << 20, gate.run, soon()))  # alone
    gate.started.acquire()
    time.sleep(0.05)
    assert gate.most == 1
    gate.open.set()
    assert [future.result(10) for future in futures] == [DONE] * 5
    assert gate.most == 1


def test_a_thousand_are_outstanding(core: Core, gate: Gate) -> None:
    futures = [core.submit(Kind.LOAD, 10, gate.run, soon()) for _ in range(1000)]
    for _ in range(2):
        gate.started.acquire()
    assert not any(future.done() for future in futures)
    gate.open.set()
    assert all(future.result(20) == DONE for future in futures)
    assert gate.most == 2


def test_many_threads_submit_at_once(core: Core) -> None:
    futures: list[CcFuture] = []

    def work() -> None:
        for n in range(100):
            futures.append(core.submit(list(Kind)[n % 2], 10, quick, soon()))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(future.result(20) == DONE for future in futures)
    assert len(futures) == 800


def test_tasks_of_a_foreign_loop_await_many(core: Core) -> None:
    async def main() -> list[CcResult]:
        return await asyncio.gather(
            *(core.submit(Kind.LOAD, 10, quick, soon()) for _ in range(200))
        )

    assert asyncio.run(main()) == [DONE] * 200


def test_closing_joins_what_runs_and_ends_what_waits(home: HomeLoop, gate: Gate) -> None:
    core = Core(home, parallelism=1)
    running = core.submit(Kind.LOAD, 10, gate.run, soon())
    gate.started.acquire()
    waiting = core.submit(Kind.LOAD, 10, quick, soon())
    closed = threading.Event()

    def close() -> None:
        core.close()
        closed.set()

    thread = threading.Thread(target=close)
    thread.start()
    assert code_of(waiting) is EmsErrorCode.EMS_INVALID_ARGUMENT
    assert not closed.wait(0.05)
    assert not running.done()
    gate.open.set()
    thread.join(10)
    assert closed.is_set()
    assert running.result(0) == DONE
    late = core.submit(Kind.LOAD, 10, quick, soon())
    assert code_of(late) is EmsErrorCode.EMS_INVALID_ARGUMENT
    core.close()


def test_a_submission_after_the_end_of_the_loop_fails(home: HomeLoop) -> None:
    core = Core(home, parallelism=1)
    core.close()
    home.stop()
    assert code_of(core.submit(Kind.LOAD, 10, quick, soon())) is EmsErrorCode.EMS_INVALID_ARGUMENT


def test_an_ended_operation_lets_go_of_its_memory(core: Core) -> None:
    class Buffer:
        pass

    freed = threading.Event()

    def submit() -> CcFuture:
        import weakref

        buffer = Buffer()
        weakref.finalize(buffer, freed.set)

        def run(cancel: CancelFlag, buffer: Buffer = buffer) -> CcResult:
            return DONE

        return core.submit(Kind.LOAD, 10, run, soon())

    future = submit()
    future.result(10)
    assert freed.wait(10)
    assert future.done()


def test_a_copy_in_flight_does_not_hold_the_callers_loop_up(core: Core, gate: Gate) -> None:
    def hold(call: Callable[[], object]) -> float:
        started = time.monotonic()
        call()
        return time.monotonic() - started

    submitted = [hold(lambda: core.submit(Kind.LOAD, 10, gate.run, soon())) for _ in range(100)]
    assert sorted(submitted)[90] < 0.01
