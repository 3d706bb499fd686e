"""The client's side of reaching a peer: addresses, connecting, TLS, proving the token."""

from __future__ import annotations

import os
import secrets
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from typing import Final

from paramserve.config import TLS, Credentials, Limits
from paramserve.errors import NotAuthenticated, ParamServeError
from paramserve.transport import auth, tcp, tls

HAS_ABSTRACT: Final = sys.platform == "linux"
"""Whether Unix sockets can have a name without a place in the file system (unix(7))."""


GRACE_S: Final = Limits().token_grace_s
"""Seconds, after its token file was renewed, in which a client tries the old token where the new
one is refused: the servers' file may be renewed later."""
LISTENS_S: Final = 1.0
"""How long an attempt may take that only asks whether a process listens."""


class NoConnection(TimeoutError):
    """The network did not answer; the peer was not even reached."""


def listens(error: BaseException | None) -> bool:
    """Whether a process listens where this was raised, and has only not finished the handshake: it
    is busy, or crowded by others."""
    if isinstance(error, ConnectionRefusedError | NoConnection):
        return False
    return isinstance(error, ConnectionError | TimeoutError)


def may_listen(addresses: Sequence[str]) -> bool:
    """Whether a process may listen at one of these addresses: at none it is certain that none does.

    A process that listens sees a peer that says nothing and goes.
    """
    for address in addresses:
        place = address.partition(":")[2]
        try:
            if is_unix(address):
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                    sock.settimeout(LISTENS_S)
                    sock.connect(unix_name(place))
                return True
            with socket.create_connection(tcp.split_place(place), LISTENS_S) as sock:
                if sock.getsockname() != sock.getpeername():  # else this socket meets itself
                    return True
        except (ConnectionRefusedError, FileNotFoundError, ParamServeError):
            continue
        except OSError:
            return True
    return False


def check_addresses(addresses: tuple[str, ...], credentials: Credentials) -> None:
    """Check what can be checked before anything is dialled.

    Raises:
        ValueError: an address that is none, or TCP with a token that is too short.
        ParamServeError: TCP with TLS settings whose files cannot be used.
    """
    if not addresses:
        raise ValueError("no address to connect to")
    for address in addresses:
        scheme, _, place = address.partition(":")
        if scheme == "unix" and place:
            continue
        try:
            if scheme != "tcp":
                raise ValueError(f"{scheme!r} is no transport")
            tcp.split_place(place)
        except ValueError as error:
            raise ValueError(
                f"{address!r} is no address: expected unix:<path> or tcp:<host>:<port>; {error}"
            ) from error
        if credentials.token:  # Without one, the Unix sockets among the addresses may do.
            auth.check_token(credentials.token)
        if credentials.tls is not None:
            tls.client_context(credentials.tls)


def is_unix(address: str) -> bool:
    return address.startswith("unix:")


def unix_name(path: str) -> str:
    """What the system calls the socket at a path: one that begins with @ is in no file system.

    Raises:
        ParamServeError: this system has no such sockets.
    """
    if not path.startswith("@"):
        return path
    if not HAS_ABSTRACT:
        raise ParamServeError(
            f"the Unix socket {path!r} cannot be used: only Linux has sockets outside the file "
            "system",
            fix="name a directory for the sockets, or use TCP",
        )
    return "\0" + path[1:]


def dial(
    address: str, credentials: Credentials, deadline: float, lost_s: float = tcp.LOST_S
) -> socket.socket:
    """Connect to a checked address; over TCP, do TLS and prove the token to each other as well.

    `deadline` is a time of `time.monotonic`. The socket comes back with a timeout set.

    Raises:
        NotAuthenticated, ProtocolError: a side does not know the other; or one side
            has no token or no TLS where the other has.
        OSError: no listener there, or no answer in time.
    """
    place = address.partition(":")[2]
    if is_unix(address):
        return _dial_unix(place, deadline)
    if not credentials.token:
        raise NotAuthenticated(
            f"{address} was not dialled: TCP needs the cluster's token, and there is none here",
            fix=f"give the token's file: {auth.TOKEN_OPTIONS}; or run on the same machine and use "
            "a Unix socket",
        )
    for token in auth.tokens(credentials, GRACE_S):
        proven = Credentials(token, credentials.tls)
        sock = _dial_tcp(address, tcp.split_place(place), proven, deadline, lost_s)
        if sock is not None:
            return sock
    raise auth.refused()


def _dial_tcp(
    address: str,
    place: tuple[str, int],
    credentials: Credentials,
    deadline: float,
    lost_s: float,
) -> socket.socket | None:
    """Connect to a host and port; None: the peer refuses the token. Raises as `dial`."""
    host, port = place
    try:
        sock = socket.create_connection((host, port), remaining(deadline))
    except TimeoutError as error:
        raise NoConnection(f"no connection to {tcp.join_place(host, port)} in time") from error
    try:
        if sock.getsockname() == sock.getpeername():
            # A port without a listener can be given to this very socket, which then meets itself.
            raise ConnectionRefusedError("no process listens there")
        tcp.prepare(sock, lost_s)
        _check_greeting(sock, address, credentials.tls, deadline)
        if credentials.tls is None:
            proved = _prove(sock, credentials.token, deadline)
        else:
            sock = tls.over(sock, tls.client_context(credentials.tls), host.partition("%")[0])
            proved = _prove_over_tls(sock, credentials, credentials.tls, address, deadline)
        if not proved:
            sock.close()
            return None
        tcp.lost_hosts.watch(sock, lost_s)
    except BaseException:
        sock.close()
        raise
    return sock


def _dial_unix(path: str, deadline: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(remaining(deadline))
        sock.connect(unix_name(path))
        # A name outside the file system is free for any user, once its owner is gone.
        uid, own = auth.peer_uid(sock), os.geteuid()
        if uid != own:
            raise NotAuthenticated(
                f"user {uid} listens at unix:{path}, this is user {own}",
                fix="run all parts as the same user, or use TCP with a token",
            )
    except BaseException:
        sock.close()
        raise
    return sock


def _check_greeting(
    sock: socket.socket, address: str, settings: TLS | None, deadline: float
) -> None:
    """Raise `NotAuthenticated` if one side wants TLS and the other does not."""
    tls_needed = auth.read_greeting(_exactly(sock, auth.GREETING_BYTES, deadline))
    if tls_needed and settings is None:
        raise NotAuthenticated(
            f"{address} speaks TLS, and this side has no certificates",
            fix="give tls=TLS(certificate, key, authority)",
        )
    if settings is not None and not tls_needed:
        raise NotAuthenticated(
            f"{address} does not speak TLS, and this side takes nothing else",
            fix="start the servers with tls= too, or check the address",
        )


def _prove_over_tls(
    sock: tls.TlsSocket, credentials: Credentials, settings: TLS, address: str, deadline: float
) -> bool:
    try:
        sock.settimeout(remaining(deadline))
        sock.do_handshake()
        # In TLS 1.3 a server checks the client's certificate after that: it refuses in place of
        # its nonce.
        return _prove(sock, credentials.token, deadline)
    except ssl.SSLError as error:
        raise tls.explain(error, settings, address) from error


def remaining(deadline: float) -> float:
    """Seconds until the deadline. Raises `TimeoutError` past it."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("no answer in time")
    return seconds


def _prove(sock: socket.socket, token: bytes, deadline: float) -> bool:
    """Prove the token to each other; False: the peer refuses it."""
    server_nonce = _exactly(sock, auth.NONCE_BYTES, deadline)
    client_nonce = secrets.token_bytes(auth.NONCE_BYTES)
    sock.sendall(auth.answer(token, server_nonce, client_nonce))
    proof = _exactly(sock, auth.PROOF_BYTES, deadline)
    if proof == auth.REFUSAL:
        return False
    auth.check_proof(token, server_nonce, client_nonce, proof)
    return True


def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        sock.settimeout(remaining(deadline))
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the peer closed within its handshake")
        data += part
    return bytes(data)
