"""A made-up multi-turn conversation workload: what chat users send, hashed as an engine would."""

from __future__ import annotations

import hashlib
import random

from ems.bench.workload import Request, Workload

__all__ = ["make_conversations"]

_BLOCK_TOKENS = 128
_TOKEN_BYTES = 4
_SYSTEM_PROMPTS = 4
_SYSTEM_TOKENS = 1100
_LAST_TURN_CHANCE = 0.12
_USER_TOKENS = (40, 600)
_ANSWER_TOKENS = (60, 500)


class _Conversation:
    """The tokens said so far, and the chained hashes of their full blocks."""

    def __init__(self, system_prompt: bytes) -> None:
        self._hashes: list[int] = []
        self._last = b""
        self._open = bytearray()  # tokens behind the last full block
        self._tokens = 0
        self.say(system_prompt)

    def say(self, tokens: bytes) -> None:
        self._open += tokens
        self._tokens += len(tokens) // _TOKEN_BYTES
        step = _BLOCK_TOKENS * _TOKEN_BYTES
        while len(self._open) >= step:
            self._last = hashlib.blake2b(self._last + self._open[:step], digest_size=8).digest()
            self._hashes.append(int.from_bytes(self._last, "little", signed=True))
            del self._open[:step]

    def request(self) -> Request:
        return Request(tuple(self._hashes), self._tokens)


def make_conversations(count: int, seed: int = 1, active: int = 24) -> Workload:
    """Make `count` requests of `active` conversations in turns; the same for the same arguments.

    Each conversation opens with one of a few system prompts. A request is the whole conversation so
    far and a new question; the answer is added to what the next one repeats.
    """
    rng = random.Random(seed)

    def tokens(number: int) -> bytes:
        return rng.randbytes(number * _TOKEN_BYTES)

    prompts = [tokens(_SYSTEM_TOKENS) for _ in range(_SYSTEM_PROMPTS)]
    going = [_Conversation(rng.choice(prompts)) for _ in range(active)]
    requests: list[Request] = []
    for _ in range(count):
        which = rng.randrange(active)
        going[which].say(tokens(rng.randint(*_USER_TOKENS)))
        requests.append(going[which].request())
        going[which].say(tokens(rng.randint(*_ANSWER_TOKENS)))
        if rng.random() < _LAST_TURN_CHANCE:
            going[which] = _Conversation(rng.choice(prompts))
    return Workload("multi-turn conversations", _BLOCK_TOKENS, tuple(requests))
