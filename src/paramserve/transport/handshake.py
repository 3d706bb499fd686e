"""The server's side of a handshake: from an accepted socket to a peer that is known.

Nothing of variable size is read before the peer's uid or token is checked, nothing is decoded
before its size is. It works on the raw socket, because asyncio drops descriptors, and reads exactly
what it needs: what the peer sends behind its hello stays in the kernel for the connection.
"""

from __future__ import annotations

import array
import asyncio
import os
import secrets
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from paramserve.config import TLS, Limits
from paramserve.errors import NotAuthenticated, ProtocolError
from paramserve.messages import Hello, Welcome, decoder
from paramserve.transport import auth
from paramserve.transport.arena import NONCE_BYTES, map_arena
from paramserve.transport.framing import PRELUDE_BYTES, ByteArray, parse_prelude
from paramserve.transport.tls import TlsSocket, explain

_HELLO: Final = decoder(Hello)
_CLOEXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def check_uid(sock: socket.socket) -> None:
    """Raise `NotAuthenticated` unless the peer of a Unix socket is this process's user."""
    uid, own = auth.peer_uid(sock), os.geteuid()
    if uid != own:
        raise NotAuthenticated(
            f"a process of user {uid} connected to a socket of user {own}",
            fix="run all parts as the same user, or use TCP with a token",
        )


def greet(sock: socket.socket, *, tls: bool) -> None:
    """Say what listens here, and whether TLS begins now."""
    _send(sock, auth.greeting(tls=tls))


async def secure(sock: TlsSocket, tls: TLS) -> None:
    """Complete the TLS handshake, which includes the check of the client's certificate.

    Raises:
        ParamServeError, ConnectionError: it failed; the client has been told as far as TLS does.
    """
    while True:
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            await _until_readable(sock)
        except ssl.SSLWantWriteError:
            await _until_writable(sock)
        except ssl.SSLError as error:
            sock.drain()  # else the alert that says why may be lost with the connection
            raise explain(error, tls, "a client") from error


async def check_token(sock: socket.socket, tokens: Sequence[bytes]) -> None:
    """Prove one of these tokens to each other; see `auth`. Raises `NotAuthenticated`."""
    nonce = secrets.token_bytes(auth.NONCE_BYTES)
    _send(sock, nonce)
    data, _ = await _read(sock, auth.ANSWER_BYTES)
    try:
        proof = auth.check_answer(tokens, nonce, data)
    except NotAuthenticated:
        _send(sock, auth.REFUSAL)
        raise
    _send(sock, proof)


async def read_hello(
    sock: socket.socket, limits: Limits, *, arenas_max: int
) -> tuple[Hello, dict[int, ByteArray]]:
    """Read the hello of a peer that is known, and map the arenas that come with it.

    Raises:
        ProtocolError, Overloaded: what the peer sent is not allowed. Nothing stays mapped or open.
    """
    fds: list[int] = []
    try:
        data, received = await _read(sock, PRELUDE_BYTES, arenas_max)
        fds += received
        header_bytes, _ = parse_prelude(
            data, header_max=limits.handshake_bytes_max - PRELUDE_BYTES, payload_max=0
        )
        data, _ = await _read(sock, header_bytes)
        hello = _HELLO.decode(data)
        return hello, _map(hello, fds, limits)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(
            f"a hello was refused: {error}", fix="run the same version of paramserve on both sides"
        ) from error
    finally:
        for fd in fds:
            os.close(fd)


def welcome(hello: Hello, arenas: dict[int, ByteArray]) -> Welcome:
    """The answer: the nonce as it stands in the last arena shows that the memory is shared."""
    if not hello.arenas:
        return Welcome()
    return Welcome(arenas[hello.arenas[-1][0]][:NONCE_BYTES].tobytes())


def _map(hello: Hello, fds: list[int], limits: Limits) -> dict[int, ByteArray]:
    """Map each arena of the hello; takes those descriptors that it deals with out of `fds`."""
    numbers = {number for number, _ in hello.arenas}
    if len(hello.arenas) != len(fds) or len(numbers) != len(fds) or min(numbers, default=1) < 1:
        raise ProtocolError(
            f"a hello was refused: it names arenas {hello.arenas}, "
            f"{len(fds)} descriptors came with it",
            fix="number arenas from 1, each once, and send one descriptor for each",
        )
    arenas: dict[int, ByteArray] = {}
    remaining = limits.arena_bytes_max
    for number, nbytes in hello.arenas:
        arenas[number] = map_arena(fds.pop(0), nbytes, remaining)
        remaining -= nbytes
    return arenas


async def _read(sock: socket.socket, size: int, fds_max: int = 0) -> tuple[bytes, list[int]]:
    """Read exactly `size` bytes, and up to `fds_max` descriptors that lie at them."""
    data = bytearray()
    fds: list[int] = []
    room = socket.CMSG_SPACE(fds_max * array.array("i").itemsize) if fds_max else 0
    try:
        while len(data) < size:
            try:
                part, ancillary, flags, _ = sock.recvmsg(size - len(data), room, _CLOEXEC)
            except BlockingIOError:
                await _until_readable(sock)
                continue
            for level, kind, raw in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    numbers = array.array("i")
                    numbers.frombytes(raw[: len(raw) - len(raw) % numbers.itemsize])
                    fds += numbers
            if flags & socket.MSG_CTRUNC:
                raise ProtocolError(
                    f"a hello was refused: more than {fds_max} descriptors came with it",
                    fix="use fewer arenas, or raise arenas_max",
                )
            if not part:
                raise ConnectionResetError("the peer closed within its handshake")
            data += part
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return bytes(data), fds


async def _until_readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await _until(sock, loop.add_reader, loop.remove_reader)


async def _until_writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await _until(sock, loop.add_writer, loop.remove_writer)


async def _until(
    sock: socket.socket, add: Callable[..., Any], remove: Callable[[socket.socket], Any]
) -> None:
    ready = asyncio.get_running_loop().create_future()

    def wake() -> None:
        remove(sock)
        if not ready.done():
            ready.set_result(None)

    add(sock, wake)
    try:
        await ready
    finally:
        remove(sock)


def _send(sock: socket.socket, data: bytes) -> None:
    if sock.send(data) != len(data):
        raise ConnectionAbortedError("the peer reads nothing of its handshake")
