"""Time to first token of a real vLLM: cold, from its own cache, from EMS, from a peer."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ems.testing import LocalPool
from ems.testing.vllm_engine import MODELS, VOCABULARY, Engine, ems_transfer, make_model

__all__ = ["VllmReport", "VllmRow", "VllmSettings", "measure_vllm"]

NOTHING, EMS, EXAMPLE = "no connector", "EMS", "ExampleConnector"
_DECODED = 64


@dataclasses.dataclass(frozen=True)
class VllmSettings:
    """What to measure.

    Args:
        model: one of `MODELS`.
        tokens: lengths of prompts.
        rounds: prompts of each length; the median counts.
        dtype: of model and cache.
        threads: of OpenMP in each engine.
        capacity_bytes: of the pool.
        peers: whether vLLM's example connector runs as well.
    """

    model: str = "tiny"
    tokens: tuple[int, ...] = (129, 1000, 2000)
    rounds: int = 3
    dtype: str = "bfloat16"
    threads: int = 1
    capacity_bytes: int = 2 << 30
    peers: bool = True


@dataclasses.dataclass(frozen=True)
class VllmRow:
    """One way to a first token, for one length of prompt.

    Args:
        way: which.
        connector: in which engine.
        tokens: of the prompt.
        cached: of them from a cache.
        median_ms: to the first token.
        same: whether its tokens were those of the hit in vLLM's own cache.
    """

    way: str
    connector: str
    tokens: int
    cached: int
    median_ms: float
    same: bool


@dataclasses.dataclass(frozen=True)
class VllmReport:
    """All rows, and what a decode step takes with nothing to hit.

    Args:
        settings: what was measured.
        rows: in the order in which they were measured.
        decode_ms: a decoded token, by connector, saves included.
    """

    settings: VllmSettings
    rows: tuple[VllmRow, ...]
    decode_ms: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return dataclasses.asdict(self)


def measure_vllm(
    settings: VllmSettings, progress: Callable[[str], object] = lambda text: None
) -> VllmReport:
    """Make a model and a pool, start engines one after the other, time first tokens."""
    with tempfile.TemporaryDirectory(prefix="ems-bench-vllm-") as folder:
        model = Path(folder) / "model"
        progress(f"making the model {settings.model}")
        make_model(model, MODELS[settings.model], settings.dtype)
        with LocalPool(settings.capacity_bytes) as pool:
            run = _Run(settings, model, pool.root, Path(folder) / "example", progress)
            return VllmReport(settings, tuple(run.rows()), run.decode_ms)


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
        }
        self._expected: dict[tuple[int, int], list[int]] = {}
        self.decode_ms: dict[str, float] = {}

    def rows(self) -> Iterator[VllmRow]:
        with self._engine(NOTHING) as engine:
            yield from self._ways(engine, NOTHING, "cold", "own cache")
            self._decode(engine, NOTHING)
        with self._engine(EMS) as engine:
            yield from self._ways(engine, EMS, "cold, saving", "own cache")
            engine.forget()
            yield from self._ways(engine, EMS, "same engine")
            self._decode(engine, EMS)
            with self._engine(EMS) as second:
                yield from self._ways(second, EMS, "second engine")
        with self._engine(EMS) as engine:
            yield from self._ways(engine, EMS, "restarted engine")
        if self._settings.peers:
            with self._engine(EXAMPLE) as engine:
                yield from self._ways(engine, EXAMPLE, "cold, saving")
            with self._engine(EXAMPLE) as engine:
                yield from self._ways(engine, EXAMPLE, "restarted engine")

    def _engine(self, connector: str) -> Engine:
        self._progress(f"starting an engine: {connector}")
        settings = self._settings
        engine = Engine(
            self._model,
            self._transfers[connector],
            threads=settings.threads,
            dtype=settings.dtype,
            max_model_len=max(settings.tokens) + 256,
        )
        engine.generate([_prompt(0, 140)])  # what a first call costs is not measured
        return engine

    def _ways(self, engine: Engine, connector: str, *ways: str) -> Iterator[VllmRow]:
        for tokens in self._settings.tokens:
            prompts = [_prompt(1 + at, tokens) for at in range(self._settings.rounds)]
            for way in ways:
                times, cached, same = [], 0, True
                for at, prompt in enumerate(prompts):
                    found = engine.generate([prompt], max_tokens=1)[0]
                    times.append(1e3 * engine.seconds)
                    cached = found.cached
                    if way == "own cache":
                        self._expected.setdefault((tokens, at), found.tokens)
                    same &= found.tokens == self._expected.get((tokens, at), found.tokens)
                yield VllmRow(way, connector, tokens, cached, sorted(times)[len(times) // 2], same)

    def _decode(self, engine: Engine, connector: str) -> None:
        """Time decoding behind prompts that nobody has, which save a block now and then."""
        times: list[float] = []
        for at in range(self._settings.rounds):
            prompt = _prompt(1000 + at, 200)
            for _ in range(2):  # the second one is a hit in its own cache, like the third
                engine.generate([prompt], max_tokens=1)
            first_s = engine.seconds
            engine.generate([prompt], max_tokens=1 + _DECODED)
            times.append(1e3 * (engine.seconds - first_s) / _DECODED)
        self.decode_ms[connector] = sorted(times)[len(times) // 2]


def _prompt(seed: int, tokens: int) -> Sequence[int]:
    chosen = random.Random(1_000_000 * tokens + seed)
    return [chosen.randrange(VOCABULARY) for _ in range(tokens)]
