"""The documentation is true: its Python blocks run, its links and commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ems.cli.main import command
from ems.testing import LocalPool
from ems.testing.child import child_environment

TOP = Path(__file__).resolve().parents[2]
PAGES = [TOP / "README.md", *sorted((TOP / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*$")


def blocks(page: Path, language: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, text, what stands before it) of each block in the language."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        if match[1] == language:
            yield text.count("\n", 0, match.start(2)), match[2], text[: match.start()]


def script(page: Path) -> str:
    """Return all Python blocks of a page as one program whose lines are those of the page."""
    lines: list[str] = []
    for line, text, before in blocks(page, "python"):
        if not NOT_RUN.search(before):
            lines += [""] * (line - len(lines)) + text.splitlines()
    return "\n".join(lines)


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with LocalPool("64MiB") as pool:
        yield pool


@pytest.mark.parametrize(
    "page", [page for page in PAGES if script(page)], ids=lambda page: str(page.relative_to(TOP))
)
def test_the_python_blocks_run_from_top_to_bottom(
    page: Path, pool: LocalPool, tmp_path: Path
) -> None:
    program = tmp_path / f"page_{page.stem}.py"  # not a name that a module may have
    program.write_text(script(page), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-W", "error", program],
        env={**child_environment(), "EMS_ROOT": pool.root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, f"{page}:\n{run.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_commands_and_options_exist(page: Path) -> None:
    for line, text, _ in blocks(page, "bash"):
        for words in re.findall(r"\bems ([^&|#\n]+)", text):
            check_command(words.split(), f"{page}:{line}")


def check_command(words: list[str], place: str) -> None:
    found: click.Command | None = command
    context = click.Context(command)
    while isinstance(found, click.Group) and words and not words[0].startswith("-"):
        found = found.get_command(context, words.pop(0))
        assert found is not None, f"{place} names a command that is not there"
    assert found is not None
    known = {option for parameter in found.params for option in parameter.opts}
    for word in words:
        if word.startswith("--"):
            assert word.split("=")[0] in known | {"--help"}, f"{place} names {word}"


def test_the_readme_has_the_two_commands() -> None:
    commands = [text.strip() for _, text, _ in blocks(TOP / "README.md", "bash")]
    assert "pip install . && ems demo" in commands
    assert "pip install '.[test]' && pytest" in commands
