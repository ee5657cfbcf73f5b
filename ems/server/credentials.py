"""Checks who attaches, for servers that were started with `--credentials`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from ems.rpc import codec

__all__ = ["Authenticator", "WrongCredentials"]

MAX_CHALLENGES = 1024
CHALLENGE_NS = 30 * 10**9


class WrongCredentials(Exception):
    """The text is for the client: it says what to do, and not which half was wrong."""


class Authenticator:
    """Hands out nonces and checks the proofs made of them; a nonce works once, for half a minute.

    Args:
        keys: access key by access id; None: nobody has to prove anything.
        now_ns: the clock.
    """

    def __init__(self, keys: Mapping[str, str] | None, now_ns: Callable[[], int]) -> None:
        self._keys = keys
        self._now_ns = now_ns
        self._nonces: dict[bytes, int] = {}  # oldest first
        # Compared with when the id is unknown, so that the answer takes as long as for a known one.
        self._nobodys_key = secrets.token_hex(32)

    @property
    def required(self) -> bool:
        """Whether clients have to prove who they are."""
        return self._keys is not None

    def challenge(self) -> bytes:
        """Return a nonce; the oldest one is forgotten when too many are out."""
        if not self.required:
            return b""
        while len(self._nonces) >= MAX_CHALLENGES:
            del self._nonces[next(iter(self._nonces))]
        nonce = secrets.token_bytes(codec.NONCE_BYTES)
        self._nonces[nonce] = self._now_ns()
        return nonce

    def check(self, access_id: str, nonce: bytes, proof: bytes) -> None:
        """Return if the proof holds, or if none is needed.

        Raises:
            WrongCredentials: in all other cases.
        """
        if self._keys is None:
            return
        if not proof:
            raise WrongCredentials(
                "this server wants credentials: set access_id and access_key in EmsConfig"
            )
        issued_ns = self._nonces.pop(nonce, None)
        if issued_ns is None or self._now_ns() - issued_ns > CHALLENGE_NS:
            raise WrongCredentials("the challenge is unknown, used or too old: ask for a new one")
        key = self._keys.get(access_id)
        expected = codec.proof(self._nobodys_key if key is None else key, nonce, access_id)
        if not codec.proofs_equal(expected, proof) or key is None:
            raise WrongCredentials(
                f"the access_key does not belong to access_id {access_id[:64]!r}, or this server "
                "does not know that id"
            )
