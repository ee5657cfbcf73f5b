"""The page on failures claims nothing that no test proves."""

from __future__ import annotations

import re
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
PAGE = (TOP / "docs" / "failures.md").read_text(encoding="utf-8")
PROOF = re.compile(r"`(tests/[\w/]+\.(?:py|c))(?:::(\w+))?`")

CLAIMS = PAGE.partition("## What the safety costs")[0]
ROWS = [line for line in CLAIMS.splitlines() if line.startswith("|")]
ROWS += [line for line in PAGE.partition("## Faults of")[2].splitlines() if line.startswith("|")]


def test_every_proof_is_there() -> None:
    proofs = PROOF.findall(PAGE)
    assert len(proofs) > 60
    missing = []
    for path, name in proofs:
        file = TOP / path
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        if not text or (name and not re.search(rf"^\s*(async )?def {name}\(", text, re.MULTILINE)):
            missing.append(f"{path}::{name}")
    assert not missing


def test_every_claim_names_a_proof() -> None:
    claims = [row for row in ROWS if not row.startswith(("|---", "| what", "| T |"))]
    assert len(claims) > 60
    without = [row for row in claims if not PROOF.search(row)]
    assert [row for row in without if "the pool is gone" not in row] == []


# Of the 49 scenarios; the rest need several nodes, a second tier, or do not exist.
ON_ONE_NODE = (
    {3, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 21, 22, 24, 25, 26, 27, 28, 29, 30, 32, 37}
    | {39, 40, 41, 42, 43, 45, 46, 47, 49}
)  # fmt: skip


def test_every_scenario_of_one_node_is_there() -> None:
    told = {int(number) for row in ROWS for number in re.findall(r"\bT(\d+)\b", row.split("|")[1])}
    assert told == ON_ONE_NODE
