"""TCP on the loopback interface: ours, and bare socket pairs that move as many bytes.

On one host ours would take the Unix socket and shared memory; here its client is told the servers'
TCP addresses only. Both sides run with and without TLS, with the same certificates.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from deploy.certificates import make_certificates

import paramserve as ps
from benchmarks.floor import Ping, send_back
from benchmarks.ours import InPlace
from benchmarks.workloads import Call, Tcp, fresh, medians, timed
from paramserve.client import Connection
from paramserve.config import Deadlines, Limits
from paramserve.messages import Hello, Join, Joined
from paramserve.transport.auth import credentials_of
from paramserve.transport.control import ControlLink
from paramserve.transport.link import Link

HOST = "127.0.0.1"
START_S = 30.0
GO = b"g"


def ours(load: Tcp, scratch: Path) -> dict[str, float]:
    """`push_pull`, the gradient in its slot, the values left in theirs."""
    figures: dict[str, float] = {}
    for name, tls in (("plain", None), ("tls", make_certificates(scratch / "certificates"))):
        with _served(fresh(scratch, name), tls) as client:
            client.define("large", np.zeros(load.large, np.float32), rule=ps.Add())
            call = InPlace(client, "large")
            figures[f"large_{name}"] = _of_large(call, load, call.fill)
            if tls is None:
                with bare(send_back, None) as sock:
                    figures |= _small(load, client, Ping(sock))
    return figures


def _small(load: Tcp, client: ps.Client, ping: Ping) -> dict[str, float]:
    client.define("small", np.zeros(load.small, np.float32), rule=ps.Add())
    call = InPlace(client, "small")

    def fill() -> None:
        ping.end()
        call.fill()

    calls: dict[str, Call] = {"small": call, "ping": ping}
    before: dict[str, Call] = {"small": fill, "ping": ping.begin}
    found = medians(calls, load.calls, before=before, block=1)
    rows = medians(calls, load.calls, before=before)
    return found | {"small_in_a_row": rows["small"], "ping_in_a_row": rows["ping"]}


def _of_large(call: Call, load: Tcp, prepare: Call = lambda: None) -> float:
    """Median seconds, after two calls that are not counted."""
    return median([timed(call, prepare=prepare) for _ in range(load.large_calls + 2)][2:])


@contextmanager
def _served(folder: Path, tls: ps.TLS | None) -> Iterator[ps.Client]:
    """A client of a server in another process, over TCP only."""
    token = folder / "token"
    token.touch(0o600)
    token.write_text(os.urandom(32).hex())
    address = folder / "address"
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=_serve, args=(token, tls, address))
    server.start()
    try:
        found = _read(address)
        with closing(_client(f"tcp:{found}", token, tls)) as client:
            yield client
    finally:
        server.terminate()
        server.join()


def _serve(token: Path, tls: ps.TLS | None, address: Path) -> None:
    def ready(found: str) -> None:
        part = address.with_suffix(".part")
        part.write_text(found)
        part.rename(address)

    ps.serve(f"{HOST}:0", token_file=token, tls=tls, ready=ready)


def _read(path: Path) -> str:
    until = time.monotonic() + START_S
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError("the server did not come up")
        time.sleep(0.01)
    return path.read_text()


def _client(address: str, token: Path, tls: ps.TLS | None) -> ps.Client:
    credentials, limits, deadlines = credentials_of(token, tls), Limits(), Deadlines()
    control = ControlLink.connect(
        [address], Hello("join"), credentials=credentials, limits=limits, timeout_s=START_S
    )
    joined = control.call(Join(0, -1, os.getpid()), Joined, timeout_s=START_S)
    return ps.Client(
        Connection(
            control,
            joined,
            rank=-1,
            credentials=credentials,
            limits=limits,
            deadlines=deadlines,
            connect=_by_tcp,
        )
    )


def _by_tcp(addresses: Any, hello: Hello, **options: Any) -> Link:
    return Link.connect([each for each in addresses if each.startswith("tcp:")], hello, **options)


# --- the floor --------------------------------------------------------------------------------


def floor(load: Tcp, scratch: Path) -> dict[str, float]:
    """Send the bytes, and receive as many, with buffers that both sides have had all along."""
    figures = {}
    data, back = bytearray(os.urandom(1 << 20) * (load.large_bytes >> 20)), bytearray()
    data += bytes(load.large_bytes - len(data))
    back = bytearray(load.large_bytes)
    for name, tls in (("plain", None), ("tls", make_certificates(scratch / "certificates"))):
        with bare(partial(_swap, load.large_bytes), tls) as sock:

            def both(sock: socket.socket = sock) -> None:
                sock.sendall(data)
                _fill(sock, back)

            figures[f"large_{name}"] = _of_large(both, load)
    return figures


@contextmanager
def bare(serve: Callable[[socket.socket], None], tls: ps.TLS | None) -> Iterator[socket.socket]:
    """A connected socket to a process that does `serve` at the other end."""
    with socket.create_server((HOST, 0)) as listener:
        place = listener.getsockname()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_other_end, args=(place, serve, tls))
        process.start()
        sock, _ = listener.accept()
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            server.load_cert_chain(tls.certificate, tls.key)
            server.load_verify_locations(tls.authority)
            server.verify_mode = ssl.CERT_REQUIRED
            sock = server.wrap_socket(sock, server_side=True)
        yield sock
    finally:
        sock.close()
        process.kill()
        process.join()


def _other_end(
    place: tuple[str, int], serve: Callable[[socket.socket], None], tls: ps.TLS | None
) -> None:
    sock = socket.create_connection(place)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is not None:
        context = ssl.create_default_context(cafile=tls.authority)
        context.load_cert_chain(tls.certificate, tls.key)
        sock = context.wrap_socket(sock, server_hostname=HOST)
    serve(sock)


def _swap(size: int, sock: socket.socket) -> None:
    taken, given = bytearray(size), bytes(size)
    while _fill(sock, taken):
        sock.sendall(given)


def _fill(sock: socket.socket, buffer: bytearray) -> bool:
    """Receive until the buffer is full; False if the other side has closed."""
    rest = memoryview(buffer)
    while rest:
        count = sock.recv_into(rest)
        if not count:
            return False
        rest = rest[count:]
    return True
