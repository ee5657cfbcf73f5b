"""Bytes that change in the pool's memory: never wrong bytes with verification on, never a crash."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
from collections.abc import Iterator

import pytest
from client_bench import Buffers, pattern
from fix_pool import status_of, wait_until
from fix_serve import run_ems

from ems import CcConfig, CcKvOption, CcResult, ContextCaching, Ems, EmsConfig, EmsException
from ems.pool import geometry
from ems.shm import layout
from ems.shm.segment import Segment
from ems.testing import LocalPool
from ems_native._index import LAYOUT, Reader

NBYTES = 40_000
KEYS = [f"k{n}" for n in range(40)]
LONG = CcKvOption(timeout=20_000)


def save(cc: ContextCaching, keys: list[str]) -> CcResult:
    return cc.save(LONG, keys, Buffers([pattern(key, NBYTES) for key in keys]).value_list)


def load(cc: ContextCaching, key: str) -> bytes | None:
    target = Buffers.empty([NBYTES])
    return target.value(0) if cc.load(LONG, [key], target.value_list).success else None


@pytest.fixture
def data(local_pool: LocalPool) -> Iterator[memoryview]:
    with Segment.open(os.path.join(local_pool.root, layout.DATA), True) as segment:
        yield memoryview((ctypes.c_char * segment.nbytes).from_address(segment.address)).cast("B")


@pytest.fixture
def index(local_pool: LocalPool) -> Iterator[memoryview]:
    with Segment.open(os.path.join(local_pool.root, layout.INDEX), True) as segment:
        yield memoryview((ctypes.c_char * segment.nbytes).from_address(segment.address)).cast("B")


def place_of(cc: ContextCaching, data: memoryview, key: str) -> int:
    return bytes(data).index(pattern(key, NBYTES)[:64])


@pytest.mark.parametrize("at", [0, 1, 31, 4095, 4096, 20_000, NBYTES - 1])
def test_a_flipped_byte_is_a_miss_and_the_block_is_dropped(
    cc: ContextCaching, local_pool: LocalPool, data: memoryview, at: int,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    save(cc, KEYS[:3])
    data[place_of(cc, data, "k1") + at] ^= 0x10
    before = status_of(local_pool).entries
    with caplog.at_level(logging.ERROR, "ems.client"):
        assert load(cc, "k1") is None
    assert "is corrupt in the pool" in caplog.text
    assert Ems.stats()["miss_checksum"] == 1
    assert load(cc, "k0") == pattern("k0", NBYTES)
    wait_until(lambda: status_of(local_pool).entries == before - 1)
    wait_until(lambda: "does not match its checksum: dropped" in local_pool.log_text())
    # It can be saved again at once, and a chain that it is part of counts up to it.
    assert save(cc, ["k1"]) == CcResult(1, 1)
    assert load(cc, "k1") == pattern("k1", NBYTES)


def test_the_client_may_decide_about_verification_itself(local_pool: LocalPool) -> None:
    config = local_pool.config
    config.verify = False
    Ems.init(config)
    try:
        cc = Ems.get_cc()
        assert cc is not None
        save(cc, ["k0"])
        with Segment.open(os.path.join(local_pool.root, layout.DATA), True) as segment:
            view = memoryview((ctypes.c_char * segment.nbytes).from_address(segment.address))
            found = view.cast("B")
            found[place_of(cc, found, "k0")] ^= 1
        wrong = load(cc, "k0")
        assert wrong is not None
        assert wrong != pattern("k0", NBYTES)
        assert Ems.stats()["miss_checksum"] == 0
    finally:
        Ems.close()


@pytest.mark.parametrize(
    ("server", "client", "seed"),
    [(True, None, 11), (False, None, 11), (False, True, 11), (False, None, 2), (True, None, 13)],
)
def test_wild_writes_into_the_index(server: bool, client: bool | None, seed: int) -> None:
    """As a stray pointer in the server would do it, while clients go on."""
    chance = random.Random(seed)
    options = ["--verify" if server else "--no-verify"]
    with LocalPool("4MiB", entries=128, options=options) as pool:
        Ems.init(EmsConfig(cc_config=CcConfig(0, 0, "m"), root=pool.root, verify=client))
        cc = Ems.get_cc()
        assert cc is not None
        verifies = client if client is not None else server
        with Segment.open(os.path.join(pool.root, layout.INDEX), True) as segment:
            header = Reader(segment.address, segment.nbytes, 0).header()
            sizes = geometry(header["capacity"], header["slots"])
            nbytes = sizes.slots // LAYOUT["BUCKET_SLOTS"] * LAYOUT["BUCKET_BYTES"]
            raw = (ctypes.c_char * nbytes).from_address(segment.address + LAYOUT["BUCKETS_OFFSET"])
            entries = memoryview(raw).cast("B")
            loaded = 0
            for _ in range(60):
                for _ in range(6):
                    entries[chance.randrange(nbytes)] ^= 1 << chance.randrange(8)
                for key in chance.sample(KEYS, 8):
                    found = load(cc, key)
                    loaded += found is not None
                    assert found is None or not verifies or found == pattern(key, NBYTES)
                save(cc, chance.sample(KEYS, 8))
            assert loaded > 100
            assert pool.process is not None
            assert pool.process.poll() is None
            assert Ems.check_health()
            # Nobody's memory is lost for it, and the next server mends the rest, but for what only
            # a look at all the bytes can tell.
            pool.kill()
            pool.start()
            wait_until(Ems.check_health)
            assert run_ems("fsck", "--no-read", "--root", pool.root).returncode == 0
            assert run_ems("fsck", "--repair", "--root", pool.root).returncode == 0
            for key in KEYS:
                assert save(cc, [key]) == CcResult(1, 1)
                assert load(cc, key) == pattern(key, NBYTES)
        Ems.close()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("seed", [1, 2])
def test_wild_writes_anywhere_in_the_index(seed: int, verify: bool) -> None:
    """Into the header too: clients may lose the pool, and the next server may refuse it."""
    chance = random.Random(seed)
    with LocalPool("4MiB", entries=128) as pool:
        Ems.init(EmsConfig(cc_config=CcConfig(0, 0, "m"), root=pool.root, verify=verify))
        cc = Ems.get_cc()
        assert cc is not None
        assert save(cc, KEYS) == CcResult(40, 40)
        with Segment.open(os.path.join(pool.root, layout.INDEX), True) as segment:
            raw = (ctypes.c_char * segment.nbytes).from_address(segment.address)
            index = memoryview(raw).cast("B")
            for _ in range(25):
                # Half of them where the header is, the others wherever they fall.
                for limit in (4096, segment.nbytes):
                    index[chance.randrange(limit)] ^= 1 << chance.randrange(8)
                for key in chance.sample(KEYS, 4):
                    with contextlib.suppress(EmsException):
                        found = load(cc, key)
                        assert found is None or not verify or found == pattern(key, NBYTES)
                    with contextlib.suppress(EmsException):
                        save(cc, [key])
                Ems.check_health()
        assert pool.process is not None
        assert pool.process.poll() is None
        Ems.close()
        pool.kill()
        try:
            pool.start()
        except EmsException as error:
            assert "exit code 2" in error.message()
            assert "Traceback" not in error.message()
            return
        Ems.init(pool.config)
        cc = Ems.get_cc()
        assert cc is not None
        for key in KEYS:
            found = load(cc, key)
            assert found is None or found == pattern(key, NBYTES)
            assert save(cc, [key]) == CcResult(1, 1)
            assert load(cc, key) == pattern(key, NBYTES)
        Ems.close()
