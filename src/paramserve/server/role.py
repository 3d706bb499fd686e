"""The server's role: moves bytes for `core.shard`, which decides everything.

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

from paramserve.checkpoint.storage import Storage
from paramserve.compiling import needed
from paramserve.config import ServerConfig
from paramserve.core.events import (
    CheckpointEnded,
    ClientBye,
    ClientGone,
    CutWanted,
    DeadlineReached,
    Effects,
    Event,
    FromShard,
    Inquired,
    MembersChanged,
    Requested,
)
from paramserve.core.polling import SHARED_S, AdaptivePolling
from paramserve.core.request_memory import Memory
from paramserve.core.shard import Shard
from paramserve.core.shard_sessions import ClientHere
from paramserve.debugging import report
from paramserve.errors import CoordinatorGone, ParamServeError, ProtocolError, ServerGone
from paramserve.logs import event
from paramserve.messages import (
    COORDINATOR_ROLES,
    Arenas,
    AskDebug,
    AskReport,
    Batch,
    BeginCheckpoint,
    BlockSpec,
    Bye,
    CheckpointOver,
    CoordinatorNotice,
    CutTaken,
    CutWritten,
    Define,
    Hello,
    Inquire,
    Members,
    PeerMessage,
    Read,
    ServerBeat,
    ServerEnds,
    ServerNotice,
    ShardRequest,
    Step,
    WriteCut,
    decoder,
    encode,
)
from paramserve.server.checkpoints import PartWriter
from paramserve.transport.arena import new_mirror
from paramserve.transport.connection import NO_ARENAS, refusal, take_arenas
from paramserve.transport.listener import Connection, Listener
from paramserve.transport.peers import Dial, PeerLinks
from paramserve.transport.timing import Handle, Loop, Pending
from paramserve.transport.wakeup import leave_core

logger = logging.getLogger("paramserve")

BEAT = AskReport()
"""What a heartbeat tells, unasked."""

Needed = Callable[[BlockSpec, Mapping[str, type[Any]]], Callable[[], None] | None]
"""Compilation that a block needs, if any; see `compiling.needed`."""

ClientMessage = ShardRequest | Arenas | Batch | Inquire | AskReport | Bye | AskDebug
Frame = tuple[Connection, bytes]
"""Connection and header of a frame."""

_decode_client = decoder(ClientMessage).decode
_decode_peer = decoder(PeerMessage).decode


class Control(Protocol):
    """What a server uses of its connection to the coordinator; see `transport.control`."""

    def fileno(self) -> int: ...

    def notify(self, message: CoordinatorNotice | ServerEnds, /, *, waits: bool) -> bool: ...

    def flush(self) -> bool: ...

    def read_notices(self) -> list[ServerNotice]: ...

    def restore(self, *, ended: Callable[[], bool]) -> bool: ...


class ServerRole:
    """A `transport.Handler` around one `Shard`. All its calls come one at a time.

    Args:
        shard: decides.
        loop: gives time and timers, and runs what waits in a thread.
        control: the connection to the coordinator; None: there is no coordinator.
        dial: how the other servers are reached.
        storage: of the run's checkpoints; None: it writes none.
        needed: what has to run before a block can be defined.
        wake_s: what waking this process costs, in seconds; 0.0: nothing.
        memory_bytes: how much memory this process has; 0: not known.
    """

    def __init__(
        self,
        config: ServerConfig,
        shard: Shard,
        loop: Loop,
        control: Control | None,
        dial: Dial,
        *,
        storage: Storage | None = None,
        needed: Needed = needed,
        wake_s: float = 0.0,
        memory_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.config = config
        self.shard = shard
        self.listeners: Sequence[Listener] = ()
        """Through which peers come, for the report."""
        self._control = control
        self._loop = loop
        self._needed = needed
        self._memory_bytes = memory_bytes
        self._parties: dict[Connection, int] = {}
        """Client by connection; 0: another server; -1: nothing that it sends counts."""
        self._clients: dict[int, Connection] = {}
        self._memories: dict[Connection, Memory] = {}
        """What the requests of a client speak of, by connection."""
        self._peers = PeerLinks(config.shard, dial, loop)
        self._timer: Handle | None = None
        self._timer_at = 0.0
        self._loading: list[Frame] | None = None
        """Frames that came while kernels are being compiled, in order."""
        self.ended = asyncio.Event()
        """Set when the coordinator is gone, or when the process is to end."""
        self._last_frame = 0.0
        self._polls = False
        """Whether the loop is kept from sleeping now."""
        self._polls_until = 0.0
        self._shared = False
        """Whether another process ran on this core while the next frame was polled for."""
        self._late = False
        """Whether it ran there until past the time for which this was to poll."""
        most_s = config.limits.poll_s_max
        self._polling = {tcp: AdaptivePolling(wake_s, most_s, tcp=tcp) for tcp in (False, True)}
        """Polling for the next frame, after one over TCP and after one of this host."""
        self._beating: Handle | None = None
        self._restoring = False
        self._checkpoints = PartWriter(shard, loop, storage, self._notify, self._take_cut)
        self._untold: list[CutTaken | CutWritten | ServerEnds] = []
        """What the coordinator has not taken yet."""
        self._oversize_told = False
        self._closed = False
        self._control_fd = -1 if control is None else control.fileno()
        if control is not None:
            self._loop.add_reader(self._control_fd, self._notices)
        self._beat()

    # --- what the transport tells --------------------------------------------------------------

    def opened(self, conn: Connection, hello: Hello) -> None:
        if hello.role == "probe":
            self._parties[conn] = -1
            return
        if hello.role in COORDINATOR_ROLES:
            raise ProtocolError(
                f"this is the address of shard {self.config.shard} of {self.config.servers}, and "
                "not of the cluster's first server, which alone answers here to commands and new "
                "members",
                applied="no",
                fix=f"use the address of the first server, {' or '.join(self.config.coordinator)}",
            )
        if hello.cluster != self.config.cluster:
            raise ServerGone(
                f"a {hello.role} of another cluster connected to shard {self.config.shard}: the "
                "server that it knew at this address has ended",
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
        text = "client %d (rank %d) has connected"
        logger.debug(text, hello.client, hello.rank, extra=self._event("log", client=hello.client))
        if conn.shared:
            self._memories[conn] = Memory(conn.arenas, mirrored=False)
        else:
            self._mirror(conn, self.shard.sessions.by_client[hello.client].mirror)
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
        self._memories[main].forget()
        self._parties[conn] = -1

    def frame(self, conn: Connection, header: bytes) -> None:
        polling = self._polling[conn.kind == "tcp"]
        wait_s = self._loop.time() - self._last_frame
        polling.waited(wait_s, polled=self._polls, shared=self._shared, late=self._late)
        if polling.leaves:
            leave_core()
        client = self._parties[conn]
        requests: tuple[ShardRequest, ...] = ()
        try:
            if self._loading is not None:
                self._hold(self._loading, conn, header)
            elif client == 0:
                self._happen(FromShard(_decode_peer(header)))
            else:
                message = _decode_client(header)
                if type(message) is Step or type(message) is Read:
                    requests = (message,)
                else:
                    requests = self._requests(client, message, (conn, header))
        except UnicodeDecodeError as error:  # msgspec's errors are told by the transport
            raise ProtocolError(
                f"a header was refused: {error}", fix="run the same version on both sides"
            ) from error
        for request in requests if client > 0 else ():
            if not self._closed:
                event = Requested(client, request, self._memories[conn])
                self._act(self.shard.step(event, self._loop.time()))
        self._last_frame = now = self._loop.time()
        budget_s = polling.budget_s
        self._shared = self._late = False
        self._polls_until = now + budget_s
        if budget_s and not self._polls:
            self._polls = True
            self._loop.call_soon(self._poll)

    def _hold(self, frames: list[Frame], conn: Connection, header: bytes) -> None:
        """Keep a frame until the kernels are loaded, unless the frames behind it need its effect to
        be received."""
        message = _decode_client(header) if self._parties[conn] > 0 else None
        if isinstance(message, Arenas):
            self._update_mirror(conn, message)
        else:
            frames.append((conn, header))

    def _poll(self) -> None:
        """Keep the loop from sleeping while the next frame is worth polling for."""
        now = self._loop.time()
        self._polls = now < self._polls_until
        if self._polls:
            os.sched_yield()  # a client may wait for this very core
            after = self._loop.time()
            self._shared = self._shared or after - now > SHARED_S
            self._late = after > self._polls_until + SHARED_S
            self._loop.call_soon(self._poll)

    def _requests(
        self, client: int, message: ClientMessage, frame: Frame
    ) -> tuple[ShardRequest, ...]:
        """The requests of a message; what else a client may send is done."""
        conn = frame[0]
        if isinstance(message, Define) and not self._ready_for(message):
            self._loading = [frame]
        elif isinstance(message, Inquire):
            self._happen(Inquired(client, message))
        elif isinstance(message, AskReport):
            conn.send(encode(self._report(message)))
        elif isinstance(message, Bye):
            self._happen(ClientBye(client, message.answered))
        elif isinstance(message, Arenas):
            self._update_mirror(conn, message)
        elif isinstance(message, AskDebug):
            conn.send(encode(report(message, self.config)))
        elif isinstance(message, Batch):
            if any(isinstance(each, Define) for each in message.requests):
                raise ProtocolError(
                    "a batch has a definition, which may have to wait for kernels",
                    fix="run the same version on both sides",
                )
            return message.requests
        else:
            return (message,)
        return ()

    def _update_mirror(self, conn: Connection, message: Arenas) -> None:
        """The arenas of a client whose memory is not mapped here have changed."""
        if conn.shared or conn not in self._memories:
            raise ProtocolError("arenas were named that need no mirror", fix="run the same version")
        session = self.shard.sessions.by_client[self._parties[conn]]
        mirror = session.mirror.arenas
        arenas = new_mirror(mirror, session.replaced, message.arenas, self.config.limits)
        session.mirror = Memory(arenas, mirrored=True)
        self._mirror(conn, session.mirror)

    def _mirror(self, conn: Connection, memory: Memory) -> None:
        conn.arenas, self._memories[conn] = dict(memory.arenas), memory

    def closed(self, conn: Connection) -> None:
        client = self._parties.pop(conn)
        self._memories.pop(conn, None)
        if client > 0 and self._clients.get(client) is conn:
            del self._clients[client]
            text = "the connection of client %d has ended"
            logger.debug(text, client, extra=self._event("log", client=client))
            self._happen(ClientGone(client))

    # --- what the shard wants ------------------------------------------------------------------

    def _happen(self, event: Event) -> None:
        # Connections that end with the listeners are told of later, when no client can be answered.
        if not self._closed:
            self._act(self.shard.step(event, self._loop.time()))

    def _act(self, effects: Effects) -> None:
        for client, answer in effects.replies:
            if client in self._clients:
                conn = self._clients[client]
                arenas = NO_ARENAS if answer.mirror is None else answer.mirror.arenas
                conn.send(encode(answer.message), answer.written, arenas)
        for shard, message in effects.peers:
            self._peers.send(shard, encode(message))
        for client in effects.drops:
            connection = self._clients.get(client)
            if connection is not None:
                extra = self._event("client-cut-off", client=client)
                text = "client %d broke the order of its requests; cut off"
                logger.warning(text, client, extra=extra)
                connection.close()
        for each in effects.notices:
            self._notify(each)
        for error in effects.losses:
            logger.warning(
                "shard %d: %s", self.config.shard, error, extra=self._event("buffer-lost")
            )
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
        """Handle the frames that were held while a thread loaded kernels. The first of them is the
        definition that needs these; it is refused if they could not be loaded."""
        frames, self._loading = self._loading or [], None
        error = done.exception()
        if error is not None:
            extra = self._event("bug")
            logger.error("the kernels of a rule could not be compiled", exc_info=error, extra=extra)
            refused = ParamServeError(
                f"shard {self.config.shard} could not compile the kernels of a rule: {error!r}",
                fix="look at the server's output",
            )
            conn = frames.pop(0)[0]
            conn.send(refusal(refused))
            conn.close()
        for conn, header in frames:
            if conn not in self._parties:
                continue
            try:
                self.frame(conn, header)
            except (ParamServeError, msgspec.MsgspecError):
                conn.close()
            except Exception:
                # A bug of ours ends its own connection only; the others' frames still count.
                text = "a request that waited for kernels failed"
                logger.exception(text, extra=self._event("bug"))
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

    def take_notices(self, notices: list[ServerNotice]) -> None:
        """What the coordinator has sent unasked."""
        for notice in notices:
            match notice:
                case Members():
                    if notice.servers:
                        self._peers.addresses = notice.servers
                    self._happen(MembersChanged(notice))
                case BeginCheckpoint():
                    self._checkpoints.prepare(notice)
                case WriteCut():
                    self._checkpoints.write(notice)
                case CheckpointOver():
                    self._checkpoints.over(notice)
                    self._happen(CheckpointEnded(notice.checkpoint, notice.committed))

    def _take_cut(self, notice: BeginCheckpoint) -> None:
        self._happen(CutWanted(notice.checkpoint, notice.full, notice.flush_s))

    def tell_end(self) -> None:
        """Tell the coordinator that this server was told to end, which it does not do yet."""
        self._notify(ServerEnds(self.config.shard))

    def _notify(self, message: CutTaken | CutWritten | ServerEnds) -> None:
        """Tell the coordinator, now or as soon as it takes it."""
        if self._control is not None:
            self._untold.append(message)
            self._flush()

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
                text = "a heartbeat of shard %d failed: %s"
                logger.error(text, self.config.shard, error, extra=self._event("bug"))
            self._oversize_told = True
        self._flush()

    def _flush(self) -> None:
        """Send what the coordinator has not taken, as soon as it takes it."""
        assert self._control is not None
        while self._untold and self._control.notify(self._untold[0], waits=False):
            del self._untold[0]
        done = self._control.flush()
        fd = self._control.fileno()
        if fd < 0:
            self._control_lost()  # the end that was noticed here never shows as readable
        elif fd != self._control_fd:
            pass  # made anew, and not read yet: `_restored` does it
        elif done:
            self._loop.remove_writer(fd)
        else:
            self._loop.add_writer(fd, self._flush)

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        return event(name, role="server", server=self.config.shard, **fields)

    def _report(self, ask: AskReport = BEAT) -> ServerBeat:
        blocks = self.shard.blocks.values()
        return ServerBeat(
            self.config.shard,
            self.shard.report(notes=ask.notes, saved=ask.saved),
            len(self.shard.sessions),
            sum(block.nbytes for block in blocks),
            self.shard.sessions.members_number,
            sum(each.refused for each in self.listeners),
            self._checkpoints.nbytes,
            self._memory_bytes(),
            self.shard.waiting,
        )

    def begin_cut(self) -> None:
        """Take a cut of all shards, unless one is under way; on the server of shard 0."""
        self._happen(CutWanted())

    def close(self) -> None:
        """Stop talking with the coordinator, and close the links to other servers."""
        self._closed = True
        self._checkpoints.close()
        if self._beating is not None:
            self._beating.cancel()
        if self._control is not None:
            self._forget_control()
        if self._timer is not None:
            self._timer.cancel()
        self._peers.close()
