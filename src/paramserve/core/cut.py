"""A cut of all shards while training goes on: of each client the same requests on every shard.

Every call of a client has the same number on all shards, so a vector {client: number} names one cut
everywhere. Shard 0 asks all (`CutAsk`); each stops changing anything and says how far every client
has come (`CutAt`); shard 0 answers with the highest of all (`CutTo`); each shard executes exactly
what is up to there, keeps its part of the cut (`ShardCut`) and goes on. Synchronous clocks are
treated alike: the cut lies between two commits, the same two on all shards. Where several groups
step in one call, it lies between two calls if that needs nothing that is still to come.

All messages may be lost or repeated. A shard that has stopped for `CutAsk.limit_s` goes on by
itself; the cut is given up then and tried again later, with twice that limit. None is taken while a
policy changes.

Before the cut for a checkpoint clients flush what they have left out of their gradients
(`core.flush`). Where a clock was that flush, shard 0 stops behind it, ahead of its `CutAsk`.

A shard waits only for requests that may still come: not for those of a client whose session has
ended there, is fenced, or has had no link for a while, nor of one that it does not know (a client
has a session on every shard before it sends its first request). So a client that says goodbye
behind its requests is in the cut with all of them on all shards, in whatever order its goodbyes
arrive: a shard where it has ended reports how far it came there, and the others wait for what is on
its way. Those reports need a memory only where something was unanswered at the goodbye, and the
shards release it together, after a cut that has the client's end on all of them
(`CutOver.over`). A client that stands still with some of its requests on some shards only is waited
for in the longest attempt, once; then the cut is taken without that request, and it is named
(`CutOver.torn`). One that has ended so is forgotten with a whole cut, which names it; where that is
for a checkpoint, when the checkpoint is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from math import inf

from msgspec import structs

from paramserve.config import NO_RANK
from paramserve.core.cut_parts import ShardCut
from paramserve.core.decisions import LEAD
from paramserve.core.events import GroupEffect, NotifyCoordinator, RecheckStopped, Reply, Send
from paramserve.core.flush import AHEAD_LIMIT_S, NO_GROUP, Flush, limit_s
from paramserve.core.group import GroupMachine
from paramserve.core.replies import refusal
from paramserve.core.shard_sessions import Answer, Sessions, ShardSession
from paramserve.errors import Overloaded, UnknownName
from paramserve.messages import (
    CutAsk,
    CutAt,
    CutDone,
    CutMessage,
    CutOver,
    CutTaken,
    CutTo,
    Done,
    PeerMessage,
    Step,
)

CUT_LIMIT_S = 0.25
"""A shard stops for at most this long at the first attempt of a cut; then that is given up."""
CUT_LIMIT_MAX_S = 8.0
"""The limit doubles with each attempt that was too short, up to this: where updates, or the
transfers of pushes, take long, a cut has its price and is not missed."""
CUT_RETRY_S = 1.0
"""Seconds between two attempts of a cut that a client waits for: a worker's step, or its death, may
take that long to reach all shards."""
CUT_PATIENCE_S = 20.0
"""Attempts of a cut begin within so many seconds of the request; then a client that waits is
refused. The longest attempt is among them."""
CUT_KEEP_S = 60.0
"""A part of a cut that is not read for this long is released."""
CUTS_KEPT_MAX = 4
"""Cuts that a shard has parts of at once, besides the one for a checkpoint; the oldest goes."""
FIX = (
    "look for a worker that stands still; if none does, pushes take too long: "
    "take more servers, or a faster rule"
)
GONE_S = 1.0
"""A client without a rank that has had no connection for this long is not waited for: it may never
send what other shards have of it."""


@dataclass
class CutRequest:
    """A cut that is to be taken.

    Attributes:
        session: whose request waits for it; None: no client's.
        until: tried again until then.
        limit_s: of the next attempt.
        flushes: whether the next attempt has another flush: if a clock is it, or none was needed.
        leaves_out: whether the longest attempt has failed, because of clients that stood still: one
            more is made, which leaves them out.
    """

    ask: CutAsk
    session: ShardSession | None
    until: float
    limit_s: float = CUT_LIMIT_S
    flushes: bool = False
    leaves_out: bool = False


@dataclass
class Leading:
    """Shard 0's side of an attempt."""

    request: CutRequest
    limit: float
    repeat_at: float = 0.0
    positions: dict[int, CutAt] = field(default_factory=dict)
    to: CutTo | None = None
    parts: dict[int, CutDone] = field(default_factory=dict)


class CutAgreement:
    """One shard's part in cuts.

    Args:
        shard: number of this shard, of `shards`.
        groups: of the shard, by number.
        resend_s: after which a message to another shard is sent again.
        outbox: takes what the shard is to do.
        freeze: makes the shard's part of a cut of what is there now.
    """

    def __init__(
        self,
        shard: int,
        shards: int,
        sessions: Sessions,
        groups: Mapping[int, GroupMachine],
        resend_s: float,
        outbox: deque[GroupEffect],
        freeze: Callable[[CutAsk, Mapping[int, int]], ShardCut],
    ) -> None:
        self.stops = False
        """Whether the shard executes nothing but what `allows` permits."""
        self.settling = False
        """Whether this shard knows the numbers and clocks of the cut, and executes up to them."""
        self.deadline: float | None = None
        """When `deadline_reached` is to be called."""
        self.parts_here: dict[int, ShardCut] = {}
        """Parts of cuts on this shard, by number. Those that are not `complete` may be
        abandoned."""
        self._shard = shard
        self._shards = shards
        self._sessions = sessions
        self._groups = groups
        self._resend_s = resend_s
        self._outbox = outbox
        self._freeze = freeze
        self._now = 0.0
        self._current_ask: CutAsk | None = None
        self._at: CutAt | None = None
        """Position that this shard has reported to shard 0 in the present attempt; None: the shard
        does not stop."""
        self._done: CutDone | None = None
        """Result of the last cut that this shard has a part of."""
        self._ended = 0
        """Highest number of a cut that is over on this shard: kept, or given up."""
        self._stopped_at = self._until = 0.0
        self._stopped_for = 0
        """Checkpoint of the last cut for which this shard stopped; 0: that cut was for none."""
        self._longest_s = 0.0
        """Longest stop of this shard for checkpoint `_stopped_for`, over the attempts that
        failed."""
        self._policies: dict[int, int] = {}
        """Number of each group's last change of policy when the shard stopped."""
        self._clients: dict[int, int] = {}
        self._clocks: dict[int, int] = {}
        self._leading: Leading | None = None
        self._requests: deque[CutRequest] = deque()
        self._retry_at = 0.0
        self._late: dict[tuple[int, int], int] = {}
        """On shard 0, by client and shard: the last sequence number that the shard had when the
        longest attempt waited there in vain, and has still."""
        self._unequal: tuple[int, Set[int]] = 0, frozenset()
        """Checkpoint of the last cut, and the ended clients that are forgotten when that checkpoint
        is committed."""
        self._last_report: CutTaken | None = None
        """Report to the coordinator about the last cut for a checkpoint."""
        self.flush: Flush | None = None
        """Flush that shard 0 waits for before a cut; None: it waits for none."""
        self._flushes: CutRequest | None = None
        """Request for the cut that begins when `flush` is over."""
        self._flush_number = 0
        """Number of the last flush."""
        self._ahead = False
        """Whether the shard has stopped behind a flush, before the cut begins."""
        self._number = 0
        """Attempts so far, as far as this shard knows."""

    # --- what may happen meanwhile ---------------------------------------------------------------

    def allows(self, session: ShardSession, seq: int) -> bool:
        """Whether a request may be executed while the shard stops."""
        rest = self._ahead and self._sessions.in_call(session.rank, session.client, seq - 1)
        return rest or seq <= self._clients.get(session.client, 0)

    def allows_commit(self, group: int, clock: int) -> bool:
        """Whether a clock may be decided and committed while the shard stops. Ahead of the cut it
        is one of a call that has begun."""
        return self._ahead or clock < self._clocks.get(group, 0)

    def _within_calls(self) -> bool:
        """Whether a client has begun a call, and not ended it."""
        each = self._sessions.by_client.values()
        return any(self._sessions.in_call(s.rank, s.client, s.executed) for s in each if s.live)

    def _executed(self, session: ShardSession) -> int:
        return session.executed if session.fenced_by is None else session.fenced_at

    def _ends(self, session: ShardSession) -> bool:
        """Whether a client may send no more."""
        if session.fenced_by is not None:
            return True
        gone_at = session.gone_at
        return session.rank == NO_RANK and gone_at is not None and self._now - gone_at >= GONE_S

    def numbers(self) -> dict[int, int]:
        """Last number of each client that has had its effect here."""
        sessions = self._sessions.by_client
        own = {client: self._executed(session) for client, session in sessions.items()}
        return self._sessions.closed | own

    # --- shard 0 ---------------------------------------------------------------------------------

    def want(
        self, groups: tuple[int, ...], whole: bool, session: ShardSession | None, now: float
    ) -> None:
        """Begin a cut, or another one when that which is under way is over."""
        owner, patience_s = (0, 0.0) if session is None else (session.client, CUT_PATIENCE_S)
        self._want(CutRequest(CutAsk(0, owner, groups, whole), session, now + patience_s), now)

    def want_snapshot(self, group: int, now: float) -> None:
        """Take a cut of a group for its watchers, unless one is to have what is there now."""
        asks = [each.ask for each in self._requests]
        if self._leading is not None and self._leading.request.ask.number > self._ended:
            asks.append(self._leading.request.ask)  # this shard keeps its part later
        if not any(ask.snapshot and ask.groups == (group,) for ask in asks):
            ask = CutAsk(0, 0, (group,), False, True)
            self._want(CutRequest(ask, None, now + CUT_PATIENCE_S), now)

    def want_checkpoint(self, checkpoint: int, full: bool, flush_s: float, now: float) -> None:
        """Take a whole cut for a checkpoint, and report its outcome to the coordinator; again if
        it asks again.

        Args:
            full: with all rows of tables.
            flush_s: for a flush before it, from now on.
        """
        self._now, until = now, now + min(limit_s(self._sessions), flush_s)
        report, under_way = self._last_report, [each.ask.checkpoint for each in self._requests]
        if self._leading is not None:
            under_way.append(self._leading.request.ask.checkpoint)
        if self.flush is not None and self._flushes is not None:
            under_way.append(self._flushes.ask.checkpoint)
            self.flush.until = min(self.flush.until, now + flush_s)
        if report is not None and report.checkpoint == checkpoint:
            self._outbox.append(NotifyCoordinator(report))
        elif checkpoint not in under_way:
            ask = CutAsk(0, 0, (), True, checkpoint=checkpoint, full=full)
            self._want_flushed(CutRequest(ask, None, until + CUT_PATIENCE_S), until)
        self._plan()

    def end_checkpoint(self, checkpoint: int, *, committed: bool) -> None:
        """Release the cut for a checkpoint, or take none for it any more; forget who has ended
        and is named in it, if it is committed."""
        if committed and checkpoint == self._unequal[0]:
            for client in self._unequal[1]:
                self._sessions.closed.pop(client, None)
        for number in [n for n, part in self.parts_here.items() if part.checkpoint == checkpoint]:
            self.let_go(number)
        waiting = [each for each in self._requests if each.ask.checkpoint != checkpoint]
        self._requests = deque(waiting)
        if self._flushes is not None and self._flushes.ask.checkpoint == checkpoint:
            self.flush = self._flushes = None
        self._plan()

    def _want_flushed(self, request: CutRequest, until: float) -> None:
        """Have clients flush what they have left out, if any has; then begin the cut."""
        self._flushes, self._flush_number = request, self._flush_number + 1
        self.flush = Flush(self._flush_number, until, self._sessions, self._groups)
        over = self.flush.is_over()
        request.flushes = over or self.flush.request[1] != NO_GROUP
        self._end_flush(over)

    def _end_flush(self, over: bool) -> None:
        """Begin the cut that waits for a flush, if that is over."""
        if not over or self._flushes is None:
            return
        request, self.flush, self._flushes = self._flushes, None, None
        request.until = min(request.until, self._now + CUT_PATIENCE_S)
        self._requests.appendleft(request)
        if self._leading is None:
            self._begin()

    def _begin_next(self) -> None:
        """Begin the next attempt, behind a flush if there is to be one."""
        if self._requests[0].flushes:
            attempt = self._requests.popleft()
            self._want_flushed(attempt, min(self._now + limit_s(self._sessions), attempt.until))
        else:
            self._begin()

    def look_at_flush(self, now: float) -> bool:
        """Something has happened while clients are to flush; whether they have."""
        self._now, flush = now, self.flush
        if flush is not None:
            self._end_flush(not self._within_calls() if self._ahead else flush.is_over())
            self._plan()
        return self.flush is None

    def stop_behind(self, flush: int, now: float) -> None:
        """Do nothing behind a clock that was a flush until the cut begins; on shard 0."""
        if self.stops or self.flush is None or self.flush.number != flush:
            return
        self.stops, self.settling, self._ahead = True, False, True
        self._now = self._stopped_at = now
        self._until = now + AHEAD_LIMIT_S
        self._clients, self._clocks = {}, {}
        self._plan()

    def _want(self, request: CutRequest, now: float) -> None:
        self._now = now
        self._requests.append(request)
        if self._leading is None and len(self._requests) == 1:
            self._begin()
        self._plan()

    @property
    def under_way(self) -> bool:
        """Whether this shard leads one, or is to."""
        return self._leading is not None or bool(self._requests)

    def _begin(self) -> None:
        request = self._requests.popleft()
        self._number += 1
        request.ask = structs.replace(request.ask, number=self._number, limit_s=request.limit_s)
        self._leading = Leading(request, self._now + request.limit_s)
        self._tell_all()

    def _tell_all(self) -> None:
        """Send each shard what it has not answered."""
        leading = self._leading
        assert leading is not None
        leading.repeat_at = self._now + self._resend_s
        message: PeerMessage = leading.request.ask if leading.to is None else leading.to
        answered = leading.positions if leading.to is None else leading.parts
        for shard in range(self._shards):
            if shard not in answered:
                self._outbox.append(Send(shard, message))

    def _on_at(self, message: CutAt) -> None:
        """On shard 0: note where a shard has stopped; when all have, tell them the furthest place,
        where the cut is."""
        leading = self._leading
        if leading is None or message.number != leading.request.ask.number:
            return
        if message.busy:
            self._give_up(leading)
            return
        leading.positions[message.shard] = message
        if len(leading.positions) == self._shards and leading.to is None:
            positions = list(leading.positions.values())
            leading.to = _highest(message.number, positions, self._standing_still(positions))
            self._tell_all()

    def _on_done(self, message: CutDone) -> None:
        """On shard 0: note that a shard has its part; when all have, end the cut and answer who
        waits for it. A checkpoint's is taken once more if the parts have not the same rows of
        tables."""
        leading = self._leading
        if leading is None or message.number != leading.request.ask.number:
            return
        leading.parts[message.shard] = message
        if len(leading.parts) < self._shards:
            return
        unequal = _unequal_clients(list(leading.parts.values()))
        over = _over(list(leading.positions.values()))
        if not leading.request.ask.whole:
            over -= set(unequal)  # a whole one is to name them
        self._leading = None
        session = leading.request.session
        read = session is None or session.client in self._sessions.by_client
        part = self.parts_here.get(message.number)
        version = sum(part.versions.values()) if part is not None and part.snapshot else 0
        checkpoint = leading.request.ask.checkpoint
        end = CutOver(message.number, read, unequal, version, tuple(sorted(over)), checkpoint)
        self._outbox.extend(Send(shard, end) for shard in range(self._shards))
        if session is not None and session.applied is not None:
            answer = Answer(Done(session.applied.seq, cut=message.number))
            self._outbox.append(Reply(session, answer))
        if checkpoint and part is not None:
            if _same_rows(leading):
                left_out = self._named({client for client, _ in self._late})
                self._notify(_report_of(leading, part, unequal, left_out))
            else:  # of a table that is new, one has all rows and another one only those changed
                leading.request.ask = structs.replace(leading.request.ask, full=True)
                self._requests.appendleft(leading.request)
                self._begin_next()
        self._retry_at = self._now

    def _notify(self, report: CutTaken) -> None:
        self._last_report = report
        self._outbox.append(NotifyCoordinator(report))

    def _give_up(self, leading: Leading) -> None:
        """Tell all shards that an attempt has failed, and try again later if a client waits for
        it."""
        request, self._leading = leading.request, None
        for shard in range(self._shards):
            self._outbox.append(Send(shard, CutOver(request.ask.number, False)))
        leaves_out, request.leaves_out = request.leaves_out, self._note_late(leading)
        if self._now < request.until or (request.leaves_out and not leaves_out):
            self._requests.append(request)
        elif request.session is not None and request.session.applied is not None:
            error = Overloaded(self._why(leading), fix=FIX)
            refused = refusal(request.session.applied.seq, error)
            self._outbox.append(Reply(request.session, Answer(refused)))
        elif request.ask.checkpoint:
            self._notify(CutTaken(request.ask.checkpoint, failed=self._why(leading), fix=FIX))
        self._retry_at = self._now + CUT_RETRY_S

    def _why(self, leading: Leading) -> str:
        """Why the last attempt has failed: who has not done what."""
        answered = leading.positions if leading.to is None else leading.parts
        missing = [shard for shard in range(self._shards) if shard not in answered]
        text = f"no consistent cut of all shards could be taken in {CUT_PATIENCE_S:.0f} s: all were"
        limit = f"{leading.request.ask.limit_s:g} s"
        if leading.to is None:
            return (
                f"{text} asked to stop, and shards {missing} did not in {limit}, as they were busy "
                "with pushes, or with a change of policy, or did not answer"
            )
        behind = self._behind(leading.to, [leading.positions[shard] for shard in missing])
        return (
            f"{text} stopped for {limit}, and shards {missing} have not applied what others "
            f"have{behind}: a worker stood still in the middle of a push, or pushes take that long "
            "to arrive or to be applied"
        )

    def _behind(self, to: CutTo, positions: list[CutAt]) -> str:
        """Clients whose requests were not on these shards."""
        late = self._named({client for client, _ in _late(to, positions)})
        return f" of {late}" if late else ""

    def _named(self, clients: Set[int]) -> str:
        sessions = self._sessions.by_client
        ranks = {each: sessions[each].rank for each in clients if each in sessions}
        names = {
            f"rank {ranks[each]}" if ranks.get(each, NO_RANK) != NO_RANK else f"client {each}"
            for each in clients
        }
        return ", ".join(sorted(names))

    def _note_late(self, leading: Leading) -> bool:
        """Remember who stood still in the longest attempt, which has failed; whether one did."""
        to = leading.to
        if to is None or leading.request.ask.limit_s < CUT_LIMIT_MAX_S:
            return False
        missing = [
            position for shard, position in leading.positions.items() if shard not in leading.parts
        ]
        late = _late(to, missing)
        self._late |= late
        return bool(late)

    def _standing_still(self, positions: list[CutAt]) -> set[int]:
        """Clients that have sent nothing since a cut waited for them in vain; who has, is waited
        for again."""
        numbers = {
            (client, each.shard): seq
            for each in positions
            for client, seq, _ in each.clients
            if client not in each.closed
        }
        self._late = {key: seq for key, seq in self._late.items() if numbers.get(key) == seq}
        return {client for client, _ in self._late}

    # --- all shards ------------------------------------------------------------------------------

    def on_message(self, message: CutMessage, now: float) -> None:
        """Shard 0, or on it any shard, speaks about a cut."""
        self._now = now
        match message:
            case CutAsk():
                self._on_ask(message)
            case CutAt():
                self._on_at(message)
            case CutTo():
                self._on_to(message)
            case CutDone():
                self._on_done(message)
            case CutOver():
                self._on_over(message)
        self._plan()

    def _on_ask(self, ask: CutAsk) -> None:
        """Stop for an attempt of a cut, or say busy while a policy changes; a repeated question
        gets the same answer."""
        if ask.number <= self._ended:
            self._answer_again(ask.number)
            return
        if self._current_ask is not None and self._current_ask.number != ask.number:
            if self._current_ask.number > ask.number:
                return
            self._go_on()  # the lead has given that one up
        if self._current_ask is None:
            if any(each.state.changes.paused is not None for each in self._groups.values()):
                self._send(CutAt(ask.number, self._shard, (), (), busy=True))
                return
            self._stop(ask)
        assert self._at is not None
        self._send(self._at)

    def _stop(self, ask: CutAsk) -> None:
        """Execute nothing from now on that is not in the cut, and note how far all clients and
        clocks are here."""
        self.stops, self.settling = True, False
        self._current_ask = ask
        self._number = max(self._number, ask.number)
        if ask.checkpoint != self._stopped_for:
            self._stopped_for, self._longest_s = ask.checkpoint, 0.0
        if not self._ahead:
            self._stopped_at = self._now
        self._ahead = False
        self._until = self._now + min(CUT_LIMIT_MAX_S, ask.limit_s)
        self._clients = self.numbers()
        self._clocks = {number: each.state.committed for number, each in self._groups.items()}
        self._policies = self._policy_numbers()
        self._end_calls()
        sessions = self._sessions.by_client
        ended = {client for client, session in sessions.items() if self._ends(session)}
        self._at = CutAt(
            ask.number,
            self._shard,
            tuple((client, seq, client in ended) for client, seq in self._clients.items()),
            tuple(self._clocks.items()),
            closed=tuple(self._sessions.closed),
        )

    def _end_calls(self) -> None:
        """Have calls that were begun end before the cut, where all is here that they wait for: so
        it is not between the clocks of synchronous groups that step together, as a table and the
        dense layers above it."""
        split: list[tuple[ShardSession, list[Step]]] = []
        here: dict[int, set[int]] = {
            number: set(each.state.collect.pending) for number, each in self._groups.items()
        }
        for session in self._sessions.by_client.values():
            if session.fenced_by is None and session.applied is None:
                steps = self._left_of_call(session)
                split += [(session, steps)] if steps else []
                for step in steps:
                    here.get(step.group, set()).add(session.rank)
        for session, steps in split:
            if all(self._can_end(step, here) for step in steps):
                self._clients[session.client] = steps[-1].seq
                for step in steps:
                    self._clocks[step.group] = step.clock + 1
                    for each in self._groups[step.group].state.collect.pending.values():
                        client, seq = each.session.client, each.step.seq
                        self._clients[client] = max(self._clients.get(client, 0), seq)

    def _left_of_call(self, session: ShardSession) -> list[Step]:
        """What a client has still to do of a call that it has begun; nothing if not all is here."""
        if not self._sessions.in_call(session.rank, session.client, session.executed):
            return []
        steps: list[Step] = []
        for each in ([session.held] if session.held is not None else []) + list(session.queue):
            step = each.message
            if not isinstance(step, Step):
                break
            steps.append(step)
            if not step.more:
                return steps
        return []

    def _can_end(self, step: Step, here: Mapping[int, Set[int]]) -> bool:
        """Whether the clock of a step can be decided with what the ranks have sent already."""
        machine = self._groups.get(step.group)
        if machine is None or not step.tick:
            return False
        state = machine.state
        present = step.clock == state.committed and state.at(step.clock).policy.collects
        return present and here[step.group] >= set(state.members.clocks)

    def _on_to(self, message: CutTo) -> None:
        """Go on to where the cut is, which shard 0 has found."""
        if self._current_ask is None or message.number != self._current_ask.number:
            self._answer_again(message.number)
        elif not self.settling:
            self._clients |= dict(message.clients)
            self._clocks |= dict(message.groups)
            self.settling = True
            self._outbox.append(RecheckStopped())

    def _answer_again(self, number: int) -> None:
        """Report a cut's outcome here to shard 0, which does not have it."""
        if self._done is not None and self._done.number == number:
            self._send(self._done)
        elif number <= self._ended:
            self._send(CutAt(number, self._shard, (), (), busy=True))

    def _on_over(self, message: CutOver) -> None:
        """Go on, forget clients that ended on all shards, and release or keep this shard's part."""
        if self._current_ask is not None and self._current_ask.number == message.number:
            self._go_on()
        over = set(message.over)
        if message.checkpoint:  # its manifest is to name them
            self._unequal = message.checkpoint, over.intersection(message.torn)
            over -= self._unequal[1]
        for client in over:
            self._sessions.closed.pop(client, None)
        part = self.parts_here.get(message.number)
        if part is None:
            return
        if message.complete:
            part.complete, part.torn = True, message.torn
            for group in part.versions if part.snapshot else ():
                if group in self._groups:
                    self._groups[group].state.keep_snapshot(message.version, part.values)
        if part.snapshot or not message.complete:
            self.let_go(message.number)

    def _send(self, message: CutMessage) -> None:
        self._outbox.append(Send(LEAD, message))

    def settle(self) -> None:
        """Keep this shard's part of the cut, if all is executed that is in it, and go on. None is
        kept where a policy was changed meanwhile: other parts may be from before that."""
        ask = self._current_ask
        assert ask is not None
        if not self._reached():
            return
        if self._policies.items() - self._policy_numbers().items():
            self._go_on()
            self._answer_again(ask.number)
            return
        clients = self.numbers()
        part = self.parts_here[ask.number] = self._freeze(ask, clients)
        blocks = (*part.blocks, *part.tables) if ask.whole else ()
        whole = tuple(number for number, each in part.tables.items() if each.changed is None)
        self._done = CutDone(ask.number, self._shard, tuple(clients.items()), blocks, whole)
        part.keep_until = self._now + CUT_KEEP_S
        part.stopped_s = max(part.stopped_s + self._now - self._stopped_at, self._longest_s)
        self._make_room(part)
        self._go_on()
        self._send(self._done)
        self._plan()

    def _policy_numbers(self) -> dict[int, int]:
        """Number of each group's last change of policy."""
        return {number: each.state.changes.number for number, each in self._groups.items()}

    def _make_room(self, newest: ShardCut) -> None:
        """Release the cut for the checkpoint before, or the oldest of all others."""
        alike = [
            n for n, p in self.parts_here.items() if bool(p.checkpoint) == bool(newest.checkpoint)
        ]
        for number in alike[: -1 if newest.checkpoint else -CUTS_KEPT_MAX]:
            self.let_go(number)

    def _reached(self) -> bool:
        """Whether all is executed here that is in the cut."""
        for number, clock in self._clocks.items():
            if number in self._groups and self._groups[number].state.committed < clock:
                return False
        sessions = self._sessions.by_client
        for client, seq in self._clients.items():
            session = sessions.get(client)
            if session is not None and session.executed < seq and not self._ends(session):
                return False
        return True

    def _go_on(self) -> None:
        """Stop no more: with this shard's part of the cut, or without."""
        if self._current_ask is not None:
            self._ended = self._current_ask.number
            self._longest_s = max(self._longest_s, self._now - self._stopped_at)
        self._current_ask = self._at = None
        self.stops = self.settling = self._ahead = False
        self._outbox.append(RecheckStopped())

    # --- parts that are kept, and time -----------------------------------------------------------

    def restore(self, number: int) -> None:
        """This shard was restored from a cut: later ones have higher numbers."""
        self._number = self._ended = number

    def part(self, number: int, now: float) -> ShardCut:
        """This shard's part of a cut, which is kept for longer now.

        Raises:
            UnknownName: it is not kept any more.
        """
        part = self.parts_here.get(number)
        if part is None:
            raise UnknownName(
                f"shard {self._shard} has released cut {number}, which was not read for "
                f"{CUT_KEEP_S:.0f} s or was one of more than {CUTS_KEPT_MAX}",
                fix="take another one",
            )
        if part.keep_until < inf:
            part.keep_until = now + CUT_KEEP_S
        return part

    def hold(self, number: int, now: float) -> ShardCut:
        """Return this shard's part of a cut, as `part` does, and keep it until `let_go`."""
        part = self.part(number, now)
        part.keep_until = inf
        return part

    def let_go(self, number: int) -> None:
        """Forget a part of a cut."""
        part = self.parts_here.pop(number, None)
        if part is not None:
            part.close()

    def forget(self, client: int) -> None:
        """Keep nothing any more for a client that has ended."""
        for number in [n for n, part in self.parts_here.items() if client and part.owner == client]:
            self.let_go(number)
        waiting = [each for each in self._requests if each.ask.owner != client or not client]
        self._requests = deque(waiting)

    def deadline_reached(self, now: float) -> None:
        """Repeat what was not answered; give up what takes too long."""
        self._now = now
        if self.flush is not None:
            self._end_flush(self.flush.until <= now)
        leading = self._leading
        if leading is not None:
            if leading.limit <= now:
                request = leading.request
                request.limit_s = min(2 * request.limit_s, CUT_LIMIT_MAX_S)
                self._give_up(leading)
            elif leading.repeat_at <= now:
                self._tell_all()
        elif self._requests and self._retry_at <= now:
            self._begin_next()
        if self.stops and self._until <= now:
            self._go_on()
        for number in [n for n, part in self.parts_here.items() if part.keep_until <= now]:
            self.let_go(number)
        self._plan()

    def _plan(self) -> None:
        times = [part.keep_until for part in self.parts_here.values()]
        if self.stops:
            times.append(self._until)
        if self.flush is not None:
            times.append(self.flush.until)
        if self._leading is not None:
            times.append(min(self._leading.limit, self._leading.repeat_at))
        elif self._requests:
            times.append(self._retry_at)
        self.deadline = min(times, default=None)


def _highest(number: int, positions: list[CutAt], left_out: Set[int] = frozenset()) -> CutTo:
    """Where a cut is: of each client the highest number, of each group the highest clock.

    Of a client that sends no more, or is left out, it has what each shard has.
    """
    clients: dict[int, int] = {}
    clocks: dict[int, int] = {}
    ended = set(left_out)
    for each in positions:
        for client, seq, ends in each.clients:
            clients[client] = max(clients.get(client, seq), seq)
            if ends:
                ended.add(client)
        for group, clock in each.groups:
            clocks[group] = max(clocks.get(group, 0), clock)
    remaining = tuple((client, seq) for client, seq in clients.items() if client not in ended)
    return CutTo(number, remaining, tuple(clocks.items()))


def _over(positions: list[CutAt]) -> set[int]:
    """Clients that shards remember, and whose sessions have ended on all."""
    ended = {client for each in positions for client in each.closed}
    opened = {c for each in positions for c, _, _ in each.clients if c not in each.closed}
    return ended - opened


def _late(to: CutTo, positions: list[CutAt]) -> dict[tuple[int, int], int]:
    """Progress, by client and shard, of clients that these shards have not all of and still have a
    session with."""
    highest = dict(to.clients)
    return {
        (client, each.shard): seq
        for each in positions
        for client, seq, _ in each.clients
        if seq < highest.get(client, 0) and client not in each.closed
    }


def _unequal_clients(parts: list[CutDone]) -> tuple[int, ...]:
    """Clients that shards have up to different numbers."""
    numbers: dict[int, set[int]] = {}
    for part in parts:
        for client, seq in part.clients:
            numbers.setdefault(client, set()).add(seq)
    return tuple(sorted(client for client, seqs in numbers.items() if len(seqs) > 1))


def _blocks(leading: Leading) -> set[int]:
    """The blocks that all shards have."""
    return set.intersection(*(set(each.blocks) for each in leading.parts.values()))


def _same_rows(leading: Leading) -> bool:
    """Whether the shards have of each table either all rows or all those that have changed."""
    blocks = _blocks(leading)
    return len({frozenset(blocks.intersection(p.whole)) for p in leading.parts.values()}) == 1


def _report_of(
    leading: Leading, part: ShardCut, clients: tuple[int, ...], left_out: str
) -> CutTaken:
    """What the coordinator is told of a cut for a checkpoint."""
    ask, versions = leading.request.ask, sum(part.versions.values())
    blocks = tuple(sorted(_blocks(leading)))
    return CutTaken(
        ask.checkpoint, ask.number, part.starts, clients, versions, blocks=blocks, left_out=left_out
    )
