"""The layers of docs/design.md, section 4: imports point down only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent
PACKAGE = CHECKOUT / "ems"

# The longest prefix of a module's name says where it belongs.
LAYERS = {
    "ems.__version__": 0,
    "ems.rpc._pb": 0,
    "ems.common": 1,
    "ems.cc_v1.cc_config": 1,
    "ems.devices": 2,
    "ems.shm": 2,
    "ems.rpc": 2,
    "ems.home": 2,
    "ems.future": 2,
    "ems.transfer": 3,
    "ems.pool": 3,
    "ems.engines": 3,
    "ems.client": 4,
    "ems.server": 4,
    "ems.facade": 5,
    "ems.cc": 5,
    "ems.cc_v1": 5,
    "ems": 6,  # the public names
    "ems.cli": 7,
    "ems.bench": 7,
    "ems.testing": 7,
    "ems.integrations": 7,
    "ems.__main__": 7,
}

# Beside what lies below, a unit may import these of its own layer.
NEIGHBOURS = {
    "ems.common": {"ems.cc_v1.cc_config"},
    "ems.cc_v1.cc_config": {"ems.common"},
    "ems.rpc": {"ems.shm"},
    "ems.future": {"ems.home"},
    "ems.facade": {"ems.cc", "ems.cc_v1"},
    "ems.cc": {"ems.cc_v1"},
    "ems": {"ems.testing"},
    "ems.cli": {"ems.bench", "ems.testing"},
    "ems.bench": {"ems.testing"},
    "ems.__main__": {"ems.cli"},
}

ONLY_IN = {
    "torch": ("ems.devices", "ems.integrations", "ems.testing", "ems.bench.peers.lmcache_local"),
    "torch_npu": ("ems.devices", "ems.integrations", "ems.testing"),
}
NEVER_IN = {"ems.pool": {"asyncio", "anyio", "time", "socket", "os", "threading", "subprocess"}}

LIMIT = 600


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    place: str
    at_start: bool  # when the module is loaded, not later or only for a type checker


def belongs(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def unit_of(module: str) -> str:
    found = max((unit for unit in LAYERS if belongs(module, unit)), key=len)
    # Everything in the package has a place in the table; only its root is "ems" itself.
    assert found != "ems" or module == "ems", f"{module} is in no layer: see docs/design.md"
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(CHECKOUT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = CHECKOUT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def imports_of(path: Path) -> Iterator[Import]:
    importer = module_name(path)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_start = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name != "ems"]
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "ems":
            names = [f"ems.{node.attr}" if f"ems.{node.attr}" in LAYERS else "ems"]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.append(inner if is_module(inner) or inner in LAYERS else node.module)
        for name in names:
            place = f"{path.relative_to(CHECKOUT)}:{node.lineno}"
            yield Import(importer, name, place, id(node) in at_start)


def python_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "_pb" not in path.parts]


IMPORTS = [found for path in python_files() for found in imports_of(path)]
OURS = [found for found in IMPORTS if belongs(found.imported, "ems")]


def test_imports_point_down() -> None:
    breaches = []
    for found in OURS:
        importer, imported = unit_of(found.importer), unit_of(found.imported)
        if importer == imported or LAYERS[imported] < LAYERS[importer]:
            continue
        if imported not in NEIGHBOURS.get(importer, ()):
            breaches.append(f"{found.place}: {importer} imports {found.imported}")
    assert not breaches, "\n".join(breaches)


def test_client_and_server_never_import_each_other() -> None:
    pair = {"ems.client", "ems.server"}
    assert not [f for f in OURS if {unit_of(f.importer), unit_of(f.imported)} == pair]


def test_no_cycle_when_modules_are_loaded() -> None:
    graph: dict[str, set[str]] = {}
    for found in OURS:
        if found.at_start and found.imported != "ems":
            graph.setdefault(found.importer, set()).add(found.imported)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for below in graph.get(module, ()):
                visit(below, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_the_native_modules_and_the_stubs_know_nothing_of_ems() -> None:
    sources = [*(CHECKOUT / "ems_native").rglob("*.py[xi]"), *(PACKAGE / "rpc/_pb").rglob("*.py")]
    assert sources
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(from|import|cimport)\s+ems(\.|\s)", text, re.MULTILINE), path


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_device_library_has_its_place(library: str) -> None:
    for found in IMPORTS:
        if belongs(found.imported, library):
            assert any(belongs(found.importer, place) for place in ONLY_IN[library]), found.place
            assert not found.at_start, f"{found.place}: imported before a tensor or device needs it"


@pytest.mark.parametrize("unit", NEVER_IN)
def test_a_pure_part_has_no_world(unit: str) -> None:
    for found in IMPORTS:
        if belongs(found.importer, unit):
            assert found.imported.split(".")[0] not in NEVER_IN[unit], found.place


def test_files_are_short() -> None:
    long = {}
    for folder in ("ems", "ems_native", "tests", "benchmarks"):
        for path in (CHECKOUT / folder).rglob("*"):
            # Cython writes its C beside the source; generated stubs have no reader.
            generated = path.suffix == ".c" and path.with_suffix(".pyx").exists()
            if path.suffix in {".py", ".pyx", ".pxd", ".c", ".h"} and not generated:
                length = len(path.read_text(encoding="utf-8").splitlines())
                if length > LIMIT and "_pb" not in path.parts:
                    long[str(path.relative_to(CHECKOUT))] = length
    assert not long
