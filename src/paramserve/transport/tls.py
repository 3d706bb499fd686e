"""TLS on a TCP connection: contexts from a `TLS`, and a socket that is used as a plain one is.

Both sides show a certificate and check the other's. What the errors of OpenSSL mean is said here:
which certificate was refused, by which side, and what to do.
"""

from __future__ import annotations

import errno
import functools
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from paramserve.config import TLS
from paramserve.errors import NotAuthenticated, ParamServeError, ProtocolError
from paramserve.transport.renewing import Renewed

RECORD_BYTES: Final = 16 << 10
"""What one TLS record holds at most (RFC 8446, 5.1)."""
_SENT_AT_ONCE: Final = 4 << 20
"""What one `sendmsg` takes at most: a fast reader must not keep the sender from its other peers."""
_ALERTS: Final = {
    "UNKNOWN_CA": "it is not signed by the peer's authority",
    "CERTIFICATE_EXPIRED": "it has expired",
    "CERTIFICATE_REVOKED": "it is revoked",
    "CERTIFICATE_REQUIRED": "the peer got none",
    "BAD_CERTIFICATE": "it is damaged",
    "CERTIFICATE_UNKNOWN": "the peer does not say why",
    "UNSUPPORTED_CERTIFICATE": "it is of a kind that the peer does not take",
    "ACCESS_DENIED": "the peer does not say why",
}
"""Ends of OpenSSL's names for the alerts (RFC 8446, 6.2) by which a peer refuses a certificate."""


class TlsSocket(ssl.SSLSocket):
    """A socket under TLS that behaves as a nonblocking TCP socket where the transport uses one.

    `BlockingIOError` means for reading that the socket has to become readable, for writing that it
    has to become writable and that the same bytes, or more, come again. Decrypted bytes that
    `pending` counts show in no `poll`.
    """

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive into a buffer; fills it as long as whole records arrive."""
        rest, done = buffer, 0
        while rest:
            try:
                count = int(self.read(len(rest), rest))
            except ssl.SSLWantReadError:
                break
            except ssl.SSLWantWriteError:
                raise _renegotiation() from None
            except ValueError as error:  # closed meanwhile, in another thread
                raise OSError(errno.EBADF, str(error)) from error
            if not count:
                return done
            done += count
            if count < RECORD_BYTES:
                return done
            rest = rest[count:]
        if not done:
            raise BlockingIOError(errno.EAGAIN, "no whole record has come")
        return done

    def recvmsg(  # type: ignore[override]  # ssl's own refuses every call
        self, bufsize: int, ancbufsize: int = 0, flags: int = 0
    ) -> Any:
        """Receive bytes; nothing ancillary arrives over TCP."""
        data = bytearray(bufsize)
        count = self.recv_into(memoryview(data))
        return bytes(data[:count]), [], 0, None

    def send(self, data: Any, flags: int = 0) -> int:
        """Send at most one record."""
        try:
            return super().send(data)
        except ssl.SSLWantWriteError:
            raise BlockingIOError(errno.EAGAIN, "the peer takes nothing") from None
        except ssl.SSLWantReadError:
            raise _renegotiation() from None

    def sendmsg(  # type: ignore[override]  # ssl's own refuses every call
        self, buffers: Iterable[memoryview], *_: object
    ) -> int:
        """Send buffers: small ones share a record, large ones are encrypted where they lie."""
        total = 0
        for part in _records(buffers):
            rest = part
            try:
                while rest:
                    count = self.send(rest)
                    total += count
                    rest = rest[count:]
                    if total >= _SENT_AT_ONCE:
                        return total
            except BlockingIOError:
                if total:
                    return total
                raise
        return total

    def shutdown(self, how: int) -> None:
        """Shut the socket down: `SSLSocket.shutdown` would end TLS first, and leave plain text."""
        socket.socket.shutdown(self, how)

    def drain(self) -> None:
        """Drop what has come: a socket closed over unread bytes takes back what it sent last."""
        try:
            while socket.socket.recv(self, 1 << 16):
                pass
        except OSError:
            return


def pending(sock: object) -> bool:
    """Whether there are bytes to read that do not show in a `poll`."""
    return isinstance(sock, TlsSocket) and sock.pending() > 0


def _records(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    """Cut buffers into records: neighbours of less than a record together, others by themselves.

    A piece that could not be written must begin with the same bytes the next time, and not be
    shorter: the pieces depend only on what stands in front of and within them.
    """
    small = bytearray()
    for buffer in buffers:
        if len(buffer) >= RECORD_BYTES:
            if small:
                yield memoryview(small)
                small = bytearray()
            yield buffer
            continue
        small += buffer
        if len(small) >= RECORD_BYTES:
            yield memoryview(small)
            small = bytearray()
    if small:
        yield memoryview(small)


def _renegotiation() -> ConnectionAbortedError:
    # Reading that waits for writing, or the reverse, after the handshake: contexts forbid it.
    return ConnectionAbortedError("the peer wants to renegotiate TLS, which is not taken")


# --- contexts and handshakes ---------------------------------------------------------------------


def server_context(tls: TLS) -> ssl.SSLContext:
    """Context of a listener. The files are read once per process, and again when they have changed:
    see `Renewed`.

    Raises:
        ParamServeError: a file cannot be read, or holds something else; it is named. Not where they
            could be used before.
    """
    return _for_servers(tls).get()


def client_context(tls: TLS) -> ssl.SSLContext:
    """Context of a client; see `server_context`."""
    return _for_clients(tls).get()


@functools.lru_cache(maxsize=8)
def _for_servers(tls: TLS) -> Renewed[ssl.SSLContext]:
    return _renewed("the certificate for peers that come", tls, _server_context)


@functools.lru_cache(maxsize=8)
def _for_clients(tls: TLS) -> Renewed[ssl.SSLContext]:
    return _renewed("the certificate towards servers", tls, _client_context)


def _renewed(what: str, tls: TLS, make: Callable[[TLS], ssl.SSLContext]) -> Renewed[ssl.SSLContext]:
    paths = (tls.certificate, tls.key, tls.authority)
    return Renewed(what, paths, functools.partial(make, tls))


def _server_context(tls: TLS) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _prepare(context, tls)
    context.verify_mode = ssl.CERT_REQUIRED
    # Connections last: no peer returns with a ticket.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    return context


def _client_context(tls: TLS) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = tls.check_host
    _prepare(context, tls)
    return context


def over(
    sock: socket.socket, context: ssl.SSLContext, server_hostname: str | None = None
) -> TlsSocket:
    """Take over a connected socket; `do_handshake` is the caller's. `sock` itself is empty then."""
    wrapped = context.wrap_socket(
        sock,
        server_side=server_hostname is None,
        do_handshake_on_connect=False,
        server_hostname=server_hostname,
    )
    assert isinstance(wrapped, TlsSocket)
    return wrapped


def _prepare(context: ssl.SSLContext, tls: TLS) -> None:
    context.sslsocket_class = TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    for path, what in (
        (tls.authority, "the authority's certificates"),
        (tls.certificate, "this side's certificate"),
        (tls.key, "this side's key"),
    ):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise _unusable(what, path, f"cannot be read: {error.strerror}") from error
    _load_authorities(context, tls.authority, "the authority's certificates")
    # Of two files OpenSSL does not say which one it cannot parse.
    _load_authorities(
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), tls.certificate, "this side's certificate"
    )

    def no_password() -> str:
        raise _unusable("this side's key", tls.key, "has a password")

    try:
        context.load_cert_chain(tls.certificate, tls.key, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"does not belong to the certificate {tls.certificate}"
        else:
            why = f"is no private key in PEM ({error.reason or error})"
        raise _unusable("this side's key", tls.key, why) from error


def _load_authorities(context: ssl.SSLContext, path: str, what: str) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        why = f"holds no certificate in PEM ({error.reason or error})"
        raise _unusable(what, path, why) from error


def _unusable(what: str, path: str, why: str) -> ParamServeError:
    return ParamServeError(
        f"TLS cannot be used: {what}, {path!r}, {why}",
        fix="give TLS the paths of PEM files; the key's without a password",
    )


def explain(error: ssl.SSLError, tls: TLS, peer: str) -> ParamServeError | ConnectionError:
    """What a failed handshake means, for the side whose `tls` it is."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _refused_here(error, tls, peer)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
        return ConnectionResetError("the peer closed within the TLS handshake")
    reason = error.reason or str(error)
    for end, why in _ALERTS.items():
        if reason.endswith(f"ALERT_{end}"):
            return NotAuthenticated(
                f"the peer at {peer} refused this side's certificate {tls.certificate!r}: {why}",
                fix="use a certificate that is signed by the authority of the peer's TLS settings",
            )
    return ProtocolError(
        f"the TLS handshake with {peer} failed: {reason}",
        fix="check the address, and that both sides take TLS 1.2 or 1.3",
    )


def _refused_here(error: ssl.SSLCertVerificationError, tls: TLS, peer: str) -> ParamServeError:
    why = error.verify_message.rstrip(".")
    if "mismatch" in why:
        fix = (
            "make the server's certificate for this name, dial it by a name that it has, "
            "or turn check_host off"
        )
    elif "expired" in why or "not yet valid" in why:
        fix = "renew the certificate, and check the clocks of both machines"
    else:
        fix = f"use certificates signed by the authority in {tls.authority!r} on both sides"
    return NotAuthenticated(f"the certificate of {peer} was refused: {why}", fix=fix)
