"""TLS without a peer: how pieces of memory become records, and what OpenSSL's errors mean."""

from __future__ import annotations

import ssl

from hypothesis import given
from hypothesis import strategies as st
from tests.suites import each_case

from paramserve.config import TLS
from paramserve.errors import NotAuthenticated, ProtocolError
from paramserve.transport.tls import RECORD_BYTES, _records, explain

SETTINGS = TLS("cert.pem", "key.pem", "ca.pem")


def views(sizes: list[int]) -> list[memoryview]:
    return [memoryview(bytes([i % 256]) * size) for i, size in enumerate(sizes)]


sizes = st.lists(
    st.one_of(st.integers(0, 300), st.integers(RECORD_BYTES - 2, 2 * RECORD_BYTES)), max_size=9
)


@given(sizes)
def test_records_are_the_same_bytes(sizes: list[int]) -> None:
    parts = list(_records(views(sizes)))
    assert b"".join(parts) == b"".join(views(sizes))
    assert all(parts)


def test_records_small_views_share_and_large_ones_are_not_copied() -> None:
    given_views = views([20, 100, RECORD_BYTES, 3, 4])
    parts = list(_records(given_views))
    assert [len(part) for part in parts] == [120, RECORD_BYTES, 7]
    assert parts[1] is given_views[2]


@given(sizes, sizes, st.integers(0, 10**6))
def test_records_repeat_what_could_not_be_written(
    now: list[int], later: list[int], cut: int
) -> None:
    """OpenSSL wants the record that it could not send once more, and not shorter."""
    first = views([size for size in now if size])
    total = sum(map(len, first))
    sent = min(cut, total)
    done = 0
    refused = b""
    for part in _records(first):
        if done + len(part) > sent:
            refused = bytes(part[sent - done :][:RECORD_BYTES])
            break
        done += len(part)
    rest, left = [], sent
    for view in first:
        if left < len(view):
            rest.append(view[left:])
        left = max(left - len(view), 0)
    again = next(iter(_records(rest + views(later))), memoryview(b""))
    assert bytes(again)[: len(refused)] == refused


def failed(reason: str, kind: type[ssl.SSLError] = ssl.SSLError) -> ssl.SSLError:
    error = kind(1, f"[SSL: {reason}] text")
    error.reason = reason
    return error


@each_case(
    ("reason", "says"),
    [
        ("TLSV1_ALERT_UNKNOWN_CA", "it is not signed by the peer's authority"),
        ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "it has expired"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "the peer got none"),
    ],
)
def test_explain_alert_about_a_certificate_names_the_file(reason: str, says: str) -> None:
    error = explain(failed(reason), SETTINGS, "tcp:h:1")
    assert isinstance(error, NotAuthenticated)
    assert f"the peer at tcp:h:1 refused this side's certificate 'cert.pem': {says}" in str(error)


def test_explain_anything_else_is_a_protocol_error() -> None:
    error = explain(failed("WRONG_VERSION_NUMBER"), SETTINGS, "tcp:h:1")
    assert type(error) is ProtocolError
    assert "WRONG_VERSION_NUMBER" in str(error)


@each_case("kind", [ssl.SSLEOFError, ssl.SSLZeroReturnError])
def test_explain_end_of_the_stream_is_a_lost_connection(kind: type[ssl.SSLError]) -> None:
    assert isinstance(explain(failed("EOF", kind), SETTINGS, "x"), ConnectionResetError)
