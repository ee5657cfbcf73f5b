"""What the comparison of checksums costs a load into memory of the CPU.

Two clients of one pool in one process, one that compares and one that does not, load the same
blocks, in an order left to chance: over more memory than caches hold, each pair a quarter of it
away from the last. One thread copies, so that nothing else is found out and chosen meanwhile.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from typing import Any

from ems import __version__
from ems.bench.figure import Figure, at_most, figured
from ems.bench.machine import Machine, read_machine
from ems.cc.context_caching import ContextCaching
from ems.client.client import Client
from ems.common.config import check_config
from ems.common.option import CcKvOption
from ems.common.size import format_size
from ems.testing.figures import wait_until_prepared
from ems.testing.local_pool import LocalPool
from ems.transfer import default_parallelism, share_big_copies
from ems_native._copy import KvBufferWrapper

__all__ = ["SHAPES", "VerifyReport", "VerifySettings", "measure_verify"]

SHAPES = ((32, 2 << 20), (128, 64 << 10))
"""Blocks of a call, and their size."""
_WANTED = {2 << 20: 1.05}  # times a load that does not compare
_SETS = 8
_WARM = 2 * _SETS


@dataclasses.dataclass(frozen=True)
class VerifySettings:
    """So many pairs of loads of `blocks` blocks."""

    blocks: int = SHAPES[0][0]
    block_bytes: int = SHAPES[0][1]
    pairs: int = 200


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """Medians over the pairs: GB/s of both, and the time of one over that of the other."""

    settings: VerifySettings
    compared: float
    not_compared: float
    ratio: float
    machine: Machine

    @property
    def figures(self) -> list[Figure]:
        """What is wanted of blocks of 2 MiB; of others nothing is."""
        settings = self.settings
        limit = _WANTED.get(settings.block_bytes)
        if limit is None:
            return []
        return [
            at_most(
                f"load {settings.blocks} x {format_size(settings.block_bytes)}, compared",
                self.compared,
                "GB/s",
                limit,
                roof=("not compared", self.not_compared),
                judged=("x the time of one that is not", self.ratio),
            )
        ]

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain data, ready for JSON."""
        return figured(self)


def measure_verify(settings: VerifySettings) -> VerifyReport:
    """Measure with a pool of its own; nothing is left behind.

    Raises:
        EmsException: no pool can be started here.
    """
    blocks, block_bytes = settings.blocks, settings.block_bytes
    nbytes = blocks * block_bytes
    option = CcKvOption(timeout=60_000)
    with LocalPool(_SETS * nbytes + (32 << 20)) as pool:
        clients = []
        for verify in (True, False):
            config = check_config(dataclasses.replace(pool.config, verify=verify))
            client = Client.open(config, __version__)
            assert config.instance is not None
            clients.append((client, ContextCaching(client, None, config.instance)))
        try:
            share_big_copies(1)
            wait_until_prepared(pool.root)
            chance = random.Random(1)
            compares, does_not = (cc for _, cc in clients)
            sets = [_batch(number, blocks, block_bytes) for number in range(_SETS)]
            for names, values, _ in sets:
                assert compares.save(option, names, values).success == blocks
            took: list[tuple[float, float]] = []
            for turn in range(_WARM + settings.pairs):
                names, values, _ = sets[turn * 2 % _SETS + turn // _SETS % 2]
                pair = [0.0, 0.0]
                for which in chance.sample((0, 1), 2):
                    cc = does_not if which else compares
                    started = time.perf_counter()
                    result = cc.load(option, names, values)
                    pair[which] = time.perf_counter() - started
                    assert result.success == blocks
                took.append((pair[0], pair[1]))
        finally:
            share_big_copies(default_parallelism())
            for client, _ in clients:
                client.close()
    took = took[_WARM:]
    return VerifyReport(
        settings,
        compared=nbytes / statistics.median(pair[0] for pair in took) / 1e9,
        not_compared=nbytes / statistics.median(pair[1] for pair in took) / 1e9,
        ratio=statistics.median(pair[0] / pair[1] for pair in took),
        machine=read_machine(),
    )


def _batch(number: int, blocks: int, block_bytes: int) -> tuple[list[str], Any, bytearray]:
    memory = bytearray(blocks * block_bytes)
    view = memoryview(memory)
    values = [
        [KvBufferWrapper.from_buffer(view[at : at + block_bytes])]
        for at in range(0, len(memory), block_bytes)
    ]
    return [f"set {number} block {n}" for n in range(blocks)], values, memory
