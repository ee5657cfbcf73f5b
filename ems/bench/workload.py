"""What a serving engine asks of EMS: requests whose prompts are chains of hashed blocks."""

from __future__ import annotations

import dataclasses
import json
import os

from ems.common.argument import shown
from ems.common.exception import EmsException, invalid_argument

__all__ = ["MOONCAKE_BLOCK_TOKENS", "Request", "Workload", "read_mooncake_trace"]

MOONCAKE_BLOCK_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Request:
    """One request: the prefix hashes of its prompt's blocks, head first, and its length."""

    hashes: tuple[int, ...]
    input_tokens: int


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests in the order in which they arrived."""

    name: str
    block_tokens: int
    requests: tuple[Request, ...]

    @property
    def longest(self) -> int:
        """The blocks of the longest prompt."""
        return max((len(request.hashes) for request in self.requests), default=0)


def read_mooncake_trace(path: str | os.PathLike[str], limit: int | None = None) -> Workload:
    """Read a trace in Mooncake's format: a JSON object per line, 512 tokens a block.

    Args:
        path: the file; `timestamp` and `output_length` of its lines are not used.
        limit: take this many requests from the start, None for all.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` when the file cannot be read or holds anything else;
            the text names the line.
    """
    requests: list[Request] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if line.strip():
                    requests.append(_parse(f"{path}, line {number}", line))
    except (OSError, UnicodeDecodeError) as error:
        raise invalid_argument(f"cannot read the trace {path}: {error}") from error
    if not requests:
        raise invalid_argument(f"{path} holds no request; give a trace with a JSON object per line")
    return Workload(os.path.basename(path), MOONCAKE_BLOCK_TOKENS, tuple(requests))


def _parse(place: str, line: str) -> Request:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise invalid_argument(f"{place} is no JSON: {error}") from None
    if not isinstance(record, dict):
        raise _bad(place, f"is {shown(record)}")
    tokens = record.get("input_length")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise _bad(place, f"has input_length {shown(tokens)}")
    hashes = record.get("hash_ids")
    if not isinstance(hashes, list) or not hashes:
        raise _bad(place, f"has hash_ids {shown(hashes)}")
    for index, block in enumerate(hashes):
        if not isinstance(block, int) or isinstance(block, bool):
            raise _bad(place, f"has hash_ids[{index}] {shown(block)}")
    if len(set(hashes)) != len(hashes):
        raise _bad(place, "names a block twice in hash_ids")
    return Request(tuple(hashes), tokens)


def _bad(place: str, what: str) -> EmsException:
    return invalid_argument(
        f"{place} {what}; a request looks like "
        '{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}'
    )
