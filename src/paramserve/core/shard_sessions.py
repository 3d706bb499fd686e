"""The shard's end of its clients' sessions: each numbered request takes effect exactly once.

A shard accepts exactly the number after the last one. A lower number is answered from the kept
outcomes, or is still waiting here and will be answered when its turn comes. A higher one means
that something between was lost: the connection is dropped and the client sends again in order.
An outcome keeps versions and no values: those lie in the client's memory, or in the mirror of it.

`Sessions` also knows the members of the cluster: it refuses sessions of older incarnations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import NamedTuple
from weakref import ref

from msgspec import Struct, structs

from paramserve.config import NO_RANK, Limits
from paramserve.core.request_memory import Bytes, Memory
from paramserve.errors import ClientClosed, Overloaded, ParamServeError, WorkerFenced
from paramserve.messages import (
    Done,
    Member,
    Members,
    NumberedRequest,
    Read,
    Refused,
    Run,
    ShardReply,
    Step,
)

SESSION_KEEP_S = 60.0
"""A client that is no live worker is forgotten this long after its connection ended."""
CLOSED_MAX = 1 << 16
"""Most clients that ended with an unanswered request and are remembered, until a cut shows that all
shards have ended them. Beyond it the shard forgets the oldest: no cut waits for that client or
names it any more, and a cut lacks what another shard has still to receive from it."""
FENCED_STATES = ("left", "dead", "restarting")
"""States of a member whose present incarnation may change nothing any more."""
AWAITED = ("expected", "live", "restarting", "retiring")
"""States of a member for which a synchronous clock waits."""


class ClientHere(Struct, frozen=True):
    """A client opened a connection (its older one is closed after this)."""

    client: int
    incarnation: int
    rank: int
    window: int
    again: bool = False
    """Whether the client has been connected before; then it is refused if its session is
    forgotten."""
    requests: int = 0
    """Requests that the client's `Hello` allows; 0: as many as `window`."""


class Request(Struct, frozen=True):
    """A numbered request and the memory that it speaks of."""

    message: NumberedRequest
    memory: Memory


class ReadRequest(Struct, frozen=True):
    """A read and the memory that it speaks of, by arena number; 0 is the payload."""

    message: Read
    memory: Memory


class Answer(Struct, frozen=True):
    """A reply, and what was written for it to the mirror of its client's memory."""

    message: ShardReply
    written: tuple[Run, ...] = ()
    mirror: Memory | None = None
    """Memory where that lies; it may have been replaced since. None: nothing was written to it."""


class Round(NamedTuple):
    """Where a rank is in a group when it has ended the clocks of another one before this.

    Attributes:
        entry: the other group.
        clock: the one that comes next there.
        at: of the group itself.
        seq: of the request by which the rank has joined the group; 0: not yet.
    """

    entry: int
    clock: int
    at: int
    seq: int = 0


class CallPart(NamedTuple):
    """One group's part of a call that steps several.

    Attributes:
        clock: of the step, as it says.
        more: if another part follows, the call's mark; see `messages.Step`.
    """

    client: int
    seq: int
    group: int
    clock: int
    more: tuple[int, int] | None


class SessionRecord(Struct, frozen=True):
    """A client's session on one shard, as of a cut.

    Attributes:
        last: the number of its last request that has had its effect.
        outcomes: of the last numbers.
        policy_numbers: by group, the newest change of its policy that the client knows of.
        ticks: by group, the number of its last step that ended a clock.
    """

    client: int
    incarnation: int
    rank: int
    window: int
    requests: int
    last: int
    outcomes: tuple[Done | Refused, ...]
    policy_numbers: dict[int, int]
    ticks: dict[int, int]


class SessionsRecord(Struct, frozen=True):
    """The sessions of one shard, and the cluster's members as the shard knows them, as of a cut.

    Attributes:
        members_number: of the membership that the coordinator told last.
    """

    members_number: int = 0
    members: tuple[Member, ...] = ()
    sessions: tuple[SessionRecord, ...] = ()


class Verdict(Enum):
    NEW = "new"
    REPEATED = "repeated"
    PENDING = "pending"
    FORGOTTEN = "forgotten"
    GAP = "gap"


class ShardSession:
    """One client's session on one shard; it outlives the client's connections.

    `window` is the client's own bound on unanswered calls, `requests` on their numbers: outcomes
    of that many last numbers are kept, since the client can ask again for no others, and fewer
    where it says so.
    """

    def __init__(
        self, client: int, incarnation: int, rank: int, window: int, requests: int | None = None
    ) -> None:
        self.client = client
        self.incarnation = incarnation
        self.rank = rank
        self.window = window
        self.requests = requests if requests is not None else window
        self.last = 0
        """Highest sequence number that was accepted."""
        self.queue: deque[Request] = deque()
        """Accepted requests that wait to be executed: behind the held request, or until a cut is
        over."""
        self.reads: deque[ReadRequest] = deque()
        """Reads of the present connection that wait: for earlier requests, or because the group's
        policy holds them."""
        self.last_read = 0
        """Number of the newest read on the present connection."""
        self.held: Request | None = None
        """Request that was executed as far as possible and is not answered yet; None: no request is
        held."""
        self.applied: Done | None = None
        """Outcome of the held request, if that has had its effect here and only its answer waits:
        for a read, for a decision about members or for a cut. None: it has had no effect yet."""
        self.live = False
        """Whether this is the newest incarnation of a member that clocks wait for."""
        self.fenced_by: Member | None = None
        """Member whose state or newer incarnation makes this shard refuse all requests of the
        session; None: the session is not fenced."""
        self.policy_numbers: dict[int, int] = {}
        """Newest change of each group's policy that the client knows of, by number."""
        self.rounds: dict[int, Round] = {}
        """Round at which the rank is level again, for each group that it joined ahead of its entry
        group. It holds until the rank ends a clock of the group, or suspends its membership
        there."""
        self.ticks: dict[int, int] = {}
        """Sequence number, by group, of the session's last step that ends a clock; that clock may
        still be undecided."""
        self.fenced_at = 0
        """Last sequence number whose effect counts; meaningful once the session is fenced."""
        self.counted: set[int] = set()
        """Sequence numbers of steps that were committed after the session was fenced, while earlier
        requests of it were unanswered."""
        self.gone_at: float | None = None
        """When the client's last connection ended; None while it has one."""
        self.mirror = Memory({}, mirrored=True)
        """The arenas of a client on another host, as far as their bytes have come. Where they
        change, another object takes its place: requests under way keep theirs."""
        self.replaced: list[ref[Bytes]] = []
        """Arenas of earlier mirrors, which requests under way may still keep."""
        self.left_out: set[int] = set()
        """Groups in which the client keeps a residual: a part of its gradients that it has not
        sent."""
        self.flushed = 0
        """Number of the newest flush that an applied step of the client carried out."""
        self.pushed: Step | None = None
        """Unanswered push that may change `left_out` and `flushed`; None: there is none."""
        self.step_s = 0.0
        """Longest time between the answers to two pushes that `pushed` held, in seconds; an older
        time counts less."""
        self.stepped_at = 0.0
        """When the last push that `pushed` held was answered; before the first one, when the
        session began."""
        self._outcomes: dict[int, Done | Refused] = {}
        self._written: dict[int, tuple[Run, ...]] = {}
        """Runs of memory written for each kept outcome, by sequence number; a repeated answer sends
        them again."""

    def record(self, last: int) -> SessionRecord:
        """The session as it is now; `last` is its last number that is in the cut."""
        outcomes = {seq: each for seq, each in self._outcomes.items() if seq <= last}
        if self.applied is not None and self.applied.seq <= last:
            outcomes[self.applied.seq] = self.applied  # it waits to read, which is none of the cut
        return SessionRecord(
            self.client,
            self.incarnation,
            self.rank,
            self.window,
            self.requests,
            last,
            tuple(outcomes[seq] for seq in sorted(outcomes)),
            dict(self.policy_numbers),
            dict(self.ticks),
        )

    def restore(self, record: SessionRecord, now: float) -> None:
        """Go on from a cut, without a connection."""
        self.last = record.last
        self._outcomes = {each.seq: each for each in record.outcomes}
        self.policy_numbers, self.ticks = dict(record.policy_numbers), dict(record.ticks)
        self.gone_at = self.stepped_at = now

    @property
    def executed(self) -> int:
        """The last number whose request has had its effect, though it may wait to read."""
        if self.held is not None:
            return self.held.message.seq - (self.applied is None)
        return self.queue[0].message.seq - 1 if self.queue else self.last

    @property
    def waiting(self) -> int:
        """Requests that are not answered: what is held, what is behind it, and reads."""
        return (self.held is not None) + len(self.queue) + len(self.reads)

    def has_answered(self, seq: int) -> bool:
        """Whether all requests up to a number have been answered."""
        oldest = self.held or (self.queue[0] if self.queue else None)
        return seq < oldest.message.seq if oldest is not None else seq <= self.last

    def admit(self, seq: int) -> Verdict:
        """What to do with this number; a new one counts as accepted from now on."""
        if seq == self.last + 1:
            if self.queue and len(self.queue) >= self.requests:
                return Verdict.GAP
            self.last = seq
            return Verdict.NEW
        if seq > self.last:
            return Verdict.GAP
        if seq in self._outcomes:
            return Verdict.REPEATED
        oldest = self.held or (self.queue[0] if self.queue else None)
        if oldest is not None and seq >= oldest.message.seq:
            return Verdict.PENDING
        return Verdict.FORGOTTEN

    def answer_again(self, seq: int) -> Answer:
        """The answer to a number; `admit` said REPEATED."""
        written = self._written.get(seq, ())
        if not all(map(self.mirror.has, written)):
            written = ()  # its client has released that memory
        return Answer(self._outcomes[seq], written, self.mirror)

    def keep_outcome(self, answer: Answer) -> None:
        """Keep an outcome, and forget the one that the client can no longer ask for."""
        message, outcomes, written = answer.message, self._outcomes, self._written
        assert type(message) is Done or type(message) is Refused, "all else answers no number"
        seq = message.seq
        over = seq - self.requests
        outcomes[seq] = message
        if over in outcomes:
            del outcomes[over]
        if over in written:
            del written[over]
        if answer.written:
            written[seq] = answer.written

    def clock_of(self, part: CallPart) -> int | None:
        """The clock of a step that has had its effect; None: it was refused."""
        return None if isinstance(self._outcomes.get(part.seq), Refused) else part.clock

    def fenced(self) -> WorkerFenced:
        """Why its requests are refused, while `fenced_by` is set."""
        assert self.fenced_by is not None, "it is not fenced"
        return fenced(self.rank, self.incarnation, self.fenced_by)


def fenced(rank: int, incarnation: int, member: Member) -> WorkerFenced:
    """Why an incarnation of a rank is refused."""
    return WorkerFenced(
        f"worker {rank} (incarnation {incarnation}) is {member.state} for the cluster, "
        f"which knows incarnation {member.incarnation}",
        fix="let this process end; a new one may join",
    )


class Sessions:
    """The sessions of one shard, and the cluster's members as the shard knows them.

    Args:
        shard: whose they are.
        workers: ranks that are expected; each counts as live until the coordinator says otherwise.
    """

    def __init__(self, shard: int, workers: int, limits: Limits) -> None:
        self.by_client: dict[int, ShardSession] = {}
        self.workers: dict[int, ShardSession] = {}
        """Sessions of the newest incarnation of each rank."""
        self.members = {rank: Member(rank, 0, 0, "expected") for rank in range(workers)}
        self.first = range(workers)
        """Ranks that the cluster was started with."""
        self.members_number = 0
        """Number of the membership that the coordinator reported last."""
        self.retiring: frozenset[int] = frozenset()
        self.closed: dict[int, int] = {}
        """Sequence number of the last request that had its effect here, by client that ended with
        an unanswered one. On another shard it may be a lower or a higher one."""
        self.left_behind: set[int] = set()
        """Ranks whose client ended while it kept a residual."""
        self.calls: dict[int, list[CallPart]] = {}
        """Parts that have begun of each rank's last call, if that call steps several groups."""
        self.broken: set[int] = set()
        """Ranks whose call of several groups ended between two parts; a rank stays here until its
        next step."""
        self._shard = shard
        self._limits = limits

    def __len__(self) -> int:
        return len(self.by_client)

    def live(self) -> list[int]:
        """Ranks that a synchronous clock waits for, in order."""
        return [r for r, m in sorted(self.members.items()) if m.state in AWAITED]

    def window(self) -> int:
        """The most calls that one client may have unanswered."""
        return max((each.window for each in self.by_client.values()), default=1)

    def record(self, clients: Mapping[int, int]) -> SessionsRecord:
        """Sessions and members as they are now.

        Args:
            clients: the last number of each client in the cut.
        """
        sessions = tuple(each.record(clients[each.client]) for each in self.by_client.values())
        return SessionsRecord(self.members_number, tuple(self.members.values()), sessions)

    def restore(self, record: SessionsRecord, now: float) -> None:
        """Go on from a cut; of the members, the coordinator tells what has changed since."""
        if record.members:
            self.members_number = record.members_number
            self.members = {member.rank: member for member in record.members}
            self.retiring = frozenset(r for r, m in self.members.items() if m.state == "retiring")
        for each in record.sessions:
            session = self.by_client[each.client] = ShardSession(
                each.client, each.incarnation, each.rank, each.window, each.requests
            )
            session.restore(each, now)

    # --- clients ---------------------------------------------------------------------------------

    def refuse(self, event: ClientHere) -> ParamServeError | None:
        """Why a client that opens a connection is not admitted, if it is not."""
        requests = event.requests or event.window
        if not 1 <= event.window <= requests <= self._limits.outstanding_max:
            return Overloaded(
                f"client {event.client} wants {event.window} calls with {requests} requests "
                "outstanding, "
                f"outstanding_max is {self._limits.outstanding_max}",
                fix="ask for fewer",
            )
        if event.again and event.client not in self.by_client:
            return ClientClosed(
                f"client {event.client} came back after its session on shard {self._shard} was "
                f"forgotten ({SESSION_KEEP_S:.0f} s without a connection)",
                applied="unknown",
                fix="make a new client",
            )
        if event.client not in self.by_client and len(self) >= self._limits.clients_max:
            return Overloaded(
                f"shard {self._shard} has {len(self)} clients, its clients_max",
                fix="close clients that are not used, or add servers",
            )
        member = self.members.get(event.rank)
        if member is None:
            return None
        older = event.incarnation < member.incarnation
        ended = event.incarnation == member.incarnation and member.state in FENCED_STATES
        return fenced(event.rank, event.incarnation, member) if older or ended else None

    def open(self, event: ClientHere, now: float) -> bool:
        """Begin the session of a client, or go on with it; whether the membership has changed."""
        session = self.by_client.get(event.client)
        if session is None:
            requests = event.requests or event.window
            session = ShardSession(
                event.client, event.incarnation, event.rank, event.window, requests
            )
            session.stepped_at = now
            self.by_client[event.client] = session
            self.closed.pop(event.client, None)
        session.gone_at = None
        session.reads.clear()  # what it still wants to read it asks again
        session.last_read = 0
        if event.rank == NO_RANK:
            return False
        self.workers[event.rank] = session
        self.left_behind.discard(event.rank)
        member = self.members.get(event.rank)
        changed = member is None or event.incarnation > member.incarnation
        if changed:
            # It came before the coordinator's news of it; only the coordinator gives incarnations.
            self.members[event.rank] = Member(event.rank, event.client, event.incarnation, "live")
            self.retiring -= {event.rank}
        self._mark_live()
        return changed

    def close(self, client: int, answered: bool) -> bool:
        """Forget the session of a client that has ended; whether the membership has changed.

        Args:
            answered: whether every shard is known to have all that it has sent.
        """
        session = self.by_client.pop(client, None)
        if session is None:
            return False
        if session.fenced_by is not None or not answered:  # shards fence at different requests
            self.closed[client] = session.fenced_at if session.fenced_by else session.executed
            if len(self.closed) > CLOSED_MAX:
                del self.closed[next(iter(self.closed))]
        session.held = None  # what is collected of it is answered to no connection
        session.live = False
        if self.workers.get(session.rank) is not session:
            return False
        del self.workers[session.rank]
        if session.left_out:
            self.left_behind.add(session.rank)
        member = self.members.get(session.rank)
        own = member is not None and member.incarnation == session.incarnation
        if member is None or not own or member.state not in AWAITED:
            return False
        # The coordinator will say so, too, a little later.
        self.members[session.rank] = structs.replace(member, client=client, state="left")
        return True

    def count_ended(self, client: int, seq: int) -> None:
        """A client that has ended has had this effect since, as it had before on other shards."""
        session = self.by_client.get(client)
        if session is not None and session.fenced_by is not None:
            session.counted.add(seq)
            session.fenced_at = max(seq, session.fenced_at)
        if client in self.closed:
            self.closed[client] = max(seq, self.closed[client])

    def expired(self, now: float) -> list[int]:
        """Clients that are no live workers, and have had no connection for `SESSION_KEEP_S`."""
        return [
            session.client
            for session in self.by_client.values()
            if (session.rank == NO_RANK or session.fenced_by is not None)
            and session.gone_at is not None
            and now - session.gone_at >= SESSION_KEEP_S
        ]

    # --- calls that step several groups ----------------------------------------------------------

    def begin_part(self, session: ShardSession, step: Step) -> bool:
        """A step of a rank begins that is a part of a call, or comes after one; whether the call
        has several parts, and this is the last. Of a session that is fenced it may be the next
        incarnation's call that is known."""
        last = self.calls.get(session.rank)
        if session.fenced_by is not None and not (last and last[-1].client == session.client):
            return False
        parts = [] if session.rank in self.broken else self.calls.get(session.rank, [])
        self.broken.discard(session.rank)
        part = CallPart(session.client, step.seq, step.group, step.clock, step.more)
        if not (parts and parts[-1].client == part.client and parts[-1].more):
            parts = []
        elif parts[-1].seq == part.seq:  # it was held
            return False
        if parts or part.more:
            self.calls[session.rank] = [*parts, part]
        else:
            self.calls.pop(session.rank, None)
        return bool(parts) and part.more is None

    def in_call(self, rank: int, client: int, last: int) -> bool:
        """Whether a call of this client of a rank goes on behind this number. A request to join may
        come between its parts."""
        return rank not in self.broken and self._has_begun(rank, client, last)

    def _has_begun(self, rank: int, client: int, last: int) -> bool:
        here = [p for p in self.calls.get(rank, ()) if p.client == client and p.seq <= last]
        return bool(here) and here[-1].more is not None

    def break_call(self, rank: int) -> None:
        """A call of a rank does not go on: its client begins its round anew."""
        if rank in self.calls:
            self.broken.add(rank)

    def unfinished(self, clients: Mapping[int, int]) -> dict[int, dict[int, int]]:
        """Clocks, by group and rank, of steps that a cut has of calls that are not over there.

        Args:
            clients: the last number of each client in the cut.
        """
        clocks: dict[int, dict[int, int]] = {}
        for session, last in self._within_calls(clients):
            for part in self.calls[session.rank]:
                clock = session.clock_of(part) if part.seq <= last else None
                if clock is not None:
                    clocks.setdefault(part.group, {})[session.rank] = clock
        return clocks

    def unfinished_marks(self, clients: Mapping[int, int]) -> tuple[tuple[int, int, int], ...]:
        """(client, lease, samples): how much of its leased samples is in a cut, with a call that is
        not over there.

        Args:
            clients: as for `unfinished`.
        """
        calls = [self.calls[session.rank][0] for session, _ in self._within_calls(clients)]
        return tuple((each.client, *each.more) for each in calls if each.more and any(each.more))

    def _within_calls(self, clients: Mapping[int, int]) -> Iterator[tuple[ShardSession, int]]:
        """The sessions whose last numbers are not those of a call's last part; and the numbers."""
        for rank, parts in self.calls.items():
            client = parts[0].client
            last, session = clients.get(client, 0), self.by_client.get(client)
            if session is not None and self._has_begun(rank, client, last):
                yield session, last

    # --- members ---------------------------------------------------------------------------------

    def of_rank(self, rank: int) -> ShardSession:
        """The session of a rank's newest client; one that has done nothing if it has none yet."""
        return self.workers.get(rank) or ShardSession(0, 0, rank, 1)

    def update(self, message: Members) -> bool:
        """Take the coordinator's membership, unless it is an older one; whether it was taken."""
        if message.number <= self.members_number:
            return False
        self.members_number = message.number
        for member in message.members:
            current = self.members.get(member.rank)
            if current is None or current.incarnation < member.incarnation:
                self.members[member.rank] = member
            elif current.incarnation == member.incarnation and current.state != "left":
                self.members[member.rank] = member  # a rank that has left does not come back
        self.retiring = frozenset(r for r, m in self.members.items() if m.state == "retiring")
        self._mark_live()
        return True

    def fence(self) -> list[ShardSession]:
        """Fence the sessions of ranks that have ended or have a newer incarnation; the new ones."""
        newly = []
        for session in self.by_client.values():
            member = self.members.get(session.rank)
            if member is None:
                continue
            ended = member.client == session.client and member.state in FENCED_STATES
            if session.fenced_by is not None:
                session.fenced_by = member
            elif ended or session.incarnation < member.incarnation:
                session.fenced_by = member
                session.fenced_at = session.executed
                newly.append(session)
        return newly

    def _mark_live(self) -> None:
        for session in self.by_client.values():
            member = self.members.get(session.rank)
            newest = self.workers.get(session.rank) is session
            session.live = newest and member is not None and member.state in AWAITED
