"""A save finds the room that comes by itself: memory still prepared, or kept from one session."""

from __future__ import annotations

from client_bench import Buffers, pattern

from ems import CcKvOption, CcResult, Ems
from ems.testing import LocalPool

MIB = 1 << 20


def test_a_pool_that_is_still_prepared_evicts_nobody() -> None:
    with LocalPool("768MiB") as pool:
        Ems.init(pool.config)
        try:
            cc = Ems.get_cc()
            assert cc is not None
            option = CcKvOption(timeout=60_000)
            keys = [f"k{number}" for number in range(20)]
            for at in range(0, 20, 4):
                values = [pattern(key, 32 * MIB) for key in keys[at : at + 4]]
                saved = cc.save(option, keys[at : at + 4], Buffers(values).value_list)
                assert saved == CcResult(4, 4)
            target = Buffers.empty([32 * MIB] * 20)
            assert cc.load(option, keys, target.value_list) == CcResult(20, 20)
        finally:
            Ems.close()


def test_a_batch_that_just_fits_is_saved_by_one_call() -> None:
    with LocalPool("64MiB") as pool:
        Ems.init(pool.config)
        try:
            cc = Ems.get_cc()
            assert cc is not None
            option = CcKvOption(timeout=60_000)
            keys = [f"k{number}" for number in range(64)]
            source = Buffers([pattern(key, MIB) for key in keys])
            assert cc.save(option, keys, source.value_list) == CcResult(64, 64)
            target = Buffers.empty([MIB] * 64)
            assert cc.load(option, keys, target.value_list).success >= 62
            more = [f"m{number}" for number in range(80)]
            source = Buffers([pattern(key, MIB) for key in more])
            saved = cc.save(option, more, source.value_list).success
            assert saved == 60
            target = Buffers.empty([MIB] * 80)
            assert cc.load(option, more, target.value_list).success >= saved - 3
        finally:
            Ems.close()
