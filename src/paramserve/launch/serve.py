"""A server that is started by itself: `paramserve serve`, or `serve()` in a program.

The first one of a cluster is its coordinator as well, on the same port. The others join it and get
a shard each. They run until they are stopped, the coordinator is gone or, if that is wanted, until
all workers have come and gone. When and why each ends, `life.py` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import secrets
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from paramserve.checkpoint.locations import storage_at
from paramserve.checkpoint.reader import Checkpoint as Saved
from paramserve.client.timeouts import SAY_S, ranks
from paramserve.cluster_log import ClusterLog
from paramserve.config import (
    CLUSTER_BYTES,
    TLS,
    ConsistencySpec,
    CoordinatorConfig,
    Credentials,
    Deadlines,
    Limits,
    ServerConfig,
    check_number,
    check_restart,
    check_settings,
)
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async
from paramserve.consistency.registry import Registered
from paramserve.coordinator import CoordinatorRole, open_checkpoints
from paramserve.core.coordination import Coordination
from paramserve.core.membership import DEAD, LEFT
from paramserve.engine.base import Failure
from paramserve.errors import (
    CheckpointDamaged,
    ConnectTimeout,
    ParamServeError,
    RunTimeout,
    ServerGone,
    WorkerFailed,
    shown,
)
from paramserve.launch import life
from paramserve.launch.checkpoints import (
    Checkpoint,
    Path,
    Recovery,
    ResumePoint,
    check_served,
    recovery_of,
)
from paramserve.launch.cluster_status import ClusterStatus
from paramserve.launch.connect import full_address
from paramserve.launch.entries import COORDINATOR, Entry, Key, process_failure
from paramserve.launch.life import Life, Terms
from paramserve.launch.option_names import by_name
from paramserve.launch.packing import checked
from paramserve.launch.roster import Errors
from paramserve.launch.signals import ends_for_server
from paramserve.logs import event
from paramserve.messages import (
    COORDINATOR_ROLES,
    AskCheckpoint,
    Checkpointed,
    CheckpointReport,
    Enlist,
    Enlisted,
    Hello,
)
from paramserve.recent import recorded
from paramserve.reporters import Feed, RunInfo, versions
from paramserve.server import ServerRole, new_shard, process_role, register
from paramserve.transport.auth import credentials_of
from paramserve.transport.connection import Connection, Handler
from paramserve.transport.control import ControlLink
from paramserve.transport.listener import Listener, listen
from paramserve.transport.tcp import split_place, warn_if_open

ATTEMPT_S = 2.0
"""For one attempt to reach the coordinator; the process ends no later than this when it is told."""
MISSING_TOLD_S = 60.0
"""Seconds between two lines about the workers that have not joined or left yet."""
logger = logging.getLogger("paramserve")
LAST_ANSWER_S = 0.5
"""Seconds after the last worker has left, for answers that are on their way."""
LAST_CHECKPOINT_S = 60.0
"""Seconds for the checkpoint that is written when a cluster is told to end."""


@dataclass(frozen=True)
class Settings:
    """How a server is started; see `serve`."""

    bind: str
    advertise: str
    credentials: Credentials
    join: str | None
    """The first server's address; None: this is it."""
    servers: int
    workers: int
    consistency: ConsistencySpec
    registered: Registered
    restarts: bool
    """Whether Sync waits for a worker that died."""
    until_done: bool
    timeout_s: float
    """Limit of `until_done`; 0: without end."""
    recovery: Recovery | None
    """Recovery of the first server: its checkpoints."""
    feed: Feed
    """Feed of the first server: its reporters."""
    limits: Limits
    deadlines: Deadlines


class _SharedPort:
    """A `transport.Handler` that serves a coordinator and a shard on one port.

    A peer's role tells which one it wants: the two have no role in common.
    """

    def __init__(self, coordinator: CoordinatorRole) -> None:
        self._coordinator = coordinator
        self.server: ServerRole | None = None
        self._handlers: dict[Connection, Handler] = {}

    def opened(self, conn: Connection, hello: Hello) -> None:
        handler: Handler | None = (
            self._coordinator if hello.role in COORDINATOR_ROLES else self.server
        )
        if handler is None:  # no client knows this address yet
            raise ServerGone(
                "the server that was known here has ended, and another one starts", fix="join again"
            )
        handler.opened(conn, hello)
        self._handlers[conn] = handler

    def frame(self, conn: Connection, header: bytes) -> None:
        self._handlers[conn].frame(conn, header)

    def closed(self, conn: Connection) -> None:
        self._handlers.pop(conn).closed(conn)


class _ServedProcess:
    """What has been opened, to be closed in the reverse order."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.stack = contextlib.ExitStack()
        self._loop = asyncio.get_running_loop()
        self.coordinator: CoordinatorRole | None = None
        self.role: ServerRole | None = None
        self.control: ControlLink | None = None
        self.addresses: tuple[str, ...] = ()
        """Where this server is reached."""
        self.over = asyncio.Event()
        """Set when the life of this server is over."""
        self.life = Life(self._terms(), self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._signalled = False
        self._reason: ParamServeError | None = None
        """Why this server ends: what it tells its peers."""
        self.life.begin(self._loop.time())  # others start the processes

    def _terms(self) -> Terms:
        settings, recovery = self.settings, self.settings.recovery
        point = recovery.resume_point if recovery is not None else None
        first = settings.join is None
        return Terms(
            servers=settings.servers if first else 0,
            workers=settings.workers if first and settings.until_done else 0,
            on_worker_death="continue",
            deadlines=settings.deadlines,
            start_s=math.inf,
            timeout_s=settings.timeout_s if settings.timeout_s else None,
            collects=recovery is not None or not first,
            resumes=False if recovery is not None else None,
            strict=recovery is not None and recovery.strict,
            checkpoint=point.path if point is not None else "",
            errors=Errors(self._process_lost, self._all_died, self._took_too_long),
        )

    # --- its life -------------------------------------------------------------------------------

    def happen(self, *events: life.Event) -> None:
        """Have it decided what these events mean, and do that."""
        for effect in self.life.step(events, self._loop.time()):
            match effect:
                case life.Select(cause, damaged):
                    assert self.settings.recovery is not None
                    self.happen(self.settings.recovery.select(cause, damaged))
                case life.Collect():
                    self._begin(self._collect())
                case life.Close():
                    self.over.set()
        if self._timer is not None:
            self._timer.cancel()
        if self.life.wake_at is not None and not self.life.over:
            self._timer = self._loop.call_at(self.life.wake_at, self.happen)

    def on_signal(self, number: signal.Signals) -> None:
        """It is told to end; told twice, it ends at once."""
        if self._signalled and number == signal.SIGHUP:
            return  # kernel and shell both send it when a terminal is lost
        self.happen(life.Abandon() if self._signalled else life.Stop())
        self._signalled = True

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.life.over:
            self.happen(life.Breakdown(error))

    def _look(self) -> None:
        """Tell what the coordinator knows of servers and workers."""
        coordinator = self.coordinator
        assert coordinator is not None
        membership = coordinator.membership
        events: list[life.Event] = []
        for shard, server in membership.servers.items():
            key = Key("server", shard)
            events.append(life.Silence(key) if server.lost else life.Report(key, "ready", b""))
        if self.settings.until_done:
            events.append(life.Standing(tuple(membership.members.values()), membership.workers))
        self.happen(*events)

    def _server_ends(self, shard: int) -> None:
        self.happen(
            life.Request(
                ServerGone(
                    f"the server of shard {shard} was told to end (SIGTERM or Ctrl-C), and the "
                    "cluster ends with it",
                    applied="unknown",
                    fix=f"start the whole cluster again{self._comes_back}",
                )
            )
        )

    def _on_checkpoint(self, report: CheckpointReport) -> None:
        if report.failed:
            self.happen(life.CheckpointFailed(report.why))

    async def _follow(self, role: ServerRole) -> None:
        """Tell when the coordinator is gone, and whether that is an end in order."""
        await role.ended.wait()
        if self.life.state != "finishing":  # `_collect` waits for it there
            self.happen(life.Done() if self._saw_all_leave() else life.Silence(COORDINATOR))

    async def start(self) -> None:
        """Listen, become a member, be ready."""
        settings = self.settings
        listeners: list[Listener] = []
        both: _SharedPort | None = None
        if settings.join is None:
            self.coordinator = await self._coordinate()
            self.coordinator.on_server_lost = self._look
            self.coordinator.on_members = lambda members: self._look()
            self.coordinator.on_server_ends = self._server_ends
            self.coordinator.on_checkpoint = self._on_checkpoint
            both = _SharedPort(self.coordinator)
            listeners = await self._listen("c", both)
            coordinator = tuple(each.address for each in listeners)
        else:
            coordinator = (full_address(settings.join),)
        control = self.control = await self._reach(coordinator)
        self.stack.callback(control.close)
        enlisted = await asyncio.to_thread(
            control.call, Enlist(0), Enlisted, timeout_s=settings.deadlines.start_s
        )
        config = _server_config(settings, coordinator, enlisted)
        shard = await asyncio.to_thread(new_shard, config, settings.registered)
        self.role = process_role(config, settings.credentials, control, shard=shard)
        self.stack.callback(self.role.close)
        if both is not None:
            both.server = self.role
        else:
            listeners = await self._listen(f"s{enlisted.shard}", self.role)
        self.role.listeners = listeners
        self.addresses = tuple(each.address for each in listeners)
        await register(self.role, control, self.addresses)
        self._log_serving(enlisted)
        self.happen(life.Report(COORDINATOR, "ready", b""))
        if self.coordinator is not None:
            self._report()
            self._begin(self._tell_missing(self.coordinator))
        else:
            self._begin(self._follow(self.role))

    async def _coordinate(self) -> CoordinatorRole:
        """The coordinator of a cluster, which goes on from its newest checkpoint."""
        recovery = self.settings.recovery
        config = _coordinator_config(self.settings)
        if recovery is not None:
            await self._read_through(recovery)
            config = replace(config, checkpoints=recovery.plan(recovery.seed(None)))
        committer, record = await asyncio.to_thread(open_checkpoints, config)
        if committer is not None:
            self.stack.callback(committer.close)
        work = committer.do if committer is not None else None
        role = CoordinatorRole(Coordination(config, record), self._loop, work=work, alone=True)
        self.stack.callback(role.close)
        return role

    def _report(self) -> None:
        """Have the reporters told of the cluster."""
        settings = self.settings
        cluster = ClusterStatus(
            self.addresses[-1],
            settings.credentials,
            settings.limits,
            settings.deadlines,
            settings.feed,
        )
        self.stack.callback(cluster.close)
        settings.feed.start(cluster, ends=False)

    async def _read_through(self, recovery: Recovery) -> None:
        """Read the checkpoint that the cluster goes on from; if it is damaged, the one before."""
        while (source := recovery.resume_point) is not None:
            damage = await asyncio.to_thread(_damage, source)
            if damage is None:
                _log_resumed(source)
                return
            failed = Failure(
                type(damage).__name__, str(damage), "", damage.failed, damage.fix, "no"
            )
            self.happen(life.Report(Key("server", 0), "failed", msgspec.msgpack.encode(failed)))
            if self.life.ending:
                await asyncio.Event().wait()  # until this start is cancelled
        where = shown(recovery.folder)
        extra = event("begun", role="coordinator", folder=where)
        logger.info("%s has no checkpoint: the cluster begins anew", where, extra=extra)

    async def _collect(self) -> None:
        """Save what the cluster has, which is about to end. A server that is not the first waits
        until that one has, and is gone."""
        coordinator, role = self.coordinator, self.role
        assert role is not None
        waits = coordinator is None and role.config.checkpoints.folder
        if waits and not role.ended.is_set():
            role.tell_end()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(role.ended.wait(), LAST_CHECKPOINT_S)
        error: ParamServeError | None = None
        # Where nothing has changed, the checkpoint that it goes on from is the last one.
        if coordinator is not None and coordinator.can_be_saved and not coordinator.is_as_saved:
            try:
                await asyncio.to_thread(self._ask_checkpoint)
            except ParamServeError as failed:
                words = f"the last checkpoint was not written: {failed.failed}"
                error = type(failed)(words, applied=failed.applied, fix=failed.fix)
                if self.life.failure is not None:
                    logger.warning("%s", words, extra=event("checkpoint-failed"))
        self.happen(life.Collected(error))

    def _ask_checkpoint(self) -> None:
        settings = self.settings
        control = ControlLink.connect(
            (self.addresses[-1],),
            Hello("driver"),
            credentials=settings.credentials,
            limits=settings.limits,
            timeout_s=ATTEMPT_S,
        )
        with contextlib.closing(control):
            ask = AskCheckpoint(0, LAST_CHECKPOINT_S)
            control.call(ask, Checkpointed, timeout_s=LAST_CHECKPOINT_S)

    async def _tell_missing(self, coordinator: CoordinatorRole) -> None:
        """Log the servers, and then now and then the workers, that are waited for."""
        await asyncio.sleep(SAY_S)
        coordinator.log.tell_missing_servers(coordinator.membership.missing_servers)
        while self.settings.until_done:
            await asyncio.sleep(MISSING_TOLD_S)
            coordinator.log.tell_missing()

    async def _reach(self, coordinator: tuple[str, ...]) -> ControlLink:
        """Connect to the coordinator in short attempts: a thread cannot be told to stop."""
        settings, loop = self.settings, self._loop
        began, logged = loop.time(), False
        deadline = began + settings.deadlines.start_s
        while True:
            try:
                return await asyncio.to_thread(
                    ControlLink.connect,
                    coordinator,
                    Hello("register"),
                    credentials=settings.credentials,
                    limits=settings.limits,
                    timeout_s=min(ATTEMPT_S, max(deadline - loop.time(), 0.0)),
                    lost_s=settings.deadlines.lost_s,
                )
            except ConnectTimeout as error:
                if loop.time() >= deadline:
                    raise ConnectTimeout(
                        f"no server answered at {settings.join} for "
                        f"{settings.deadlines.start_s:.1f} s; at last: {error.failed}",
                        fix="start the cluster's first server, and look at its address",
                    ) from error
                if not logged and loop.time() - began >= SAY_S:
                    logged = True
                    logger.warning(
                        "no server answers at %s yet (%s): this one waits up to %.0f s "
                        "(--start-s, or deadlines=ps.Deadlines(start_s=...))",
                        settings.join,
                        error.__cause__,
                        settings.deadlines.start_s,
                        extra=event("server-silent", address=settings.join),
                    )

    async def _listen(self, name: str, handler: Handler) -> list[Listener]:
        settings = self.settings
        listeners = await listen(
            "",
            name,
            settings.bind,
            settings.credentials,
            handler,
            settings.limits,
            advertise=settings.advertise,
            lost_s=settings.deadlines.lost_s,
        )
        for listener in listeners:
            self.stack.callback(self._close, listener)
        return listeners

    def _close(self, listener: Listener) -> None:
        listener.close(self._reason)

    def _log_serving(self, enlisted: Enlisted) -> None:
        from paramserve import __version__  # looked up where it is needed first

        extra = event(
            "serving",
            role="server",
            server=enlisted.shard,
            servers=enlisted.servers,
            address=self._place,
            version=__version__,
        )
        text = "serving shard %d of %d at %s"
        logger.info(text, enlisted.shard, enlisted.servers, self._place, extra=extra)

    def _log_done(self, log: ClusterLog) -> None:
        """Log that no worker is there any more, and which of them have died."""
        dead = log.ranks_in(DEAD)
        extra = event("done", role="coordinator", dead=dead)
        if dead:
            logger.warning(
                "the cluster ends, as until_done asks: all workers have left but %s, which died "
                "and counts as having left; the values end with it. With restart_s (--restart) a "
                "rank that died is waited for",
                ranks(dead),
                extra=extra,
            )
        else:
            text = "all workers have left: the cluster ends, as until_done asks"
            logger.info(text, extra=extra)

    async def tell_end(self) -> None:
        """This server is about to end; its peers are told why."""
        error = self.life.error
        if self.life.outcome == "failed":
            if isinstance(error, ParamServeError):
                self._reason = ServerGone(error.failed, applied="unknown", fix=error.fix)
        elif self.life.outcome == "stopped":
            logger.info(
                "told to end (SIGTERM or Ctrl-C)", extra=event("stopping", address=self._place)
            )
            self._reason = ServerGone(
                f"the server at {self._place} was told to end (SIGTERM or Ctrl-C), and its values "
                "ended with it",
                applied="unknown",
                fix=f"start the whole cluster again{self._comes_back}",
            )
        else:
            if self.coordinator is not None:
                await asyncio.sleep(LAST_ANSWER_S)
                self._log_done(self.coordinator.log)
            self._reason = ServerGone(
                f"the cluster of the server at {self._place} has ended as until_done asks: all its "
                "workers have left, and its values ended with it",
                applied="unknown",
                fix="read the values before the last worker leaves, or serve without until_done",
            )

    @property
    def _comes_back(self) -> str:
        """What a cluster that is started again begins with, for an error."""
        recovery = self.settings.recovery
        if recovery is None:
            return ""
        return f": it begins with the newest checkpoint in {shown(recovery.folder)}"

    @property
    def _place(self) -> str:
        place = self.addresses[-1] if self.addresses else self.settings.bind
        return place.removeprefix("tcp:")

    # --- why it ends ----------------------------------------------------------------------------

    def _process_lost(self, entry: Entry) -> ParamServeError:
        """The error for a server that is lost, for the coordinator where another server is that, or
        for a checkpoint that this server cannot read."""
        if entry.failure is not None:
            return process_failure(entry)
        if self.coordinator is None:
            return ParamServeError(
                f"the coordinator at {self.settings.join} is gone, and the cluster with it",
                applied="unknown",
                fix="start the cluster again, its first server first",
            )
        servers = sorted(self.coordinator.membership.servers.items())
        listing = ", ".join(
            f"the server of shard {shard} at {each.addresses[-1].removeprefix('tcp:')}"
            for shard, each in servers
            if each.lost
        )
        return ServerGone(
            f"{listing} has ended or is lost, and its values with it",
            applied="unknown",
            fix=f"look why it ended, and start the whole cluster again{self._comes_back}",
        )

    def _all_died(self, entry: Entry, instead: str = "") -> WorkerFailed:
        assert self.coordinator is not None
        dead = ranks(self.coordinator.log.ranks_in(DEAD))
        return WorkerFailed(
            f"the cluster ends, as until_done asks: no worker has returned, {dead} died, and the "
            "values end with the cluster",
            applied="unknown",
            fix="look why they died; with restart_s (--restart) a rank that died is waited for",
        )

    def _took_too_long(self, timeout_s: float, workers: Iterable[Entry]) -> RunTimeout:
        assert self.coordinator is not None
        return RunTimeout(
            f"the cluster ends: after {timeout_s:g} s (timeout_s) its workers have not all come "
            f"and left. {self.coordinator.log.missing()}",
            applied="unknown",
            fix=f"look at these workers, or give them longer{self._comes_back}",
        )

    def _saw_all_leave(self) -> bool:
        """Whether the coordinator, before it went, told that all workers had come and left."""
        assert self.role is not None
        assert self.control is not None
        self.role.take_notices(list(self.control.notices))  # what came together with its end
        members = self.role.shard.sessions.members.values()
        return bool(members) and all(member.state in (LEFT, DEAD) for member in members)


def _damage(source: ResumePoint) -> CheckpointDamaged | None:
    """What is wrong with a checkpoint, every part of which is read."""
    try:
        with Saved(storage_at(source.folder), source.manifest) as saved:
            saved.verify()
    except CheckpointDamaged as error:
        return error
    return None


def _log_resumed(source: ResumePoint) -> None:
    clocks = ", ".join(f"{name} {clock}" for name, clock in source.manifest.cut.clocks.items())
    extra = event("resumed", role="coordinator", checkpoint=shown(source.path))
    text = "the cluster goes on from %s; clocks: %s"
    logger.info(text, source.path, clocks or "none", extra=extra)


def _coordinator_config(settings: Settings) -> CoordinatorConfig:
    return CoordinatorConfig(
        settings.servers,
        settings.workers,
        "",
        settings.consistency,
        restarts=settings.restarts,
        cluster=secrets.token_bytes(CLUSTER_BYTES),
        limits=settings.limits,
        deadlines=settings.deadlines,
    )


def _server_config(
    settings: Settings, coordinator: tuple[str, ...], enlisted: Enlisted
) -> ServerConfig:
    deadlines = settings.deadlines
    told_s = enlisted.heartbeat_s
    every_s = min(deadlines.heartbeat_s, told_s) if told_s > 0 else deadlines.heartbeat_s
    return ServerConfig(
        enlisted.shard,
        enlisted.servers,
        enlisted.workers,
        coordinator,
        "",
        enlisted.consistency,
        cluster=enlisted.cluster,
        limits=settings.limits,
        deadlines=replace(deadlines, heartbeat_s=every_s),
        checkpoints=enlisted.checkpoints,
    )


@by_name
def serve(
    bind: str,
    *,
    token_file: str | os.PathLike[str],
    join: str | None = None,
    servers: int = 1,
    workers: int = 0,
    consistency: Policy | None = None,
    rules: Sequence[Callable[..., Any]] = (),
    tls: TLS | None = None,
    advertise: str = "",
    restart_s: float | None = None,
    until_done: bool = False,
    timeout_s: float | None = None,
    checkpoint: Checkpoint | Path | None = None,
    report_to: Sequence[Any] = (),
    ready: Callable[[str], None] | None = None,
    limits: Limits | None = None,
    deadlines: Deadlines | None = None,
) -> None:
    """Serve in this process until it is told to stop (SIGTERM, Ctrl-C), or the cluster is gone.

    SIGHUP, of a terminal that is lost, means the same unless it is ignored (`nohup`).

    The first server of a cluster is started without `join` and says how many servers and workers
    there will be. Workers come with `ps.connect`. The first one tells the logger "paramserve" who
    comes, leaves, dies and is refused; with `until_done` also, now and then, who is waited for.

    Args:
        bind: `host:port` to listen on; port 0: any free one. Beyond loopback, use TLS or a network
            that you trust: the token keeps other peers out, but hides nothing.
        token_file: the cluster's token; see `paramserve token`.
        join: `host:port` of the first server; None: this is it.
        servers, workers: of the whole cluster. Only the first server is told.
        consistency: when gradients are applied; `ps.Async()` if None. Only the first is told.
        rules: classes of your own rules, policies and codecs, and functions for `damping=`, that
            this server may run. All servers of a cluster need the same ones.
        tls: certificates; None: no TLS.
        advertise: host by which others reach `bind`, where that is another one (0.0.0.0).
        restart_s: how long a worker that died may take to come again and go on where it was, under
            every policy; Sync waits for it meanwhile. None: the others go on at once, and it goes
            on at the clock of the slowest of them, with a warning.
        until_done: return when all workers have come and left. The others then end by themselves.
            A worker that died counts as having left, with `restart_s` once that is over; the log
            names it.
        timeout_s: with `until_done`: how long all workers may take until they have come and left;
            None: without end. Only the first server is told. A cluster with `checkpoint` writes a
            last one then.
        checkpoint: a folder that all servers see under this path, or `ps.Checkpoint(...)`: the
            cluster begins with the newest checkpoint there, writes more, and a last one when its
            first server is told to end. Workers that are started again go on where they were. Only
            the first is told.
        report_to: reporters, as of `ps.run`. Only the first is told.
        ready: is called with the `host:port` of this server when it serves.
    Raises:
        ValueError, TypeError: a wrong argument, or a policy that cannot work with this many
            workers. Nothing was started.
        CheckpointFolderTaken: a living run or cluster writes to the folder.
        CheckpointError: the folder has something else in it, or cannot be used; or this server
            does not see it.
        UnknownRule: this server joins a cluster whose policy it does not know.
        ParamServeError: the port is taken, the cluster is complete already, or it is gone.
        ServerGone: another server has ended or is lost, and not because `until_done` is reached.
        RunTimeout: `timeout_s` is over, and not all workers have come and left; those are named.
        WorkerFailed: `until_done` is reached, and no worker has left in order: all died.
        NotAuthenticated: the token or a certificate does not match.
        ConnectTimeout: no answer from `join`.
    """
    waits = _deadlines(deadlines, restart_s)
    bounds = check_settings("limits", limits, Limits)
    policy = consistency if consistency is not None else Async()
    described, registered = checked(policy, workers, rules)
    _check_numbers(servers, workers, ends=until_done and join is None)
    _check_timeout(timeout_s, ends=until_done and join is None)
    _check_advertise(advertise)
    split_place(bind)
    if checkpoint is not None and join is not None:
        raise ValueError(
            "checkpoint= is told to the first server, which tells the others: leave it out where "
            "join= is given"
        )
    check_served(checkpoint)
    feed = Feed(report_to, _tell_reporter)
    if report_to and join is not None:
        raise ValueError(
            "report_to= is told to the first server: leave it out where join= is given"
        )
    recovery = recovery_of("serve", checkpoint, checkpoint is not None)
    settings = Settings(
        bind=bind,
        advertise=advertise,
        credentials=credentials_of(token_file, tls, joins=join is not None),
        join=join,
        servers=servers,
        workers=workers,
        consistency=described,
        registered=registered,
        restarts=restart_s is not None,
        until_done=until_done,
        timeout_s=timeout_s if timeout_s is not None else 0.0,
        recovery=recovery,
        feed=feed,
        limits=bounds,
        deadlines=waits,
    )
    warn_if_open(bind, tls)
    seed = recovery.seed(None) if recovery is not None else None
    resumed = recovery is not None and recovery.resume_point is not None
    feed.open(RunInfo("serve", workers, servers, repr(policy), seed or 0, versions(), resumed))
    with recorded("server"):
        asyncio.run(_serve(settings, ready))


def _tell_reporter(words: str) -> None:
    logger.warning("%s", words, extra=event("reporter-dropped"))


def _check_numbers(servers: int, workers: int, ends: bool) -> None:
    """Refuse what a cluster cannot have. `ends`: it is to end when all workers have left."""
    if servers < 1 or workers < 0:
        raise ValueError(f"servers must be at least 1 and workers 0, not {servers} and {workers}")
    if ends and not workers:
        raise ValueError("until_done needs the number of workers: without any it would never end")


def _check_timeout(timeout_s: float | None, ends: bool) -> None:
    """`ends`: as of `_check_numbers`."""
    if timeout_s is None:
        return
    check_number("timeout_s", timeout_s, above=0.0)
    if not ends:
        raise ValueError(
            "timeout_s is for until_done, and told to the first server: leave it out without "
            "until_done=True or where join= is given"
        )


def _check_advertise(host: str) -> None:
    bare = host.strip("[]")
    if ":" not in bare:
        return
    try:
        ipaddress.IPv6Address(bare)
    except ValueError:
        raise ValueError(
            f"advertise must be a host without a port (the port is that of bind), not {host!r}"
        ) from None


def _deadlines(deadlines: Deadlines | None, restart_s: float | None) -> Deadlines:
    if restart_s is None:
        return check_settings("deadlines", deadlines, Deadlines)
    waits = replace(deadlines if deadlines is not None else Deadlines(), restart_s=restart_s)
    check_settings("deadlines", waits, Deadlines)
    check_restart(waits)
    return waits


async def _serve(settings: Settings, ready: Callable[[str], None] | None) -> None:
    running = _ServedProcess(settings)
    if threading.current_thread() is threading.main_thread():
        loop = asyncio.get_running_loop()
        for number in ends_for_server():
            loop.add_signal_handler(number, running.on_signal, number)
    starting = asyncio.create_task(running.start())
    over = asyncio.create_task(running.over.wait())
    try:
        await asyncio.wait((starting, over), return_when=asyncio.FIRST_COMPLETED)
        if not running.life.over:
            try:
                await starting
                if ready is not None:
                    ready(running.addresses[-1].removeprefix("tcp:"))
            except Exception as error:
                running.happen(life.Breakdown(error))
        await over
        await running.tell_end()
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await asyncio.to_thread(settings.feed.close)  # its last report asks this loop
        running.stack.close()
    if running.life.outcome == "failed":
        assert running.life.error is not None
        raise running.life.error
    logger.info("ended in order", extra=event("ended"))
