"""EMS and its peers side by side: the same bytes, the same batches, in turns within one run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from ems.bench.contender import Contender
from ems.bench.figure import Figure, at_least, figured, percentile
from ems.bench.machine import Machine, available_bytes, read_machine
from ems.bench.peers.catalogue import EMS, PEERS, Peer
from ems.common.exception import EmsException, invalid_argument
from ems.common.size import format_size

__all__ = ["SHAPES", "Comparison", "ComparisonSettings", "Shape", "Timing", "compare"]

_MIN_BATCHES = 2
_TURN_BYTES = 32 << 20
_TURN_CALLS = 50
_TELL = 4
_MANY = 32
_MEMORY = 7  # times a call's bytes, of each contender: a pool of four, two of its own, and some


@dataclasses.dataclass(frozen=True)
class Shape:
    """A call of so many keys."""

    keys: int
    value_bytes: int

    @property
    def batch_bytes(self) -> int:
        """The bytes of one call."""
        return self.keys * self.value_bytes

    def __str__(self) -> str:
        return f"{self.keys} x {format_size(self.value_bytes)}"


SHAPES = tuple(
    Shape(keys, nbytes)
    for nbytes in (64 << 10, 512 << 10, 2 << 20, 8 << 20)
    for keys in (1, 32, 128)
)


_WANTED_LOADS = {Shape(32, 2 << 20): 1.4}  # times the best peer; others 1


@dataclasses.dataclass(frozen=True)
class ComparisonSettings:
    """What is compared.

    Args:
        shapes: of the calls.
        names: contenders, all of `PEERS` when empty; EMS always.
        folder: where the peers' virtual environments are, None for nowhere.
        rotate_bytes: memory that the calls rotate over, in each store and at each caller.
        most_bytes: of a call that all contenders take turns with; each needs about six times as
            much memory. With larger ones only one peer at a time takes turns with EMS, a third as
            often; what two contenders have no memory for is left out, and the report says so.
        seconds: of each shape.
        turns: of each contender, at least, whatever the time.
    """

    shapes: tuple[Shape, ...] = SHAPES
    names: tuple[str, ...] = ()
    folder: str | None = None
    rotate_bytes: int = 128 << 20
    most_bytes: int = 256 << 20
    seconds: float = 15.0
    turns: int = 12

    def batches(self, shape: Shape) -> int:
        """How many batches of a shape the memory on either side holds."""
        return max(_MIN_BATCHES, self.rotate_bytes // shape.batch_bytes)


@dataclasses.dataclass(frozen=True)
class Timing:
    """One way to move one shape, by one contender."""

    contender: str
    operation: str
    keys: int
    value_bytes: int
    calls: int
    median_us: float
    p99_us: float
    gb_per_s: float  # of the median

    @property
    def shape(self) -> Shape:
        """Of its calls."""
        return Shape(self.keys, self.value_bytes)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was found; `skipped` holds names (of contenders or shapes) and reasons."""

    settings: ComparisonSettings
    versions: tuple[tuple[str, str], ...]
    skipped: tuple[tuple[str, str], ...]
    timings: tuple[Timing, ...]
    mismatches: int
    machine: Machine

    @property
    def figures(self) -> list[Figure]:
        """EMS beside the best of the peers, shape by shape, and what is wanted of it."""
        return [
            figure
            for shape in dict.fromkeys(timing.shape for timing in self.timings)
            for figure in _judge(shape, [one for one in self.timings if one.shape == shape])
        ]

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain data, ready for JSON."""
        return figured(self)


def compare(
    settings: ComparisonSettings, progress: Callable[[str], object] = lambda text: None
) -> Comparison:
    """Start every contender that can be started, and let them take turns, shape after shape.

    Nothing is left behind, whatever is raised. A peer that fails drops out, with its reason.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` for an unknown name; EMS itself failed.
    """
    known = [peer.name for peer in PEERS]
    for name in settings.names:
        if name not in known:
            raise invalid_argument(f"no contender is called {name!r}; there are {', '.join(known)}")
    peers = [
        peer for peer in PEERS if peer is EMS or not settings.names or peer.name in settings.names
    ]
    together = [one for one in settings.shapes if one.batch_bytes <= settings.most_bytes]
    run = _Run(settings, progress)
    with tempfile.TemporaryDirectory(prefix="ems-bench-") as folder:
        if together:
            with run.started(peers, together, folder):
                for shape in together:
                    run.measure(shape, settings.turns, settings.seconds)
        for shape in settings.shapes:
            if shape in together:
                continue
            if 2 * _MEMORY * shape.batch_bytes > available_bytes():
                run.skip(
                    str(shape),
                    f"two contenders need {_MEMORY} x {shape.batch_bytes >> 20} MiB each",
                )
                continue
            for peer in peers[1:]:
                if peer.name in run.skipped:
                    continue
                with run.started([EMS, peer], [shape], folder):
                    run.measure(shape, max(1, settings.turns // 3), 0)
    return Comparison(
        settings,
        tuple(run.versions.items()),
        tuple(run.skipped.items()),
        tuple(_timing(*kind, seconds) for kind, seconds in run.seconds.items()),
        run.mismatches,
        read_machine(),
    )


class _Run:
    """The contenders that are left, and what they did."""

    def __init__(self, settings: ComparisonSettings, progress: Callable[[str], object]) -> None:
        self._settings = settings
        self._progress = progress
        self._contenders: dict[str, Contender] = {}
        self._folders = 0
        self.versions: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.seconds: dict[tuple[str, str, Shape], list[float]] = {}
        self.mismatches = 0

    @contextlib.contextmanager
    def started(
        self, peers: Sequence[Peer], shapes: Sequence[Shape], folder: str
    ) -> Iterator[None]:
        """Have these contenders, as far as they can be started, with memory for these shapes."""
        memory = max(self._settings.batches(one) * one.batch_bytes for one in shapes)
        try:
            for peer in peers:
                if peer.name not in self.skipped:
                    self._folders += 1
                    self._begin(peer, os.path.join(folder, str(self._folders)), memory)
            yield
        finally:
            for name in list(self._contenders):
                self._end(name)

    def measure(self, shape: Shape, least_turns: int, least_s: float) -> None:
        """Let all contenders work on a shape; who fails rests until the next one."""
        batches = self._settings.batches(shape)
        calls = max(1, min(_TURN_CALLS, batches // 2, _TURN_BYTES // shape.batch_bytes))
        times: dict[str, dict[str, list[float]]] = {}
        self._progress(f"{shape}: preparing")
        for name, contender in self._contenders.items():
            fields = {**dataclasses.asdict(shape), "batches": batches}
            if self._try(
                name, f"{name}, {shape}", functools.partial(contender.ask, "shape", **fields)
            ):
                times[name] = {operation: [] for operation in contender.operations}
        start, turns = time.monotonic(), 0
        while turns < least_turns or time.monotonic() - start < least_s:
            order = list(times)
            at = turns % len(order)
            for name in order[at:] + order[:at]:
                turn = functools.partial(self._turn, name, times[name], turns * calls, calls)
                if not self._try(name, f"{name}, {shape}", turn):
                    del times[name]
            turns += 1
            if turns % _TELL == 0:
                self._progress(f"{shape}: {turns} turns, {time.monotonic() - start:.0f} s")
        for name in times:
            if self._try(name, f"{name}, {shape}", functools.partial(self._verify, name)):
                for what, seconds in times[name].items():
                    self.seconds.setdefault((name, what, shape), []).extend(seconds)

    def skip(self, what: str, reason: str) -> None:
        """Note that something is left out, and why."""
        self.skipped[what] = reason
        self._progress(f"without {what}: {reason}")

    def _begin(self, peer: Peer, folder: str, memory_bytes: int) -> None:
        reason = peer.missing(self._settings.folder)
        if reason:
            self.skip(peer.name, reason)
            return
        self._progress(f"starting {peer.name}")
        contender = Contender(peer, self._settings.folder, folder)
        self._contenders[peer.name] = contender

        def start() -> None:
            self.versions[peer.name] = contender.open(2 * memory_bytes, memory_bytes)

        if not self._try(peer.name, peer.name, start):
            self._end(peer.name)

    def _end(self, name: str) -> None:
        contender = self._contenders.pop(name, None)
        if contender is not None:
            contender.close()

    def _turn(self, name: str, times: dict[str, list[float]], first: int, calls: int) -> None:
        for what, seconds in times.items():
            answer = self._contenders[name].ask("turn", what=what, first=first, calls=calls)
            seconds += answer["seconds"]

    def _verify(self, name: str) -> None:
        self.mismatches += self._contenders[name].ask("verify")["mismatches"]
        self._contenders[name].ask("clear")

    def _try(self, name: str, what: str, action: Callable[[], object]) -> bool:
        try:
            action()
        except EmsException as error:
            if name == EMS.name:
                raise
            self.skip(what, error.message())
            return False
        return True


def _timing(name: str, operation: str, shape: Shape, seconds: Sequence[float]) -> Timing:
    median = statistics.median(seconds)
    return Timing(
        contender=name,
        operation=operation,
        keys=shape.keys,
        value_bytes=shape.value_bytes,
        calls=len(seconds),
        median_us=1e6 * median,
        p99_us=1e6 * percentile(seconds, 0.99),
        gb_per_s=shape.batch_bytes / median / 1e9,
    )


def _judge(shape: Shape, timings: Sequence[Timing]) -> Iterator[Figure]:
    private = {peer.name for peer in PEERS if not peer.shared}
    loads = [one for one in timings if one.operation == "load"]
    saves = [one for one in timings if one.operation == "save"]
    shared = [one for one in saves if one.contender not in private]
    yield from _beside("load", loads, _WANTED_LOADS.get(shape, 1.0), "the best peer")
    yield from _beside("save", shared, 1.0, "the best peer that shares")
    if shape.keys >= _MANY:
        alone = [one for one in saves if one.contender in private or one.contender == EMS.name]
        yield from _beside("save", alone, 1.0, "the best in process")


def _beside(what: str, timings: Sequence[Timing], limit: float, which: str) -> Iterator[Figure]:
    ours = [one for one in timings if one.contender == EMS.name]
    peers = [one for one in timings if one.contender != EMS.name]
    if ours and peers:
        best = min(peers, key=lambda one: one.median_us)
        ratio = best.median_us / ours[0].median_us
        yield at_least(
            f"{what} {ours[0].shape}, beside {which}",
            ours[0].gb_per_s,
            "GB/s",
            limit,
            roof=(best.contender, best.gb_per_s),
            judged=("x", ratio),
        )
