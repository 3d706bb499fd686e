"""The coordinator's process: moves messages for `core.coordination`, which decides."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from paramserve.checkpoint.committing import Committer, read_cluster, see_claim
from paramserve.checkpoint.locations import storage_at
from paramserve.checkpoint.storage import telling
from paramserve.cluster_log import ClusterLog
from paramserve.config import CoordinatorConfig
from paramserve.core.checkpointing import FileEvent, FilesFailed, FileWork
from paramserve.core.cluster_state import ClusterRecord
from paramserve.core.coordination import (
    Called,
    ConnectionLost,
    Coordination,
    CoordinatorEvent,
    Decided,
    FilesWorked,
    NoListener,
    Noticed,
    ProcessPaused,
    TimePassed,
)
from paramserve.core.membership import Membership
from paramserve.debugging import report
from paramserve.engine.child import Bootstrap, call_soon
from paramserve.errors import ProtocolError
from paramserve.logs import event, hide
from paramserve.messages import (
    COORDINATOR_ROLES,
    AskDebug,
    CheckpointReport,
    CoordinatorNotice,
    CoordinatorRequest,
    DebugReport,
    Failed,
    Hello,
    Members,
    ServerBeat,
    ServerEnds,
    decoder,
    encode,
)
from paramserve.recent import recorded
from paramserve.transport.dial import may_listen
from paramserve.transport.listener import Connection, listen
from paramserve.transport.tcp import join_place
from paramserve.transport.timing import Loop, Pending

logger = logging.getLogger("paramserve")

TICK_S = 0.1
"""How often deadlines of waiting calls are looked at."""
PAUSE_S = 0.5
"""Seconds, more than `TICK_S`, without a step after which the process did not run: it was stopped,
or something held its loop up."""

_decode = decoder(CoordinatorRequest | CoordinatorNotice | ServerEnds).decode


class CoordinatorRole:
    """A `transport.Handler` around `Coordination`. All its calls come one at a time.

    Args:
        coordination: decides.
        loop: gives time and timers.
        listens: whether a process may listen at one of these addresses; called in a thread.
        work: does work on the files of checkpoints; called in a thread, once at a time.
        alone: whether no driver tells of deaths, losses and refusals: the log warns of them.
    """

    def __init__(
        self,
        coordination: Coordination,
        loop: Loop,
        listens: Callable[[Sequence[str]], bool] = may_listen,
        work: Callable[[FileWork], FileEvent | None] | None = None,
        *,
        alone: bool = False,
    ) -> None:
        self._coordination = coordination
        self._loop = loop
        self._listens = listens
        self._work = work
        self._to_do: deque[FileWork] = deque()
        """Work on files; the first is being done."""
        self._numbers: dict[Connection, int] = {}
        self._connections: dict[int, Connection] = {}
        self._servers: set[int] = set()
        """Connections of servers: they are told of every change of the membership."""
        self._next = 1
        config = coordination.config
        self.log = ClusterLog(config.servers, config.workers, warns=alone)
        self._registered = 0
        """Servers that have."""
        self.on_server_lost: Callable[[], None] = lambda: None
        """Called when a server that had registered is lost."""
        self.on_server_ends: Callable[[int], None] = lambda shard: None
        """Called when a server that had registered was told to end: its shard."""
        self.on_checkpoint: Callable[[CheckpointReport], None] = lambda report: None
        """Called when a checkpoint is over."""
        self.on_members: Callable[[Members], None] = lambda members: None
        """Called with every change of the membership."""
        self._closed = False
        self._stepped_at = self._loop.time()
        self._stall_s = config.deadlines.stall_s
        self._loop.call_later(TICK_S, self._tick)

    def opened(self, conn: Connection, hello: Hello) -> None:
        if hello.role not in COORDINATOR_ROLES:
            raise ProtocolError(
                f"a peer connected to the coordinator as {hello.role!r}", fix="run the same version"
            )
        number, self._next = self._next, self._next + 1
        self._numbers[conn] = number
        self._connections[number] = conn
        if hello.role == "register":
            self._servers.add(number)

    def frame(self, conn: Connection, header: bytes) -> None:
        try:
            message = _decode(header)
        except UnicodeDecodeError as error:  # msgspec's errors are told by the transport
            raise ProtocolError(
                f"a header was refused: {error}", fix="run the same version on both sides"
            ) from error
        number = self._numbers[conn]
        if isinstance(message, AskDebug):
            self._connections[number].send(encode(self._debug(message)))
        elif isinstance(message, ServerEnds):
            if number in self._servers:
                self.on_server_ends(message.shard)
        elif isinstance(message, CoordinatorNotice):
            if isinstance(message, ServerBeat) and number in self._servers:
                self.log.on_beat(message)
            self._step(Noticed(number, message))
        else:
            self._step(Called(number, message))

    def closed(self, conn: Connection) -> None:
        number = self._numbers.pop(conn)
        del self._connections[number]
        self._servers.discard(number)
        self._step(ConnectionLost(number, conn.reset))

    def close(self) -> None:
        """Let nothing more happen: the loop ends, and takes no work for other threads."""
        self._closed = True

    @property
    def membership(self) -> Membership:
        """Servers and workers, as they are known now: to be read."""
        return self._coordination.membership

    @property
    def is_as_saved(self) -> bool:
        """Whether nothing has changed since the checkpoint that the cluster goes on from."""
        return self._coordination.as_saved

    @property
    def can_be_saved(self) -> bool:
        """Whether there is something for a checkpoint."""
        return self._coordination.can_be_saved()

    def _debug(self, ask: AskDebug) -> DebugReport:
        servers, config = self._coordination.membership.servers, self._coordination.config
        every = range(max(config.servers, *(shard + 1 for shard in servers), 0))
        addresses = tuple(servers[k].addresses if k in servers else () for k in every)
        return report(ask, config, addresses)

    def _tick(self) -> None:
        self._step(TimePassed())
        if not self._closed:
            self._loop.call_later(TICK_S, self._tick)

    def _step(self, event: CoordinatorEvent) -> None:
        if self._closed:
            return
        now = self._loop.time()
        paused_s = now - self._stepped_at - TICK_S
        self._stepped_at = now
        if paused_s > PAUSE_S:
            self.log.tell_paused(paused_s, self._stall_s)
            self._act(self._coordination.step(ProcessPaused(paused_s), now))
        self._act(self._coordination.step(event, now))

    def _act(self, decided: Decided) -> None:
        for number, reply in decided.replies:
            connection = self._connections.get(number)
            if connection is not None:
                connection.send(encode(reply))
                if isinstance(reply, Failed):
                    self.log.on_refused(reply)
        servers = self._coordination.membership.servers
        if decided.server_lost or len(servers) != self._registered:
            self._registered = len(servers)
            self.log.on_servers(servers)
        if decided.members is not None:
            self.log.on_members(decided.members)
            self.on_members(decided.members)
            header = encode(decided.members)
            for number in sorted(self._servers):
                self._connections[number].send(header)
        if decided.server_lost:
            self.on_server_lost()
        for number, notice in decided.notices:
            self._connections[number].send(encode(notice))
        for each in decided.checkpoints:
            self.log.on_checkpoint(each)
            self.on_checkpoint(each)
        for work in decided.work:
            self._to_do.append(work)
            if len(self._to_do) == 1 and not self._closed:  # else the loop takes no jobs any more
                self._begin_work()
        for shard, addresses in decided.look_for if not self._closed else ():
            looking = self._loop.run_in_executor(None, partial(self._listens, addresses))
            looking.add_done_callback(partial(self._looked, shard))

    def _begin_work(self) -> None:
        assert self._work is not None, "it writes checkpoints"
        doing = self._loop.run_in_executor(None, partial(self._work, self._to_do[0]))
        doing.add_done_callback(self._worked)

    def _worked(self, doing: Pending[FileEvent | None]) -> None:
        work = self._to_do.popleft()
        error = doing.exception()
        if error is not None:  # a bug of ours ends this checkpoint only
            extra = event("bug", role="coordinator")
            logger.error("work on the files of checkpoints failed", exc_info=error, extra=extra)
            number = getattr(work, "checkpoint", 0)
            outcome: FileEvent | None = FilesFailed(number, repr(error), "report this")
        else:
            outcome = doing.result()
        if self._to_do and not self._closed:
            self._begin_work()
        if outcome is not None:
            self._step(FilesWorked(outcome))

    def _looked(self, shard: int, looking: Pending[bool]) -> None:
        if not looking.result():
            self._step(NoListener(shard))


def open_checkpoints(config: CoordinatorConfig) -> tuple[Committer | None, ClusterRecord | None]:
    """Claim the folder of checkpoints, if the cluster writes some, and read the one that it goes on
    from, if it does.

    Raises:
        CheckpointError: the folder cannot be used, or is not the one that the driver sees; or the
            checkpoint is not there or is damaged.
    """
    plan, committer, record = config.checkpoints, None, None
    if plan.resume:
        record = read_cluster(storage_at(plan.resume_folder), plan.resume)
    if plan.folder:
        storage = storage_at(plan.folder)
        if plan.claimed:
            see_claim(storage, plan.run)
        with telling(storage, "the folder of checkpoints cannot be made"):
            storage.make()
        committer = Committer(storage, plan, config.servers, config.cluster.hex())
    return committer, record


async def _serve(boot: Bootstrap, config: CoordinatorConfig) -> None:
    loop = asyncio.get_running_loop()
    committer, record = await asyncio.to_thread(open_checkpoints, config)
    work = committer.do if committer is not None else None
    role = CoordinatorRole(Coordination(config, record), loop, work=work)
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
        role.close()
        if committer is not None:
            committer.close()


def main(boot: Bootstrap) -> None:
    config = msgspec.msgpack.decode(boot.payload, type=CoordinatorConfig)
    hide(boot.credentials.token)
    with recorded("coordinator"):
        asyncio.run(_serve(boot, config))
