from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from client_bench import Bench, Buffers, digests_of, pattern

from ems.client import operations, saving
from ems.client.batch import OperationCancelled
from ems.client.operations import load, save
from ems.client.writer import ChannelBroken
from ems.common.deadline import Deadline, DeadlineExpired
from ems.common.exception import EmsErrorCode, EmsException
from ems.common.metrics import Count
from ems.devices.base import DeviceError
from ems.devices.cpu import CpuDevice
from ems_native._copy import CancelFlag

KEYS = ["a", "b", "c", "d"]
SIZES = [4096, 10_000, 65_536, 1]


def soon(ms: float = 5000) -> Deadline:
    return Deadline.after_ms(ms)


def values_of(generation: str, keys: list[str] = KEYS, sizes: list[int] = SIZES) -> list[bytes]:
    return [pattern((generation, key), nbytes) for key, nbytes in zip(keys, sizes)]


def save_all(bench: Bench, generation: str = "old", replace: bool = True) -> int:
    source = Buffers(values_of(generation))
    return save(bench.context, digests_of(KEYS), source.spans, soon(), replace=replace)


def load_all(bench: Bench) -> tuple[int, Buffers]:
    target = Buffers.empty(SIZES)
    return load(bench.context, digests_of(KEYS), target.spans, soon()), target


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench()
    yield one
    one.memory.check()


def test_a_saved_value_comes_back_cut_into_other_pieces(bench: Bench) -> None:
    sizes = [5000, 12_345, 70_000, 64]
    values = values_of("old", sizes=sizes)
    source = Buffers(values, pieces=7)
    assert save(bench.context, digests_of(KEYS), source.spans, soon(), replace=True) == 4
    target = Buffers.empty(sizes, pieces=3)
    assert load(bench.context, digests_of(KEYS), target.spans, soon()) == 4
    assert [target.value(key) for key in range(4)] == values
    assert target.guards_intact()
    assert source.guards_intact()
    bench.check_quiet()


def test_a_hole_ends_the_row(bench: Bench) -> None:
    source = Buffers(values_of("old")[:2])
    save(bench.context, digests_of(["a", "d"]), source.spans, soon(), replace=True)
    target = Buffers.empty([4096, 4096, 10_000])
    assert load(bench.context, digests_of(["a", "x", "d"]), target.spans, soon()) == 1
    assert target.value(0) == values_of("old")[0]
    assert bench.counters[Count.MISS_ABSENT] == 1
    assert bench.counters[Count.MISS_BEHIND] == 1
    assert bench.counters[Count.LOAD_HITS] == 1
    assert bench.counters[Count.LOAD_BYTES] == 4096


def test_another_length_is_a_miss_and_no_byte_is_written(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    save_all(bench)
    target = Buffers.empty([4096, 9_999])
    with caplog.at_level(logging.WARNING, "ems"):
        assert load(bench.context, digests_of(["a", "b"]), target.spans, soon()) == 1
    assert target.value(1) == b"\xaa" * 9_999
    assert bench.counters[Count.MISS_LENGTH] == 1
    assert "another length" in caplog.text


def test_a_load_sends_nothing(bench: Bench) -> None:
    save_all(bench)
    bench.faults.steps.clear()
    assert load_all(bench)[0] == 4
    assert bench.faults.steps == ["copy out", "copy out done"]


def test_a_save_takes_two_messages(bench: Bench) -> None:
    assert save_all(bench) == 4
    messages = [step for step in bench.faults.steps if step in ("reserve", "commit", "abort")]
    assert messages == ["reserve", "commit"]
    assert bench.counters[Count.SAVE_MESSAGES] == 2
    assert bench.counters[Count.SAVE_COMMITTED] == 4
    assert bench.counters[Count.SAVE_BYTES] == sum(SIZES)


def test_keep_leaves_what_is_there_and_copies_only_the_rest(bench: Bench) -> None:
    first = Buffers([pattern("first", 10_000)])
    save(bench.context, digests_of(["b"]), first.spans, soon(), replace=False)
    assert save_all(bench, "second", replace=False) == 4
    assert bench.stored("b") == pattern("first", 10_000)
    assert bench.stored("c") == values_of("second")[2]
    assert bench.counters[Count.SAVE_PRESENT] == 1
    assert bench.counters[Count.SAVE_BYTES] == 10_000 + sum(SIZES) - 10_000


def test_chunks_of_a_large_batch_are_validated_one_by_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "chunk_bytes", 12_000)
    save_all(bench)
    bench.faults.steps.clear()
    hits, target = load_all(bench)
    assert hits == 4
    assert [target.value(key) for key in range(4)] == values_of("old")
    # 4096 | 10,000 | 65,536 (alone though too large) | 1
    assert bench.faults.steps.count("copy out") == 4


def test_a_batch_larger_than_a_frame_is_split(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "MAX_FRAME_KEYS", 3)
    keys = [f"k{n}" for n in range(8)]
    values = [pattern(key, 100 + n) for n, key in enumerate(keys)]
    source = Buffers(values)
    assert save(bench.context, digests_of(keys), source.spans, soon(), replace=True) == 8
    assert bench.faults.steps.count("reserve") == 3
    assert [bench.stored(key) for key in keys] == values
    assert bench.counters[Count.SAVE_BYTES] == sum(map(len, values))
    bench.check_quiet()


def test_a_full_pool_is_a_result() -> None:
    bench = Bench(capacity=2 << 20)
    sizes = [1 << 20, 3 << 20, 4096]
    source = Buffers([pattern(n, nbytes) for n, nbytes in enumerate(sizes)])
    assert save(bench.context, digests_of("xyz"), source.spans, soon(), replace=True) == 1
    assert bench.stored("x") == pattern(0, 1 << 20)
    assert bench.stored("z") == pattern(2, 4096)
    assert bench.counters[Count.SAVE_NO_ROOM] == 1
    bench.check_quiet()


# ---- two writers ----


def begin_elsewhere(bench: Bench, keys: list[str], sizes: list[int]) -> Callable[[str], None]:
    """Another client reserves keys; what is returned commits or aborts them."""
    other = bench.again()
    request = other.requests.begin(soon())
    source = Buffers([pattern(("other", key), n) for key, n in zip(keys, sizes)])
    statuses, places = other.channel.reserve(
        request, digests_of(keys), source.spans.lengths, True, False, soon()
    )
    assert not any(statuses)

    def end(how: str) -> None:
        if how == "commit":
            other.context.device.copy_in(
                source.spans, 0, len(keys), other.data, places, None, 0, None
            )
            other.channel.commit(request, None, places, True, soon())
        else:
            other.channel.abort(request, soon())
        other.requests.end(request)

    return end


def test_busy_keys_are_asked_for_again_after_the_rest(bench: Bench) -> None:
    end = begin_elsewhere(bench, ["b", "c"], SIZES[1:3])
    bench.faults.at["commit done"] = lambda: end("abort")
    assert save_all(bench) == 4
    assert bench.faults.steps.count("reserve") == 2
    assert [bench.stored(key) for key in KEYS] == values_of("old")
    assert bench.counters[Count.SAVE_BUSY] == 2
    bench.check_quiet()


def test_keys_that_stay_busy_are_written_all_the_same(bench: Bench) -> None:
    end = begin_elsewhere(bench, ["a", "c"], [SIZES[0], SIZES[2]])
    assert save_all(bench) == 4
    assert bench.faults.steps.count("reserve") == 3
    assert [bench.stored(key) for key in KEYS] == values_of("old")
    bench.check_quiet()
    end("commit")  # replace: the order of commits decides
    assert bench.stored("c") == pattern(("other", "c"), SIZES[2])


def test_a_writer_that_keeps_and_comes_second_has_succeeded(bench: Bench) -> None:
    end = begin_elsewhere(bench, ["a"], SIZES[:1])
    bench.faults.at["copy in done"] = lambda: None

    def commit_of_the_other_first() -> None:
        if bench.faults.steps.count("copy in done") == 2:
            end("commit")
        else:
            bench.faults.at["copy in done"] = commit_of_the_other_first

    bench.faults.at["copy in done"] = commit_of_the_other_first
    assert save_all(bench, replace=False) == 4
    assert bench.stored("a") == pattern(("other", "a"), SIZES[0])
    assert bench.counters[Count.SAVE_KEPT] == 1
    bench.check_quiet()


# ---- readers under change ----


def overwrite(bench: Bench, generation: str) -> Callable[[], None]:
    other = bench.again()
    return lambda: void(save_all(other, generation))


def void(value: object) -> None:
    del value


def test_an_entry_that_changes_during_the_copy_is_read_again(bench: Bench) -> None:
    save_all(bench)
    bench.faults.at["copy out done"] = overwrite(bench, "new")
    hits, target = load_all(bench)
    assert hits == 4
    assert [target.value(key) for key in range(4)] == values_of("new")
    assert bench.counters[Count.LOAD_RETRIES] == 1


def test_an_entry_that_always_changes_becomes_a_miss(bench: Bench) -> None:
    save_all(bench)
    change = overwrite(bench, "new")

    def always() -> None:
        change()
        bench.faults.at["copy out done"] = always

    bench.faults.at["copy out done"] = always
    assert load_all(bench)[0] == 0
    assert bench.counters[Count.LOAD_RETRIES] == operations.ATTEMPTS
    assert bench.counters[Count.MISS_CHANGING] == 1


def test_a_key_is_read_again_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(bench)
    change = overwrite(bench, "new")
    copy_out = bench.context.device.copy_out
    counts: list[int] = []

    def overtaken(*arguments: Any) -> tuple[int, int]:
        answer = copy_out(*arguments)
        counts.append(arguments[2])
        if arguments[2] > 1:  # whoever copies a batch is slow
            change()
        return answer

    monkeypatch.setattr(bench.context.device, "copy_out", overtaken)
    assert load_all(bench)[0] == 4
    assert counts == [4, 1, 3, 1, 2, 1, 1]


def test_a_change_in_the_middle_keeps_what_was_read_before_it(bench: Bench) -> None:
    save_all(bench)
    other = bench.again()

    def evict_c() -> None:
        place = other.memory.pool.locate(digests_of(["c"]))
        assert place is not None
        assert other.memory.pool.drop(place[0], place[1])

    bench.faults.at["copy out done"] = evict_c
    hits, target = load_all(bench)
    assert hits == 2
    assert [target.value(key) for key in (0, 1)] == values_of("old")[:2]
    assert bench.counters[Count.MISS_ABSENT] == 1


def test_a_pool_retired_during_the_copy_is_a_miss(bench: Bench) -> None:
    save_all(bench)
    bench.faults.at["copy out done"] = bench.memory.pool.retire
    assert load_all(bench)[0] == 0
    assert bench.counters[Count.MISS_RETIRED] == 1
    assert bench.broken.is_set()


def damage(bench: Bench, key: str) -> None:
    place = bench.memory.pool.locate(digests_of([key]))
    assert place is not None
    bench._data[place[2]] ^= 1


def test_a_wrong_checksum_is_a_miss_and_is_reported(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    save_all(bench)
    damage(bench, "b")
    with caplog.at_level(logging.ERROR, "ems"):
        hits, target = load_all(bench)
    assert hits == 1
    assert target.value(0) == values_of("old")[0]
    place = bench.memory.pool.locate(digests_of(["b"]))
    assert place is not None
    assert bench.suspects == [(digests_of(["b"]), place[1])]
    assert bench.counters[Count.MISS_CHECKSUM] == 1
    assert "corrupt" in caplog.text


def test_a_checksum_of_an_entry_that_changed_means_nothing(bench: Bench) -> None:
    save_all(bench)
    damage(bench, "b")
    bench.faults.at["copy out done"] = overwrite(bench, "new")
    hits, target = load_all(bench)
    assert hits == 4
    assert target.value(1) == values_of("new")[1]
    assert not bench.suspects


# ---- every step of a save fails, is cancelled, is too late, or its server dies ----

STEPS = [
    "reserve",
    "reserve done",
    "copy in",
    "copy in done",
    "commit",
    "commit done",
]


def raising(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def step_of(bench: Bench, fault: str, deadline: list[Deadline], cancel: CancelFlag) -> object:
    def die() -> None:
        bench.channel.away = True

    def be_late() -> None:
        while not deadline[0].expired:
            time.sleep(0.001)

    return {
        "device": raising(DeviceError("the device fell off the bus")),
        "stray": raising(ZeroDivisionError("a bug")),
        "cancel": cancel.set,
        "late": be_late,
        "die": die,
    }[fault]


@pytest.mark.parametrize("fault", ["device", "stray", "cancel", "late", "die"])
@pytest.mark.parametrize("step", STEPS)
def test_a_save_that_ends_at_any_step_leaves_everything_in_order(step: str, fault: str) -> None:
    bench = Bench()
    save_all(bench, "old")
    before = bench.memory.pool.stats()
    bench.faults.steps.clear()
    cancel = CancelFlag()
    deadline = [soon(40 if fault == "late" else 5000)]
    bench.faults.at[step] = step_of(bench, fault, deadline, cancel)  # type: ignore[assignment]
    source = Buffers(values_of("new"))
    memory = bytes(source.memory)

    outcome: object
    try:
        outcome = save(
            bench.context, digests_of(KEYS), source.spans, deadline[0], cancel, replace=True
        )
    except (EmsException, OperationCancelled) as error:
        outcome = error

    # What the caller sees.
    if fault == "cancel" and step in ("commit", "commit done"):
        assert outcome == 4  # it was too late for a cancellation
    elif fault == "cancel":
        assert isinstance(outcome, OperationCancelled)
    else:
        assert isinstance(outcome, EmsException), outcome
        expected = {
            "device": EmsErrorCode.EMS_INTERNAL_ERROR,
            "stray": EmsErrorCode.EMS_INTERNAL_ERROR,
            "late": EmsErrorCode.EMS_IO_TIMEOUT,
            "die": EmsErrorCode.EMS_IO_ERROR,
        }[fault]
        assert outcome.status_code() is expected
    assert bytes(source.memory) == memory

    # The pool: every value is all old or all new, nothing stays reserved.
    bench.pay()
    bench.check_quiet()
    committed = step == "commit done" or outcome == 4
    assert [bench.stored(key) for key in KEYS] == values_of("new" if committed else "old")
    after = bench.memory.pool.stats()
    assert (after.used, after.reserved, after.entries) == (before.used, 0, before.entries)

    # And the next operation works.
    assert save_all(bench, "next") == 4
    hits, target = load_all(bench)
    assert hits == 4
    assert [target.value(key) for key in range(4)] == values_of("next")


@pytest.mark.parametrize("fault", ["device", "stray", "cancel", "late"])
@pytest.mark.parametrize("step", ["copy out", "copy out done"])
def test_a_load_that_ends_at_any_step_touches_nothing_else(step: str, fault: str) -> None:
    bench = Bench()
    save_all(bench)
    cancel = CancelFlag()
    deadline = [soon(40 if fault == "late" else 5000)]
    bench.faults.at[step] = step_of(bench, fault, deadline, cancel)  # type: ignore[assignment]
    target = Buffers.empty(SIZES)
    try:
        outcome: object = load(bench.context, digests_of(KEYS), target.spans, deadline[0], cancel)
    except (EmsException, OperationCancelled) as error:
        outcome = error
    if step == "copy out done" and fault in ("cancel", "late"):
        assert outcome == 4
    elif fault == "cancel":
        assert isinstance(outcome, OperationCancelled)
    else:
        assert isinstance(outcome, EmsException)
        late = fault == "late"
        assert outcome.status_code() is (
            EmsErrorCode.EMS_IO_TIMEOUT if late else EmsErrorCode.EMS_INTERNAL_ERROR
        )
    assert target.guards_intact()
    assert load_all(bench)[0] == 4
    bench.check_quiet()


def test_an_abort_that_is_lost_is_owed_and_not_live(bench: Bench) -> None:
    bench.faults.at["copy in"] = raising(DeviceError("gone"))
    bench.faults.at["abort"] = raising(DeadlineExpired("frozen"))
    with pytest.raises(EmsException):
        save_all(bench)
    assert bench.requests.owed() == [1]
    assert bench.requests.pause() == []
    assert bench.memory.pool.reserved_requests(bench.session) == [1]
    bench.pay()
    bench.check_quiet()


def test_a_message_that_timed_out_does_not_make_the_call_wait_for_an_abort(bench: Bench) -> None:
    bench.faults.at["reserve done"] = raising(DeadlineExpired("frozen"))
    with pytest.raises(EmsException) as caught:
        save_all(bench)
    assert caught.value.status_code() is EmsErrorCode.EMS_IO_TIMEOUT
    assert "abort" not in bench.faults.steps
    bench.pay()
    bench.check_quiet()


def test_a_broken_channel_is_told_to_the_session(bench: Bench) -> None:
    bench.faults.at["reserve"] = raising(ChannelBroken("no server"))
    with pytest.raises(EmsException, match="away"):
        save_all(bench)
    assert bench.broken.is_set()


def test_an_interrupt_from_the_keyboard_gives_the_reservation_back(bench: Bench) -> None:
    bench.faults.at["copy in"] = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        save_all(bench)
    bench.check_quiet()


def test_failures_are_counted(bench: Bench) -> None:
    bench.faults.at["copy in"] = raising(DeviceError("x"))
    with pytest.raises(EmsException):
        save_all(bench)
    flag = CancelFlag()
    flag.set()
    source = Buffers(values_of("old"))
    with pytest.raises(OperationCancelled):
        save(bench.context, digests_of(KEYS), source.spans, soon(), flag, replace=True)
    with pytest.raises(EmsException):
        save(bench.context, digests_of(KEYS), source.spans, soon(0), replace=True)
    assert bench.counters[Count.SAVE_ERRORS] == 1
    assert bench.counters[Count.SAVE_CANCELLED] == 1
    assert bench.counters[Count.SAVE_TIMEOUTS] == 1


def test_a_save_shows_the_server_what_it_goes_on_with(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last key that is there: so the new ones are known to follow on it, and keep it alive."""
    named: list[bytes] = []
    reserve = bench.channel.reserve

    def noted(request: int, digests: bytes, *rest: Any) -> tuple[bytes, bytearray]:
        named.append(digests)
        return reserve(request, digests, *rest)

    monkeypatch.setattr(bench.channel, "reserve", noted)
    for keys in ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]):
        buffers = Buffers([pattern(key, 5000) for key in keys])
        saved = save(bench.context, digests_of(keys), buffers.spans, soon(), replace=False)
        assert saved == len(keys)
    assert named == [digests_of([1, 2, 3]), digests_of([3, 4, 5])]
    assert bench.counters[Count.SAVE_PRESENT] == 3 + 5
    assert bench.counters[Count.SAVE_COMMITTED] == 5
