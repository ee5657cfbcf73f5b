"""Opaque pages as an engine's connector uses them. Client and pool are real."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
from v1_bench import V1Bench

from ems import CcResult, EmsErrorCode, EmsException, KvPages, PageCaching
from ems.common.key import PageSpace

KEYS = [bytes([at]) * 32 for at in range(6)]


class Layers:
    """Two layers of 8 blocks, with gaps between the pages of the second."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(8 * 512 + 8 * 1024)
        base = ctypes.addressof(self.memory)
        self.pages = [
            KvPages(base, 8, 512, 512, owner=self.memory),
            KvPages(base + 8 * 512, 8, 1024, 300, owner=self.memory),
        ]

    def write(self, block: int, text: bytes) -> None:
        for one in self.pages:
            filling = (text * one.page_bytes)[: one.page_bytes]
            ctypes.memmove(one.address + block * one.block_stride, filling, one.page_bytes)

    def read(self, block: int) -> list[bytes]:
        return [
            ctypes.string_at(one.address + block * one.block_stride, one.page_bytes)
            for one in self.pages
        ]

    def gaps(self) -> bytes:
        one = self.pages[1]
        return b"".join(
            ctypes.string_at(one.address + block * one.block_stride + 300, 724)
            for block in range(8)
        )


@pytest.fixture
def layers() -> Layers:
    return Layers()


@pytest.fixture
def caching(v1: V1Bench, layers: Layers) -> PageCaching:
    return v1.cc().register_pages(layers.pages, "float, packed")


@pytest.mark.parametrize("how", ["plain", "async"])
def test_pages_come_back_into_other_blocks(caching: PageCaching, layers: Layers, how: str) -> None:
    do: Callable[..., CcResult] = lambda name, *given: (  # noqa: E731
        getattr(caching, name)(*given)
        if how == "plain"
        else getattr(caching, f"async_{name}")(*given).result()
    )
    for block in (0, 3, 7):
        layers.write(block, b"block %d, " % block)
    saved = [layers.read(block) for block in (3, 0, 7)]
    assert do("save", [3, 0, 7], KEYS[:3]) == CcResult(3, 3)
    assert caching.exists(KEYS) == CcResult(3, 6)
    assert do("load", [1, 2, 4, 5], KEYS[:4]) == CcResult(3, 4)
    assert [layers.read(block) for block in (1, 2, 4)] == saved
    assert layers.gaps() == bytes(8 * 724)


def test_page_after_page(caching: PageCaching, layers: Layers) -> None:
    for block in (0, 3, 7):
        layers.write(block, b"block %d, " % block)
    saved = [layers.read(block) for block in (3, 0, 7)]
    assert caching.save([3, 0, 7], KEYS[:3]) == CcResult(3, 3)
    started = caching.load_by_page([1, 2, 4, 5], KEYS[:4])
    for page in (1, 0, 1, 2, 100):  # beyond the last one is the end
        started.wait(page)
    assert started.future.result() == CcResult(3, 4)
    assert [layers.read(block) for block in (1, 2, 4)] == saved
    assert layers.gaps() == bytes(8 * 724)
    with pytest.raises(EmsException, match="page is -1"):
        started.wait(-1)


def test_nobody_waits_for_a_page_for_ever(v1: V1Bench, caching: PageCaching) -> None:
    started = caching.load_by_page([1], KEYS[:1])
    refused: list[str] = []

    async def in_the_home_loop() -> None:
        try:
            started.wait(0)
        except EmsException as error:
            refused.append(error.message())

    v1.home.run(in_the_home_loop)
    assert "home loop would wait for ever" in refused[0]
    pid = os.fork()
    if pid == 0:
        try:
            started.wait(0)
        except EmsException:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def test_what_changes_below_a_load_by_page_is_not_tried_again(
    v1: V1Bench, caching: PageCaching, layers: Layers
) -> None:
    caching.save([0, 1, 2], KEYS[:3])
    digests = PageSpace(None, "m", "float, packed").digests(KEYS[:3])
    place = v1.bench.memory.pool.locate(digests[16:32])
    assert place is not None
    v1.bench.faults.at["copy out done"] = lambda: v1.bench.memory.pool.drop(*place[:2])
    started = caching.load_by_page([3, 4, 5], KEYS[:3])
    assert started.future.result() == CcResult(1, 3)
    assert v1.bench.faults.steps.count("copy out") == 1


def test_another_layout_model_or_tenant_is_another_thing(
    v1: V1Bench, caching: PageCaching, layers: Layers
) -> None:
    caching.save([0], KEYS[:1])
    assert v1.cc().register_pages(None, "float, packed").exists(KEYS[:1]).success == 1
    others = [
        v1.cc().register_pages(layers.pages, "float, plain"),
        v1.cc("tenant").register_pages(layers.pages, "float, packed"),
        v1.cc(model_id="n").register_pages(layers.pages, "float, packed"),
    ]
    assert [other.exists(KEYS[:1]).success for other in others] == [0, 0, 0]
    assert [other.load([1], KEYS[:1]).success for other in others] == [0, 0, 0]


def test_pages_of_another_size_are_a_miss(
    v1: V1Bench, caching: PageCaching, layers: Layers
) -> None:
    caching.save([0], KEYS[:1])
    smaller = [dataclasses.replace(one, page_bytes=256) for one in layers.pages]
    assert v1.cc().register_pages(smaller, "float, packed").load([1], KEYS[:1]).success == 0


def test_registrations_stand_beside_each_other(v1: V1Bench, layers: Layers) -> None:
    cc, second = v1.cc(), Layers()
    one, two = cc.register_pages(layers.pages, "x"), cc.register_pages(second.pages, "x")
    layers.write(2, b"first")
    assert one.save([2], KEYS[:1]).success == two.load([5], KEYS[:1]).success == 1
    assert second.read(5) == layers.read(2)


WRONG: list[tuple[Callable[[PageCaching], Any], str]] = [
    (lambda c: c.load([8], KEYS[:1]), "block_ids[0] is 8, the registered blocks have slots 0 to 7"),
    (lambda c: c.load([-1], KEYS[:1]), "block_ids[0] is -1"),
    (lambda c: c.load([0, 1], KEYS[:1]), "block_ids has 2 entries and keys 1"),
    (lambda c: c.save([0], [b""]), "keys[0] is b'' of type bytes"),
    (lambda c: c.exists(["text"]), "keys[0] is 'text' of type str"),
    (lambda c: c.exists([]), "keys is empty"),
    (lambda c: c.exists(b"0" * 32), "keys is b'0000"),
    (lambda c: c.save("0", KEYS[:1]), "block_ids is of type str"),
]


@pytest.mark.parametrize(("call", "text"), WRONG, ids=[text for _, text in WRONG])
def test_wrong_arguments(
    caching: PageCaching, call: Callable[[PageCaching], Any], text: str
) -> None:
    with pytest.raises(EmsException) as caught:
        call(caching)
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
    assert text in caught.value.message()


GOOD = KvPages(4096, 8, 512, 512)
BAD: list[tuple[Any, str]] = [
    ([], "pages is empty"),
    (GOOD, "pages is KvPages("),
    ([GOOD, 1], "pages[1] is 1 of type int"),
    ([dataclasses.replace(GOOD, address=0)], "pages[0].address is 0"),
    ([dataclasses.replace(GOOD, block_stride=511)], "pages[0].block_stride is 511"),
    ([GOOD, dataclasses.replace(GOOD, num_blocks=9)], "pages[1].num_blocks is 9, pages[0] has 8"),
    ([dataclasses.replace(GOOD, device="npu:9")], "kvcache is on device npu:9"),
    ([dataclasses.replace(GOOD, address=2**62 - 1)], "pages[0] ends beyond 2**62"),
]


@pytest.mark.parametrize(("pages", "text"), BAD, ids=[text for _, text in BAD])
def test_pages_that_cannot_be(v1: V1Bench, pages: Any, text: str) -> None:
    with pytest.raises(EmsException) as caught:
        v1.cc().register_pages(pages)
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
    assert text in caught.value.message()


def test_without_memory_there_is_only_asking(v1: V1Bench) -> None:
    with pytest.raises(EmsException, match="only `exists` works"):
        v1.cc().register_pages(None, "x").load([0], KEYS[:1])


def test_spaces_do_not_run_into_each_other() -> None:
    spaces = [PageSpace(None, "ab", "c"), PageSpace(None, "a", "bc"), PageSpace("", "ab", "c")]
    assert len({space.digests([1]) for space in spaces}) == 3
