"""One small key at a time, beside what such a call cannot do without.

Sync calls beside a bare memmove and a bare message, awaited ones beside an empty hop; and what
outstanding loads do to the caller's event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import time
from collections.abc import Awaitable, Callable

from ems import CcFuture, CcKvOption, CcResult, ContextCaching, Ems
from ems.bench.bare_writer import BareWriter
from ems.bench.figure import (
    Figure,
    at_most,
    figured,
    median_us,
    percentile,
    take_turns,
    take_turns_awaiting,
)
from ems.bench.machine import Machine, read_machine
from ems.bench.memory import BlockMemory
from ems.common.exception import internal_error
from ems.common.size import format_size
from ems.home import HomeLoop
from ems.rpc import frames
from ems.testing import LocalPool
from ems.testing.figures import wait_until_prepared
from ems.transfer import CopyWorkers

__all__ = ["LatencyReport", "LatencySettings", "measure_latency"]

_OPTION = CcKvOption(timeout=60_000)
_TICK_S = 0.001
_FEW, _MANY = 32, 1000
_LAG_TURNS = 3


@dataclasses.dataclass(frozen=True)
class LatencySettings:
    """What is measured: calls of one key, over `rotate_bytes` of memory on either side."""

    block_bytes: int = 64 << 10
    rotate_bytes: int = 1 << 30
    rounds: int = 4000
    local_loads: int = 10_000
    lag_s: float = 2.0  # how long the lag of the event loop is watched, each time

    @property
    def blocks(self) -> int:
        """How many blocks the memory on either side holds."""
        return self.rotate_bytes // self.block_bytes


@dataclasses.dataclass(frozen=True)
class LatencyReport:
    """What was found."""

    settings: LatencySettings
    figures: tuple[Figure, ...]
    page_kind: str
    machine: Machine

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain data, ready for JSON."""
        return figured(self)


def measure_latency(settings: LatencySettings) -> LatencyReport:
    """Measure with a pool of its own; nothing is left behind.

    Takes `Ems` of this process for itself, so it must not be initialised.

    Raises:
        EmsException: whatever the pool says.
    """
    with LocalPool(settings.rotate_bytes * 3 // 2 + (16 << 20)) as pool:
        page_kind = wait_until_prepared(pool.root).page_kind
        Ems.init(pool.config)
        try:
            bench = _Latency(settings)
            figures = bench.measure_sync(pool.root)
            figures += asyncio.run(bench.measure_awaited())
            figures += asyncio.run(bench.measure_lag())
        finally:
            Ems.close()
    return LatencyReport(settings, tuple(figures), page_kind, read_machine())


class _Latency:
    def __init__(self, settings: LatencySettings) -> None:
        cc = Ems.get_cc()
        assert cc is not None
        self._cc: ContextCaching = cc
        self._settings = settings
        self._blocks = settings.blocks
        self._memory = BlockMemory(self._blocks, settings.block_bytes)
        self._what = f"of one key of {format_size(settings.block_bytes)}"
        self._keys = [[f"latency@{block}"] for block in range(self._blocks)]
        self._values = [[buffers] for buffers in self._memory.buffers]
        for call in (self._save, self._load):  # all memory is touched, all keys are there
            for block in range(self._blocks):
                call(block)

    def measure_sync(self, root: str) -> list[Figure]:
        settings = self._settings
        payload = bytes(len(frames.reserve(1, bytes(16), bytes(8), True, False)) - 16)
        with BareWriter(root) as writer:
            times = take_turns(
                {
                    "memmove": self._memmove,
                    "load": self._load,
                    "save": self._save,
                    "echo": lambda number: writer.echo(payload),
                },
                settings.rounds,
            )
        us = {name: median_us(seconds) for name, seconds in times.items()}
        return [
            at_most(
                f"sync load {self._what}",
                us["load"],
                "us",
                3,
                roof=("memmove", us["memmove"]),
                judged=("x memmove", us["load"] / us["memmove"]),
            ),
            self._count_messages(),
            at_most(
                f"sync save {self._what}",
                us["save"],
                "us",
                2.5,
                roof=("echo", us["echo"]),
                judged=("echoes beside the copy", (us["save"] - us["memmove"]) / us["echo"]),
            ),
        ]

    def _count_messages(self) -> Figure:
        before = Ems.stats()["messages"]
        loads = self._settings.local_loads
        for number in range(loads):
            self._load(number)
        messages = Ems.stats()["messages"] - before
        return at_most(f"messages in {loads:,} local loads", messages, "messages", 0)

    async def measure_awaited(self) -> list[Figure]:
        settings = self._settings
        with _Hop() as hop:
            times = await take_turns_awaiting(
                {"sync": self._load_inline, "hop": hop.make, "awaited": self._load_awaited},
                settings.rounds,
            )
        us = {name: median_us(seconds) for name, seconds in times.items()}
        return [
            at_most(
                f"awaited load {self._what}",
                us["awaited"],
                "us",
                2,
                roof=("empty hop", us["hop"]),
                judged=("hops above the sync load", (us["awaited"] - us["sync"]) / us["hop"]),
            )
        ]

    async def measure_lag(self) -> list[Figure]:
        """The lag of this loop with loads outstanding, and with as many no-ops in an executor."""
        loop = asyncio.get_running_loop()

        def no_op(number: int) -> Awaitable[object]:
            return loop.run_in_executor(None, _nothing)

        kinds: list[tuple[int, Callable[[int], Awaitable[object]]]] = [
            (_FEW, self._load_later),
            (_MANY, self._load_later),
            (_MANY, no_op),
        ]
        lags: list[list[float]] = [[] for _ in kinds]
        for _ in range(_LAG_TURNS):
            for (outstanding, start), mine in zip(kinds, lags):
                mine += await _lag(outstanding, start, self._settings.lag_s)
        few, many, no_ops = (1e3 * percentile(one, 0.99) for one in lags)
        name = "lag of the event loop, p99, {} loads outstanding"
        return [
            at_most(name.format(_FEW), few, "ms", 5),
            at_most(
                name.format(f"{_MANY:,}"),
                many,
                "ms",
                2,
                roof=("run_in_executor", no_ops),
                judged=("x run_in_executor", many / no_ops),
            ),
        ]

    def _memmove(self, number: int) -> None:
        target, source = number % self._blocks, (number + self._blocks // 2) % self._blocks
        addresses = self._memory.addresses
        ctypes.memmove(addresses[target], addresses[source], self._settings.block_bytes)

    def _load(self, number: int) -> None:
        key, place = number % self._blocks, (number + self._blocks // 4) % self._blocks
        _check(self._cc.load(_OPTION, self._keys[key], self._values[place]))

    def _save(self, number: int) -> None:
        key, place = number % self._blocks, (number + 3 * self._blocks // 4) % self._blocks
        _check(self._cc.save(_OPTION, self._keys[key], self._values[place]))

    async def _load_inline(self, number: int) -> None:
        self._load(number)

    async def _load_awaited(self, number: int) -> None:
        _check(await self._load_later(number))

    def _load_later(self, number: int) -> CcFuture:
        key, place = number % self._blocks, (number + self._blocks // 4) % self._blocks
        return self._cc.async_load(_OPTION, self._keys[key], self._values[place])


class _Hop:
    """The way of an awaited call without the call: home loop, worker, back to the caller's loop."""

    def __init__(self) -> None:
        self._home = HomeLoop("ems-bench-hop")
        self._workers = CopyWorkers(1)

    async def make(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        back: asyncio.Future[None] = loop.create_future()

        def work() -> None:
            loop.call_soon_threadsafe(back.set_result, None)

        self._home.call_soon(self._workers.run, work)
        await back

    def __enter__(self) -> _Hop:
        self._home.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()
        self._home.stop()


async def _lag(
    outstanding: int, start: Callable[[int], Awaitable[object]], seconds: float
) -> list[float]:
    """How late a timer of this loop fires while `outstanding` calls are kept under way."""
    going = True

    async def keep(number: int) -> None:
        while going:
            await start(number)
            number += outstanding

    tasks = [asyncio.ensure_future(keep(number)) for number in range(outstanding)]
    late: list[float] = []
    until = time.perf_counter() + seconds
    while (now := time.perf_counter()) < until:
        await asyncio.sleep(_TICK_S)
        late.append(time.perf_counter() - now - _TICK_S)
    going = False
    await asyncio.gather(*tasks)
    return late


def _nothing() -> None:
    pass


def _check(result: CcResult) -> None:
    if result.success != 1:
        raise internal_error(f"the pool did {result}, which makes no measurement")
