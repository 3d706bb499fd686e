"""A server that clients of its own process enter themselves, one call at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.contract.inprocess import InProcessListener

from paramserve.checkpoint.storage import LocalFolder
from paramserve.config import Credentials, ServerConfig
from paramserve.consistency.registry import Registered
from paramserve.messages import Hello
from paramserve.server import ServerRole, new_shard
from paramserve.transport.connection import Connection
from paramserve.transport.control import ControlLink
from paramserve.transport.framing import ByteArray
from paramserve.transport.peers import dialer

Callback = Callable[[], object]


class _FromAnyThread:
    """An event loop for a role whose calls come from clients' threads as well: what it is asked to
    call takes turns with these."""

    def __init__(self, entrance: InProcessListener) -> None:
        self._loop = asyncio.get_running_loop()
        self._entrance = entrance
        self.time = self._loop.time
        self.remove_reader = self._loop.remove_reader
        self.remove_writer = self._loop.remove_writer

    def _in_turn(self, do: Callback) -> Callback:
        def turn() -> None:
            with self._entrance.turn():
                do()

        return turn

    def call_soon(self, do: Callback) -> None:
        self._loop.call_soon_threadsafe(self._in_turn(do))

    def call_later(self, delay_s: float, do: Callback) -> _Later:
        later = _Later(self._in_turn(do))
        self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, later)
        return later

    def add_reader(self, fd: int, do: Callback) -> None:
        self._loop.add_reader(fd, self._in_turn(do))

    def add_writer(self, fd: int, do: Callback) -> None:
        self._loop.add_writer(fd, self._in_turn(do))

    def run_in_executor(self, _: None, function: Callable[[], Any]) -> _Done:
        waiting = asyncio.to_thread(function)
        return _Done(self, asyncio.run_coroutine_threadsafe(waiting, self._loop))


class _Done:
    """What ran in another thread; its callbacks are made on the loop."""

    def __init__(self, loop: _FromAnyThread, future: Any) -> None:
        self._loop = loop
        self._future = future
        self.exception = future.exception
        self.result = future.result

    def add_done_callback(self, do: Callable[[Any], object]) -> None:
        self._future.add_done_callback(lambda _: self._loop.call_soon(lambda: do(self)))


class _Later:
    def __init__(self, do: Callback) -> None:
        self._do: Callback | None = do

    def __call__(self) -> None:
        if self._do is not None:
            self._do()

    def cancel(self) -> None:
        self._do = None


class InProcessRole(ServerRole):
    """A server that clients of its process enter themselves; other servers come by socket."""

    def __init__(
        self,
        config: ServerConfig,
        credentials: Credentials,
        control: ControlLink,
        registered: Registered,
    ) -> None:
        self.entrance = InProcessListener(self, config.limits)
        loop, dial = _FromAnyThread(self.entrance), dialer(config, credentials)
        shard, folder = new_shard(config, registered), config.checkpoints.folder
        storage = LocalFolder(folder) if folder else None
        super().__init__(config, shard, loop, control, dial, storage=storage)


class TakesTurns:
    """A handler whose calls take turns with those of the clients within the process."""

    def __init__(self, role: InProcessRole) -> None:
        self._role = role

    def opened(self, conn: Connection, hello: Hello) -> None:
        with self._role.entrance.turn():
            self._role.opened(conn, hello)

    def frame(self, conn: Connection, header: bytes, payload: ByteArray | None) -> None:
        with self._role.entrance.turn():
            self._role.frame(conn, header, payload)

    def closed(self, conn: Connection) -> None:
        with self._role.entrance.turn():
            self._role.closed(conn)
