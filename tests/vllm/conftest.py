"""Tests with a real vLLM engine; without vLLM they are skipped, `tests/vllm/run` makes a place."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

MAKE = """
import sys
from pathlib import Path
from ems.testing.vllm_engine import MODELS, make_model
make_model(Path(sys.argv[1]), MODELS["tiny"], sys.argv[2])
"""


def have_vllm() -> bool:
    found = importlib.util.find_spec("vllm")  # without it, this folder looks like a package
    return found is not None and found.origin is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and not have_vllm():
            item.add_marker(pytest.mark.skip(reason="vllm is not installed: run tests/vllm/run"))


class Models(dict[str, Path]):
    """Folders of a tiny model by its type of number, made when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, dtype: str) -> Path:
        folder = self._folder / dtype
        # Apart, because torch leaves threads behind.
        subprocess.run([sys.executable, "-c", MAKE, str(folder), dtype], check=True, cwd="/")
        self[dtype] = folder
        return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Models(tmp_path_factory.mktemp("models"))
