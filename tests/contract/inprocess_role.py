"""A server that clients of its own process enter themselves, one call at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paramserve.config import Credentials, ServerConfig
from paramserve.consistency.registered import Registered
from paramserve.messages import Hello
from paramserve.server import ServerRole
from paramserve.transport.connection import Connection
from paramserve.transport.control import ControlLink
from paramserve.transport.framing import ByteArray
from paramserve.transport.inprocess import InProcessListener


class _FromAnyThread:
    """The methods of an event loop that a role uses, callable from a client's thread too."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pool = ThreadPoolExecutor(1)
        self.time = loop.time
        self.call_soon = loop.call_soon_threadsafe
        self.remove_reader = loop.remove_reader
        self.add_reader = loop.add_reader
        self.remove_writer = loop.remove_writer
        self.add_writer = loop.add_writer

    def call_later(self, delay: float, do: Callable[[], None]) -> _Later:
        later = _Later(do)
        self._loop.call_soon_threadsafe(self._loop.call_later, delay, later)
        return later

    def create_task(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run_in_executor(self, _: None, do: Callable[..., None], *args: Any) -> Any:
        return self._pool.submit(do, *args)


class _Later:
    def __init__(self, do: Callable[[], None]) -> None:
        self._do: Callable[[], None] | None = do

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
        *,
        registered: Registered,
    ) -> None:
        self.entrance = InProcessListener(self, config.limits)
        super().__init__(config, credentials, control, registered=registered)
        self._loop: Any = _FromAnyThread(self._loop)

    def _beat(self) -> None:
        with self.entrance.turn():
            super()._beat()

    def _deadline(self) -> None:
        with self.entrance.turn():
            super()._deadline()

    def _notices(self) -> None:
        with self.entrance.turn():
            super()._notices()

    def _kernels_loaded(self, done: Any) -> None:
        with self.entrance.turn():
            super()._kernels_loaded(done)


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
