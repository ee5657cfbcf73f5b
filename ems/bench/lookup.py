"""What a key costs in a pool of many entries, beside a pool of few."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable

from ems import CcKvOption, ContextCaching, __version__
from ems.bench.figure import Figure, at_most, median_us, take_turns
from ems.bench.memory import BlockMemory
from ems.client.client import Client
from ems.common.config import check_config
from ems.common.exception import internal_error
from ems.common.key import KeySpace
from ems.testing import LocalPool
from ems.testing.figures import wait_until_prepared

__all__ = ["LookupSettings", "measure_lookup"]

BLOCK_BYTES = 4096
_OPTION = CcKvOption(timeout=60_000)
_FILL_KEYS = 1024
_FILLED_SHARE = 0.6  # of the slots: two-choice buckets hold 0.72 before the first is full
_MODEL = "lookup"


@dataclasses.dataclass(frozen=True)
class LookupSettings:
    """Entries of 4 KiB in the two pools, keys of a call, memory that the loads rotate over."""

    many: int = 1_000_000
    few: int = 4_000
    batch: int = 128
    rotate_bytes: int = 1 << 30
    rounds: int = 1000


class _Filled:
    """A pool with entries, and a client of it: both pools are open in this process."""

    def __init__(self, entries: int, memory: BlockMemory, seed: int) -> None:
        self._entries = entries
        self._memory = memory
        self._chance = random.Random(seed)
        self._space = KeySpace.v0(None, _MODEL)
        self._closing = contextlib.ExitStack()
        self._client: Client
        self._cc: ContextCaching

    def open(self) -> None:
        capacity = self._entries * BLOCK_BYTES * 21 // 20 + (16 << 20)
        pool = self._closing.enter_context(
            LocalPool(capacity, int(self._entries / _FILLED_SHARE), start_timeout_s=300)
        )
        wait_until_prepared(pool.root)
        settings = check_config(pool.config_for(model_id=_MODEL))
        assert settings.instance is not None
        self._client = Client.open(settings, __version__)
        self._closing.callback(self._client.close)
        self._cc = ContextCaching(self._client, None, settings.instance)
        for first in range(0, self._entries, _FILL_KEYS):
            keys = [str(key) for key in range(first, min(first + _FILL_KEYS, self._entries))]
            if self._cc.save(_OPTION, keys, self._memory.buffers[: len(keys)]).success != len(keys):
                raise internal_error(f"the pool had no room for {self._entries:,} entries")

    def close(self) -> None:
        self._closing.close()

    def choose(self, count: int) -> list[str]:
        """Keys at random places of the pool; fresh strings, which are in the cache."""
        return [str(key) for key in self._chance.sample(range(self._entries), count)]

    def load(self, names: list[str], number: int) -> None:
        place = number * len(names) % (self._memory.blocks - len(names))
        buffers = self._memory.buffers[place : place + len(names)]
        if self._cc.load(_OPTION, names, buffers).success != len(names):
            raise internal_error("an entry is not there, which makes no measurement")

    def exists(self, names: list[str]) -> None:
        if self._client.exists(self._space.digests(names)) != len(names):
            raise internal_error("an entry is not there, which makes no measurement")


def measure_lookup(settings: LookupSettings) -> list[Figure]:
    """Fill both pools and measure them in turn; nothing is left behind."""
    blocks = max(settings.rotate_bytes // BLOCK_BYTES, 2 * _FILL_KEYS)
    memory = BlockMemory(blocks, BLOCK_BYTES)
    pools = {
        "many": _Filled(settings.many, memory, seed=1),
        "few": _Filled(settings.few, memory, seed=2),
    }
    with contextlib.ExitStack() as stack:
        for pool in pools.values():
            stack.callback(pool.close)
            pool.open()
        return [_measure(settings, what, pools) for what in ("exists", "load of 4 KiB")]


def _measure(settings: LookupSettings, what: str, pools: dict[str, _Filled]) -> Figure:
    names: list[str] = []  # chosen before each call, and not timed

    def contender(pool: _Filled) -> Callable[[int], None]:
        if what == "exists":
            return lambda number: pool.exists(names)
        return lambda number: pool.load(names, number)

    def choose(name: str) -> None:
        names[:] = pools[name].choose(settings.batch)

    times = take_turns(
        {name: contender(pool) for name, pool in pools.items()},
        settings.rounds,
        prepare=choose,
    )
    many, few = (median_us(times[name]) / settings.batch for name in ("many", "few"))
    return at_most(
        f"{what}, a key of {settings.batch}, {settings.many:,} entries",
        many,
        "us",
        1,
        roof=(f"{settings.few:,} entries", few),
        judged=("us above", many - few),
    )
