"""Many processes on one pool: random keys, sizes, overwrites, deadlines and cancels.

Every value carries its key and its version and its bytes follow from both, so a reader that gets a
value knows every byte that belongs to it: bytes of two versions, of two keys, or of somebody
else's block are a mismatch. After a time-out, an error or a cancel the caller's memory is
scribbled over and looked at later: nothing may write there any more.

Run as a child by `run_stress`; see there.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import hashlib
import os
import random
import struct
import threading
import time
from collections.abc import Callable

from ems import CcFuture, CcKvOption, Ems, EmsConfig, EmsErrorCode, EmsException, KvBufferWrapper
from ems.common.exception import internal_error
from ems.testing.jobs import answer_job
from ems.testing.tasks import count_tasks, tell_tasks

__all__ = ["StressJob", "StressTally", "expected_value", "main", "value_sizes"]

_NOISE_BYTES = 1 << 20
_STAMP = struct.Struct("<IIQ")  # key, size class, version
_SCRIBBLE = 0x5A
_EXPLAINED = 5
_IN_FLIGHT = 4
_TIMEOUT_MS = 20_000
_HURRIED_MS = 20
_LATE_S = 1.0
"""Beyond its time-out: more than a busy machine of two cores explains."""
_TICK_S = 0.05
_TASKS_START_S, _TASKS_END_S = 0.3, 3.0
"""For the tasks of a client to start, and for those of its last calls to end."""
_OUTAGE_PAUSE_S = 0.01


@dataclasses.dataclass(frozen=True)
class StressJob:
    """What one process does until `seconds` have passed or the parent is gone.

    Args:
        config: reaches the pool.
        number: of the process; with `seed` it decides everything that is random.
        seed: of the whole run.
        seconds: how long.
        keys: how many keys there are; the fewer, the more they collide.
        max_bytes: the largest value.
        batch: the most keys in a call.
        writes: share of calls that save, 0.0 to 1.0.
        hurried: share of calls with a time-out of a few milliseconds, or cancelled.
        tasks_file: where the number of its asyncio tasks is told; None: nowhere.
        chaos: servers come and go: an outage is no failure, but the first wrong byte ends the
            process at once, since it may be killed before it could report it.
    """

    config: EmsConfig
    number: int
    seed: int
    seconds: float
    keys: int
    max_bytes: int
    batch: int
    writes: float
    hurried: float
    tasks_file: str | None = None
    chaos: bool = False


@dataclasses.dataclass
class StressTally:
    """What one process did; `explanations` says where bytes were wrong."""

    calls: int = 0
    saved: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    timeouts: int = 0
    cancels: int = 0
    outages: int = 0
    late: int = 0
    mismatches: int = 0
    written_late: int = 0
    messages_in_loads: int = 0
    tasks_left: int = 0
    explanations: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: StressTally) -> None:
        """Add another process's figures to these."""
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, mine + theirs)


def value_sizes(key: int, max_bytes: int) -> tuple[int, ...]:
    """The three sizes that values of a key can have: an overwrite may change it."""
    chance = random.Random(key * 2654435761)
    top = max_bytes.bit_length()
    return tuple(
        min(max_bytes, chance.randrange(1 << bits >> 1, 1 << bits) or 1)
        for bits in (chance.randint(1, top) for _ in range(3))
    )


_NOISE = hashlib.shake_128(b"ems stress").digest(_NOISE_BYTES) * 2


def expected_value(key: int, size_class: int, version: int, nbytes: int) -> bytes:
    """The bytes of one version of a value; below 16 bytes there is one version only."""
    if nbytes < _STAMP.size:
        return hashlib.shake_128(b"%d" % key).digest(nbytes)
    start = (version * 0x9E3779B97F4A7C15 + key * 40503) % _NOISE_BYTES
    window = _NOISE[start : start + _NOISE_BYTES]
    body = (window * (nbytes // _NOISE_BYTES + 1))[: nbytes - _STAMP.size]
    return _STAMP.pack(key, size_class, version) + body


@dataclasses.dataclass
class _Pending:
    """An asynchronous call under way and the memory that belongs to it."""

    future: CcFuture
    buffers: list[bytearray]
    choices: list[tuple[int, int]]
    saves: bool


class _StandStill:
    """Adds up the time that this process did not run: stopped by a signal, or starved."""

    def __init__(self) -> None:
        self.seconds = 0.0
        threading.Thread(target=self._watch, name="stress-clock", daemon=True).start()

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(_TICK_S)
            now = time.monotonic()
            self.seconds += max(0.0, now - last - 2 * _TICK_S)
            last = now


class _Stress:
    def __init__(self, job: StressJob) -> None:
        cc = Ems.get_cc()
        assert cc is not None
        self._cc = cc
        self._job = job
        self._chance = random.Random(job.seed * 1000 + job.number)
        self._version = job.number << 40
        self._pending: list[_Pending] = []
        # Memory of calls that failed, scribbled over: (buffers, when it is looked at).
        self._given_up: list[tuple[list[bytearray], float]] = []
        self.tally = StressTally()
        self._stood_still = _StandStill()

    def run(self, parent_is_gone: Callable[[], bool]) -> None:
        until = time.monotonic() + self._job.seconds
        while time.monotonic() < until and not parent_is_gone():
            self._call()
            while len(self._pending) > _IN_FLIGHT:
                self._finish(self._pending.pop(0))
            self._look_at_given_up(time.monotonic())
        for pending in self._pending:
            self._finish(pending)
        self._look_at_given_up(float("inf"))

    def _call(self) -> None:
        chance, job = self._chance, self._job
        self.tally.calls += 1
        keys = chance.sample(range(job.keys), min(job.keys, chance.randint(1, job.batch)))
        choices = [(key, chance.randrange(3)) for key in keys]
        sizes = [value_sizes(key, job.max_bytes)[size_class] for key, size_class in choices]
        saves = chance.random() < job.writes
        if saves:
            self._version += 1
            buffers = [
                bytearray(expected_value(key, size_class, self._version, nbytes))
                for (key, size_class), nbytes in zip(choices, sizes)
            ]
        else:
            buffers = [bytearray(nbytes) for nbytes in sizes]
        hurried = chance.random() < job.hurried
        timeout_ms = chance.randint(1, _HURRIED_MS) if hurried else _TIMEOUT_MS
        option = CcKvOption(timeout=timeout_ms)
        names = [f"stress {key}" for key in keys]
        values = [self._pieces(buffer) for buffer in buffers]
        if chance.random() < 0.5:
            call = self._cc.async_save if saves else self._cc.async_load
            future = call(option, names, values)
            self._pending.append(_Pending(future, buffers, choices, saves))
            if hurried and chance.random() < 0.5:
                future.cancel()
            return
        started, stood_still = time.monotonic(), self._stood_still.seconds
        try:
            result = (self._cc.save if saves else self._cc.load)(option, names, values)
        except EmsException as error:
            self._failed(error, buffers)
        else:
            self._succeeded(result.success, buffers, choices, saves)
        took_s = time.monotonic() - started - (self._stood_still.seconds - stood_still)
        self.tally.late += took_s > timeout_ms / 1000 + _LATE_S

    def _pieces(self, buffer: bytearray) -> list[KvBufferWrapper]:
        """Cut a buffer in up to three pieces: where it is cut is nobody's business."""
        view = memoryview(buffer)
        cuts = sorted(self._chance.randrange(len(buffer) + 1) for _ in range(2))
        parts = (view[: cuts[0]], view[cuts[0] : cuts[1]], view[cuts[1] :])
        return [KvBufferWrapper.from_buffer(part) for part in parts if part.nbytes]

    def _finish(self, pending: _Pending) -> None:
        try:
            result = pending.future.result()
        except EmsException as error:
            self._failed(error, pending.buffers)
        else:
            self._succeeded(result.success, pending.buffers, pending.choices, pending.saves)

    def _failed(self, error: EmsException, buffers: list[bytearray]) -> None:
        code = error.status_code()
        if code is EmsErrorCode.EMS_IO_TIMEOUT:
            self.tally.timeouts += 1
        elif code is EmsErrorCode.EMS_INVALID_ARGUMENT and "cancel" in error.message():
            self.tally.cancels += 1
        elif code is EmsErrorCode.EMS_IO_ERROR and self._job.chaos:
            self.tally.outages += 1
            time.sleep(_OUTAGE_PAUSE_S)
        else:
            raise error
        for buffer in buffers:
            buffer[:] = bytes([_SCRIBBLE]) * len(buffer)
        self._given_up.append((buffers, time.monotonic() + 0.2))

    def _look_at_given_up(self, now: float) -> None:
        while self._given_up and self._given_up[0][1] <= now:
            for buffer in self._given_up.pop(0)[0]:
                if buffer.count(_SCRIBBLE) != len(buffer):
                    self.tally.written_late += 1
                    if self._job.chaos:
                        raise internal_error("memory was written to after its call had failed")

    def _succeeded(
        self, success: int, buffers: list[bytearray], choices: list[tuple[int, int]], saves: bool
    ) -> None:
        if saves:
            self.tally.saved += success
            return
        self.tally.loaded += success
        for buffer, (key, size_class) in zip(buffers[:success], choices):
            self.tally.loaded_bytes += len(buffer)
            version = 0
            if len(buffer) >= _STAMP.size:
                version = _STAMP.unpack_from(buffer)[2]
            if buffer != self._allowed(key, size_class, version, buffer):
                self.tally.mismatches += 1
                if len(self.tally.explanations) < _EXPLAINED:
                    self.tally.explanations.append(_explain(key, size_class, buffer))
                if self._job.chaos:
                    raise internal_error(f"wrong bytes: {self.tally.explanations}")

    def _allowed(self, key: int, size_class: int, version: int, buffer: bytearray) -> bytes:
        # Two size classes of a key may have the same size by chance: both are the key's own.
        if len(buffer) >= _STAMP.size:
            written_as = _STAMP.unpack_from(buffer)[1]
            sizes = value_sizes(key, self._job.max_bytes)
            if written_as < 3 and sizes[written_as] == len(buffer):
                size_class = written_as
        return expected_value(key, size_class, version, len(buffer))


def _explain(key: int, size_class: int, buffer: bytearray) -> str:
    stamp = _STAMP.unpack_from(buffer) if len(buffer) >= _STAMP.size else ()
    version = stamp[2] if stamp else 0
    want = expected_value(key, size_class, version, len(buffer))
    wrong = [at for at in range(len(buffer)) if buffer[at] != want[at]]
    place = f"{len(wrong)} wrong from {wrong[0]} to {wrong[-1]}" if wrong else "size class differs"
    return f"key {key} class {size_class}, {len(buffer)} bytes: {place}; its stamp says {stamp}"


def _init(job: StressJob, parent_is_gone: Callable[[], bool]) -> None:
    while True:
        try:
            return Ems.init(job.config)
        except EmsException as error:
            away = error.status_code() is EmsErrorCode.EMS_RECOVERD_ERROR
            if not (job.chaos and away) or parent_is_gone():
                raise


def _work(job: StressJob, parent_is_gone: Callable[[], bool]) -> StressTally:
    _init(job, parent_is_gone)
    try:
        time.sleep(_TASKS_START_S)
        tasks = count_tasks()
        if job.tasks_file is not None:
            tell_tasks(job.tasks_file)
        stress = _Stress(job)
        stress.run(parent_is_gone)
        stress.tally.messages_in_loads = Ems.stats()["load_messages"]
        stress.tally.tasks_left = _tasks_left(tasks)
        return stress.tally
    finally:
        Ems.close()


def _tasks_left(before: int) -> int:
    """How many more asyncio tasks there are than before, all calls being done, after a while."""
    give_up = time.monotonic() + _TASKS_END_S
    while (left := count_tasks() - before) > 0 and time.monotonic() < give_up:
        time.sleep(_TICK_S)
    return max(left, 0)


def main() -> None:
    """Do the job on the standard input."""
    faulthandler.enable()  # SIGABRT shows where each thread is
    os.nice(1)  # whoever watches the run should stay able to
    answer_job(_work)


if __name__ == "__main__":
    # By its full name, so that what is pickled belongs to a module that the parent knows.
    from ems.testing.stress import main

    main()
