from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ems import EmsErrorCode, EmsException
from ems.bench.conversations import make_conversations
from ems.bench.workload import read_mooncake_trace


def line(**changes: Any) -> str:
    record = {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}
    return json.dumps({**record, **changes})


def test_a_trace_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line() + "\n\n" + line(input_length=9, hash_ids=[-5]) + "\n" + line())
    workload = read_mooncake_trace(path, limit=2)
    assert workload.block_tokens == 512
    assert [request.hashes for request in workload.requests] == [(1, 2), (-5,)]
    assert [request.input_tokens for request in workload.requests] == [600, 9]
    assert workload.longest == 2


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", "line 2 is [1]; a request looks like"),
        (line(input_length=None), "line 2 has input_length None"),
        (line(input_length=0), "line 2 has input_length 0"),
        (line(input_length=True), "line 2 has input_length True"),
        (line(hash_ids=[]), "line 2 has hash_ids []"),
        (line(hash_ids="12"), "line 2 has hash_ids '12'"),
        (line(hash_ids=[1, "2"]), "line 2 has hash_ids[1] '2'"),
        (line(hash_ids=[1, 1]), "line 2 names a block twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, second: str, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line() + "\n" + second + "\n")
    with pytest.raises(EmsException) as caught:
        read_mooncake_trace(path)
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
    assert text in caught.value.message()
    assert read_mooncake_trace(path, limit=1).longest == 2


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "cannot read"), (b"\n", "no request"), (b"\xff\xfe", "cannot read")],
)
def test_a_file_that_is_no_trace(tmp_path: Path, content: bytes | None, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EmsException, match=text):
        read_mooncake_trace(path)


def test_conversations_are_chains_that_grow() -> None:
    workload = make_conversations(300)
    assert workload == make_conversations(300)
    assert workload != make_conversations(300, seed=2)
    chains: dict[int, tuple[int, ...]] = {}  # a prefix hash names the whole chain before it
    continued = 0
    asked: set[int] = set()
    for request in workload.requests:
        assert len(request.hashes) == request.input_tokens // workload.block_tokens
        assert len(set(request.hashes)) == len(request.hashes)
        for depth, block in enumerate(request.hashes, 1):
            assert chains.setdefault(block, request.hashes[:depth]) == request.hashes[:depth]
        continued += not asked.isdisjoint(request.hashes)
        asked.add(request.hashes[-1])
    assert continued > 200
