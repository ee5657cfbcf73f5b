"""Load and save of a batch of large blocks beside plain memcpy, with nothing in any cache."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Iterator

from ems import CcKvOption, CcResult, Ems
from ems.bench.figure import Figure, at_least, figured, take_turns
from ems.bench.fresh import FreshJob, judge_fresh, measure_fresh
from ems.bench.machine import Machine, read_machine
from ems.bench.memory import BlockMemory
from ems.common.exception import internal_error, invalid_argument
from ems.common.size import format_size
from ems.testing import BlockPattern, LocalPool
from ems.testing.figures import wait_until_prepared
from ems_native import _copy

__all__ = ["SHAPES", "Contender", "CopyReport", "CopySettings", "measure_copy"]

SHAPES = ((32, 2 << 20), (128, 64 << 10))
"""(keys, bytes of a value) of the calls for which there are wanted figures."""
_WANTED = {SHAPES[0]: (1.4, 1.25), SHAPES[1]: (1.0, 0.8)}  # load, save: times memcpy
_MIN_BATCHES = 4
_FRESH_BATCHES = 8
_OPTION = CcKvOption(timeout=60_000)


@dataclasses.dataclass(frozen=True)
class CopySettings:
    """What is measured: calls of `blocks` keys, over `rotate_bytes` of memory on either side."""

    blocks: int = 32
    block_bytes: int = 2 << 20
    rotate_bytes: int = 1 << 30
    rounds: int = 24
    fresh: int = 0  # how many processes make a first load, and how many a first save

    @property
    def batch_bytes(self) -> int:
        """The bytes of one call."""
        return self.blocks * self.block_bytes

    @property
    def batches(self) -> int:
        """How many batches the memory on either side holds."""
        return self.rotate_bytes // self.batch_bytes


@dataclasses.dataclass(frozen=True)
class Contender:
    """The times of one way to move a batch."""

    name: str
    median_ms: float
    best_ms: float
    gb_per_s: float  # of the median
    to_memcpy: float  # memcpy's median over this one's: above 1 is faster than memcpy


@dataclasses.dataclass(frozen=True)
class CopyReport:
    """What was found."""

    settings: CopySettings
    contenders: tuple[Contender, ...]
    page_kind: str
    mismatches: int
    fresh: tuple[Figure, ...]
    machine: Machine

    @property
    def figures(self) -> list[Figure]:
        """The figures for which something is wanted; none for another shape of call."""
        settings = self.settings
        times = {one.name: one for one in self.contenders}
        shape = f"{settings.blocks} x {format_size(settings.block_bytes)}"
        wanted = _WANTED.get((settings.blocks, settings.block_bytes), ())
        copies = [
            at_least(
                f"{name} {shape}",
                times[name].gb_per_s,
                "GB/s",
                limit,
                roof=("memcpy", times["memcpy"].gb_per_s),
                judged=("x memcpy", times[name].to_memcpy),
            )
            for name, limit in zip(("load", "save"), wanted)
        ]
        return [*copies, *self.fresh]

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain data, ready for JSON."""
        return figured(self)


def measure_copy(settings: CopySettings) -> CopyReport:
    """Measure with a pool of its own; nothing is left behind.

    Takes `Ems` of this process for itself, so it must not be initialised.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` for settings that make no sense; whatever the pool
            says.
    """
    if settings.batches < _MIN_BATCHES:
        raise invalid_argument(
            f"{format_size(settings.rotate_bytes)} hold {settings.batches} batches of "
            f"{format_size(settings.batch_bytes)}; give room for {_MIN_BATCHES} at least"
        )
    # An overwrite needs the new place before the old one is free, and nothing must be evicted.
    capacity = settings.rotate_bytes * 3 // 2 + 4 * settings.batch_bytes
    with LocalPool(capacity) as pool:
        page_kind = wait_until_prepared(pool.root).page_kind
        with _initialised(pool):
            bench = _CopyBenchmark(settings)
            bench.prepare()
            times = bench.measure()
            mismatches = bench.verify()
        fresh = _measure_fresh(settings, pool, bench.keys)
    ranked = _rank(times, settings)
    return CopyReport(settings, ranked, page_kind, mismatches, fresh, read_machine())


def _measure_fresh(
    settings: CopySettings, pool: LocalPool, keys: list[list[str]]
) -> tuple[Figure, ...]:
    """First load and first save, in turn, each at another place of the pool."""
    if not settings.fresh:
        return ()
    batches = min(_FRESH_BATCHES, settings.batches)
    some = [key for batch in keys[:batches] for key in batch]
    jobs = [
        FreshJob(pool.config, some, settings.blocks, settings.block_bytes, saves, turn % batches)
        for turn in range(settings.fresh)
        for saves in (False, True)
    ]
    times = measure_fresh(jobs)
    return judge_fresh("first load", times[::2]), judge_fresh("first save", times[1::2])


@contextlib.contextmanager
def _initialised(pool: LocalPool) -> Iterator[None]:
    Ems.init(pool.config)
    try:
        yield
    finally:
        Ems.close()


class _CopyBenchmark:
    """Moves batches between rotating places, so that nothing is in a cache when its turn comes.

    In one round the contenders work a quarter of the memory apart from each other.
    """

    def __init__(self, settings: CopySettings) -> None:
        self._settings = settings
        cc = Ems.get_cc()
        assert cc is not None
        self._cc = cc
        self._memory = BlockMemory(settings.batches * settings.blocks, settings.block_bytes)
        self._pattern = BlockPattern(settings.block_bytes)
        self.keys = [
            [f"copy@{batch}@{block}" for block in range(settings.blocks)]
            for batch in range(settings.batches)
        ]
        self._buffers = [
            self._memory.buffers[first : first + settings.blocks]
            for first in range(0, self._memory.blocks, settings.blocks)
        ]
        self._addresses = [
            self._memory.addresses[first : first + settings.blocks]
            for first in range(0, self._memory.blocks, settings.blocks)
        ]

    def prepare(self) -> None:
        """Put every batch into the pool, and touch all memory that will be measured."""
        for batch in range(self._settings.batches):
            self._save(batch)
        for batch in range(self._settings.batches):
            self._load(batch)

    def measure(self) -> dict[str, list[float]]:
        """Return the seconds of each round by contender; they take turns in going first."""
        batches = self._settings.batches
        return take_turns(
            {
                "memcpy": lambda number: self._memcpy(number % batches),
                "load": lambda number: self._load(number % batches),
                "save": lambda number: self._save(number % batches),
            },
            self._settings.rounds,
        )

    def verify(self) -> int:
        """Save and load one batch of known bytes and return how many blocks came back wrong."""
        views = self._memory.views[: self._settings.blocks]
        for block, view in enumerate(views):
            self._pattern.fill(block, view)
        self._check(self._cc.save(_OPTION, self.keys[0], self._buffers[0]))
        self._memory.scrub(0, self._settings.blocks)
        self._check(self._cc.load(_OPTION, self.keys[0], self._buffers[0]))
        return sum(not self._pattern.matches(block, view) for block, view in enumerate(views))

    def _memcpy(self, batch: int) -> None:
        _copy.memcpy_many(
            self._addresses[self._ahead(batch, 2)],
            self._addresses[batch],
            self._settings.block_bytes,
        )

    def _load(self, batch: int) -> None:
        keys, buffers = self.keys[self._ahead(batch, 2)], self._buffers[self._ahead(batch, 1)]
        self._check(self._cc.load(_OPTION, keys, buffers))

    def _save(self, batch: int) -> None:
        keys, buffers = self.keys[batch], self._buffers[self._ahead(batch, 3)]
        self._check(self._cc.save(_OPTION, keys, buffers))

    def _ahead(self, batch: int, quarters: int) -> int:
        return (batch + quarters * self._settings.batches // 4) % self._settings.batches

    def _check(self, result: CcResult) -> None:
        if result.success != self._settings.blocks:
            raise internal_error(f"the pool did {result}, which makes no measurement")


def _rank(times: dict[str, list[float]], settings: CopySettings) -> tuple[Contender, ...]:
    roof = statistics.median(times["memcpy"])
    ranked: list[Contender] = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        ranked.append(
            Contender(
                name=name,
                median_ms=1e3 * median,
                best_ms=1e3 * min(seconds),
                gb_per_s=settings.batch_bytes / median / 1e9,
                to_memcpy=roof / median,
            )
        )
    return tuple(ranked)
