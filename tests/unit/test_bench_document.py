"""What `ems bench report` makes of a run: tables, and what of an old document it keeps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ems import EmsErrorCode, EmsException
from ems.bench.comparison import Timing
from ems.bench.document import BEGIN, END, Run, read_run, write_document
from ems.bench.figure import at_least, at_most
from ems.bench.machine import Machine
from ems.bench.roof import Rate

MACHINE = Machine("A processor", 2, "6.1", "3.11", "avx2")


def timing(name: str, operation: str, keys: int, us: float) -> Timing:
    return Timing(name, operation, keys, 1 << 20, 10, us, 2 * us, keys * 1048.576 / us)


RUN = Run(
    begun="2026-01-02T03:04:05+00:00",
    machine=MACHINE,
    figures=(
        at_least("load", 20.0, "GB/s", 1.4, roof=("memcpy", 10.0), judged=("x memcpy", 2.0)),
        at_most("step", 12.0, "ms", 10),
        at_most("lost", 0, "blocks", 0),
    ),
    rates=(Rate("memcpy", 1, "4 KiB", 9.5),),
    versions=(("EMS", "ems 1"), ("Other", "other 2")),
    skipped=(("Third", "not\ninstalled"),),
    timings=(
        timing("EMS", "load", 1, 50.0),
        timing("Other", "load", 1, 100.0),
        timing("Other", "load_elsewhere", 1, 400.0),
        timing("EMS", "load", 32, 5000.0),
        timing("Other", "load", 32, 4000.0),
        timing("EMS", "save", 32, 5000.0),
    ),
    mismatches=0,
)


@pytest.fixture(autouse=True, scope="module")
def fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Draw once: matplotlib keeps the files of its fonts open."""
    write_document([RUN], str(tmp_path_factory.mktemp("fonts") / "page.md"))


def test_a_document_has_all_tables_and_plots(tmp_path: Path) -> None:
    path = tmp_path / "performance.md"
    written = write_document([RUN], str(path))
    lines = path.read_text().splitlines()
    assert "### 2026-01-02, A processor" in lines
    assert any("begun at 03:04 UTC. 2 of 3 figures reached; 0 wrong values." in x for x in lines)
    assert "| load | 20 GB/s | memcpy 10 | 2 x memcpy | at least 1.4 | yes |" in lines
    assert "| step | 12 ms |  | 12 ms | at most 10 | **no** |" in lines
    assert "| memcpy | 1 | 4 KiB | 9.50 |" in lines
    assert "| Other | other 2 |" in lines
    assert "- Left out: Third: not installed" in lines
    # One key in µs, several in GB/s; the best of a column is bold.
    assert "| EMS | **50** / 100 |" in lines
    assert "| Other, elsewhere | 400 / 800 |" in lines
    assert "| Other | **8.39** (8.0) |" in lines
    assert [Path(one).name for one in written] == [
        "performance.md",
        "performance-reached.png",
        "performance-peers-load.png",
        "performance-peers-save.png",
    ]
    assert all(Path(one).read_bytes()[1:4] == b"PNG" for one in written[1:])


def test_what_people_wrote_around_a_report_stays(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"# Ours\n\n{BEGIN}\nold\n{END}\n\n## Limits\n")
    write_document([RUN], str(path))
    once = path.read_text()
    assert once.startswith(f"# Ours\n\n{BEGIN}\n") and once.endswith(f"{END}\n\n## Limits\n")
    assert "old" not in once
    write_document([RUN], str(path))
    assert path.read_text() == once


def test_a_document_without_a_place_for_it_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("# Ours\n")
    with pytest.raises(EmsException, match="no lines <!-- ems bench report: begin -->"):
        write_document([RUN], str(path))
    assert path.read_text() == "# Ours\n"


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    worse = dataclasses.replace(RUN, begun="2026-01-03T00:00:00+00:00", figures=RUN.figures[1:])
    written = write_document([RUN, worse], str(tmp_path / "page.md"))
    text = (tmp_path / "page.md").read_text()
    heads = "| judged; bold is not reached | 2026-01-02 03:04 | 2026-01-03 00:00 |"
    assert heads in text
    assert "| load | 2 x memcpy |  |" in text
    assert "| step | **12 ms** | **12 ms** |" in text
    assert {Path(one).name for one in written[1:]} >= {"page-1-reached.png", "page-2-reached.png"}


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"begun": "", "machine": {}})])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(EmsException, match="is no report of `ems bench all --json`") as refused:
        read_run(str(path))
    assert refused.value.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT
