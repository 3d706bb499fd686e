"""Which peer this is: the uid behind a Unix socket, a mutual HMAC over TCP.

Over TCP both sides prove that they hold the cluster's token without showing it, in three messages
of fixed size, before anything of variable size is read:

    server: magic, version, whether TLS begins here
    server: nonce s                     client: nonce c, HMAC(token, "client" s c)
    server: HMAC(token, "server" s c)   or `REFUSAL`

Under TLS all but the first line is within it. The first line tells a client at once what it lacks;
an attacker who changes it gains nothing, because a client with TLS settings takes nothing else.

Functions over bytes, apart from `peer_uid` and the files of tokens, which may be renewed. The
token keeps unknown peers out; it neither hides nor protects what follows from an attacker on the
path (that takes TLS).
"""

from __future__ import annotations

import functools
import hmac
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from paramserve.config import NO_CREDENTIALS, TLS, Credentials, check_tls
from paramserve.errors import NotAuthenticated, ParamServeError, ProtocolError
from paramserve.logs import hide
from paramserve.messages import PROTOCOL_VERSION
from paramserve.transport.renewing import Renewed

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
TOKEN_BYTES_MIN: Final = 16
"""128 bits: an eavesdropper on a handshake must not find the token by trying."""
AUTH_MAGIC: Final = b"PSRA"
_GREETING: Final = struct.Struct("<4sHH")
GREETING_BYTES: Final = _GREETING.size
ANSWER_BYTES: Final = NONCE_BYTES + PROOF_BYTES
REFUSAL: Final = bytes(PROOF_BYTES)
"""Proof of a server that refuses: the client's was wrong. No HMAC has this value."""
TOKEN_OPTIONS: Final = (
    "--token-file of a command, token_file= of ps.connect, PARAMSERVE_TOKEN_FILE of "
    "ps.from_environment"
)
"""How a user gives a process the cluster's token."""
FIX_JOINS: Final = (
    "name that cluster's token file: copy the one that its first server was started with"
)
TOKENS_BEFORE_MAX: Final = 4
"""Most tokens that a file held before, kept for the grace period."""
FILES_MAX: Final = 64
"""Files that are looked at for new tokens."""
_UCRED: Final = struct.Struct("3i")


def check_token(token: bytes) -> None:
    """Raise `ValueError` if this is no token; the text does not show it."""
    if len(token) < TOKEN_BYTES_MIN:
        raise ValueError(
            f"a cluster's token needs at least {TOKEN_BYTES_MIN} bytes, got {len(token)}; "
            "make one with secrets.token_bytes(32)"
        )


def greeting(*, tls: bool) -> bytes:
    """The server's first message. With `tls`, TLS begins behind it; the nonce follows."""
    return _GREETING.pack(AUTH_MAGIC, PROTOCOL_VERSION, tls)


def read_greeting(data: bytes) -> bool:
    """Whether TLS begins behind the server's first message.

    Raises:
        ProtocolError: the listener is no paramserve, or one of another version.
    """
    magic, version, tls = _GREETING.unpack(data)
    if magic != AUTH_MAGIC:
        raise ProtocolError(
            f"the peer greets with {magic!r}, not with {AUTH_MAGIC!r}",
            fix="check the address: something else listens there",
        )
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {version}, this side speaks {PROTOCOL_VERSION}",
            fix="run the same version of paramserve on both sides",
        )
    return bool(tls)


def answer(token: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """The client's message: its nonce and its proof."""
    return client_nonce + _proof(token, b"client", server_nonce, client_nonce)


def check_answer(tokens: Sequence[bytes], server_nonce: bytes, data: bytes) -> bytes:
    """Check the client's message and return the server's proof, of the same one of the tokens.

    Raises:
        NotAuthenticated: the client does not hold the token. To be told by `REFUSAL`.
    """
    client_nonce, proof = data[:NONCE_BYTES], data[NONCE_BYTES:]
    for token in tokens:
        if hmac.compare_digest(_proof(token, b"client", server_nonce, client_nonce), proof):
            return _proof(token, b"server", server_nonce, client_nonce)
    raise NotAuthenticated(
        "a client's proof of the token is wrong", fix="give it this cluster's token"
    )


def check_proof(token: bytes, server_nonce: bytes, client_nonce: bytes, proof: bytes) -> None:
    """Check the server's last message.

    Raises:
        NotAuthenticated: the server refused our proof, or does not hold the token itself.
    """
    if proof == REFUSAL:
        raise refused()
    if not hmac.compare_digest(_proof(token, b"server", server_nonce, client_nonce), proof):
        raise NotAuthenticated(
            "the server does not hold this cluster's token",
            fix="check the address: another cluster, or an unknown process, listens there",
        )


def refused() -> NotAuthenticated:
    """What `REFUSAL` means for the client."""
    return NotAuthenticated(
        "the server refused this side's token",
        fix=f"use the token of the cluster at that address: {TOKEN_OPTIONS}",
    )


def _proof(token: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(token, side + server_nonce + client_nonce, "sha256")


def peer_uid(sock: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket, as the kernel knows it.

    Raises:
        NotAuthenticated: this system does not tell.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        raise NotAuthenticated(
            "this system does not tell who is at the other end of a Unix socket",
            fix="use TCP with a token",
        )
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def _age_s(path: str) -> float:
    """How long ago a file was written or put there, in seconds; 0: it is gone, or not known."""
    try:
        status = os.stat(path)
    except OSError:
        return 0.0
    return max(time.time() - max(status.st_mtime, status.st_ctime), 0.0)


class TokenFile:
    """The token that a file holds, which may be renewed.

    Args:
        first: the token that was read there before.
        now: a clock, in seconds.
        age_s: how long ago the file was written or put there.
    """

    def __init__(
        self,
        path: str,
        first: bytes,
        now: Callable[[], float] = time.monotonic,
        age_s: Callable[[str], float] = _age_s,
    ) -> None:
        self._now, self._current = now, first
        self._path, self._age_s = path, age_s
        self._asked_at = now()
        read = functools.partial(_read, path, FIX_JOINS)
        self._file = Renewed("the token", (path,), read, first=first, now=now)
        self._before: dict[bytes, float] = {}
        """Tokens that the file held before, and until when it did."""

    def tokens(self, grace_s: float) -> tuple[bytes, ...]:
        """The token, and behind it those that it has replaced in the last `grace_s`."""
        token, now = self._file.get(), self._now()
        if token != self._current:
            # Made anew, not changed: another thread may be reading it.
            before = {each: until for each, until in self._before.items() if each != token}
            # The last peer may have come long ago: the grace period is from the renewal on.
            before[self._current] = max(now - self._age_s(self._path), self._asked_at)
            self._before = dict([*before.items()][-TOKENS_BEFORE_MAX:])
            self._current = token
        self._asked_at = now
        valid = [each for each, until in self._before.items() if now - until < grace_s]
        return (token, *reversed(valid))


_files: dict[bytes, TokenFile] = {}
"""Files by the token that was read there first. What is pickled has a token only: in another
process it stays as it is, for the path may be another cluster's there."""


def tokens(credentials: Credentials, grace_s: float) -> tuple[bytes, ...]:
    """The tokens that hold at present, the newest first: of a file, as it is now.

    Args:
        grace_s: for how long one holds that its file had before.
    """
    hide(credentials.token)  # also one that came with a pickle, and not from a file
    file = _files.get(credentials.token)
    return file.tokens(grace_s) if file is not None else (credentials.token,)


def credentials_of(
    token_file: str | os.PathLike[str] | None, tls: TLS | None = None, *, joins: bool = True
) -> Credentials:
    """Credentials with the token that a file holds (64 hexadecimal digits, or any text).

    Args:
        joins: whether they are for a cluster that is there already, so that a new token is none.
    Raises:
        ParamServeError: it cannot be read, others may read it, or it holds no token.
    """
    check_tls(tls)
    if token_file is None:
        return Credentials(tls=tls) if tls is not None else NO_CREDENTIALS
    path = os.path.abspath(token_file)
    token = _read(path, FIX_JOINS if joins else "make one with: paramserve token FILE")
    if token not in _files:
        while len(_files) >= FILES_MAX:
            del _files[next(iter(_files))]
        _files[token] = TokenFile(path, token)
    return Credentials(token, tls)


def _read(name: str, fix: str) -> bytes:
    """The token in a file. Raises as `credentials_of`, with this `fix`."""
    path = Path(name)
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read().strip()
    except OSError as error:
        raise ParamServeError(
            f"the token file {path} cannot be read: {error.strerror}",
            fix=fix,
        ) from error
    if mode & 0o007:
        raise ParamServeError(
            f"every user of this machine may use the token file {path} (mode {mode & 0o777:o})",
            fix=f"chmod 600 {path}, and make a new token if others may have read it",
        )
    if len(token) < TOKEN_BYTES_MIN:
        raise ParamServeError(
            f"the token in {path} has {len(token)} characters, it needs {TOKEN_BYTES_MIN}",
            fix=fix,
        )
    hide(token)
    return token
