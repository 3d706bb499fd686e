"""The token's proof: both sides, and each way to get it wrong."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.suites import each_case

from paramserve.errors import NotAuthenticated, ProtocolError
from paramserve.messages import PROTOCOL_VERSION
from paramserve.transport import auth

TOKEN = b"T" * 32
SERVER, CLIENT = b"s" * 32, b"c" * 32


def test_both_sides_with_the_token_accept_each_other() -> None:
    for tls in (False, True):
        assert auth.read_greeting(auth.greeting(tls=tls)) is tls
    proof = auth.check_answer([TOKEN], SERVER, auth.answer(TOKEN, SERVER, CLIENT))
    auth.check_proof(TOKEN, SERVER, CLIENT, proof)


def test_proofs_are_hmac_sha256_of_side_and_nonces() -> None:
    expected = hmac.new(TOKEN, b"client" + SERVER + CLIENT, hashlib.sha256).digest()
    assert auth.answer(TOKEN, SERVER, CLIENT) == CLIENT + expected
    expected = hmac.new(TOKEN, b"server" + SERVER + CLIENT, hashlib.sha256).digest()
    assert auth.check_answer([TOKEN], SERVER, auth.answer(TOKEN, SERVER, CLIENT)) == expected


def test_messages_have_the_sizes_that_are_read() -> None:
    assert len(auth.greeting(tls=True)) == auth.GREETING_BYTES
    assert len(auth.answer(TOKEN, SERVER, CLIENT)) == auth.ANSWER_BYTES
    assert len(auth.REFUSAL) == auth.PROOF_BYTES


def test_server_with_two_tokens_answers_with_the_one_that_the_client_has() -> None:
    for token in (TOKEN, b"X" * 32):
        proof = auth.check_answer([b"X" * 32, TOKEN], SERVER, auth.answer(token, SERVER, CLIENT))
        auth.check_proof(token, SERVER, CLIENT, proof)


def test_client_with_another_token_is_refused() -> None:
    with pytest.raises(NotAuthenticated) as caught:
        auth.check_answer([TOKEN], SERVER, auth.answer(b"X" * 32, SERVER, CLIENT))
    assert "T" * 32 not in str(caught.value)


def test_answer_to_another_challenge_is_refused() -> None:
    with pytest.raises(NotAuthenticated):
        auth.check_answer([TOKEN], b"n" * 32, auth.answer(TOKEN, SERVER, CLIENT))


def test_clients_own_proof_sent_back_is_refused() -> None:
    reflected = auth.answer(TOKEN, SERVER, CLIENT)[auth.NONCE_BYTES :]
    with pytest.raises(NotAuthenticated, match="does not hold"):
        auth.check_proof(TOKEN, SERVER, CLIENT, reflected)


def test_refusal_is_told_apart_from_a_wrong_server() -> None:
    with pytest.raises(NotAuthenticated, match="refused this side's token"):
        auth.check_proof(TOKEN, SERVER, CLIENT, auth.REFUSAL)


@given(data=st.binary(min_size=auth.ANSWER_BYTES, max_size=auth.ANSWER_BYTES))
def test_random_answers_are_refused(data: bytes) -> None:
    with pytest.raises(NotAuthenticated):
        auth.check_answer([TOKEN], SERVER, data)


@each_case(
    ("data", "says"),
    [
        (b"HTTP" + bytes(auth.GREETING_BYTES - 4), "greets with b'HTTP'"),
        (
            b"PSRA\x63\0" + bytes(auth.GREETING_BYTES - 6),
            f"version 99, this side speaks {PROTOCOL_VERSION}",
        ),
    ],
)
def test_challenge_of_another_protocol_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        auth.read_greeting(data)


def test_short_token_is_a_value_error_that_does_not_show_it() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes, got 6") as caught:
        auth.check_token(b"secret")
    assert "secret" not in str(caught.value).replace("secrets.token_bytes", "")


def test_certificates_that_are_none_are_refused_with_what_they_are() -> None:
    with pytest.raises(TypeError, match=r"tls must be ps.TLS\(certificate=.*how to make them"):
        auth.credentials_of(None, True)
