"""The server's process: moves bytes for `core.shard`, which decides everything.

One connection of a client at a time: a newer one ends the older before its first request is read.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from paramserve.compiling import load_if_compiled, needed
from paramserve.config import Credentials, ServerConfig
from paramserve.consistency.registry import Registered, registered
from paramserve.consistency.registry import build as build_policy
from paramserve.core.events import (
    ClientBye,
    ClientGone,
    ClientHere,
    DeadlineReached,
    Effects,
    Event,
    FromShard,
    Inquired,
    MembersChanged,
    Requested,
)
from paramserve.core.shard import Shard
from paramserve.engine.child import Bootstrap, call_soon
from paramserve.errors import CoordinatorGone, ParamServeError, ProtocolError, ServerGone
from paramserve.messages import (
    AskReport,
    Batch,
    BlockSpec,
    Bye,
    Define,
    Hello,
    Inquire,
    Members,
    Ok,
    PeerMessage,
    Reconnect,
    Register,
    ServerBeat,
    ShardRequest,
    decoder,
    encode,
)
from paramserve.transport.buffers import Buffers
from paramserve.transport.connection import refusal, take_arenas
from paramserve.transport.control import ControlLink
from paramserve.transport.framing import ByteArray
from paramserve.transport.listener import Connection, Listener, listen
from paramserve.transport.peers import Dial, PeerLinks, dialer
from paramserve.transport.tcp import join_place
from paramserve.transport.timing import Handle, Loop, Pending

logger = logging.getLogger("paramserve")

QUICK_S = 200e-6
"""Requests that follow each other sooner than this are quick succession."""
SPIN_S = 100e-6
"""How long the loop then looks for the next one before it sleeps: waking up costs 20 to 60 us on a
virtual machine, several times what a small step takes."""
QUICK_TCP_S = 400e-6
SPIN_TCP_S = 250e-6
"""The same for a request over TCP."""
NOTHING = Registered()

Needed = Callable[[BlockSpec, Mapping[str, type[Any]]], Callable[[], None] | None]
"""As `compiling.needed`."""

_decode_client = decoder(ShardRequest | Batch | Inquire | AskReport | Bye).decode
_decode_peer = decoder(PeerMessage).decode


class Control(Protocol):
    """What a server uses of its connection to the coordinator; see `transport.control`."""

    def fileno(self) -> int: ...

    def notify(self, message: ServerBeat, /, *, waits: bool) -> bool: ...

    def flush(self) -> bool: ...

    def read_notices(self) -> list[Members]: ...

    def restore(self, *, ended: Callable[[], bool]) -> bool: ...


class ServerRole:
    """A `transport.Handler` around one `Shard`. All its calls come one at a time.

    Args:
        shard: decides.
        loop: gives time and timers, and runs what waits in a thread.
        control: the connection to the coordinator; None: there is no coordinator.
        dial: how the other servers are reached.
        needed: what has to run before a block can be defined.
    """

    def __init__(
        self,
        config: ServerConfig,
        shard: Shard,
        loop: Loop,
        control: Control | None,
        dial: Dial,
        *,
        needed: Needed = needed,
    ) -> None:
        self.config = config
        self.shard = shard
        self.listeners: Sequence[Listener] = ()
        """Through which peers come, for the report."""
        self._control = control
        self._loop = loop
        self._needed = needed
        self._parties: dict[Connection, int] = {}
        """By connection, its client; 0: another server; -1: nothing that it sends counts."""
        self._clients: dict[int, Connection] = {}
        self._peers = PeerLinks(config.shard, dial, loop)
        self._timer: Handle | None = None
        self._timer_at = 0.0
        self._loading: list[tuple[Connection, bytes, ByteArray | None]] | None = None
        """Frames that came while kernels are being compiled, in order."""
        self.ended = asyncio.Event()
        """Set when the coordinator is gone, or when the process is to end."""
        self._last_frame = 0.0
        self._spinning = False
        self._spin_s = SPIN_S
        self._beating: Handle | None = None
        self._restoring = False
        self._oversize_told = False
        self._closed = False
        self._control_fd = -1 if control is None else control.fileno()
        if control is not None:
            self._loop.add_reader(self._control_fd, self._notices)
        self._beat()

    # --- what the transport tells --------------------------------------------------------------

    def opened(self, conn: Connection, hello: Hello) -> None:
        if hello.cluster != self.config.cluster:
            raise ServerGone(
                f"a {hello.role} of another cluster came to shard {self.config.shard}: the server "
                "that it knew at this address has ended",
                applied="unknown",
                fix="start that cluster again; give each cluster a token of its own",
            )
        if hello.role == "attach":
            self._attach(conn, hello)
        elif hello.role == "server" and 0 <= hello.client < self.config.servers:
            self._parties[conn] = 0
        elif hello.role == "client" and hello.client > 0:
            self._client(conn, hello)
        else:
            raise ProtocolError(
                f"a peer came as {hello.role!r} number {hello.client}", fix="run the same version"
            )

    def _client(self, conn: Connection, hello: Hello) -> None:
        event = ClientHere(
            hello.client, hello.incarnation, hello.rank, hello.window, hello.again, hello.requests
        )
        effects = self.shard.step(event, self._loop.time())
        if effects.refused is not None:
            raise effects.refused
        older = self._clients.get(hello.client)
        if older is not None:
            self._parties[older] = -1
            older.close()
        self._parties[conn] = hello.client
        self._clients[hello.client] = conn
        self._act(effects)

    def _attach(self, conn: Connection, hello: Hello) -> None:
        """Move the arena that came along to the client's main connection."""
        main = self._clients.get(hello.client)
        if main is None or main.hello.incarnation != hello.incarnation:
            raise ProtocolError(
                f"client {hello.client} attached an arena without a connection",
                fix="connect first",
            )
        take_arenas(main, conn, self.config.limits)
        self._parties[conn] = -1

    def frame(self, conn: Connection, header: bytes, payload: ByteArray | None) -> None:
        try:
            self._frame(conn, header, payload)
        except UnicodeDecodeError as error:  # msgspec's errors are told by the transport
            raise ProtocolError(
                f"a header was refused: {error}", fix="run the same version on both sides"
            ) from error
        now = self._loop.time()
        tcp = conn.kind == "tcp"
        if now - self._last_frame < (QUICK_TCP_S if tcp else QUICK_S) and not self._spinning:
            self._spinning = True
            self._loop.call_soon(self._spin)
        self._last_frame = now
        self._spin_s = SPIN_TCP_S if tcp else SPIN_S

    def _spin(self) -> None:
        """Keep the loop from sleeping for a moment, while requests come in quick succession."""
        self._spinning = self._loop.time() - self._last_frame < self._spin_s
        if self._spinning:
            self._loop.call_soon(self._spin)

    def _frame(self, conn: Connection, header: bytes, payload: ByteArray | None) -> None:
        if self._loading is not None:
            self._loading.append((conn, header, payload))
            return
        client = self._parties[conn]
        if client == 0:
            self._happen(FromShard(_decode_peer(header)))
            return
        message = _decode_client(header)
        if isinstance(message, Define) and not self._ready_for(message):
            self._loading = [(conn, header, payload)]
            return
        if isinstance(message, Inquire):
            self._happen(Inquired(client, message))
        elif isinstance(message, AskReport):
            conn.send(encode(self._report(notes=message.notes)))
        elif isinstance(message, Bye):
            self._happen(ClientBye(client))
        elif isinstance(message, Batch):
            if any(isinstance(each, Define) for each in message.requests):
                raise ProtocolError(
                    "a batch has a definition, which may have to wait for kernels",
                    fix="run the same version on both sides",
                )
            for request in message.requests:
                self._request(conn, client, request, payload)
        else:
            self._request(conn, client, message, payload)

    def _request(
        self, conn: Connection, client: int, message: ShardRequest, payload: ByteArray | None
    ) -> None:
        if client > 0:
            memory = conn.arenas if payload is None else {**conn.arenas, 0: payload}
            self._happen(Requested(client, message, memory))

    def closed(self, conn: Connection) -> None:
        client = self._parties.pop(conn)
        if client > 0 and self._clients.get(client) is conn:
            del self._clients[client]
            self._happen(ClientGone(client))

    # --- what the shard wants ------------------------------------------------------------------

    def _happen(self, event: Event) -> None:
        # Connections that end with the listeners are told of later, when no client can be answered.
        if not self._closed:
            self._act(self.shard.step(event, self._loop.time()))

    def _act(self, effects: Effects) -> None:
        for client, answer in effects.replies:
            connection = self._clients.get(client)
            if connection is not None:
                payload = () if answer.payload is None else (answer.payload,)
                connection.send(encode(answer.message), payload)
        for shard, message in effects.peers:
            self._peers.send(shard, encode(message))
        for client in effects.drops:
            connection = self._clients.get(client)
            if connection is not None:
                logger.warning("client %d broke the order of its requests; cut off", client)
                connection.close()
        if effects.deadline is not None:
            self._wake_at(effects.deadline)

    def _wake_at(self, deadline: float) -> None:
        """Look at the shard's deadlines then, or sooner if that was planned before."""
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        delay = max(0.0, deadline - self._loop.time())
        self._timer = self._loop.call_later(delay, self._deadline)

    def _deadline(self) -> None:
        self._timer = None
        self._happen(DeadlineReached())

    # --- kernels -------------------------------------------------------------------------------

    def _ready_for(self, message: Define) -> bool:
        """Whether a define can go on at once; otherwise its kernels are loaded in a thread."""
        work = self._needed(message.spec, self.shard.rules)
        if work is not None:
            self._loop.run_in_executor(None, work).add_done_callback(self._kernels_loaded)
        return work is None

    def _kernels_loaded(self, done: Pending[None]) -> None:
        frames, self._loading = self._loading or [], None
        error = done.exception()
        if error is not None:
            logger.error("the kernels of a rule could not be compiled", exc_info=error)
            refused = ParamServeError(
                f"shard {self.config.shard} could not compile the kernels of a rule: {error!r}",
                fix="look at the server's output",
            )
            conn = frames.pop(0)[0]
            conn.send(refusal(refused))
            conn.close()
        for conn, header, payload in frames:
            if conn not in self._parties:
                continue
            try:
                self.frame(conn, header, payload)
            except (ParamServeError, msgspec.MsgspecError):
                conn.close()
            except Exception:
                # A bug of ours ends its own connection only; the others' frames still count.
                logger.exception("a request that waited for kernels failed")
                conn.close()

    # --- the coordinator -----------------------------------------------------------------------

    def _notices(self) -> None:
        assert self._control is not None
        try:
            notices = self._control.read_notices()
        except CoordinatorGone:
            self._control_lost()
            return
        self.take_notices(notices)

    def _control_lost(self) -> None:
        """The connection to the coordinator broke."""
        if not self._closed and not self._restoring:
            self._forget_control()
            self._restore()

    def _forget_control(self) -> None:
        if self._control_fd >= 0:
            self._loop.remove_reader(self._control_fd)
            self._loop.remove_writer(self._control_fd)
        self._control_fd = -1

    def _restore(self) -> None:
        """Reach the coordinator again, or end: it is gone."""
        assert self._control is not None
        self._restoring = True
        restore = partial(self._control.restore, ended=self._no_longer_needed)
        self._loop.run_in_executor(None, restore).add_done_callback(self._restored)

    def _no_longer_needed(self) -> bool:
        return self._closed or self.ended.is_set()

    def _restored(self, done: Pending[bool]) -> None:
        self._restoring = False
        restored = done.result()
        if self._closed:
            return
        if not restored:
            self.ended.set()
            return
        assert self._control is not None
        self._control_fd = self._control.fileno()
        if self._control_fd < 0:  # it broke again meanwhile
            self._control_lost()
            return
        self._loop.add_reader(self._control_fd, self._notices)
        self._flush()
        self._notices()  # what the link holds already does not show at the descriptor

    def take_notices(self, notices: list[Members]) -> None:
        """Memberships that the coordinator has sent."""
        for members in notices:
            if members.servers:
                self._peers.addresses = members.servers
            self._happen(MembersChanged(members))

    def _beat(self) -> None:
        """Heartbeat; also the moment when the shard looks at its own deadlines."""
        self._beating = self._loop.call_later(self.config.deadlines.heartbeat_s, self._beat)
        self._happen(DeadlineReached())
        control = self._control
        if control is None:
            return
        try:
            # A beat that does not fit is left out: the next one may fit.
            control.notify(self._report(), waits=False)
        except ProtocolError as error:
            if not self._oversize_told:
                logger.error("a heartbeat of shard %d failed: %s", self.config.shard, error)
            self._oversize_told = True
        self._flush()

    def _flush(self) -> None:
        """Send what the coordinator has not taken of a heartbeat, as soon as it takes it."""
        assert self._control is not None
        taken = self._control.flush()
        fd = self._control.fileno()
        if fd < 0:
            self._control_lost()  # the end that was noticed here never shows as readable
        elif fd != self._control_fd:
            pass  # made anew, and not read yet: `_restored` does it
        elif taken:
            self._loop.remove_writer(fd)
        else:
            self._loop.add_writer(fd, self._flush)

    def _report(self, *, notes: bool = False) -> ServerBeat:
        blocks = self.shard.blocks.values()
        return ServerBeat(
            self.config.shard,
            self.shard.report(notes=notes),
            len(self.shard.sessions),
            sum(block.nbytes for block in blocks),
            self.shard.sessions.members_number,
            sum(each.refused for each in self.listeners),
        )

    def close(self) -> None:
        """Stop talking with the coordinator, and close the links to other servers."""
        self._closed = True
        if self._beating is not None:
            self._beating.cancel()
        if self._control is not None:
            self._forget_control()
        if self._timer is not None:
            self._timer.cancel()
        self._peers.close()


def new_shard(config: ServerConfig, registered: Registered = NOTHING) -> Shard:
    """The decisions of a server that is told this.

    Raises:
        UnknownRule: the cluster's policy is neither built in nor registered.
    """
    return Shard(
        config.shard,
        config.servers,
        config.workers,
        build_policy(config.consistency, registered.all),
        limits=config.limits,
        resend_s=config.deadlines.resend_s,
        rules=registered.rules,
        policies=registered.all,
        allocate=Buffers(config.limits.buffers_bytes_max).take,
    )


def process_role(
    config: ServerConfig,
    credentials: Credentials,
    control: Control | None,
    registered: Registered = NOTHING,
) -> ServerRole:
    """The server of this process: on the running event loop, with sockets to the others."""
    shard, loop = new_shard(config, registered), asyncio.get_running_loop()
    return ServerRole(config, shard, loop, control, dialer(config, credentials))


async def _serve(boot: Bootstrap, config: ServerConfig) -> None:
    credentials = boot.credentials
    control = await asyncio.to_thread(
        ControlLink.connect,
        config.coordinator,
        Hello("register"),
        credentials=credentials,
        limits=config.limits,
        timeout_s=config.deadlines.start_s,
        lost_s=config.deadlines.lost_s,
    )
    role = process_role(config, credentials, control, registered(boot.load() or ()))
    loop = asyncio.get_running_loop()
    boot.on_stop(lambda: call_soon(loop, role.ended.set))
    listeners = await listen(
        config.directory,
        f"s{config.shard}",
        join_place(boot.host, 0) if boot.host else config.tcp_bind,
        credentials,
        role,
        config.limits,
        advertise=config.advertise,
        lost_s=config.deadlines.lost_s,
    )
    addresses = tuple(listener.address for listener in listeners)
    role.listeners = listeners
    try:
        await register(role, control, addresses)
        boot.report("ready", msgspec.msgpack.encode(addresses))
        await role.ended.wait()  # or until the driver is gone
    finally:
        for listener in listeners:
            listener.close()
        role.close()
        control.close()


async def register(role: ServerRole, control: ControlLink, addresses: tuple[str, ...]) -> None:
    """Tell the coordinator that a server is up."""
    call = Register(0, role.config.shard, os.getpid(), addresses)
    timeout_s = role.config.deadlines.start_s
    await asyncio.to_thread(control.call, call, Ok, timeout_s=timeout_s)
    config = role.config
    identity = Reconnect(
        0, config.cluster, shard=config.shard, pid=call.pid, addresses=call.addresses
    )
    control.identify(identity, config.deadlines)
    role.take_notices(control.read_notices())


def prepare_process() -> None:
    """Load what a server needs before it is forked; see `engine.prepared`."""
    load_if_compiled()


def main(boot: Bootstrap) -> None:
    config = msgspec.msgpack.decode(boot.payload, type=ServerConfig)
    asyncio.run(_serve(boot, config))
