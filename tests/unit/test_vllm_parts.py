"""Settings, layout and breaker of the vLLM connector, without vLLM."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ems.integrations.breaker import Breaker
from ems.integrations.vllm_layout import layout_text, model_identity, pages_of
from ems.integrations.vllm_settings import Settings
from ems.integrations.vllm_stats import added, summary

# ---- settings ----


def test_defaults_work() -> None:
    assert Settings.read({}, "recompute") == Settings()


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"rot": "/dev/shm/ems"}, "'rot', which EmsConnector does not know; it knows access_key, "),
        ({"load": "later"}, "is 'later'; give one of 'sync', 'async'"),
        ({"save_decoded": 1}, "['save_decoded'] is 1; give true or false"),
        ({"load_timeout_ms": 0}, "is 0; give milliseconds"),
        ({"probe_interval_s": -1}, "is -1; give seconds"),
        ({"min_hit_tokens": "128"}, "is '128'; give a number of tokens"),
        ({"root": 5}, "is 5; give a text"),
    ],
)
def test_wrong_settings_are_told_at_the_start(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Settings.read(extra, "recompute")
    assert text in str(caught.value)


def test_a_policy_that_ends_requests_is_refused_unless_forced() -> None:
    with pytest.raises(ValueError, match='Set "kv_load_failure_policy": "recompute"'):
        Settings.read({}, "fail")
    assert Settings.read({"allow_fail_policy": True}, "fail").allow_fail_policy


# ---- breaker ----


def test_three_good_probes_in_a_row_close_it() -> None:
    breaker = Breaker(1.0)
    assert breaker.fail(0.0) and not breaker.fail(0.1)
    outcomes = [breaker.probed(good, 1.0) for good in (True, True, False, True, True, True)]
    assert outcomes == [False] * 5 + [True]
    assert not breaker.is_open and not breaker.probed(True, 2.0)


def test_one_that_flaps_is_looked_at_less_often() -> None:
    breaker = Breaker(1.0)
    now_s = 0.0
    seen = []
    for _ in range(7):
        breaker.fail(now_s)
        seen.append(breaker.interval_s)
        for _ in range(3):
            now_s += breaker.interval_s
            breaker.probed(True, now_s)
    assert seen == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    breaker.fail(now_s + 61)
    assert breaker.interval_s == 1.0


# ---- layout ----


class FakeTensor:
    """Strides and a shape, as a tensor says them; 2 bytes an element."""

    dtype, device = "bfloat16", "cpu"

    def __init__(self, shape: list[int], strides: list[int], address: int = 4096) -> None:
        self.shape, self._strides, self._address = shape, strides, address

    def stride(self) -> list[int]:
        return self._strides

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return self._address

    def addresses(self, block: int, at: int) -> set[int]:
        """Where every byte of a block lies, by definition."""
        found = set()
        ranges = [range(n) if i != at else [block] for i, n in enumerate(self.shape)]
        for index in itertools.product(*ranges):
            first = self._address + 2 * sum(i * s for i, s in zip(index, self._strides))
            found |= {first, first + 1}
        return found


def strided(order: str, sizes: dict[str, int], axes: str) -> FakeTensor:
    """A tensor with dimensions `axes` in memory that is ordered by `order`."""
    step, strides = 1, {}
    for axis in reversed(order):
        strides[axis] = step
        step *= sizes[axis]
    return FakeTensor([sizes[a] for a in axes], [strides[a] for a in axes])


SIZES = {"L": 3, "B": 7, "H": 4, "N": 5, "C": 6}


@pytest.mark.parametrize(
    ("order", "pieces"),
    [("LBHNC", 1), ("BLHNC", 1), ("LBNHC", 1), ("BLNHC", 1), ("BHLNC", 4), ("LHBNC", 4)],
)
def test_every_order_of_a_cache_is_described_by_its_strides(order: str, pieces: int) -> None:
    tensor = strided(order, SIZES, "BHNC")
    pages, shape = pages_of("layer", tensor, SIZES["B"])
    assert len(pages) == pieces and shape[-1] == 4 * 5 * 6 * 2 // pieces
    for block in (0, 6):
        covered = [
            one.address + block * one.block_stride + at
            for one in pages
            for at in range(one.page_bytes)
        ]
        assert len(covered) == len(set(covered))
        assert set(covered) == tensor.addresses(block, 0)


def test_k_and_v_outside_the_blocks() -> None:
    tensor = FakeTensor([2, 7, 5, 4, 6], [840, 120, 24, 6, 1])
    pages, _ = pages_of("layer", tensor, 7)
    assert [(one.address, one.page_bytes) for one in pages] == [(4096, 240), (4096 + 1680, 240)]


def test_a_cache_without_blocks() -> None:
    with pytest.raises(ValueError, match="none of its dimensions has 8, the number of blocks"):
        pages_of("layer", FakeTensor([7, 4], [4, 1]), 8)


def test_the_text_does_not_depend_on_the_order_of_facts() -> None:
    assert layout_text({"a": 1, "b": [2]}) == layout_text({"b": [2], "a": 1})
    assert layout_text({"a": 1}) != layout_text({"a": 2})


def test_a_folder_is_told_by_its_files(tmp_path: Path) -> None:
    def folder(name: str, weights: bytes, config: dict[str, int]) -> str:
        path = tmp_path / name / "model"
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(weights)
        (path / "config.json").write_text(json.dumps(config))
        return model_identity(str(path), None)

    weights = bytes(100_000)
    one = folder("a", weights, {"layers": 2})
    assert one.startswith("model#") and one == folder("b", weights, {"layers": 2})
    assert one != folder("c", weights[:-1] + b"1", {"layers": 2})
    assert one != folder("d", b"1" + weights[1:], {"layers": 2})
    assert one != folder("e", weights, {"layers": 3})
    assert model_identity("org/name", "main") == "org/name@main"


# ---- figures ----


def test_figures() -> None:
    total = added({"hit_tokens": 512.0, "load_ns": 2e6}, {"load_ns": 1e6, "miss_absent": 2.0})
    found = summary(total)
    assert found["EMS hit tokens"] == 512 and found["load ms"] == 3.0 and found["miss absent"] == 2
