"""The client's end of one connection: blocking, polled in the thread that calls.

It reaches a peer (same host first), says hello, and moves frames. It retries nothing that was sent,
and a lock is the caller's business: one thread at a time, apart from `close`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from paramserve.config import NO_CREDENTIALS, Credentials, Deadlines, Limits
from paramserve.errors import (
    ClientClosed,
    ConnectTimeout,
    ParamServeError,
    ProtocolError,
    rebuild,
)
from paramserve.messages import Hello, Refused, Run, decoder
from paramserve.transport import forks
from paramserve.transport.arena import Arena
from paramserve.transport.dial import check_addresses, dial, is_unix, listens, remaining
from paramserve.transport.framing import (
    BUFFER_BYTES,
    IO_PARTS_MAX,
    PRELUDE_BYTES,
    ByteArray,
    FrameReader,
    drop,
    framed,
    header_not_sent,
    located,
    prelude,
)
from paramserve.transport.hello import check_answer, hello_frame, write_nonce
from paramserve.transport.redial import Redial
from paramserve.transport.tcp import LOST_S, lost_hosts
from paramserve.transport.tls import TlsSocket, pending

logger = logging.getLogger("paramserve")

_LIMITS: Final = Limits()
_IO_TIMEOUT_S: Final = Deadlines().request_s
LOGGED_MAX: Final = 1024
_logged: set[tuple[str, str]] = set()
"""Pairs, as far as logged, of the address that was used and the one it replaced."""
_RETRY_S: Final = 0.02
"""Seconds between attempts to reach a peer that is not there yet."""
_LOOK_S: Final = 0.5
"""How often a waiting thread looks whether another one has changed `io_timeout_s`."""
_decode_refused = decoder(Refused).decode


class EndedByPeer(ConnectionAbortedError):
    """A send failed, because the peer has ended the connection and has said why.

    Attributes:
        reason: what it said.
    """

    def __init__(self, reason: ParamServeError) -> None:
        super().__init__(reason.failed)
        self.reason = reason


class Link:
    """A connection to a server or the coordinator.

    Attributes:
        address: the one of the addresses that was reached.
        shared: whether the peer has mapped the arenas that `connect` was given.
        arenas: by number, where the runs of frames lie; set by its owner.
        payload_bytes: what is left to read of the payload whose header came last.
        more: whether `buffered` may have more frames, as `receive` has found last.
        broken_off: whether a call ended within a frame: the connection is of no further use.
        while_blocked: called, if set, when the peer takes nothing of a frame and something has come
            from it: it may read on only when that is read. It may call `receive` and read payloads.
    """

    def __init__(
        self, sock: socket.socket, address: str, hello: Hello, limits: Limits, io_timeout_s: float
    ) -> None:
        self.address = address
        self.shared = False
        self.arenas: Mapping[int, ByteArray] = {}
        self.payload_bytes = 0
        self.more = False
        self.broken_off = False
        self._broken_socket: socket.socket | None = None
        """Socket of a connection that was broken off and stays open."""
        self._spare: socket.socket | None = None
        """A closed one, for its place; see `keep_open`."""
        self.while_blocked: Callable[[], None] | None = None
        self._within_frame = False
        """Whether `while_blocked` runs."""
        self._rest: deque[memoryview] = deque()
        """Rest of the frame that `offer` took last, which the peer has not taken yet."""
        self._sock = sock
        self._hello = hello
        self._limits = limits
        self.io_timeout_s = io_timeout_s
        """A started send or payload that moves no byte for this long has failed; may be changed."""
        self._reader = FrameReader(limits.header_bytes_max, limits.payload_bytes_max)
        self._pid = os.getpid()
        self._closed = False
        """True: closed here; in a forked child too, where `abandon` is called first of all."""
        self._tls = isinstance(sock, TlsSocket)
        sock.setblocking(False)
        self._poll_in = select.poll()
        self._poll_in.register(sock, select.POLLIN)
        self._poll_out = select.poll()
        self._poll_out.register(sock, select.POLLOUT)
        self._poll_both = select.poll()
        self._poll_both.register(sock, select.POLLIN | select.POLLOUT)

    @classmethod
    def connect(
        cls,
        addresses: Sequence[str],
        hello: Hello,
        *,
        credentials: Credentials = NO_CREDENTIALS,
        arenas: Sequence[Arena] = (),
        timeout_s: float,
        limits: Limits = _LIMITS,
        io_timeout_s: float = _IO_TIMEOUT_S,
        lost_s: float = LOST_S,
        may_retry: Callable[[], bool] = lambda: True,
    ) -> Link:
        """Reach a peer at one of its addresses, over a Unix socket if that can be done.

        Without an answer it tries again, all addresses in turn, until `timeout_s`. Why a Unix
        address was passed over is logged once. The hello's `arenas` and `nonce` are set here.

        Args:
            addresses: `unix:<path>` (`unix:@<name>`: a name outside the file system) or
                `tcp:<host>:<port>`, an IPv6 address in brackets.
            credentials: the cluster's; needed for TCP.
            arenas: shared with the peer over a Unix socket. The first `RESERVED_BYTES` of the
                last one are written.
            io_timeout_s: a started send or payload that moves no byte for this long has failed.
            lost_s: a TCP connection ends when the peer's host is silent for about this long.
            may_retry: asked before all addresses are tried again: whether they are to be.
        Raises:
            ValueError: an address that is none, or TCP with a token that is too short.
            ConnectTimeout: no answer. Nothing was applied. Its cause is the failure at an address
                where a process listens, if there is one: see `dial.listens`.
            NotAuthenticated, ProtocolError: a side does not know the other; or a TCP
                address was about to be dialled without a token, or without TLS where it is spoken.
            ParamServeError: the peer refused the hello; this is its error.
        """
        redial = Redial(time.monotonic() + timeout_s, _RETRY_S)
        order = tuple(sorted(addresses, key=is_unix, reverse=True))
        check_addresses(order, credentials)
        while True:
            failures: list[tuple[str, Exception]] = []
            for address in order:
                tokenless = not (is_unix(address) or credentials.token)
                if tokenless and any(listens(failure) for _, failure in failures):
                    continue  # The peer is reached over a Unix socket: it is busy, not unknown.
                try:
                    link = cls._open(
                        address,
                        hello,
                        credentials,
                        arenas,
                        redial.deadline,
                        limits,
                        io_timeout_s,
                        lost_s,
                    )
                except (OSError, ParamServeError) as error:
                    failures.append((address, error))
                    continue
                for passed, why in failures:
                    _tell_once(address, passed, why)
                return link
            for _, failure in failures:
                if isinstance(failure, ParamServeError):
                    raise failure
            now = time.monotonic()
            again_at = redial.next_at(now)
            if again_at is None or not may_retry():
                answers = [failure for _, failure in failures if listens(failure)]
                raise _unreached(failures, timeout_s) from (answers or [failures[-1][1]])[0]
            time.sleep(again_at - now)

    @classmethod
    def _open(
        cls,
        address: str,
        hello: Hello,
        credentials: Credentials,
        arenas: Sequence[Arena],
        deadline: float,
        limits: Limits,
        io_timeout_s: float,
        lost_s: float,
    ) -> Link:
        sock = dial(address, credentials, deadline, lost_s)
        try:
            link = cls(sock, address, hello, limits, io_timeout_s)
            passed = arenas if is_unix(address) else ()
            link._greet(hello, [arena for arena in passed if arena.fd is not None], deadline)
        except BaseException:
            sock.close()
            raise
        forks.watch(link)
        return link

    def _greet(self, hello: Hello, arenas: Sequence[Arena], deadline: float) -> None:
        data = hello_frame(hello, arenas, self._limits.handshake_bytes_max)
        nonce = write_nonce(arenas)
        fds = [arena.fd for arena in arenas if arena.fd is not None]
        count = socket.send_fds(self._sock, [data], fds) if fds else self._sock.send(data)
        if count != len(data):
            raise ConnectionAbortedError("the peer reads nothing of its handshake")
        reply = self.receive(remaining(deadline))
        if reply is None:
            raise TimeoutError("no answer to the hello in time")
        check_answer(reply, nonce)
        self.shared = bool(arenas)

    def fileno(self) -> int:
        """The socket's descriptor, for a `poll` over several links; -1 once closed.

        After it shows readable, call `receive(0)` until it returns None: frames that came
        together are held here, not in the socket.
        """
        return self._sock.fileno()

    def send(self, header: bytes, runs: Sequence[Run] = ()) -> None:
        """Send one frame, with runs of `arenas`; when it returns, these may change.

        Raises:
            ProtocolError: the header is over `header_bytes_max`. Nothing was sent.
            ConnectionError: the peer is gone, or took nothing for `io_timeout_s`; the link is of
                no further use. Whether the frame had an effect is unknown.
            ClientClosed: closed here, or this is a forked child.
        """
        if self._closed:
            raise self._ended()
        size = len(header)
        if size > self._limits.header_bytes_max:
            raise header_not_sent(size, self._limits.header_bytes_max)
        try:
            if self._rest:
                self._send_all(self._rest)
            if runs:
                views, total = framed(header, runs, self.arenas)
            else:
                data = prelude(size, 0) + header
                views, total = [memoryview(data)], PRELUDE_BYTES + size
            try:
                count = self._sock.sendmsg(views[:IO_PARTS_MAX]) if runs else self._sock.send(data)
            except BlockingIOError:
                count = 0
            except OSError as error:
                raise self._failed(error) from error
            if count < total:
                rest = deque(views)
                drop(rest, count)
                self._send_all(rest)
        except BaseException:
            self._break_off()
            raise

    def offer(self, header: bytes) -> bool:
        """Send one frame without a payload, and never wait. What the peer does not take at once, of
        this one frame, goes before what is sent next; see `flush`.

        Returns:
            False: it has not taken the one before yet, or `while_blocked` asks. Nothing was sent.
        Raises:
            As `send`.
        """
        if self._within_frame or not self.flush():
            return False
        if len(header) > self._limits.header_bytes_max:
            raise header_not_sent(len(header), self._limits.header_bytes_max)
        self._rest.append(memoryview(prelude(len(header), 0) + header))
        self.flush()
        return True

    def flush(self) -> bool:
        """Send what is left of the frame that was offered last, and never wait; whether the peer
        has taken all of it.

        Raises:
            ConnectionError, ClientClosed: as `send`.
        """
        if self._closed:
            raise self._ended()
        try:
            while self._rest:
                drop(self._rest, self._sock.sendmsg(self._rest))
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._failed(error) from error
        except BaseException:
            self._break_off()
            raise
        return True

    def _send_all(self, views: deque[memoryview]) -> None:
        while views:
            try:
                drop(views, self._sock.sendmsg(islice(views, IO_PARTS_MAX)))
            except BlockingIOError:
                self._wait_to_send()
            except OSError as error:
                raise self._failed(error) from error

    def _wait_to_send(self) -> None:
        if self.while_blocked is None:
            self._wait(self._poll_out, "the peer took nothing")
            return
        self._wait(self._poll_both, "the peer took nothing")
        if pending(self._sock) or self._poll_in.poll(0):
            self._within_frame = True
            self.while_blocked()
            self._within_frame = False

    def receive(self, timeout_s: float) -> bytes | None:
        """The header of the next frame, or None if none was complete in time.

        If the frame has a payload, `payload_bytes` is its size, and it has to be read or skipped
        before the next call. A frame that has come in part is kept.

        Raises:
            ConnectionError: the peer is gone.
            ProtocolError: it sent what is no frame; the link is of no further use.
            ClientClosed: closed here, or this is a forked child.
        """
        if self._closed:
            raise self._ended()
        if self.payload_bytes:
            raise RuntimeError("read or skip the payload before the next receive")
        reader = self._reader
        header = reader.next() if reader.end else None
        deadline = 0.0
        while header is None:
            if timeout_s > 0:
                if not deadline:
                    deadline = time.monotonic() + timeout_s
                if not pending(self._sock) and not self._poll_in.poll(timeout_s * 1000):
                    return None
                timeout_s = max(deadline - time.monotonic(), 0.0)
            try:
                header = self._fill()
            except BlockingIOError:
                if timeout_s <= 0:
                    return None
                # Under TLS what came may be no whole record.
        self.payload_bytes = reader.payload_bytes
        self.more = reader.end > 0 or self._tls
        return header

    def _fill(self) -> bytes | None:
        """Read what the socket has; the next header, if it is whole then."""
        reader = self._reader
        try:
            try:
                count = self._sock.recv_into(reader.space() if reader.end else reader.buffer)
            except BlockingIOError:
                raise
            except OSError as error:
                raise self._failed(error) from error
            if not count:
                raise self._closed_by_peer("the peer closed the connection")
            return reader.filled(count)
        except BlockingIOError:
            raise
        except BaseException:
            self._break_off()
            raise

    def buffered(self) -> bytes | None:
        """Receive only what is here already: the socket is not touched.

        Raises:
            As `receive`.
        """
        reader = self._reader
        header = reader.next() if reader.end else None
        while header is None and self._tls and pending(self._sock):  # Decrypted already.
            header = self._fill()
        self.payload_bytes = reader.payload_bytes if header is not None else 0
        return header

    def read_payload(self) -> None:
        """Read the whole payload of the frame whose header came last to its places in `arenas`.

        Raises:
            ProtocolError: a place is not in one; the link is of no further use.
            ConnectionError: the peer is gone, or sent nothing for `io_timeout_s`.
        """
        try:
            rest = located(self._reader.runs, self.arenas)
            self._reader.place(rest)
            if rest:
                self._read(rest)
        except BaseException:
            self._break_off()
            raise
        self.payload_bytes = 0
        self.more = self._reader.end > 0 or self._tls

    def skip_payload(self) -> None:
        """Read the payload of the frame whose header came last and drop it."""
        size = self.payload_bytes
        scrap = memoryview(bytearray(min(size, 1 << 20)))
        try:
            while size:
                part = deque([scrap[:size]])
                size -= len(part[0])
                self._reader.place(part)
                self._read(part)
        except BaseException:
            self._break_off()
            raise
        self.payload_bytes = 0

    def _read(self, rest: deque[memoryview]) -> None:
        """Read on within a payload, to where it belongs."""
        reader = self._reader
        while rest:
            # A small part is read together with what follows it, a large one into its place.
            direct = len(rest[0]) >= BUFFER_BYTES
            try:
                count = self._sock.recv_into(rest[0] if direct else reader.space())
            except BlockingIOError:
                self._wait(self._poll_in, "the peer sent nothing")
                continue
            except OSError as error:
                raise self._failed(error) from error
            if not count:
                raise self._closed_by_peer("the peer closed within a payload")
            if direct:
                drop(rest, count)
            else:
                reader.more(count)
                reader.place(rest)

    def attach(self, arena: Arena, *, timeout_s: float) -> None:
        """Share one more arena with the peer, over a connection made for that alone.

        When it returns, the peer has mapped the arena and knows it by its number.

        Raises:
            ValueError: this link shares no memory (`shared` is False).
            ParamServeError: as `connect`. The peer knows no such arena.
        """
        if not self.shared or arena.fd is None:
            raise ValueError(f"the link to {self.address} shares no memory")
        hello = msgspec.structs.replace(self._hello, role="attach")
        Link.connect(
            [self.address], hello, arenas=[arena], timeout_s=timeout_s, limits=self._limits
        ).close()

    def keep_open(self) -> None:
        """Keep a broken connection open until `close`, since the peer takes its end for the end of
        this process."""
        self._spare = socket.socket()
        self._spare.close()

    def close(self) -> None:
        """End the connection; repeating is safe. A call that waits in another thread raises."""
        self._closed = True
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptor in a forked child; the parent's connection goes on."""
        self._closed = True
        self._sock.close()
        if self._broken_socket is not None:
            self._broken_socket.close()

    def _break_off(self) -> None:
        """Use the connection no more: a call was interrupted within a frame, and the peer would
        take the next frame for the rest of it. Later calls raise `ConnectionError`."""
        if self._sock.fileno() >= 0:
            self.broken_off = True
            if self._spare is not None:
                self._broken_socket, self._sock = self._sock, self._spare
            else:
                self._sock.close()

    def _wait(self, poll: select.poll, what: str) -> None:
        began = time.monotonic()
        left_s = self.io_timeout_s
        while not poll.poll(min(left_s, _LOOK_S) * 1000):
            left_s = self.io_timeout_s - (time.monotonic() - began)
            if left_s <= 0:
                late = f"{what} for {self.io_timeout_s:.1f} s"
                raise self._failed(ConnectionAbortedError(late))

    def _closed_by_peer(self, how: str) -> Exception:
        host_lost = lost_hosts.ended(self._sock)
        return self._failed(ConnectionResetError("the peer's host is lost" if host_lost else how))

    def _ended(self) -> ClientClosed:
        """Why it is of no use any more: it was closed, or this is a forked child."""
        if os.getpid() != self._pid:
            return forks.forked(self.address, self._pid)
        return forks.ended(self.address)

    def _failed(self, error: OSError) -> Exception:
        """What to raise after the socket failed: it was closed here, or the peer is gone."""
        if self._closed:
            return self._ended()
        reason = None
        if isinstance(error, BrokenPipeError | ConnectionResetError):
            reason = self._last_refusal()
        self._sock.close()
        if reason is not None:
            return EndedByPeer(reason)
        if isinstance(error, ConnectionError):
            return error
        if self.broken_off:
            return ConnectionAbortedError(
                f"the connection to {self.address} was broken off: a call was interrupted within a "
                "message"
            )
        return ConnectionAbortedError(f"the connection to {self.address} failed: {error}")

    def _last_refusal(self) -> ParamServeError | None:
        """Why the peer has ended the connection, if that is the last that it has sent."""
        reader = self._reader
        last: bytes | None = None
        try:
            while not self.payload_bytes:
                header = reader.next() if reader.end else None
                if header is None:
                    count = self._sock.recv_into(reader.space())
                    if not count:
                        break
                    header = reader.filled(count)
                last = header if header is not None else last
                self.payload_bytes = reader.payload_bytes if header is not None else 0
        except (OSError, ProtocolError) as failed:
            logger.debug("what %s has sent last cannot be read: %s", self.address, failed)
        try:
            refusal = _decode_refused(last) if last is not None else None
        except msgspec.MsgspecError:
            return None
        return (
            rebuild(refusal.kind, refusal.failed, refusal.applied, refusal.fix) if refusal else None
        )


def _tell_once(address: str, passed: str, why: Exception) -> None:
    """Say why an address was passed over; at debug if that was said before."""
    level = logging.DEBUG if (address, passed) in _logged else logging.WARNING
    if len(_logged) >= LOGGED_MAX:
        _logged.clear()
    _logged.add((address, passed))
    logger.log(level, "using %s, because %s failed: %s", address, passed, why)


def _unreached(failures: list[tuple[str, Exception]], timeout_s: float) -> ConnectTimeout:
    tried = ", ".join(f"{address} ({error})" for address, error in failures)
    return ConnectTimeout(
        f"connect timed out: no process answered at {tried}; waited {timeout_s:.1f} s",
        fix="look whether the process that should listen there still runs, or raise timeout_s",
    )
