"""What TCP needs besides bytes: addresses as text, socket options, and a lost host that is noticed.

An idle connection to a lost host ends by keepalive. One with data on its way would be repeated for
a quarter of an hour, and `TCP_USER_TIMEOUT`, which is there to shorten that, ends connections to
living peers as well: those that have not read for as long (tcp(7): "buffered data may remain
untransmitted (due to zero window size)"; so does Linux since 5.11). A client that computes while
an answer waits for it is such a peer. So a thread looks at the kernel's own account instead: data
that was sent, and no acknowledgement of anything for `lost_s`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import struct
import threading
import weakref
from typing import Final

from paramserve.config import TLS, Deadlines
from paramserve.logs import event

logger = logging.getLogger("paramserve")

LOST_S: Final = Deadlines().lost_s
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})
_PROBES: Final = 60
"""Keepalive probes within `lost_s`, if it is so long; else one each second, the finest there is."""
_LOOKS: Final = 4
"""How often within `lost_s` the kernel's account is read."""
_TCP_INFO: Final = struct.Struct("8B24I")
_UNACKED: Final = 8 + 4
_LAST_ACK_RECEIVED_MS: Final = 8 + 12
"""Fields of `struct tcp_info` (linux/tcp.h, kernel ABI): packets without an acknowledgement, and
how long ago one came."""
UNSENT4, UNSENT6 = "192.0.2.1", "2001:db8::1"
"""Addresses that no host has (RFC 5737, RFC 3849), to ask the kernel for the way out."""


# --- addresses -----------------------------------------------------------------------------------


def split_place(place: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[host]:port`; raise `ValueError` for anything else."""
    host, _, port = place.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    plain = ":" not in bare or bare != host
    if not (bare and plain and port.isdecimal() and port.isascii() and int(port) < 1 << 16):
        raise ValueError(
            f"{place!r} is no place: expected host:port, or [host]:port with an IPv6 address, "
            "and a port up to 65535"
        )
    return bare, int(port)


def join_place(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    """The kind of address to listen at for a host: of a name that has both, IPv4's.

    Raises:
        OSError: the name is unknown.
    """
    if ":" in host:
        return socket.AF_INET6
    families = {each[0] for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return socket.AF_INET if socket.AF_INET in families else socket.AF_INET6


def plain(host: str) -> str:
    """A peer's address; one of IPv4 at a listener of both kinds is shown as such."""
    return host.removeprefix("::ffff:") if "." in host else host


def reached_at(host: str) -> str:
    """The host to tell others, for one that was bound: a wildcard stands for this machine.

    It is the address of the way out of this machine, because a host's name is often one of
    loopback at home, and unknown elsewhere. The wildcard of IPv6 stands for IPv4 as well, where
    there is no other way out. Without a way out it is loopback.
    """
    if host not in ("0.0.0.0", "::"):
        return host
    for unsent in (UNSENT6, UNSENT4) if host == "::" else (UNSENT4,):
        with contextlib.suppress(OSError):
            return way_to(unsent)
    return "::1" if ":" in host else "127.0.0.1"


def way_to(host: str) -> str:
    """The address of this machine from which it reaches a host.

    Raises:
        OSError: there is no way.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way_out:
        way_out.connect(address)  # datagrams: this sends nothing
        return str(way_out.getsockname()[0])


def warn_if_open(bind: str, tls: TLS | None) -> None:
    """Say so where others than this machine's processes can reach a port, and TLS is missing."""
    if bind.rpartition(":")[0] not in _LOOPBACK and tls is None:
        text = "listening beyond this machine at %s without TLS: values can be read on the way"
        logger.warning(text, bind, extra=event("no-tls", address=bind))


# --- options -------------------------------------------------------------------------------------


def prepare(sock: socket.socket, lost_s: float) -> None:
    """Set the options of a connected socket: no delay, and an end when the peer's host is lost."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval = max(1, math.ceil(lost_s / _PROBES))
    count = max(1, math.ceil(lost_s / interval) - 1)
    for name, value in (
        ("TCP_KEEPIDLE", interval),
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", count),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# --- lost hosts ----------------------------------------------------------------------------------


def is_lost(info: bytes, lost_s: float) -> bool:
    """Whether a peer's kernel has said nothing for `lost_s` to data that was sent to it.

    A full window is no sign: then nothing is on its way, and the kernel asks ever more seldom.
    Keepalive sees to it that the last word of a living peer is not older than a second or two.
    """
    if len(info) < _TCP_INFO.size:
        return False
    fields = _TCP_INFO.unpack_from(info)
    return bool(fields[_UNACKED]) and fields[_LAST_ACK_RECEIVED_MS] > lost_s * 1000


def _peer(sock: socket.socket) -> dict[str, str]:
    """Fields of a log line that name the peer, if it is known still."""
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return {}
    return {"peer": join_place(plain(host), port)}


class LostHosts:
    """Ends connections whose peer's host is lost while data is on its way there.

    `watch` takes a socket in; it needs no word at its end. One thread looks, as long as there is a
    socket to look at.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._sockets: weakref.WeakKeyDictionary[socket.socket, float] = weakref.WeakKeyDictionary()
        self._lost_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._running = False

    def ended(self, sock: socket.socket) -> bool:
        """Whether this connection was ended here, because the peer's host is lost."""
        return sock in self._lost_sockets

    def watch(self, sock: socket.socket, lost_s: float) -> None:
        """End this connection when its peer is lost: `shutdown`, which wakes a waiting reader."""
        if not hasattr(socket, "TCP_INFO"):
            return
        if os.getpid() != self._pid:  # A fork has no thread, and its sockets are the parent's.
            self._start()
        with self._changed:
            self._sockets[sock] = lost_s
            if self._running:
                self._changed.notify()
                return
            self._running = True
        threading.Thread(target=self._run, name="paramserve-lost-hosts", daemon=True).start()

    def look(self) -> float | None:
        """Look at each socket once; seconds until the next look, or None if none is left."""
        with self._changed:
            watched = list(self._sockets.items())
        remaining: list[float] = []
        for sock, lost_s in watched:
            try:
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                if is_lost(info, lost_s):
                    text = "a TCP peer's host has been silent for %.1f s"
                    logger.warning(text, lost_s, extra=event("host-lost", **_peer(sock)))
                    self._lost_sockets.add(sock)
                    sock.shutdown(socket.SHUT_RDWR)
                remaining.append(lost_s)
            except OSError:  # closed
                with self._changed:
                    self._sockets.pop(sock, None)
        return min(remaining) / _LOOKS if remaining else None

    def _run(self) -> None:
        while True:
            pause = self.look()
            with self._changed:
                if pause is not None:
                    self._changed.wait(pause)
                elif not self._sockets:
                    self._running = False
                    return


lost_hosts = LostHosts()
