"""Tests with a real vLLM engine; without vLLM they are skipped, `tests/vllm/run` makes a place."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ems.testing.vllm_engine import MODELS, make_model


def have_vllm() -> bool:
    found = importlib.util.find_spec("vllm")  # without it, this folder looks like a package
    return found is not None and found.origin is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and not have_vllm():
            item.add_marker(pytest.mark.skip(reason="vllm is not installed: run tests/vllm/run"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for dtype in ("bfloat16", "float32"):
        made[dtype] = tmp_path_factory.mktemp(dtype) / "model"
        make_model(made[dtype], MODELS["tiny"], dtype)
    return made
