"""The page on failures claims nothing that no test proves."""

from __future__ import annotations

import re
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
PAGE = (TOP / "docs" / "failures.md").read_text(encoding="utf-8")
PROOF = re.compile(r"`(tests/[\w/]+\.(?:py|c))(?:::(\w+))?`")


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
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    claims = [row for row in rows if not row.startswith(("|---", "| what", "| T |"))]
    assert len(claims) > 60
    without = [row for row in claims if not PROOF.search(row)]
    assert [row for row in without if "the pool is gone" not in row] == []
