"""The coordinator's process: moves messages for `core.coordination`, which decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from paramserve.config import CoordinatorConfig
from paramserve.core.coordination import (
    Called,
    ConnectionLost,
    Coordination,
    CoordinatorEvent,
    Decided,
    Noticed,
    ProcessPaused,
    TimePassed,
)
from paramserve.engine.child import Bootstrap, call_soon
from paramserve.errors import ProtocolError
from paramserve.messages import (
    CoordinatorNotice,
    CoordinatorRequest,
    Failed,
    Hello,
    Members,
    ServerBeat,
    WorkerBeat,
    decoder,
    encode,
)
from paramserve.transport.framing import ByteArray
from paramserve.transport.listener import Connection, listen
from paramserve.transport.tcp import join_place
from paramserve.transport.timing import Loop

logger = logging.getLogger("paramserve")

TICK_S = 0.1
"""How often deadlines of waiting calls are looked at."""
PAUSE_S = 0.5
"""Without a step for this much longer than `TICK_S`, the process did not run: it was stopped, or
something held its loop up."""

ROLES = frozenset({"join", "register", "driver"})
"""Roles of `Hello` that belong to the coordinator; the others belong to a shard."""

_decode = decoder(CoordinatorRequest | CoordinatorNotice).decode


class CoordinatorRole:
    """A `transport.Handler` around `Coordination`. All its calls come one at a time.

    Args:
        coordination: decides.
        loop: gives time and timers.
    """

    def __init__(self, coordination: Coordination, loop: Loop) -> None:
        self._coordination = coordination
        self._loop = loop
        self._numbers: dict[Connection, int] = {}
        self._connections: dict[int, Connection] = {}
        self._servers: set[int] = set()
        """Connections of servers: they are told of every change of the membership."""
        self._next = 1
        self.on_server_lost: Callable[[], None] = lambda: None
        """Called when a server that had registered is lost."""
        self.on_members: Callable[[Members], None] = lambda members: None
        """Called with every change of the membership."""
        self.on_refused: Callable[[Failed], None] = lambda answer: None
        """Called when something that was asked for is refused."""
        self._stepped_at = self._loop.time()
        self._stall_s = coordination.config.deadlines.stall_s
        self._loop.call_later(TICK_S, self._tick)

    def opened(self, conn: Connection, hello: Hello) -> None:
        if hello.role not in ROLES:
            raise ProtocolError(
                f"a peer came to the coordinator as {hello.role!r}", fix="run the same version"
            )
        number, self._next = self._next, self._next + 1
        self._numbers[conn] = number
        self._connections[number] = conn
        if hello.role == "register":
            self._servers.add(number)

    def frame(self, conn: Connection, header: bytes, payload: ByteArray | None) -> None:
        try:
            message = _decode(header)
        except UnicodeDecodeError as error:  # msgspec's errors are told by the transport
            raise ProtocolError(
                f"a header was refused: {error}", fix="run the same version on both sides"
            ) from error
        number = self._numbers[conn]
        if isinstance(message, WorkerBeat | ServerBeat):
            self._step(Noticed(number, message))
        else:
            self._step(Called(number, message))

    def closed(self, conn: Connection) -> None:
        number = self._numbers.pop(conn)
        del self._connections[number]
        self._servers.discard(number)
        self._step(ConnectionLost(number, conn.reset))

    @property
    def all_left(self) -> bool:
        """Whether every worker has come, and has left or died."""
        return self._coordination.membership.all_left

    @property
    def lost_servers(self) -> dict[int, tuple[str, ...]]:
        """The addresses of each server that is lost, by shard."""
        servers = self._coordination.membership.servers
        return {shard: each.addresses for shard, each in sorted(servers.items()) if each.lost}

    def _tick(self) -> None:
        self._step(TimePassed())
        self._loop.call_later(TICK_S, self._tick)

    def _step(self, event: CoordinatorEvent) -> None:
        now = self._loop.time()
        paused_s = now - self._stepped_at - TICK_S
        self._stepped_at = now
        if paused_s > PAUSE_S:
            level = logging.WARNING if paused_s > self._stall_s else logging.DEBUG
            logger.log(level, "the coordinator did not run for %.1f s: not counted", paused_s)
            self._act(self._coordination.step(ProcessPaused(paused_s), now))
        self._act(self._coordination.step(event, now))

    def _act(self, decided: Decided) -> None:
        for number, reply in decided.replies:
            connection = self._connections.get(number)
            if connection is not None:
                connection.send(encode(reply))
                if isinstance(reply, Failed):
                    self.on_refused(reply)
        if decided.members is not None:
            self.on_members(decided.members)
            header = encode(decided.members)
            for number in sorted(self._servers):
                self._connections[number].send(header)
        if decided.server_lost:
            self.on_server_lost()


async def _serve(boot: Bootstrap, config: CoordinatorConfig) -> None:
    loop = asyncio.get_running_loop()
    role = CoordinatorRole(Coordination(config), loop)
    listeners = await listen(
        config.directory,
        "c",
        join_place(boot.host, 0) if boot.host else config.tcp_bind,
        boot.credentials,
        role,
        config.limits,
        advertise=config.advertise,
        lost_s=config.deadlines.lost_s,
    )
    ended = asyncio.Event()
    boot.on_stop(lambda: call_soon(loop, ended.set))
    boot.report("ready", msgspec.msgpack.encode([each.address for each in listeners]))
    try:
        await ended.wait()  # or until the driver is gone
    finally:
        for listener in listeners:
            listener.close()


def main(boot: Bootstrap) -> None:
    config = msgspec.msgpack.decode(boot.payload, type=CoordinatorConfig)
    asyncio.run(_serve(boot, config))
