"""What the comparison of checksums costs a load into memory of the CPU.

    python benchmarks/bench_verify.py

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
from ems.cc.context_caching import ContextCaching
from ems.client.client import Client
from ems.common.config import check_config
from ems.common.option import CcKvOption
from ems.testing.figures import wait_until_prepared
from ems.testing.local_pool import LocalPool
from ems.transfer import share_big_copies
from ems_native import _copy
from ems_native._copy import KvBufferWrapper

__all__ = ["VerifyCost", "main", "measure_verify"]

WANTED = 1.05
"""Of a load that does not compare, for blocks of 2 MiB."""
_SETS = 8
_WARM = 2 * _SETS


@dataclasses.dataclass(frozen=True)
class VerifyCost:
    """Medians over pairs of loads: GB/s of both, and the time of one over that of the other."""

    blocks: int
    block_bytes: int
    pairs: int
    compared: float
    not_compared: float
    ratio: float


def measure_verify(pairs: int, blocks: int = 32, block_bytes: int = 2 << 20) -> VerifyCost:
    """Measure pairs of loads of `blocks` blocks.

    Raises:
        EmsException: no pool can be started here.
    """
    nbytes = blocks * block_bytes
    option = CcKvOption(timeout=60_000)
    with LocalPool(_SETS * nbytes + (32 << 20)) as pool:
        clients = []
        for verify in (True, False):
            settings = check_config(dataclasses.replace(pool.config, verify=verify))
            client = Client.open(settings, __version__)
            assert settings.instance is not None
            clients.append((client, ContextCaching(client, None, settings.instance)))
        try:
            share_big_copies(1)
            wait_until_prepared(pool.root)
            chance = random.Random(1)
            compares, does_not = (cc for _, cc in clients)
            sets = [_batch(number, blocks, block_bytes) for number in range(_SETS)]
            for names, values, _ in sets:
                assert compares.save(option, names, values).success == blocks
            took: list[tuple[float, float]] = []
            for turn in range(_WARM + pairs):
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
            for client, _ in clients:
                client.close()
    took = took[_WARM:]
    return VerifyCost(
        blocks=blocks,
        block_bytes=block_bytes,
        pairs=pairs,
        compared=nbytes / statistics.median(pair[0] for pair in took) / 1e9,
        not_compared=nbytes / statistics.median(pair[1] for pair in took) / 1e9,
        ratio=statistics.median(pair[0] / pair[1] for pair in took),
    )


def _batch(number: int, blocks: int, block_bytes: int) -> tuple[list[str], Any, bytearray]:
    memory = bytearray(blocks * block_bytes)
    view = memoryview(memory)
    values = [
        [KvBufferWrapper.from_buffer(view[at : at + block_bytes])]
        for at in range(0, len(memory), block_bytes)
    ]
    return [f"set {number} block {n}" for n in range(blocks)], values, memory


def main() -> int:
    """Print the figures; 0 if blocks of 2 MiB cost no more than what is wanted."""
    print(f"copy: {_copy.implementation()}")
    answer = 0
    for blocks, block_bytes in ((32, 2 << 20), (128, 64 << 10)):
        cost = measure_verify(200, blocks, block_bytes)
        print(
            f"{blocks} x {block_bytes >> 10} KiB: {cost.compared:.2f} GB/s compared, "
            f"{cost.not_compared:.2f} not; {100 * (cost.ratio - 1):+.1f} % (median of "
            f"{cost.pairs} pairs)"
        )
        if block_bytes == 2 << 20:
            answer = int(cost.ratio > WANTED)
    return answer
