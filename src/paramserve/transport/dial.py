"""The client's side of reaching a peer: addresses, connecting, proving the token."""

from __future__ import annotations

import secrets
import socket
import time

from paramserve.transport import auth


def check_addresses(addresses: tuple[str, ...], token: bytes) -> None:
    """Raise `ValueError` for an address that is none, or a TCP one without a usable token."""
    if not addresses:
        raise ValueError("no address to connect to")
    for address in addresses:
        scheme, _, place = address.partition(":")
        host, _, port = place.rpartition(":")
        if not (scheme == "unix" and place) and not (scheme == "tcp" and host and port.isdecimal()):
            raise ValueError(
                f"{address!r} is no address: expected unix:<path> or tcp:<host>:<port>"
            )
        if scheme == "tcp":
            auth.check_token(token)


def is_unix(address: str) -> bool:
    return address.startswith("unix:")


def dial(address: str, token: bytes, deadline: float) -> socket.socket:
    """Connect to a checked address; over TCP, prove the token to each other as well.

    `deadline` is a time of `time.monotonic`. The socket comes back with a timeout set.

    Raises:
        NotAuthenticated, ProtocolError: the peer is a stranger, or takes us for one.
        OSError: nobody there, or no answer in time.
    """
    scheme, _, place = address.partition(":")
    if scheme == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(remaining(deadline))
            sock.connect(place)
        except BaseException:
            sock.close()
            raise
        return sock
    host, _, port = place.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), remaining(deadline))
    try:
        if sock.getsockname() == sock.getpeername():
            # A port without a listener can be given to this very socket, which then meets itself.
            raise ConnectionRefusedError("nobody listens there")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _prove(sock, token, deadline)
    except BaseException:
        sock.close()
        raise
    return sock


def remaining(deadline: float) -> float:
    """Seconds until the deadline. Raises `TimeoutError` past it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def _prove(sock: socket.socket, token: bytes, deadline: float) -> None:
    server_nonce = auth.read_challenge(_exactly(sock, auth.CHALLENGE_BYTES, deadline))
    client_nonce = secrets.token_bytes(auth.NONCE_BYTES)
    sock.sendall(auth.answer(token, server_nonce, client_nonce))
    proof = _exactly(sock, auth.PROOF_BYTES, deadline)
    auth.check_proof(token, server_nonce, client_nonce, proof)


def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        sock.settimeout(remaining(deadline))
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the peer closed within its handshake")
        data += part
    return bytes(data)
