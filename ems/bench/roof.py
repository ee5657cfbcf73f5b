"""What the machine copies at best, by one thread and by two, and how near to it EMS comes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import mmap
import statistics
from collections.abc import Callable, Sequence

from ems import CcKvOption, Ems, KvBufferWrapper
from ems.bench.figure import Figure, at_least, figured, take_turns
from ems.bench.machine import Machine, read_machine
from ems.common.exception import internal_error
from ems.common.size import format_size
from ems.testing import LocalPool
from ems.testing.figures import wait_until_prepared
from ems.transfer import default_parallelism
from ems_native import _copy

__all__ = ["Rate", "RoofReport", "RoofSettings", "measure_roof"]

_OPTION = CcKvOption(timeout=60_000)
_PAGES = ("4 KiB", "2 MiB")
_TOUCH = 0x5A


@dataclasses.dataclass(frozen=True)
class RoofSettings:
    """Copies of `keys` blocks, over `rotate_bytes` on either side.

    Args:
        keys: blocks of a copy.
        one_bytes: size of a block where one thread copies.
        two_bytes: size of a block where two threads do.
        rotate_bytes: on either side.
        rounds: copies of each contender.
    """

    keys: int = 32
    one_bytes: int = 2 << 20
    two_bytes: int = 8 << 20
    rotate_bytes: int = 1 << 30
    rounds: int = 24


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast something copies, by the median."""

    name: str
    threads: int
    pages: str  # of both sides, as the system gave them
    gb_per_s: float


@dataclasses.dataclass(frozen=True)
class RoofReport:
    """Rates of bare copies and of EMS, all of one run."""

    settings: RoofSettings
    rates: tuple[Rate, ...]
    page_kind: str
    machine: Machine

    @property
    def figures(self) -> list[Figure]:
        """EMS beside the best bare copy by as many threads, whatever its pages."""
        settings = self.settings
        one = f"{settings.keys} x {format_size(settings.one_bytes)}"
        two = f"{settings.keys} x {format_size(settings.two_bytes)}"
        return [
            self._judge("load", f"load {one}, one thread", 1, 0.9),
            self._judge("save", f"save {one}, one thread", 1, 0.9),
            self._judge("load", f"load {two}, two threads, {self.page_kind} pages", 2, 0.85),
        ]

    def _judge(self, what: str, name: str, threads: int, limit: float) -> Figure:
        mine = [rate for rate in self.rates if rate.threads == threads]
        ours = next(rate for rate in mine if rate.name == what)
        bare = [rate for rate in mine if rate.name not in ("load", "save")]
        best = max(bare, key=lambda rate: rate.gb_per_s)
        ratio = ours.gb_per_s / best.gb_per_s
        roof = (f"{best.name}, {best.pages} pages", best.gb_per_s)
        return at_least(name, ours.gb_per_s, "GB/s", limit, roof=roof, judged=("x", ratio))

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain data, ready for JSON."""
        return figured(self)


def measure_roof(settings: RoofSettings) -> RoofReport:
    """Measure with a pool of its own; nothing is left behind.

    Takes `Ems` of this process for itself, so it must not be initialised.

    Raises:
        EmsException: whatever the pool says.
    """
    memory = {pages: _Memory(settings.rotate_bytes, pages) for pages in _PAGES}
    capacity = settings.rotate_bytes * 3 // 2 + 2 * settings.keys * settings.two_bytes
    rates: list[Rate] = []
    with LocalPool(capacity) as pool, contextlib.ExitStack() as stack:
        page_kind = wait_until_prepared(pool.root).page_kind
        helper = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))
        Ems.init(pool.config)
        stack.callback(_copy.set_threads, default_parallelism())
        stack.callback(Ems.close)
        for threads, block_bytes in ((1, settings.one_bytes), (2, settings.two_bytes)):
            _copy.set_threads(threads)
            sides = {pages: _Blocks(settings, one, block_bytes) for pages, one in memory.items()}
            batches = sides[_PAGES[1]].with_pool()
            contenders: dict[str, Callable[[int], object]] = {"load": batches.load}
            if threads == 1:
                contenders["save"] = batches.save
            for pages, blocks in sides.items():
                for name, copy in (("memcpy", _copy.memcpy), ("stream", _copy.stream_copy)):
                    contenders[f"{name}/{pages}"] = _bare(blocks, copy, threads, helper)
            for name, seconds in take_turns(contenders, settings.rounds).items():
                what, _, pages = name.partition("/")
                given = memory[pages or _PAGES[1]].given
                nbytes = settings.keys * block_bytes
                rate = nbytes / statistics.median(seconds) / 1e9
                rates.append(Rate(what, threads, given, rate))
    return RoofReport(settings, tuple(rates), page_kind, read_machine())


def _bare(
    blocks: _Blocks,
    copy: Callable[[int, int, int], None],
    threads: int,
    helper: concurrent.futures.Executor,
) -> Callable[[int], None]:
    """A contender: each thread copies its part of a batch, block by block."""

    def part(pairs: Sequence[tuple[int, int]]) -> None:
        for target, source in pairs:
            copy(target, source, blocks.block_bytes)

    def run(number: int) -> None:
        pairs = blocks.pairs(number)
        half = len(pairs) // threads
        other = helper.submit(part, pairs[half:]) if threads == 2 else None
        part(pairs[:half])
        if other is not None:
            other.result()

    return run


class _Memory:
    """Two sides of private memory, with pages of the kind asked for where the system gives it."""

    def __init__(self, nbytes: int, pages: str) -> None:
        self._map = mmap.mmap(-1, 2 * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        huge = pages == _PAGES[1]
        with contextlib.suppress(AttributeError, OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.nbytes = nbytes
        ctypes.memset(self.address, _TOUCH, 2 * nbytes)
        self.given = _PAGES[_huge_bytes(self.address) >= nbytes]


class _Blocks:
    """Batches of blocks in a memory; sources and targets lie half of it apart from each other."""

    def __init__(self, settings: RoofSettings, memory: _Memory, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._keys = settings.keys
        self._batches = max(1, memory.nbytes // (settings.keys * block_bytes))
        self._memory = memory

    def pairs(self, number: int) -> list[tuple[int, int]]:
        """Target and source of each block of a batch."""
        sources = self._addresses(number % self._batches)
        targets = self._addresses((number + self._batches // 2) % self._batches)
        return [(target + self._memory.nbytes, at) for target, at in zip(targets, sources)]

    def with_pool(self) -> _Batches:
        """Put the sources into the pool."""
        addresses = [self._addresses(batch) for batch in range(self._batches)]
        return _Batches(addresses, self._memory.nbytes, self.block_bytes)

    def _addresses(self, batch: int) -> range:
        nbytes = self._keys * self.block_bytes
        first = self._memory.address + batch * nbytes
        return range(first, first + nbytes, self.block_bytes)


class _Batches:
    """The same blocks moved by EMS, between the pool and the memory."""

    def __init__(self, sources: Sequence[range], apart: int, block_bytes: int) -> None:
        cc = Ems.get_cc()
        assert cc is not None
        self._cc = cc
        self._sources = [[[KvBufferWrapper(at, block_bytes)] for at in part] for part in sources]
        self._targets = [
            [[KvBufferWrapper(at + apart, block_bytes)] for at in part] for part in sources
        ]
        self._names = [
            [f"roof@{batch}@{key}" for key in range(len(part))]
            for batch, part in enumerate(sources)
        ]
        for batch in range(len(sources)):
            self.save(batch)
        for batch in range(len(sources)):
            self.load(batch)

    def load(self, number: int) -> None:
        batch, place = number % len(self._names), (number + 1) % len(self._names)
        self._check(self._cc.load(_OPTION, self._names[batch], self._targets[place]).success)

    def save(self, number: int) -> None:
        batch, place = number % len(self._names), (number + 1) % len(self._names)
        self._check(self._cc.save(_OPTION, self._names[batch], self._sources[place]).success)

    def _check(self, success: int) -> None:
        if success != len(self._names[0]):
            raise internal_error(f"the pool moved {success} blocks, which makes no measurement")


def _huge_bytes(address: int) -> int:
    """How much of the mapping at `address` lies on huge pages, as the kernel tells."""
    inside = False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
        for line in file:
            word, *words = line.split()
            if "-" in word:
                low, _, high = word.partition("-")
                inside = int(low, 16) <= address < int(high, 16)
            elif inside and word == "AnonHugePages:":
                return 1024 * int(words[0])
    return 0
