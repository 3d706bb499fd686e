"""The coordinator's whole logic as `step(event, now) -> Decided`: membership, names, records.

Calls that cannot be answered yet (a join before all servers are up, a wait for a define) are kept
with their deadline and looked at again after every change.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from paramserve.config import NO_RANK, CoordinatorConfig
from paramserve.core.checkpointing import Checkpointing, FileEvent, FileWork
from paramserve.core.cluster_state import ClusterRecord, ClusterState
from paramserve.core.membership import DEAD, EXPECTED, LEFT, LIVE, RESTARTING, RETIRING
from paramserve.core.own_speeds import OwnSpeeds
from paramserve.core.sent_gradients import SentByRank
from paramserve.core.worker_usage import UsageByRank
from paramserve.errors import (
    CheckpointError,
    ConnectTimeout,
    CoordinatorGone,
    DefineTimeout,
    ParamServeError,
    UnknownName,
    WorkerFenced,
    shown,
)
from paramserve.messages import (
    AllReduce,
    AllReduced,
    AskCheckpoint,
    AskStatus,
    CheckpointReport,
    CoordinatorNotice,
    CoordinatorReply,
    CoordinatorRequest,
    CutTaken,
    DatasetSize,
    Defined,
    Enlist,
    Enlisted,
    Failed,
    Fastest,
    Found,
    GiveBack,
    Join,
    Joined,
    Lease,
    Leased,
    Leave,
    Lookup,
    MarkDead,
    Member,
    Members,
    Missing,
    Ok,
    OpenCollective,
    PassBy,
    PlaceBlock,
    Placed,
    Reconnect,
    Record,
    Register,
    Scale,
    ServerBeat,
    ServerNotice,
    Status,
    TellSpeed,
    WorkerBeat,
    encode,
)

WAITING_MAX = 4096
"""Calls that may wait at one time, and parties whose connection was reset."""
LOST_RECORDS_MAX = 1 << 62
"""Counted, and some more: peers tell any number, and a status holds none above 64 bits."""
STATUS_BYTES_MAX = 4 << 20
"""Most bytes of the records in one status; a quarter of `header_bytes_max` if that is less."""


class Called(NamedTuple):
    """A request on a connection (numbered by the role)."""

    connection: int
    message: CoordinatorRequest


class Noticed(NamedTuple):
    """A heartbeat on a connection."""

    connection: int
    message: CoordinatorNotice


class ConnectionLost(NamedTuple):
    """A connection ended.

    `reset`: the network broke it, which says nothing of the process at its other end: that may
    connect again until it has not been heard of for `stall_s`.
    """

    connection: int
    reset: bool = False


class TimePassed(NamedTuple):
    """Look at deadlines and at silent processes."""


class NoListener(NamedTuple):
    """No process listens any more where a shard's server did: it has ended."""

    shard: int


class ProcessPaused(NamedTuple):
    """This process did not run for so long: what came in was not read, so that no silence and no
    wait of that time counts."""

    seconds: float


class FilesWorked(NamedTuple):
    """Work on the files of checkpoints is done, or has failed."""

    event: FileEvent


CoordinatorEvent = (
    Called | Noticed | ConnectionLost | TimePassed | NoListener | ProcessPaused | FilesWorked
)


@dataclass
class Decided:
    """What the role must do: answer calls, and tell all servers of a new membership."""

    replies: list[tuple[int, CoordinatorReply]] = field(default_factory=list)
    members: Members | None = None
    server_lost: bool = False
    """Whether a server that had registered is lost, and its values with it."""
    look_for: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    """Shards whose server has not come again after a reset, with its addresses: find out whether a
    process listens there, and say so if none does (`NoListener`)."""
    notices: list[tuple[int, ServerNotice]] = field(default_factory=list)
    """What to tell a server, by its connection."""
    work: list[FileWork] = field(default_factory=list)
    """Work on checkpoint files, to be done in this order, in a thread (`FilesWorked`)."""
    checkpoints: list[CheckpointReport] = field(default_factory=list)
    """How things stand after each checkpoint that is over."""


@dataclass
class Party:
    """The process at the other end of a connection."""

    client: int = 0
    rank: int = NO_RANK
    shard: int | None = None
    """Shard of a server that has registered."""
    enlisted: int | None = None
    """Shard that was given out to a server which was started by itself."""
    logged: int = 0
    """Records that this client has logged, as far as is known."""


@dataclass
class _Absent:
    """A party whose connection was reset: it may connect again."""

    party: Party
    since: float
    look_at: float
    """When to look whether its process still listens, if it is a server."""


Waits = Join | PlaceBlock | Lookup | Lease | AllReduce | AskCheckpoint
"""Calls that may have to wait."""


class _Waiting(NamedTuple):
    connection: int
    message: Waits
    deadline: float


class Coordination:
    """The coordinator without its sockets.

    Args:
        record: of the checkpoint that the cluster goes on from; None: it begins.
    """

    def __init__(self, config: CoordinatorConfig, record: ClusterRecord | None = None) -> None:
        self.config = config
        state = ClusterState(
            config.servers,
            config.workers,
            config.limits.reduce_bytes_max,
            config.consistency,
            record,
        )
        self.as_saved = record is not None
        """Whether the cluster is as its checkpoint has it: no client has come since, and it was not
        scaled."""
        self.membership, self.directory = state.membership, state.directory
        self.leases, self.collectives = state.leases, state.collectives
        self.checkpoints: Checkpointing | None = None
        """None: the cluster writes none."""
        if config.checkpoints.folder:
            self.checkpoints = Checkpointing(config.checkpoints, config.servers, state)
        self._parties: dict[int, Party] = {}
        self._absent: list[_Absent] = []
        self._waiting: list[_Waiting] = []
        self._records: deque[tuple[int, Record]] = deque()
        """Each with its size."""
        self._record_bytes = 0
        self._records_max = config.limits.log_records_max * max(1, config.workers)
        self._page_bytes_max = min(STATUS_BYTES_MAX, config.limits.header_bytes_max // 4)
        self._sent_gradients = SentByRank()
        self._speeds = OwnSpeeds()
        self._usage = UsageByRank()
        self._first_record = 0
        self._lost_records = 0
        self._now = 0.0
        self._began: float | None = None
        self._decided = Decided()

    def step(self, event: CoordinatorEvent, now: float) -> Decided:
        """Let one event happen at `now` (seconds on a clock that never goes back)."""
        self._now = now
        self._began = self._began if self._began is not None else now
        decided = self._decided = Decided()
        before = self.membership.number
        match event:
            case Called():
                self._called(event.connection, event.message)
            case Noticed():
                self._noticed(event.connection, event.message)
            case ConnectionLost():
                self._on_disconnect(event.connection, reset=event.reset)
            case TimePassed():
                self._give_up_absent()
                for rank in self.membership.silent_workers(now, self.config.deadlines.stall_s):
                    self._died(rank)
                for rank in self.membership.overdue(now, self.config.deadlines.restart_s):
                    self._ended(rank, DEAD)
            case NoListener():
                self._no_listener(event.shard)
            case ProcessPaused():
                self.membership.paused(event.seconds)
                self._waiting = [
                    each._replace(deadline=each.deadline + event.seconds) for each in self._waiting
                ]
                for each in self._absent:
                    each.since += event.seconds
                    each.look_at += event.seconds
                if self.checkpoints is not None:
                    self.checkpoints.paused(event.seconds)
            case FilesWorked():
                assert self.checkpoints is not None
                self.checkpoints.worked(event.event, now)
        if self.membership.number != before:
            self.leases.changed(self._living(), self.membership.number)
            self.collectives.changed()
        if self.checkpoints is not None:
            self.checkpoints.look(now, self.can_be_saved)
        self._retry_waiting()  # joins may change the membership, but no member ends there
        if self.membership.number != before:
            decided.members = self.membership.snapshot()
        if self.checkpoints is not None:
            self._pass_on(self.checkpoints)
        return decided

    def _living(self) -> set[int]:
        """The clients of the ranks that live."""
        members = self.membership.members.values()
        return {each.client for each in members if each.state in (LIVE, RETIRING)}

    def _pass_on(self, checkpoints: Checkpointing) -> None:
        """Have done what checkpoints need."""
        servers = {each.shard: number for number, each in self._parties.items()}
        self._decided.notices += [
            (servers[shard], notice) for shard, notice in checkpoints.notices if shard in servers
        ]  # the others are told when they connect again
        self._decided.work += checkpoints.work
        self._decided.checkpoints += checkpoints.ended
        checkpoints.notices, checkpoints.work, checkpoints.ended = [], [], []

    def can_be_saved(self) -> bool:
        """Whether all servers have come, and something is defined."""
        return self.membership.complete and bool(self.directory.find(None))

    def _reply(self, connection: int, message: CoordinatorReply) -> None:
        self._decided.replies.append((connection, message))

    def _called(self, connection: int, message: CoordinatorRequest) -> None:
        """Answer a call, or let it wait until it can be answered; of too many that wait the oldest
        is answered as late."""
        try:
            reply = self._answer(connection, message)
        except ParamServeError as error:
            reply = failure(message.call, error)
        if reply is not None:
            self._reply(connection, reply)
            return
        assert isinstance(message, Waits)
        wait_s = message.wait_s
        if isinstance(message, Join) and not wait_s:
            wait_s = self.config.deadlines.start_s
        self._waiting.append(_Waiting(connection, message, self._now + wait_s))
        if len(self._waiting) > WAITING_MAX:
            oldest = self._waiting.pop(0)
            self._reply(oldest.connection, self._too_late(oldest))

    def _answer(self, connection: int, message: CoordinatorRequest) -> CoordinatorReply | None:
        """The reply to a call; None: not yet."""
        party = self._parties.setdefault(connection, Party())
        match message:
            case Enlist():
                return self._enlist(party, message)
            case Register():
                self.membership.register(message, self._now, party.enlisted)
                party.shard = message.shard
            case Join():
                return self._join(party, message)
            case Reconnect():
                self._reconnect(connection, message)
            case PlaceBlock():
                self._require_live(party)
                placed = self.directory.place(message, party.client)
                return None if placed is None else Placed(message.call, *placed)
            case Defined():
                self.directory.defined(message.block, message.attempt)
            case Lookup():
                specs = self.directory.find(message.names)
                return None if specs is None else Found(message.call, specs)
            case Lease():
                return self._lease(party, message)
            case AllReduce():
                return self.collectives.call(message, self._worker_of(party, "called a collective"))
            case DatasetSize():
                member = self._worker_of(party, "made a loader")
                return self.leases.compare_size(message, member.rank)
            case TellSpeed():
                return self._fastest(party, message)
            case GiveBack():
                self.leases.give_back(message, party.client)
            case Leave():
                self.directory.client_gone(party.client)
                self._ended(party.rank, LEFT, party.client)
            case MarkDead():
                self._mark_dead(message)
            case Scale():
                most = self.config.limits.clients_max
                if message.workers > most:
                    raise ParamServeError(
                        f"the cluster was not scaled to {message.workers} workers: its clients_max "
                        f"is {most}",
                        fix="ask for fewer, or raise it with limits=ps.Limits(clients_max=...) of "
                        "the engine or ps.serve",
                    )
                self.membership.scale(message.workers)
                self.as_saved = False
                self._records_max = self.config.limits.log_records_max * message.workers
            case PassBy():
                member = self._worker_of(party, "passed a collective by")
                if message.place >= 0:
                    self.collectives.begin_steps(message, member)
                    return Ok(message.call)
                opened = self._open_collective()
                if opened is not None and opened.number == message.number:
                    self.collectives.pass_by(member)
                return Ok(message.call)
            case AskStatus():
                return self._status(message)
            case AskCheckpoint():
                if self.checkpoints is None:
                    raise CheckpointError(
                        "no checkpoint was taken: the cluster has no folder for checkpoints",
                        fix="start it with one: checkpoint=",
                    )
                return self.checkpoints.ask(connection, message, self._now)
        return Ok(message.call)

    def _enlist(self, party: Party, message: Enlist) -> Enlisted:
        if party.enlisted is None:
            party.enlisted = self.membership.enlist()
        config = self.config
        return Enlisted(
            message.call,
            party.enlisted,
            config.servers,
            config.workers,
            config.consistency,
            config.cluster,
            config.deadlines.heartbeat_s,
            config.checkpoints,
        )

    def _join(self, party: Party, message: Join) -> Joined | None:
        if not self.membership.complete or self._absent_servers():
            return None
        if self.checkpoints is not None and not self.checkpoints.servers_seen():
            return None
        before = self.membership.members.get(message.rank)
        client, incarnation = self.membership.join(message, self._now)
        self.as_saved = False
        party.client, party.rank = client, message.rank
        return Joined(
            message.call,
            client,
            incarnation,
            self.membership.workers,
            0,
            self.membership.addresses(),
            self.config.consistency,
            self.config.cluster,
            self.membership.late(message.rank, incarnation),
            self.config.restarts or bool(self.config.checkpoints.folder),
            self.config.deadlines.heartbeat_s,
            before is not None and before.state in (LEFT, DEAD),
            self.membership.workers_at_first,
            self.membership.workers_before,
            bool(self.config.checkpoints.folder),
        )

    def _lease(self, party: Party, message: Lease) -> Leased | None:
        member = self._worker_of(party, f"asked for samples of loader {message.loader!r}")
        if member.state == RETIRING:
            return Leased(message.call, over=True)
        sharing = [
            rank
            for rank, each in self.membership.members.items()
            if each.state in (EXPECTED, LIVE, RESTARTING)
        ]
        workers = self.config.workers
        return self.leases.take(message, party.client, party.rank, sharing, workers)

    def _fastest(self, party: Party, message: TellSpeed) -> Fastest:
        member = self._worker_of(party, "told how fast it is")
        if not self.directory.has_group(message.group):
            raise UnknownName(
                f"rank {member.rank} told how fast it is in group {message.group!r}, which is not "
                "defined",
                fix="define it first, or correct the name",
            )
        self._speeds.on_report(member.rank, member.client, message)
        return Fastest(message.call, self._speeds.fastest(message.group, self._living()))

    def _worker_of(self, party: Party, what: str) -> Member:
        """The live worker that did this."""
        self._require_live(party)
        member = self.membership.members.get(party.rank)
        if member is None:
            raise ParamServeError(
                f"client {party.client} {what}, but it is no worker", fix="do so in a worker"
            )
        return member

    def _require_live(self, party: Party) -> None:
        """Refuse a worker that counts as dead: the others must not wait for its define."""
        member = self.membership.members.get(party.rank)
        lives = member is not None and member.state in (LIVE, RETIRING)
        if member is None or (member.client == party.client and lives):
            return
        raise WorkerFenced(
            f"worker {party.rank} (client {party.client}) is {member.state} for the cluster, "
            f"which knows incarnation {member.incarnation}",
            fix="let this process end; a new one may join",
        )

    def _mark_dead(self, message: MarkDead) -> None:
        if message.kind != "worker":
            raise ParamServeError(
                f"{message.kind} {message.number} was reported dead; only workers can be",
                fix="stop the run when a server or the coordinator ends",
            )
        member = self.membership.members.get(message.number)
        if member is not None and 0 < message.incarnation < member.incarnation:
            return  # late report: the worker that ended has a successor
        if message.final:
            self._ended(message.number, DEAD)
        else:
            self._died(message.number)

    def _died(self, rank: int, client: int | None = None) -> None:
        """A worker ended without leaving: its place is kept if it will be started again."""
        member = self.membership.members.get(rank)
        retiring = member is not None and member.state == RETIRING
        if retiring or not self.config.restarts:
            self._ended(rank, DEAD, client)
            return
        if member is not None and self.membership.restarting(rank, self._now, client):
            self.directory.client_gone(member.client)

    def _ended(self, rank: int, state: str, client: int | None = None) -> None:
        member = self.membership.members.get(rank)
        if member is not None and self.membership.ended(rank, state, client):
            self.directory.client_gone(member.client)

    def _noticed(self, connection: int, message: CoordinatorNotice) -> None:
        party = self._parties.setdefault(connection, Party())
        if isinstance(message, ServerBeat):
            if party.shard == message.shard:
                self.membership.heard_server(message, self._now)
                beats = [each.beat for each in self.membership.servers.values()]
                if self.membership.complete:
                    self.leases.reported(beats)
                if self.checkpoints is not None:
                    self.checkpoints.on_beat(message, beats, self._now)
        elif isinstance(message, WorkerBeat):
            self._note_alive(party)
            self._log(party, message)
        elif self.checkpoints is not None and party.shard is not None:
            if isinstance(message, CutTaken):
                self.checkpoints.cut_taken(message, self._now)
            elif party.shard == message.shard:
                self.checkpoints.cut_written(message, self._now)

    def _log(self, party: Party, message: WorkerBeat) -> None:
        """Keep what a client has logged, sent and used, and count what it has dropped."""
        if message.usage is not None and party.rank != NO_RANK:
            self._usage.on_report(party.rank, party.client, message.usage)
        if message.sent and party.rank != NO_RANK:
            reported = [each for each in message.sent if self.directory.has_group(each.group)]
            self._sent_gradients.on_report(party.rank, party.client, reported)
        dropped = max(message.first_record - party.logged, 0)
        self._lost_records = min(self._lost_records + dropped, LOST_RECORDS_MAX)
        party.logged = max(message.first_record, party.logged) + len(message.records)
        for record in message.records:
            size = len(encode(record))
            if size > self._page_bytes_max:
                self._lost_records += 1
                continue
            self._records.append((size, record))
            self._record_bytes += size
        limits = self.config.limits
        while len(self._records) > self._records_max or self._record_bytes > limits.log_bytes_max:
            self._record_bytes -= self._records.popleft()[0]
            self._first_record += 1

    def _note_alive(self, party: Party) -> None:
        member = self.membership.members.get(party.rank)
        if member is not None and member.client == party.client:
            self.membership.heard_worker(party.rank, self._now)

    def _reconnect(self, connection: int, message: Reconnect) -> None:
        """Let a client or server go on with this connection.

        Raises:
            CoordinatorGone: it belongs to another cluster.
            WorkerFenced, ParamServeError: it counts as dead, or another one has its place. Nothing
                was changed.
        """
        if message.cluster != self.config.cluster:
            raise CoordinatorGone(
                "the coordinator at this address is another cluster's: the one that was known here "
                "has ended",
                applied="unknown",
                fix="start that cluster again; give each cluster a token of its own",
            )
        party = self._party_of(message)
        for number, each in list(self._parties.items()):
            if each is party:  # its end was not noticed here
                self._parties[number] = Party()
                self._waiting = [w for w in self._waiting if w.connection != number]
        self._absent = [each for each in self._absent if each.party is not party]
        self._parties[connection] = party
        self._note_alive(party)
        if party.shard is not None:
            self.membership.heard_server(self.membership.servers[party.shard].beat, self._now)
            self._decided.members = self.membership.snapshot()
            if self.checkpoints is not None:
                self.checkpoints.repeat_notice(party.shard, self._now)

    def _party_of(self, message: Reconnect) -> Party:
        """The party that reconnects, if it is still waited for."""
        parties = [*self._parties.values(), *(each.party for each in self._absent)]
        if message.shard >= 0:
            entry = self.membership.servers.get(message.shard)
            identity = (message.pid, message.addresses)
            same = entry is not None and not entry.lost and (entry.pid, entry.addresses) == identity
            for party in parties:
                if same and party.shard == message.shard:
                    return party
            raise ParamServeError(
                f"a server connected again as that of shard {message.shard}, which counts as lost "
                "or is another one",
                fix="start the whole cluster again",
            )
        for party in parties:
            if party.client == message.client > 0 and party.rank == message.rank:
                self._require_live(party)
                return party
        raise WorkerFenced(
            f"client {message.client} (rank {message.rank}, incarnation {message.incarnation}) "
            "connected again, but counts as dead for the cluster",
            fix="let this process end; a new one may join",
        )

    def _give_up_absent(self) -> None:
        """End the wait for parties that did not connect again in time."""
        deadlines = self.config.deadlines
        silent = self.membership.silent_servers(self._now, deadlines.stall_s)
        absent, self._absent = self._absent, []
        for each in absent:
            shard = each.party.shard
            if shard is not None and shard in silent:
                self._server_lost(shard)
            elif shard is None and self._now - each.since > deadlines.stall_s:
                self._client_lost(each.party)
            else:
                self._absent.append(each)
                if shard is not None and self._now >= each.look_at:
                    each.look_at = self._now + deadlines.reconnect_s
                    addresses = self.membership.servers[shard].addresses
                    self._decided.look_for.append((shard, addresses))

    def _absent_servers(self) -> list[int]:
        """Shards whose server is lost, or may connect again: a client that joined now would try in
        vain to reach it."""
        absent = {each.party.shard for each in self._absent}
        servers = sorted(self.membership.servers.items())
        return [shard for shard, each in servers if each.lost or shard in absent]

    def _no_listener(self, shard: int) -> None:
        """A server that has not come again has ended. One that has is another connection's."""
        others = [each for each in self._absent if each.party.shard != shard]
        if len(others) < len(self._absent):
            self._absent = others
            self._server_lost(shard)

    def _on_disconnect(self, connection: int, *, reset: bool) -> None:
        """Drop a connection's calls, and what stands and falls with it. After a reset its client or
        server is waited for."""
        self._waiting = [w for w in self._waiting if w.connection != connection]
        party = self._parties.pop(connection, None)
        if self.checkpoints is not None:
            self.checkpoints.on_disconnect(connection)
        if party is None:
            return
        if reset and (party.shard is not None or party.client):
            look_at = self._now + self.config.deadlines.reconnect_s
            self._absent.append(_Absent(party, self._now, look_at))
            if len(self._absent) <= WAITING_MAX:
                return
            party = self._absent.pop(0).party
        if party.shard is not None:
            self._server_lost(party.shard)
        elif party.enlisted is not None:
            self.membership.resign(party.enlisted)
        if party.client:
            self._client_lost(party)

    def _server_lost(self, shard: int) -> None:
        self.membership.server_lost(shard)
        self._decided.server_lost = True
        if self.checkpoints is not None:
            self.checkpoints.server_lost(shard, self._now)

    def _client_lost(self, party: Party) -> None:
        self.directory.client_gone(party.client)
        self._died(party.rank, party.client)

    def _status(self, message: AskStatus) -> Status:
        end = self._first_record + len(self._records)
        start = min(max(message.after_record, self._first_record), end)
        page = self._page(start - self._first_record)
        return Status(
            message.call,
            self.membership.present(),
            tuple(entry.beat for _, entry in sorted(self.membership.servers.items())),
            self.membership.silent_servers(self._now, self.config.deadlines.stall_s),
            page,
            start + len(page),
            self._first_record,
            self.leases.reports(),
            end,
            self._lost_records,
            self.collectives.number,
            self._now - self._began if self._began is not None else 0.0,
            self._open_collective(),
            self.config.servers,
            self.checkpoints.report(self._now) if self.checkpoints is not None else None,
            self._sent_gradients.report(),
            self._speeds.report(self._living()),
            self._usage.report(self._living()),
        )

    def _open_collective(self) -> OpenCollective | None:
        """The collective that ranks wait in. A call that its caller has given up waits until its
        `wait_s` is over."""
        calls = {
            self._parties[each.connection].rank: each.message
            for each in self._waiting
            if isinstance(each.message, AllReduce)
        }
        if not calls:
            return None
        missing = tuple(each.rank for each in self.collectives.missing())
        number = self.collectives.number + 1
        op = next(iter(calls.values())).op
        epoch = max(each.epoch for each in calls.values())
        return OpenCollective(number, op, tuple(sorted(calls)), missing, epoch)

    def _page(self, skip: int) -> tuple[Record, ...]:
        """The records from there on that fit into one status."""
        room = self._page_bytes_max
        page: list[Record] = []
        for size, record in islice(self._records, skip, None):
            if size > room:
                break
            room -= size
            page.append(record)
        return tuple(page)

    def _retry_waiting(self) -> None:
        """Answer the waiting calls that can be answered by now, and those at their deadline."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            try:
                reply = self._answer(each.connection, each.message)
            except ParamServeError as error:
                reply = failure(each.message.call, error)
            if reply is None and each.deadline <= self._now:
                reply = self._too_late(each)
            if reply is None:
                self._waiting.append(each)
            else:
                self._reply(each.connection, reply)

    def _too_late(self, waiting: _Waiting) -> CoordinatorReply:
        """The reply to a call that has waited for long enough."""
        message = waiting.message
        if isinstance(message, Lease):
            return Leased(message.call, holders=self.leases.holders(message))
        if isinstance(message, AllReduce):
            missing = tuple(
                Missing(each.rank, each.state, *self.membership.furthest(each.rank))
                for each in self.collectives.missing()
            )
            if message.last:
                self.collectives.withdraw(self._parties[waiting.connection].rank)
            return AllReduced(message.call, missing=missing)
        if isinstance(message, AskCheckpoint):
            assert self.checkpoints is not None
            late = self.checkpoints.asked_too_long(waiting.connection, message)
            return failure(message.call, late)
        return failure(message.call, self._late(message))

    def _late(self, message: Join | PlaceBlock | Lookup) -> ParamServeError:
        """Make the error of a call that has waited to its deadline: what it lacks."""
        if isinstance(message, Join):
            missing = self.membership.missing_servers
            absent = self._absent_servers()
            if not (missing or absent):
                return ConnectTimeout(
                    "the servers have registered, and the folder of checkpoints "
                    f"{shown(self.config.checkpoints.folder)} does not answer",
                    fix="look at its storage",
                )
            failed = f"{self.config.servers - len(missing)} of {self.config.servers} servers have "
            failed += f"registered, those of shards {missing} have not" if missing else "registered"
            failed += f"; the connection to those of shards {absent} is lost" if absent else ""
            return ConnectTimeout(failed, fix="start the missing servers, or look at their output")
        if isinstance(message, Lookup):
            defined = {p.name for spec in self.directory.find(None) or () for p in spec.pieces}
            names = [name for name in message.names or () if name not in defined]
            return UnknownName(
                f"no parameter is named {', '.join(map(repr, names[:5]))}; "
                f"defined: {', '.join(sorted(defined)[:10]) or 'nothing yet'}",
                fix="define it first, or correct the name",
            )
        names = [piece.name for piece in message.pieces[:3]]
        return DefineTimeout(
            f"group {message.group!r} with {', '.join(map(repr, names))} was not defined in "
            f"{message.wait_s:.1f} s",
            fix="look at the rank that defines it (rank 0), or raise timeout_s",
        )


def failure(call: int, error: ParamServeError) -> Failed:
    """An error as the reply that carries it."""
    return Failed(call, type(error).__name__, error.failed, error.applied, error.fix)
