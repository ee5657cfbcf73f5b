"""Time to first token of a real vLLM: cold, from its own cache, from EMS, from its peers."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ems.bench.figure import Figure, at_most, figured
from ems.bench.machine import Machine, read_machine
from ems.testing import LocalPool
from ems.testing.vllm_engine import MODELS, VOCABULARY, Engine, ems_transfer, make_model

__all__ = ["VllmReport", "VllmRow", "VllmSettings", "measure_vllm"]

NOTHING, EMS, EXAMPLE, NATIVE = "no connector", "EMS", "ExampleConnector", "OffloadingConnector"
COLD, LOCAL, SAME, SECOND, RESTARTED = (
    "cold",
    "own cache",
    "same engine",
    "second engine",
    "restarted engine",
)


@dataclasses.dataclass(frozen=True)
class VllmSettings:
    """What to measure.

    Args:
        model: one of `MODELS`.
        tokens: lengths of prompts.
        prompts: of each length.
        rounds: how often a hit is repeated, and an engine restarted; the median over prompts and
            rounds counts.
        dtype: of model and cache.
        threads: of OpenMP in each engine.
        capacity_bytes: of the pool, and of the memory of the native peer.
        decoded: tokens of which the time of one decode step is made.
        misses: pairs of prefills and of decodes, without and with EMS, that nobody has cached.
        peers: whether vLLM's own connectors run as well.
    """

    model: str = "tiny"
    tokens: tuple[int, ...] = (129, 1000, 2000)
    prompts: int = 2
    rounds: int = 5
    dtype: str = "bfloat16"
    threads: int = 1
    capacity_bytes: int = 2 << 30
    decoded: int = 130
    misses: int = 8
    peers: bool = True


@dataclasses.dataclass(frozen=True)
class VllmRow:
    """One way to a first token, for one length of prompt.

    Args:
        connector: in which engine.
        way: which.
        tokens: of the prompt.
        cached: of them from a cache.
        median_ms: to the first token.
        local_ms: a hit in the cache of the same engine, measured in turn with it; 0 for none.
        ratio: of each first token to the local hit right behind it, the median; 0 for none.
        same: whether its token was that of a hit in vLLM's own cache.
    """

    connector: str
    way: str
    tokens: int
    cached: int
    median_ms: float
    local_ms: float
    ratio: float
    same: bool


@dataclasses.dataclass(frozen=True)
class VllmReport:
    """All ways, and what is wanted of them.

    Args:
        settings: what was measured.
        rows: in the order in which they were measured.
        figures: with what they are held against.
        machine: on which.
    """

    settings: VllmSettings
    rows: tuple[VllmRow, ...]
    figures: tuple[Figure, ...]
    machine: Machine

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return figured(self)


def measure_vllm(
    settings: VllmSettings, progress: Callable[[str], object] = lambda text: None
) -> VllmReport:
    """Make a model and a pool, start engines, time first tokens."""
    with tempfile.TemporaryDirectory(prefix="ems-bench-vllm-") as folder:
        model = Path(folder) / "model"
        progress(f"making the model {settings.model}")
        make_model(model, MODELS[settings.model], settings.dtype)
        with LocalPool(settings.capacity_bytes) as pool:
            run = _Run(settings, model, pool.root, Path(folder) / "example", progress)
            rows = tuple(run.rows())
            figures = (*_judged(rows), *run.judged_misses())
    return VllmReport(settings, rows, figures, read_machine())


class _Run:
    def __init__(
        self,
        settings: VllmSettings,
        model: Path,
        root: str,
        shared: Path,
        progress: Callable[[str], object],
    ) -> None:
        self._settings = settings
        self._model = model
        self._progress = progress
        self._transfers = {
            NOTHING: None,
            EMS: ems_transfer(root),
            EXAMPLE: {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": str(shared)},
            },
            NATIVE: {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "HostSpec",
                    "spec_module_path": "ems.testing.vllm_offloading",
                    "cpu_bytes_to_use": settings.capacity_bytes,
                },
            },
        }
        self._expected: dict[tuple[int, int], list[int]] = {}

    def rows(self) -> Iterator[VllmRow]:
        with self._engine(NOTHING) as engine:
            yield from self._cold(engine, NOTHING)
            yield from self._hits(engine, NOTHING, LOCAL)
        with self._engine(EMS) as engine:
            yield from self._cold(engine, EMS)
            yield from self._hits(engine, EMS, SAME)
            with self._engine(EMS) as second:
                yield from self._hits(second, EMS, SECOND)
        yield from self._restarted(EMS)
        if not self._settings.peers:
            return
        with self._engine(EXAMPLE) as engine:
            yield from self._cold(engine, EXAMPLE)
            yield from self._hits(engine, EXAMPLE, SAME)
        yield from self._restarted(EXAMPLE)
        with self._engine(NATIVE) as engine:
            yield from self._cold(engine, NATIVE)
            yield from self._hits(engine, NATIVE, SAME)

    def judged_misses(self) -> Iterator[Figure]:
        """Two engines that take turns, each with prompts of its own that nobody has."""
        longest = max(self._settings.tokens)
        prefills: dict[str, list[float]] = {NOTHING: [], EMS: []}
        steps: dict[str, list[float]] = {NOTHING: [], EMS: []}
        decoded = self._settings.decoded
        with contextlib.ExitStack() as stack:
            engines = {name: stack.enter_context(self._engine(name)) for name in prefills}
            for number in range(self._settings.misses):
                order = list(engines.items())
                for name, engine in order[number % 2 :] + order[: number % 2]:
                    prompt = _prompt(10_000 + number, min(longest, 1024))
                    prefills[name].append(self._first_token(engine, prompt)[0])
                    prompt = _prompt(20_000 + number, 200)
                    first_s, *_ = self._first_token(engine, prompt)
                    first_s, *_ = self._first_token(engine, prompt)  # its prefix is cached now
                    engine.generate([prompt], max_tokens=1 + decoded)
                    steps[name].append((engine.seconds - first_s) / decoded)
        for what, times in (("a prefill of 1,024 tokens", prefills), ("a decode step", steps)):
            base, ours = (_median_ms(times[name]) for name in (NOTHING, EMS))
            ratio = _ratio(times[NOTHING], times[EMS])
            yield at_most(
                f"{what}, saved, nothing but misses",
                ours,
                "ms",
                1.01,
                roof=(NOTHING, base),
                judged=("x no connector", ratio),
            )

    def _restarted(self, connector: str) -> Iterator[VllmRow]:
        """The first hits of engines that were just started: one of each prompt for each engine."""
        found = [_Hits(tokens) for tokens in self._settings.tokens]
        for _ in range(self._settings.rounds):
            with self._engine(connector) as engine:
                for hits in found:
                    self._hit(engine, RESTARTED, hits)
        for hits in found:
            yield hits.row(connector, RESTARTED)

    def _engine(self, connector: str) -> Engine:
        self._progress(f"starting an engine: {connector}")
        settings = self._settings
        engine = Engine(
            self._model,
            self._transfers[connector],
            threads=settings.threads,
            dtype=settings.dtype,
            max_model_len=max(*settings.tokens, 1024) + 256,
        )
        # What first calls cost is not measured, neither computing nor hitting.
        for _ in range(2):
            engine.generate([_prompt(0, 140)])
        engine.forget()
        return engine

    def _cold(self, engine: Engine, connector: str) -> Iterator[VllmRow]:
        for tokens in self._settings.tokens:
            times = [self._first_token(engine, prompt)[0] for _, prompt in self._prompts(tokens)]
            yield VllmRow(connector, COLD, tokens, 0, _median_ms(times), 0.0, 0.0, True)

    def _hits(self, engine: Engine, connector: str, way: str) -> Iterator[VllmRow]:
        for tokens in self._settings.tokens:
            hits = _Hits(tokens)
            for _ in range(self._settings.rounds):
                self._hit(engine, way, hits)
            yield hits.row(connector, way)

    def _hit(self, engine: Engine, way: str, hits: _Hits) -> None:
        """Each prompt after vLLM's own cache forgot, and again: a hit in that cache."""
        tokens = hits.tokens
        for at, prompt in self._prompts(tokens):
            if way != LOCAL:
                engine.forget()
                seconds, count, found = self._first_token(engine, prompt)
                hits.times.append(seconds)
                hits.cached = min(hits.cached, count)
                hits.same &= found == self._expected[tokens, at]
            seconds, count, found = self._first_token(engine, prompt)
            hits.local.append(seconds)
            if way == LOCAL:
                hits.cached = min(hits.cached, count)
                self._expected.setdefault((tokens, at), found)

    def _prompts(self, tokens: int) -> Iterator[tuple[int, Sequence[int]]]:
        return ((at, _prompt(1 + at, tokens)) for at in range(self._settings.prompts))

    def _first_token(self, engine: Engine, prompt: Sequence[int]) -> tuple[float, int, list[int]]:
        found = engine.generate([prompt], max_tokens=1)[0]
        return engine.seconds, found.cached, found.tokens


class _Hits:
    """First tokens of prompts of one length, each with the local hit behind it."""

    def __init__(self, tokens: int) -> None:
        self.tokens = self.cached = tokens
        self.times: list[float] = []
        self.local: list[float] = []
        self.same = True

    def row(self, connector: str, way: str) -> VllmRow:
        beside = _median_ms(self.local)
        mine = _median_ms(self.times) if self.times else beside
        # Pairs see the same weather.
        ratio = _ratio(self.local, self.times) if self.times else 1.0
        return VllmRow(connector, way, self.tokens, self.cached, mine, beside, ratio, self.same)


def _median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


def _ratio(base: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(b / a for a, b in zip(base, ours))


def _judged(rows: Sequence[VllmRow]) -> Iterator[Figure]:
    """What is wanted of first tokens."""
    by = {(row.connector, row.way, row.tokens): row for row in rows}
    lengths = sorted({row.tokens for row in rows})
    longest = by[EMS, RESTARTED, lengths[-1]]
    yield at_most(
        f"first token of {longest.tokens:,} tokens after a restart",
        longest.median_ms,
        "ms",
        1.05,
        roof=("own cache", longest.local_ms),
        judged=("x own cache", longest.ratio),
    )
    shortest = by[EMS, SAME, lengths[0]]
    computed = by[NOTHING, COLD, lengths[0]].median_ms
    yield at_most(
        f"first token of {shortest.tokens:,} tokens, hit in EMS",
        shortest.median_ms,
        "ms",
        1.0,
        roof=("computed", computed),
        judged=("x computed", shortest.median_ms / computed),
    )
    for tokens in lengths:
        native = by.get((NATIVE, SAME, tokens))
        if native is not None:
            ours = by[EMS, SAME, tokens].median_ms
            yield at_most(
                f"first token of {tokens:,} tokens, hit in EMS",
                ours,
                "ms",
                1.0,
                roof=(NATIVE, native.median_ms),
                judged=(f"x {NATIVE}", ours / native.median_ms),
            )


def _prompt(seed: int, tokens: int) -> Sequence[int]:
    chosen = random.Random(1_000_000 * tokens + seed)
    return [chosen.randrange(VOCABULARY) for _ in range(tokens)]
