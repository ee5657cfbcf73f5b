"""The V1 calls of a real client on a real pool in this process, and a KV cache to register."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from client_bench import Bench

from ems.cc.context_caching import ContextCaching
from ems.cc_v1.cc_config import CcConfig_v1
from ems.client.client import Client
from ems.client.context import Context
from ems.client.core import Core
from ems.client.profile import Profiler
from ems.common.config import EmsConfig, InstanceConfig, check_config
from ems.common.deadline import Deadline
from ems.home import HomeLoop
from ems.testing.host_tensor import HostTensor

BLOCK_SIZE = 4


class BenchSession:
    """A session that is always attached, to the pool of a bench."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.context: Context | None = bench.context

    def writable(self, deadline: Deadline) -> Context:
        assert self.context is not None
        return self.context

    def counters(self) -> list[int]:
        return self.bench.counters.values

    async def close(self) -> None:
        self.context = None

    def forget(self) -> None:
        pass


class V1Bench:
    """A client of a bench's pool; `again()` is another process's, of another rank if you like."""

    def __init__(self, bench: Bench | None = None, profiler: Profiler | None = None) -> None:
        self.bench = bench or Bench()
        self.home = HomeLoop("test-home")
        self.home.start()
        self.session = BenchSession(self.bench)
        self.client = Client(
            self.home,
            self.session,  # type: ignore[arg-type]
            Core(self.home),
            self.bench.context.device,  # type: ignore[arg-type]
            profiler,
        )

    def again(self) -> V1Bench:
        return V1Bench(self.bench.again())

    def cc(self, tenant: str | None = None, **fields: Any) -> ContextCaching:
        """The object of a process with this configuration."""
        return ContextCaching(self.client, tenant, instance(**fields))

    def close(self) -> None:
        self.client.close()


def instance(**fields: Any) -> InstanceConfig:
    config = CcConfig_v1(**{"rank_id": 0, "device_id": 0, "model_id": "m", **fields})
    checked = check_config(EmsConfig(cc_config_v1=config)).instance
    assert checked is not None
    return checked


class Cache:
    """A KV cache: `head_sizes[layer][component]`; what is in a slot tells where it came from."""

    def __init__(
        self,
        head_sizes: Sequence[Sequence[int]] = ((8, 8), (8, 8)),
        num_blocks: int = 16,
        block_size: int = BLOCK_SIZE,
        heads: int = 1,
        dtype: str = "torch.bfloat16",
        gap: int = 0,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tensors: list[list[HostTensor]] = []
        for layer in head_sizes:
            row = []
            for head_size in layer:
                block = block_size * heads * head_size
                strides = (block + gap, heads * head_size, head_size, 1)
                memory = bytearray(2 * (num_blocks * (block + gap) + 64))
                shape = (num_blocks, block_size, heads, head_size)
                row.append(HostTensor(memory, shape, dtype=dtype, offset=64, strides=strides))
            self.tensors.append(row)

    def write(self, slots: Iterable[int], seed: object) -> None:
        """Fill slots with bytes that follow from the seed and the token's place in the list."""
        for at, slot in enumerate(slots):
            for target, text in self._tokens(slot, seed, at):
                target[:] = text

    def holds(self, slots: Iterable[int], seed: object) -> bool:
        return all(
            target == text
            for at, slot in enumerate(slots)
            for target, text in self._tokens(slot, seed, at)
        )

    def untouched(self, slots: Iterable[int]) -> bool:
        return not any(
            any(tensor.token(slot)) for slot in slots for row in self.tensors for tensor in row
        )

    def _tokens(self, slot: int, seed: object, at: int) -> Iterable[tuple[memoryview, bytes]]:
        for layer, row in enumerate(self.tensors):
            for component, tensor in enumerate(row):
                target = tensor.token(slot)
                name = repr((seed, at, layer, component)).encode()
                yield target, hashlib.shake_128(name).digest(len(target))

    def slots(self, *blocks: int) -> list[int]:
        size = self.block_size
        return [block * size + at for block in blocks for at in range(size)]


def whole(cache: Cache, blocks: Sequence[int], hashes: Sequence[int]) -> dict[str, Any]:
    """The arguments of a call that names whole blocks by hash."""
    return {
        "slot_mapping": cache.slots(*blocks),
        "hashes": list(hashes),
        "offsets": [cache.block_size] * len(blocks),
    }


def filled(cache: Cache, blocks: Sequence[int], hashes: Sequence[int]) -> dict[str, Any]:
    """The same, with each block filled with what follows from its hash."""
    for block, name in zip(blocks, hashes):
        cache.write(cache.slots(block), name)
    return whole(cache, blocks, hashes)


def right(cache: Cache, blocks: Sequence[int], hashes: Sequence[int]) -> list[bool]:
    """Which blocks hold what follows from their hashes."""
    return [cache.holds(cache.slots(block), name) for block, name in zip(blocks, hashes)]
