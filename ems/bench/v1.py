"""Loads of registered blocks beside the copy engine alone on the same pieces.

The engine gets its pieces planned and its places known; what a load of the SDK takes longer is
planning, names, look-up, validation and everything else that is not the copy.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import dataclasses
import json
import mmap
import os
import random
import statistics
import tempfile
from collections.abc import Iterator

from ems import CcConfig_v1, CcKvOption, CcResult, ContextCaching, Ems, EmsConfig, KVCacheType
from ems.bench.figure import Figure, at_least, at_most, figured, median_us, take_turns
from ems.bench.machine import Machine, read_machine
from ems.common.exception import internal_error
from ems.common.size import format_size
from ems.testing import LocalPool
from ems.testing.figures import wait_until_prepared
from ems.testing.host_tensor import HostTensor
from ems_native import _copy, _plan

__all__ = ["MODELS", "BlocksReport", "BlocksSettings", "Model", "measure_blocks"]

_OPTION = CcKvOption(timeout=60_000)
_ITEM_BYTES = 2  # bf16
_PLACE = 5  # numbers of 64 bits: slot, version, offset, length, checksum
_SCRUB = 0xA5
_UNIT = 4096


@dataclasses.dataclass(frozen=True)
class Model:
    """The KV cache of a model, of two bytes an element."""

    name: str
    kind: KVCacheType
    layers: int
    heads: int
    head_sizes: tuple[int, ...]  # of the components of each layer
    block_size: int

    @property
    def block_bytes(self) -> int:
        """The bytes of a block in all layers."""
        tokens = self.block_size * self.heads * sum(self.head_sizes)
        return self.layers * tokens * _ITEM_BYTES

    @property
    def pieces(self) -> int:
        """The pieces of a block."""
        return self.layers * len(self.head_sizes)


MODELS = {
    "mla": Model("61 layers MLA", KVCacheType.MLA, 61, 1, (512, 64), 128),
    "gqa": Model("32 layers GQA", KVCacheType.GQA, 32, 8, (128, 128), 16),
}


@dataclasses.dataclass(frozen=True)
class BlocksSettings:
    """What is measured: loads of `blocks` blocks, over `rotate_bytes` of memory on either side."""

    model: Model
    blocks: int = 32
    rotate_bytes: int = 1 << 30
    rounds: int = 15
    plan_blocks: int = 64
    exists_hashes: int = 1000

    @property
    def batch_bytes(self) -> int:
        """The bytes of one call."""
        return self.blocks * self.model.block_bytes

    @property
    def batches(self) -> int:
        """How many batches the memory on either side holds, two at least."""
        return max(2, self.rotate_bytes // self.batch_bytes)


@dataclasses.dataclass(frozen=True)
class BlocksReport:
    """What was found. Times are medians of a call."""

    settings: BlocksSettings
    engine_ms: float
    load_ms: float
    outside: float  # part of a load that is not the copy
    plan_us: float
    exists_us: float
    mismatches: int
    page_kind: str
    machine: Machine

    @property
    def figures(self) -> list[Figure]:
        """The figures for which something is wanted."""
        settings = self.settings
        model, batch_bytes = settings.model, settings.batch_bytes
        what = f"{settings.blocks} blocks of {model.pieces} pieces, {model.name}"
        engine, load = batch_bytes / self.engine_ms / 1e6, batch_bytes / self.load_ms / 1e6
        ratio = ("x engine", self.engine_ms / self.load_ms)
        plan = f"plan {settings.plan_blocks} blocks of {model.block_size} tokens"
        return [
            at_least(f"load {what}", load, "GB/s", 0.9, roof=("engine", engine), judged=ratio),
            at_most(f"outside the copy, {model.name}", self.outside, "of a load", 0.1),
            at_most(f"{plan}, {model.name}", self.plan_us, "us", 500.0),
            at_most(f"exists {settings.exists_hashes} hashes", self.exists_us, "us", 500.0),
        ]

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain data, ready for JSON."""
        return figured(self)


def measure_blocks(settings: BlocksSettings) -> BlocksReport:
    """Measure with a pool of its own; nothing is left behind.

    Takes `Ems` of this process for itself, so it must not be initialised.

    Raises:
        EmsException: whatever the pool says.
    """
    capacity = settings.batches * settings.blocks * (settings.model.block_bytes + _UNIT)
    with LocalPool(capacity + (16 << 20)) as pool:
        page_kind = wait_until_prepared(pool.root).page_kind
        bench = _Blocks(settings, pool)
        with _initialised(pool, settings.model):
            bench.prepare()
            times = take_turns({"engine": bench.engine, "load": bench.load}, settings.rounds)
            plan_us, exists_us = bench.plan_us(), bench.exists_us()
            mismatches = bench.verify()
        outside = bench.outside()
    return BlocksReport(
        settings=settings,
        engine_ms=1e3 * statistics.median(times["engine"]),
        load_ms=1e3 * statistics.median(times["load"]),
        outside=outside,
        plan_us=plan_us,
        exists_us=exists_us,
        mismatches=mismatches,
        page_kind=page_kind,
        machine=read_machine(),
    )


@contextlib.contextmanager
def _initialised(pool: LocalPool, model: Model) -> Iterator[None]:
    v1 = CcConfig_v1(rank_id=0, device_id=0, model_id="bench", kvcache_type=model.kind)
    Ems.init(EmsConfig(cc_config_v1=v1, root=pool.root))
    try:
        yield
    finally:
        Ems.close()


class _Blocks:
    """A KV cache, its content in the pool, and the same bytes where the engine alone finds them."""

    def __init__(self, settings: BlocksSettings, pool: LocalPool) -> None:
        self._settings = settings
        self._pool = pool
        model = settings.model
        blocks = settings.batches * settings.blocks
        self._memory = _huge_pages(blocks * model.block_bytes)
        self._tensors: list[list[HostTensor]] = []
        components: list[tuple[int, int, int]] = []
        offset = 0
        for _ in range(model.layers):
            layer = []
            for head_size in model.head_sizes:
                shape = (blocks, model.block_size, model.heads, head_size)
                layer.append(HostTensor(self._memory, shape, _ITEM_BYTES, offset=offset))
                token_bytes = model.heads * head_size * _ITEM_BYTES
                block_bytes = model.block_size * token_bytes
                components.append((layer[-1].data_ptr(), block_bytes, token_bytes))
                offset += blocks * block_bytes
            self._tensors.append(layer)
        self._pages = _plan.Pages(blocks, model.block_size, components)
        # Blocks of a request lie anywhere, as in an engine that has run for a while.
        order = list(range(blocks))
        random.Random(1).shuffle(order)
        self._slots = [
            [block * model.block_size + at for block in part for at in range(model.block_size)]
            for part in _cut(order, settings.blocks)
        ]
        self._offsets = [model.block_size] * settings.blocks
        self._hashes = [
            [hash((batch, block)) for block in range(settings.blocks)]
            for batch in range(settings.batches)
        ]
        self._spans = [self._plan(slots, self._offsets) for slots in self._slots]
        self._roof = _huge_pages(blocks * model.block_bytes)
        self._base = _address(self._roof)
        self._places = [self._places_of(batch) for batch in range(settings.batches)]

    def prepare(self) -> None:
        """Fill the cache, put every batch into the pool and before the engine, touch all memory."""
        self._register()
        noise = random.Random(2).randbytes(1 << 20)
        view = memoryview(self._memory)
        for first in range(0, len(view), len(noise)):
            part = view[first : first + len(noise)]
            part[:] = noise[: len(part)]
        for batch in range(self._settings.batches):
            _copy.copy_in(
                self._spans[batch],
                0,
                self._settings.blocks,
                self._base,
                self._places[batch],
                None,
                0,
            )
            self._check(self._cc.save(*self._call(batch, batch)))
        for batch in range(self._settings.batches):
            self.engine(batch)
            self.load(batch)

    def engine(self, number: int) -> None:
        """Load a batch without the SDK."""
        batch = number % self._settings.batches
        end, why = _copy.copy_out(
            self._spans[self._next(batch)],
            0,
            self._settings.blocks,
            self._base,
            self._places[batch],
            None,
            0,
            True,
        )
        if why or end != self._settings.blocks:
            raise internal_error(f"the engine ended at {end}, reason {why}")

    def load(self, number: int) -> None:
        """Load the same batch with the SDK, to the same place."""
        batch = number % self._settings.batches
        self._check(self._cc.load(*self._call(batch, self._next(batch))))

    def plan_us(self) -> float:
        """Return the time it takes to describe the memory of a batch, from plain lists."""
        slots = [slot for part in self._slots for slot in part]
        size = self._settings.model.block_size
        wanted = self._settings.plan_blocks * size
        slots = (slots * (wanted // len(slots) + 1))[:wanted]
        offsets = [size] * self._settings.plan_blocks
        return median_us(take_turns({"plan": lambda _: self._plan(slots, offsets)}, 100)["plan"])

    def exists_us(self) -> float:
        """Return the time of `exists` of hashes that are all there."""
        known = [one for hashes in self._hashes for one in hashes]
        count = self._settings.exists_hashes
        hashes = (known * (count // len(known) + 1))[:count]

        def ask(_: int) -> None:
            if self._cc.exists(hashes).success != count:
                raise internal_error("a block is gone, which makes no measurement")

        return median_us(take_turns({"exists": ask}, 100)["exists"])

    def outside(self) -> float:
        """Return the part of a load's time that is not the copy, by the client's own profile."""
        settings = self._settings
        variables = {"ENABLE_CC_PROFILING": "1"}
        with tempfile.TemporaryDirectory(prefix="ems-bench-") as folder:
            variables["EMS_SDK_LOG"] = folder
            with _environment(variables), _initialised(self._pool, settings.model):
                self._register()
                for batch in range(settings.batches):  # page tables of the new mapping
                    self.load(batch)
                spent = take_turns({"load": self.load}, settings.rounds)["load"]
            (name,) = os.listdir(folder)
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                lines = [json.loads(line) for line in file]
        copied_ms: list[float] = [line["copy_ms"] for line in lines[-settings.rounds :]]
        return statistics.median(1 - ms / (1e3 * s) for ms, s in zip(copied_ms, spent))

    def verify(self) -> int:
        """Load a batch over scrubbed memory and return how many blocks are wrong."""
        wrong = 0
        self.engine(0)
        target = self._spans[self._next(0)]
        expected = [_bytes_of(target, key) for key in range(self._settings.blocks)]
        ctypes.memset(_address(self._memory), _SCRUB, len(self._memory))
        self.load(0)
        for key, value in enumerate(expected):
            wrong += _bytes_of(target, key) != value
        return wrong

    def _register(self) -> None:
        cc = Ems.get_cc()
        assert cc is not None
        self._cc: ContextCaching = cc
        self._cc.register_kvcache(self._tensors)

    def _plan(self, slots: list[int], offsets: list[int]) -> _copy.Spans:
        counts = _plan.int64s(offsets, "offsets")
        columns = _plan.int64s(slots, "slot_mapping")
        return _copy.Spans.from_columns(
            *_plan.plan_slots(self._pages, columns, counts, 0, "slot_mapping"), self
        )

    def _places_of(self, batch: int) -> bytearray:
        size, blocks = self._settings.model.block_bytes, self._settings.blocks
        numbers = array.array("Q", bytes(8 * _PLACE * blocks))
        for block in range(blocks):
            numbers[_PLACE * block + 2] = (batch * blocks + block) * size
            numbers[_PLACE * block + 3] = size
        return bytearray(numbers.tobytes())

    def _call(self, batch: int, place: int) -> tuple[list[int], list[int], list[int], CcKvOption]:
        return self._slots[place], self._hashes[batch], self._offsets, _OPTION

    def _next(self, batch: int) -> int:
        return (batch + 1) % self._settings.batches

    def _check(self, result: CcResult) -> None:
        if result.success != self._settings.blocks:
            size = format_size(self._settings.batch_bytes)
            raise internal_error(f"the pool did {result} ({size}), which makes no measurement")


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _huge_pages(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _bytes_of(spans: _copy.Spans, key: int) -> bytes:
    return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in spans.pieces_of(key))


def _cut(items: list[int], size: int) -> list[list[int]]:
    return [items[first : first + size] for first in range(0, len(items), size)]
