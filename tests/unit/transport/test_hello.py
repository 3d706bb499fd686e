"""The client's hello: what it names, how long it may be, and which answers are taken."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from tests.suites import each_case

from paramserve.errors import Overloaded, ProtocolError
from paramserve.messages import Hello, Ok, Refused, Welcome, decoder, encode
from paramserve.transport.arena import NONCE_BYTES, Arena
from paramserve.transport.framing import PRELUDE_BYTES
from paramserve.transport.hello import check_answer, hello_frame, write_nonce

HELLO = Hello("client", 3, nonce=b"left over")


@pytest.fixture
def arenas() -> Iterator[list[Arena]]:
    made = [Arena.create(4096 * number, number) for number in (1, 2)]
    yield made
    for arena in made:
        arena.close()


def test_hello_names_the_arenas_and_no_nonce(arenas: list[Arena]) -> None:
    frame = hello_frame(HELLO, arenas, 4096)
    sent = decoder(Hello).decode(frame[PRELUDE_BYTES:])
    assert sent == msgspec.structs.replace(HELLO, arenas=((1, 4096), (2, 8192)), nonce=b"")


def test_hello_over_the_limit_is_refused_here() -> None:
    size = len(hello_frame(HELLO, [], 4096))
    assert len(hello_frame(HELLO, [], size)) == size
    with pytest.raises(ProtocolError, match=f"of {size} bytes was not sent, the limit is"):
        hello_frame(HELLO, [], size - 1)


def test_nonce_lies_at_the_start_of_the_last_arena_and_is_fresh(arenas: list[Arena]) -> None:
    first = write_nonce(arenas)
    second = write_nonce(arenas)
    assert len(second) == NONCE_BYTES
    assert first != second
    assert arenas[1].memory[:NONCE_BYTES].tobytes() == second
    assert not np.any(arenas[0].memory)
    assert write_nonce([]) == b""


def test_answer_with_the_nonce_is_taken() -> None:
    check_answer(encode(Welcome(b"1234")), b"1234")
    check_answer(encode(Welcome()), b"")


def test_answer_with_another_nonce_says_that_nothing_is_shared() -> None:
    with pytest.raises(ProtocolError, match="the memory is not shared"):
        check_answer(encode(Welcome(b"1234")), b"1235")


@each_case("answer", [b"", b"\xff", encode(Ok(1))], ids=["none", "noise", "other"])
def test_answer_that_is_none_is_a_protocol_error(answer: bytes) -> None:
    with pytest.raises(ProtocolError, match="was no welcome"):
        check_answer(answer, b"")


@each_case(("told", "applied"), [("no", "no"), ("yes", "yes"), ("?", "unknown")])
def test_refusal_is_raised_as_the_peers_error(told: str, applied: str) -> None:
    with pytest.raises(Overloaded, match="too many") as caught:
        check_answer(encode(Refused(0, "Overloaded", "too many", told, "wait")), b"")
    assert (caught.value.applied, caught.value.fix) == (applied, "wait")
