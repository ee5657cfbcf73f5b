from __future__ import annotations

import hashlib
import hmac

import pytest

from ems.rpc import codec
from ems.server.credentials import CHALLENGE_NS, MAX_CHALLENGES, Authenticator, WrongCredentials

KEY = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def clock() -> list[int]:
    return [0]


@pytest.fixture
def authenticator(clock: list[int]) -> Authenticator:
    return Authenticator({"tenant": KEY}, lambda: clock[0])


def test_the_proof_is_a_plain_hmac() -> None:
    expected = hmac.new(KEY.encode(), b"nonce" + b"tenant", hashlib.sha256).digest()
    assert codec.proof(KEY, b"nonce", "tenant") == expected


def test_nobody_has_to_prove_anything_without_keys() -> None:
    authenticator = Authenticator(None, lambda: 0)
    assert not authenticator.required
    assert authenticator.challenge() == b""
    authenticator.check("", b"", b"")


def test_a_nonce_works_once(authenticator: Authenticator) -> None:
    nonce = authenticator.challenge()
    proof = codec.proof(KEY, nonce, "tenant")
    authenticator.check("tenant", nonce, proof)
    with pytest.raises(WrongCredentials, match="challenge"):
        authenticator.check("tenant", nonce, proof)


def test_wrong_key_unknown_id_and_none_at_all(authenticator: Authenticator) -> None:
    for access_id, key in (("tenant", KEY[::-1]), ("other", KEY)):
        nonce = authenticator.challenge()
        with pytest.raises(WrongCredentials, match="does not belong"):
            authenticator.check(access_id, nonce, codec.proof(key, nonce, access_id))
    with pytest.raises(WrongCredentials, match="set access_id and access_key"):
        authenticator.check("", b"", b"")


def test_an_old_or_invented_nonce(authenticator: Authenticator, clock: list[int]) -> None:
    nonce = authenticator.challenge()
    clock[0] += CHALLENGE_NS + 1
    for each in (nonce, bytes(codec.NONCE_BYTES)):
        with pytest.raises(WrongCredentials, match="challenge"):
            authenticator.check("tenant", each, codec.proof(KEY, each, "tenant"))


def test_the_number_of_challenges_is_bounded(authenticator: Authenticator) -> None:
    first = authenticator.challenge()
    for _ in range(MAX_CHALLENGES):
        last = authenticator.challenge()
    authenticator.check("tenant", last, codec.proof(KEY, last, "tenant"))
    with pytest.raises(WrongCredentials):
        authenticator.check("tenant", first, codec.proof(KEY, first, "tenant"))


def test_columns() -> None:
    assert codec.unpack_u64(codec.pack_u64([0, 2**64 - 1])) == (0, 2**64 - 1)
    assert codec.unpack_u64(b"") == ()
    with pytest.raises(ValueError, match="7 bytes"):
        codec.unpack_u64(bytes(7))
