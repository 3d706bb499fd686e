"""Listening: sockets that accept peers, have them prove who they are, and hand them to a handler.

Bad peers are closed, counted in `Listener.refused` and logged at debug; where the token or the
certificate is wrong, as a warning once a minute for each address. None of them raises out of the
event loop. What an unknown peer can hold is one of `handshakes_max` sockets, for at most
`handshake_timeout_s`, with at most `handshake_bytes_max` bytes. Where all are held, the next peer
takes the place of the one that has waited longest without a proof, of the address that holds most:
so idle peers keep no other one out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import secrets
import socket
from collections import Counter
from collections.abc import Callable
from typing import Final

from paramserve.config import NO_CREDENTIALS, Credentials, Limits
from paramserve.errors import NotAuthenticated, ParamServeError
from paramserve.logs import event
from paramserve.transport import auth, forks, handshake, tcp, tls
from paramserve.transport.connection import (
    Connection,
    Handler,
    Kind,
    StreamConnection,
    refusal,
)
from paramserve.transport.dial import unix_name
from paramserve.transport.framing import prelude

__all__ = ["Connection", "Handler", "Listener", "listen", "listen_tcp", "listen_unix"]

logger = logging.getLogger("paramserve")

_BACKLOG: Final = 128
_ACCEPTS_AT_ONCE: Final = 32
_NO_DESCRIPTORS_PAUSE_S: Final = 0.1
"""How long to leave peers waiting when this process has no descriptor left."""
_DESCRIPTORS_EACH: Final = 3
"""Descriptors of a client: socket and arena, and one more while it shares a larger arena."""
_DESCRIPTORS_OWN: Final = 256
"""Descriptors of the process itself."""
_LOG_EVERY_S: Final = 60.0
"""Seconds between two warnings that unknown peers hold all places, that no peer can be accepted, or
of refusals of one address."""
_REFUSED_FROM_MAX: Final = 256
"""Addresses that are told apart in such warnings within that time; others are only counted."""


class Listener:
    """A listening socket and the connections that came through it.

    Attributes:
        address: `unix:<path>` or `tcp:<host>:<port>`, as a client takes it.
        refused: peers that were closed before the handler saw them.
    """

    def __init__(
        self,
        sock: socket.socket,
        kind: Kind,
        address: str,
        handler: Handler,
        limits: Limits,
        *,
        credentials: Credentials = NO_CREDENTIALS,
        lost_s: float = tcp.LOST_S,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self.refused = 0
        self._sock = sock
        self._kind: Kind = kind
        self._handler = handler
        self._limits = limits
        self._credentials = credentials
        self._lost_s = lost_s
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], socket.socket] = {}
        self._unproven: dict[asyncio.Task[None], str] = {}
        """Handshakes of peers that have proved nothing yet, oldest first, with their addresses."""
        self._crowded_out: set[asyncio.Task[None]] = set()
        self._told_at = self._accept_told_at = -_LOG_EVERY_S
        self._refused_from: dict[str, tuple[float, int]] = {}
        """When a refusal of each address was logged, and how often it was refused since."""
        self._connections: set[StreamConnection] = set()
        self._closed = False
        sock.setblocking(False)
        self._loop.add_reader(sock, self._accept)
        forks.watch(self)

    def close(self, reason: ParamServeError | None = None) -> None:
        """Stop listening, end all handshakes and connections; repeating is safe.

        Args:
            reason: what peers are told, as far as their sockets take it at once; None: nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self._on_close()
        for task in list(self._handshakes):
            task.cancel()
        for conn in list(self._connections):
            if reason is not None:
                conn.refuse(reason)
            conn.close()

    def abandon(self) -> None:
        """Close the descriptors in a forked child: there the parent's peers must not find a
        listener when the parent is gone."""
        self._closed = True
        self._sock.close()
        for sock in self._handshakes.values():
            sock.close()
        for conn in self._connections:
            conn.abandon()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, peer = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            sock.setblocking(False)
            if len(self._connections) >= self._limits.connections_max or not self._make_room():
                self._refused(sock, "too many peers at one time")
                continue
            task = self._loop.create_task(self._admit(sock))
            self._handshakes[task] = sock
            self._unproven[task] = tcp.plain(str(peer[0])) if self._kind == "tcp" else ""
            task.add_done_callback(self._handshake_ended)

    def _make_room(self) -> bool:
        """Whether one more handshake may begin; for that, the oldest unproven one may be ended."""
        if len(self._handshakes) - len(self._crowded_out) < self._limits.handshakes_max:
            return True
        if not self._unproven:
            return False
        ((crowd, count),) = Counter(self._unproven.values()).most_common(1)
        oldest = next(task for task, address in self._unproven.items() if address == crowd)
        del self._unproven[oldest]
        self._crowded_out.add(oldest)
        oldest.cancel()
        if self._loop.time() - self._told_at >= _LOG_EVERY_S:
            self._told_at = self._loop.time()
            logger.warning(
                "%d peers at %s have proved nothing yet, %d of them from %s: the oldest are closed",
                self._limits.handshakes_max,
                self.address,
                count,
                crowd or "this machine",
                extra=event("peers-crowded", address=self.address, peer=crowd, peers=count),
            )
        return True

    def _pause(self, error: OSError) -> None:
        """Accept nothing for a moment: the socket stays readable and would keep the loop busy."""
        if self._loop.time() - self._accept_told_at >= _LOG_EVERY_S:
            self._accept_told_at = self._loop.time()
            extra = event("accept-failed", address=self.address)
            logger.warning("cannot accept at %s: %s", self.address, error, extra=extra)
        self._loop.remove_reader(self._sock)
        self._loop.call_later(_NO_DESCRIPTORS_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock, self._accept)

    def _handshake_ended(self, task: asyncio.Task[None]) -> None:
        sock = self._handshakes.pop(task)
        self._unproven.pop(task, None)
        if task.cancelled():
            if task in self._crowded_out:
                self._crowded_out.discard(task)
                self._refused(sock, "it proved nothing while others came")
            sock.close()
            return
        self._crowded_out.discard(task)
        error = task.exception()
        if error is not None:
            context = {"message": f"the handler at {self.address} failed", "exception": error}
            self._loop.call_exception_handler(context)

    async def _admit(self, sock: socket.socket) -> None:
        """One handshake, from the accepted socket to the handler."""
        authenticated = False
        try:
            async with asyncio.timeout(self._limits.handshake_timeout_s):
                if self._kind == "unix":
                    handshake.check_uid(sock)
                else:
                    sock = self._greet(sock)
                    await self._authenticate(sock)
                authenticated = True
                self._proved()
                arenas_max = self._limits.arenas_max if self._kind == "unix" else 0
                hello, arenas = await handshake.read_hello(
                    sock, self._limits, arenas_max=arenas_max
                )
        except (ParamServeError, OSError) as error:
            if authenticated and isinstance(error, ParamServeError):
                _send_refusal(sock, error)
            if isinstance(error, NotAuthenticated):
                self._log_refused(sock, error.failed)
            self._refused(sock, str(error) or type(error).__name__)
            return
        conn = StreamConnection(
            sock,
            self._kind,
            hello,
            arenas,
            self._handler,
            self._limits,
            self._forget,
            self._loop,
        )
        self._connections.add(conn)
        conn.open(handshake.welcome(hello, arenas))

    def _proved(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._unproven.pop(task, None)

    def _greet(self, sock: socket.socket) -> socket.socket:
        """Begin a TCP peer's handshake; the socket to go on with."""
        settings = self._credentials.tls
        tcp.prepare(sock, self._lost_s)
        handshake.greet(sock, tls=settings is not None)
        if settings is not None:
            task = asyncio.current_task()
            assert task is not None
            sock = self._handshakes[task] = tls.over(sock, tls.server_context(settings))
        tcp.lost_hosts.watch(sock, self._lost_s)
        return sock

    async def _authenticate(self, sock: socket.socket) -> None:
        if self._credentials.tls is not None:
            assert isinstance(sock, tls.TlsSocket)
            await handshake.secure(sock, self._credentials.tls)
        tokens = auth.tokens(self._credentials, self._limits.token_grace_s)
        await handshake.check_token(sock, tokens)

    def _forget(self, conn: StreamConnection) -> None:
        self._connections.discard(conn)

    def _log_refused(self, sock: socket.socket, why: str) -> None:
        """Log a peer that is not authenticated, once a minute for each address."""
        try:
            tcp_peer = self._kind == "tcp"
            peer = tcp.plain(str(sock.getpeername()[0])) if tcp_peer else "this machine"
        except OSError:  # it has gone already
            peer = "an address that is gone"
        now, log_times = self._loop.time(), self._refused_from
        logged_at, count = log_times.get(peer, (now - _LOG_EVERY_S, 0))
        if peer not in log_times and len(log_times) >= _REFUSED_FROM_MAX:
            oldest = next(iter(log_times))
            if now - log_times[oldest][0] < _LOG_EVERY_S:
                return
            del log_times[oldest]
        if now - logged_at < _LOG_EVERY_S:
            log_times[peer] = logged_at, count + 1
            return
        log_times.pop(peer, None)  # those that were told last stand last
        log_times[peer] = now, 0
        more = f"; {count} more from there since the last such line" if count else ""
        extra = event("peer-refused", address=self.address, peer=peer, more=count)
        text = "refused a peer from %s at %s: %s%s"
        logger.warning(text, peer, self.address, why, more, extra=extra)

    def _refused(self, sock: socket.socket, reason: str) -> None:
        self.refused += 1
        logger.debug("a peer was refused at %s: %s", self.address, reason)
        sock.close()


def _send_refusal(sock: socket.socket, error: ParamServeError) -> None:
    header = refusal(error)
    with contextlib.suppress(OSError):
        sock.send(prelude(len(header), 0) + header)


async def listen(
    directory: str,
    name: str,
    tcp_bind: str,
    credentials: Credentials,
    handler: Handler,
    limits: Limits,
    *,
    advertise: str = "",
    lost_s: float = tcp.LOST_S,
) -> list[Listener]:
    """Listen at a Unix socket and, if there is a `tcp_bind` (`host:port`), at that as well.

    Raises this process's soft limit of open files to what `limits.clients_max` clients need, as far
    as the hard limit lets it.

    Args:
        directory: folder of the socket `<name>.sock`; empty: it has no place in the file system.
        tcp_bind: an IPv6 address stands in brackets.
        advertise, lost_s: as for `listen_tcp`.
    Raises:
        ParamServeError, ValueError: as `listen_unix` and `listen_tcp`. Nothing listens.
    """
    path = f"{directory}/{name}.sock" if directory else f"@paramserve-{secrets.token_hex(16)}"
    place = tcp.split_place(tcp_bind) if tcp_bind else None
    _allow_descriptors(limits.clients_max)
    listeners = [await listen_unix(path, handler, limits)]
    if place is not None:
        host, port = place
        try:
            listener, _ = await listen_tcp(
                host, port, credentials, handler, limits, advertise=advertise, lost_s=lost_s
            )
        except BaseException:
            listeners[0].close()
            raise
        listeners.append(listener)
    return listeners


def _allow_descriptors(clients: int) -> None:
    # The usual soft limit of 1,024 ends near 400 local clients, the hard one is far above that.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _DESCRIPTORS_OWN + _DESCRIPTORS_EACH * clients
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):  # forbidden in this container
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


async def listen_unix(path: str, handler: Handler, limits: Limits) -> Listener:
    """Listen at a Unix socket for peers of this user.

    The socket's file has mode 0600, and `close` unlinks it. A path that begins with @ is a name
    outside the file system (Linux): it has no mode, and is gone with the socket.

    Raises:
        ParamServeError: the path is taken, too long, or cannot be written; or begins with @ where
            that is not known. Nothing is left there.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        raise NotAuthenticated(
            "Unix sockets cannot be used: this system does not tell who connects", fix="use TCP"
        )
    bound = unix_name(path)
    in_file_system = bound == path
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if in_file_system:
            # On Linux the file gets the socket's mode: at no moment could others connect.
            os.fchmod(sock.fileno(), 0o600)
        sock.bind(bound)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise _cannot_listen(
            f"unix:{path}", error, "use another, shorter or writable, path"
        ) from error

    def unlink() -> None:
        if in_file_system:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    return Listener(sock, "unix", f"unix:{path}", handler, limits, on_close=unlink)


async def listen_tcp(
    host: str,
    port: int,
    credentials: Credentials,
    handler: Handler,
    limits: Limits,
    *,
    advertise: str = "",
    lost_s: float = tcp.LOST_S,
) -> tuple[Listener, str]:
    """Listen at a TCP port (0: any free one) for peers that hold the token.

    Whether `host` may be other than loopback is the caller's to decide.

    Args:
        host: a name or address of this machine, IPv6 without brackets; 0.0.0.0, all of its IPv4
            addresses; ::, all of both kinds.
        credentials: with `tls`, peers must show a certificate as well.
        advertise: host that others dial, if it is another one. Without it a wildcard stands for
            the address of this machine's way out.
        lost_s: a connection ends when the peer's host is silent for about this long.
    Returns:
        The listener and the `host:port` at which others reach it.
    Raises:
        ValueError: the token is too short.
        ParamServeError: the port is taken, the host is not this machine's, or a file of the TLS
            settings cannot be used. Nothing listens.
    """
    auth.check_token(credentials.token)
    if credentials.tls is not None:
        tls.server_context(credentials.tls)
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        family = tcp.family_of(host)
        sock = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        fix = "choose another host or port (0: any free port)"
        raise _cannot_listen(f"tcp:{tcp.join_place(host, port)}", error, fix) from error
    advertised = advertise.strip("[]") if advertise else tcp.reached_at(host)
    place = tcp.join_place(advertised, sock.getsockname()[1])
    listener = Listener(
        sock, "tcp", f"tcp:{place}", handler, limits, credentials=credentials, lost_s=lost_s
    )
    return listener, place


def _cannot_listen(address: str, error: OSError, fix: str) -> ParamServeError:
    in_use = error.errno == errno.EADDRINUSE
    why = "another process listens there" if in_use else error.strerror or str(error)
    return ParamServeError(f"could not listen at {address}: {why}", fix=fix)
