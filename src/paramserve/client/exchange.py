"""One client's exchange with all shards: it sends requests, waits for answers, and sends again.

It is synchronous: a thread that waits polls the sockets. Of several waiting threads one polls and
the others wait for what it reads. It knows nothing of names, rules or groups' meaning.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import attrgetter
from typing import NoReturn

from msgspec import structs

from paramserve.client.links import (
    FIRST_ARENA_BYTES,
    POLL_SLICE_S,
    WINDOW,
    Allocate,
    Connect,
    Framed,
    Links,
    ReachedShard,
    Slot,
    copy_error,
)
from paramserve.config import NO_RANK, Credentials, Deadlines, Limits
from paramserve.core.client_session import ClientSession, Operation, SlotPool
from paramserve.errors import (
    ClientClosed,
    ConnectTimeout,
    ParamServeError,
    rebuild,
)
from paramserve.messages import (
    AskReport,
    Bye,
    Done,
    Inquire,
    Joined,
    Read,
    Refused,
    ServerBeat,
    ShardReply,
    ShardRequest,
    Step,
    Values,
    Waiting,
    decoder,
    encode,
)
from paramserve.transport import forks
from paramserve.transport.arena import Arena
from paramserve.transport.dial import listens
from paramserve.transport.link import Link
from paramserve.transport.timing import SYSTEM, Timing

__all__ = ["WINDOW", "Connect", "Exchange", "Slot", "answers_by_shard", "copy_error"]

logger = logging.getLogger("paramserve")

RECONNECT_PAUSE_S = 0.01
"""Seconds before a broken link is made anew: no tight loop around a server that refuses."""

_decode = decoder(ShardReply).decode
is_complete: Callable[[Operation], bool] = attrgetter("complete")
"""Whether all shards have answered."""


class Question:
    """A question that is not numbered, and under way in one thread; other threads may ask too."""

    def __init__(self, asks: Inquire | AskReport) -> None:
        self.asks = asks
        self.answers: dict[int, Waiting | ServerBeat] = {}
        """Answers by shard."""

    def take(self, shard: int, answer: Waiting | ServerBeat) -> None:
        """Keep what a shard has said, if it answers this question."""
        if isinstance(answer, Waiting):
            fits = isinstance(self.asks, Inquire) and self.asks.group == answer.group
        else:
            fits = isinstance(self.asks, AskReport)
        if fits:
            self.answers[shard] = answer


class Exchange(Links):
    """Requests to shards and their answers.

    Args:
        joined: identity and addresses, from the coordinator.
        rank: of the worker, or -1.
        connect: how a shard is reached at its addresses.
        timing: gives the time, and lets it wait.
        window: calls that one shard may have unanswered.
        session: keeps the numbers of requests to one shard.
        allocate: makes an arena of a size, with a number.
    """

    def __init__(
        self,
        joined: Joined,
        rank: int,
        credentials: Credentials,
        limits: Limits,
        deadlines: Deadlines,
        connect: Connect = Link.connect,
        timing: Timing = SYSTEM,
        window: int = WINDOW,
        session: type[ClientSession] = ClientSession,
        allocate: Allocate = Arena.create,
    ) -> None:
        super().__init__(
            joined, rank, credentials, limits, deadlines, connect, timing, window, session, allocate
        )
        self._condition = threading.Condition(self._lock)
        """Condition on the lock; notified when a thread has read something."""
        self._waiters = 0
        self._polling = False
        """Whether a thread polls the links, without the lock."""
        self._questions: list[Question] = []
        """Questions under way; each keeps its own answers."""
        self.waited_s = 0.0
        """Seconds that calls have waited for answers; where several threads wait, each counts."""
        self.waits_since: float | None = None
        """When the wait began that is under way, the latest of them; None: there is none."""
        self._mute_at = self.now()
        """When a shard that listens was last tried in vain."""
        self._session_lost = False
        """Whether a shard has ended the session while nothing was unanswered."""
        self._add_arena(FIRST_ARENA_BYTES)
        until = self.now() + deadlines.start_s
        try:
            for shard in self.shards:
                self._connect(shard, max(until - self.now(), 0.0))
            self._hello = structs.replace(self._hello, again=True)
        except BaseException:
            self.close()
            raise
        forks.watch(self)

    def _connect(self, shard: ReachedShard, timeout_s: float) -> Link:
        link = super()._connect(shard, timeout_s)
        if not link.shared:
            self._pollings.clear()
        # Bytes may also come over a link that shares memory: for what was asked over another one.
        link.while_blocked = partial(self._read_while_blocked, shard)
        return link

    def _read_while_blocked(self, shard: ReachedShard) -> None:
        """Take answers while a message is sent: a server with much unread reads no more of it."""
        assert shard.link is not None
        try:
            self._take_all(shard, shard.link)
        except ParamServeError as error:
            self._give_up(shard, error)
            raise ConnectionAbortedError(f"shard {shard.number} is given up") from error

    def _reconnect(self, shard: ReachedShard, why: Exception) -> None:
        """Make a broken link anew and send again what is unanswered; or give the shard up."""
        self._disconnect(shard)
        if self._closed:
            return
        if self._failure is not None:  # With one shard the cluster is lost: the others end as well.
            self._give_up(shard, self._failure)
            return
        if shard.farewell is not None:
            self._give_up(shard, shard.farewell)
            return
        self._timing.sleep(RECONNECT_PAUSE_S)
        began = self.now()
        try:
            self._connect(shard, self._deadlines.reconnect_s)
            shard.mute_since = None
            for message in shard.session.to_resend():
                self._transmit(shard, self._frame(shard, [message]))
        except ConnectionError:
            self._disconnect(shard)  # It broke again.
        except (ParamServeError, OSError) as error:
            if self._may_answer(shard, error, began):
                self._disconnect(shard)
                return
            logger.debug("shard %d is given up: %s; before: %s", shard.number, error, why)
            self._give_up(shard, error)

    def _may_answer(self, shard: ReachedShard, error: Exception, began: float) -> bool:
        """Whether a shard that could not be reached is only busy, or crowded by other peers.

        Args:
            began: when it was tried.
        """
        if not (isinstance(error, ConnectTimeout) and listens(error.__cause__)):
            return False
        if began - self._mute_at > self._deadlines.reconnect_s:
            for each in self.shards:  # No call waited, and none was tried meanwhile.
                each.mute_since = None
        self._mute_at = now = self.now()
        shard.mute_since = shard.mute_since if shard.mute_since is not None else now
        return now - shard.mute_since < self._deadlines.stall_s

    # --- idle clients ------------------------------------------------------------------------

    def _may_begin_anew(self) -> bool:
        """Whether a new session would repeat and lose nothing: no worker waits for this client, and
        all that it has sent was answered."""
        return self._hello.rank == NO_RANK and not any(s.session.outstanding for s in self.shards)

    def refresh(self) -> bool:
        """Connect links again, before a call, that have ended while the client was idle.

        Returns:
            False: a shard has forgotten the client meanwhile; see `begin_anew`.
        """
        with self._lock:
            under_way = self._closed or self._polling or self._mutating or self._shards_being_sent
            if under_way or self._failure is not None or not self._may_begin_anew():
                return True
            ended = [self.shards[number] for number in sorted(self._down)]
            if not ended:
                events = self._poll.poll(0)
                by_fileno = self._by_fileno
                ended = [by_fileno[fileno] for fileno, _ in events if fileno in by_fileno]
            for shard in ended:
                self._shards_being_sent |= {shard.number}
                self._renew_link(shard)
                self._shards_being_sent -= {shard.number}
            return not self._session_lost

    def _renew_link(self, shard: ReachedShard) -> None:
        """Make a link anew if it has ended, while nothing is unanswered. What else is wrong, the
        call finds that follows."""
        try:
            if shard.link is not None and shard.number not in self._down:
                self._take_all(shard, shard.link)
                return
        except ConnectionError as error:
            logger.debug("the idle link to shard %d has ended: %s", shard.number, error)
        except ParamServeError as error:  # the server has said why it ends
            shard.farewell = error
        self._disconnect(shard)
        if shard.farewell is not None:
            return
        try:
            self._connect(shard, self._deadlines.reconnect_s)
        except ClientClosed:
            self._disconnect(shard)
            self._session_lost = True
        except (ParamServeError, OSError):
            self._disconnect(shard)

    def begin_anew(self, joined: Joined, timeout_s: float) -> None:
        """Begin a new session with every shard, with a new identity; `refresh` said that a shard
        has none.

        Raises:
            ParamServeError: a shard was not reached. `refresh` goes on asking for a new session.
        """
        with self._lock:
            for shard in self.shards:
                if shard.link is not None:
                    with contextlib.suppress(ConnectionError, ParamServeError):
                        shard.link.send(encode(Bye(True)))
                self._disconnect(shard)
            self._mutating = "the beginning of a new session"
            for shard, addresses in zip(self.shards, joined.servers, strict=True):
                old = shard.session
                shard.session = type(old)(old.shard, old.window, old.requests)
                shard.addresses, shard.farewell = addresses, None
            hello = structs.replace(self._hello, client=joined.client, again=False)
            self._hello = hello
            self._mutating = ""
            for shard in self.shards:
                self._connect(shard, timeout_s)
            self._hello = structs.replace(hello, again=True)
            self._session_lost = False

    # --- sending -----------------------------------------------------------------------------

    def has_room(self, requests: int = 1, *, reads: bool = False) -> bool:
        """Whether every session's window has room: then a call goes to all shards or to none.

        Args:
            requests: of the call, to each shard.
            reads: whether these are reads, which have a room of their own.
        Raises:
            ServerGone, WorkerFenced: a shard is gone. Nothing was sent.
        """
        for shard in self.shards:
            session = shard.session
            if reads:
                room = not session.reads or session.has_room_to_read(requests)
            else:
                room = not session.unanswered and requests <= self.requests
                room = room or session.has_room(requests)
            if shard.failure is not None or not room:
                self._check_gone()
                return False
        return True

    def wait_for_room(self, timeout_s: float, requests: int, *, reads: bool = False) -> bool:
        """Wait until `has_room`; whether that was in time.

        Raises:
            ServerGone, WorkerFenced: a shard is gone. ClientClosed: the client was closed. Nothing
                was sent.
        """
        return self.read_until(lambda: self.has_room(requests, reads=reads), self.now() + timeout_s)

    def full(self, requests: int, *, reads: bool = False) -> str:
        """Which shard has no room; empty: all have."""
        for shard in self.shards:
            session = shard.session
            if reads and not session.has_room_to_read(requests):
                return f"shard {shard.number} left {len(session.reads)} reads unanswered"
            if not (reads or session.has_room(requests)):
                return f"shard {shard.number} left {session.window} calls unanswered"
        return ""

    @property
    def failure(self) -> ParamServeError | None:
        """Why the first shard that was given up is gone; None: none is."""
        return self._failure

    def _check_gone(self) -> None:
        """Raise what a shard was lost by, for a call that has sent nothing."""
        if self._failure is not None:
            raise rebuild(
                type(self._failure).__name__, self._failure.failed, "no", self._failure.fix
            )

    def submit(
        self,
        requests: Sequence[ShardRequest | None],
        operation: Operation,
        numbered: Callable[[], None] | None = None,
    ) -> None:
        """Send one request to each shard, in shard order; returns before they are answered.

        `has_room` was true before, for the same thread. All requests are numbered before the first
        is sent: a call that is interrupted later is sent whole, on new connections if need be.

        Args:
            operation: what is to happen when it is complete must be agreed already, since another
                thread may read the answers at once.
            numbered: called as soon as the call is certain to be sent.
        Raises:
            ClientClosed: nothing was sent.
            ProtocolError: the header is over `header_bytes_max`. Nothing was sent.
        """
        self.submit_together([(requests, operation)], numbered)

    def submit_together(
        self,
        calls: Sequence[tuple[Sequence[ShardRequest | None], Operation]],
        numbered: Callable[[], None] | None = None,
    ) -> None:
        """Send several requests to each shard in one frame; for the rest as `submit`.

        Args:
            calls: one request for each shard, in shard order, and the operation that they are. Of a
                read None for a shard that has nothing of it, which the operation does not wait for.
        """
        with self._lock:
            if self._closed or self._mutating or self._shards_being_sent:
                self._check()
            self._mutating = "a request"
            self._shards_being_sent |= self._numbers
            self._place = place = self._place + 1
            for _, operation in calls:
                operation.numbered = True
            messages: list[list[ShardRequest]] = []
            for shard in self.shards:
                each: list[ShardRequest] = []
                for requests, operation in calls:
                    request = requests[shard.number]
                    if request is None:
                        continue
                    if self._failure is not None:
                        operation.failed(self._failure)
                        continue
                    each += [shard.session.submit(request, operation, first=not each, place=place)]
                messages += [each]
            frames: list[Framed | None] = []
            try:
                for shard, each in zip(self.shards, messages, strict=True):
                    frames += [self._frame(shard, each) if each else None]
            except BaseException:
                self._take_back(calls, messages)
                raise
            if numbered is not None:
                numbered()
            self._mutating = ""
            for shard, frame in zip(self.shards, frames, strict=True):
                # A broken link is made anew by the thread that reads next, which sends this again.
                if frame is not None:
                    try:
                        self._transmit(shard, frame)
                    except ConnectionError:
                        self._disconnect(shard)
                self._shards_being_sent -= {shard.number}

    def _take_back(
        self,
        calls: Sequence[tuple[Sequence[ShardRequest | None], Operation]],
        messages: Sequence[Sequence[ShardRequest]],
    ) -> None:
        """Calls that were numbered just now are not sent: the next one has their numbers."""
        for shard, each in zip(self.shards, messages, strict=True):
            shard.session.take_back(each)
        for _, operation in calls:
            operation.numbered = False
        self._shards_being_sent.clear()
        self._mutating = ""

    # --- interrupts --------------------------------------------------------------------------

    def _check(self) -> None:
        """Break off links that an interrupted call has used, before they are used again.

        A call that was interrupted while it used a link may have left half a frame there: that
        link is broken off, and what is unanswered is sent again on the next one.

        Raises:
            ClientClosed: it is closed, or what it knows was being changed when it was interrupted.
        """
        if self._closed:
            raise self._ended()
        if self._mutating:
            self._end_interrupted(self._mutating)
        if self._shards_being_sent:
            for number in sorted(self._shards_being_sent):
                self._disconnect(self.shards[number])
            self._shards_being_sent.clear()

    def check_whole(self) -> None:
        """Refuse a call where an earlier one left `interrupted_in` set.

        Raises:
            ClientClosed: it did.
        """
        if self.interrupted_in:
            self._end_interrupted(self.interrupted_in)

    def check_answers(self) -> None:
        """Whether all that was read has had its effect.

        Raises:
            ClientClosed: no: an interrupt came meanwhile; or the exchange is closed.
        """
        with self._lock:
            self._check()

    def _end_interrupted(self, what: str) -> NoReturn:
        """Close, because what is known of the session was being changed when it was interrupted."""
        error = ClientClosed(
            f"the client closed itself: an earlier call was interrupted within {what}, and what "
            "the client knows of its session is incomplete",
            applied="unknown",
            fix="connect again, as with cluster.client()",
        )
        self.close(error, bye=False)
        raise self._ended()

    # --- waiting -----------------------------------------------------------------------------

    def wait(self, operation: Operation, timeout_s: float, kind: Hashable = None) -> bool:
        """Wait until every shard has answered; False after `timeout_s`.

        Args:
            kind: as `_ready` takes it.
        Raises:
            ClientClosed: the client was closed meanwhile.
        """
        if operation.complete:
            return True
        return self.read_until(partial(is_complete, operation), self.now() + timeout_s, kind)

    def poll(self, operation: Operation) -> bool:
        """Read what has come, without waiting; whether the operation is complete."""
        with self._lock:
            if not operation.complete and not self._polling and not self._closed:
                self._check()
                self._read(self._ready(0.0))
            return operation.complete

    def read_until(self, done: Callable[[], bool], deadline: float, kind: Hashable = None) -> bool:
        """Read answers, or let another thread do so, until `done`; whether it was in time. The
        caller does not hold the lock, under which `done` is called.

        Args:
            kind: as `_ready` takes it.
        Raises:
            ClientClosed: the client was closed meanwhile.
        """
        began = now = self.waits_since = self.now()
        polling = False
        ready: list[ReachedShard] = []
        try:
            while True:
                with self._lock:
                    if polling:
                        self._polling = polling = False
                        self._read(ready)
                        now = self.now()
                    finished = done()
                    if finished or now >= deadline:
                        self.waited_s += now - began
                        return finished
                    if self._closed or self._mutating or self._shards_being_sent:
                        self._check()
                    if self._polling:
                        self._wait_for_other(deadline - now)
                        now = self.now()
                    else:
                        self._polling = polling = True
                if polling:
                    ready = self._ready(deadline - now, kind)
        finally:
            self.waits_since = None
            if polling:  # Interrupted; there is no call here that another interrupt could hit.
                self._polling = False

    def _wait_for_other(self, left_s: float) -> None:
        """Let another thread read; not for long, since it may be interrupted."""
        self._waiters += 1
        try:
            self._condition.wait(min(left_s, POLL_SLICE_S))
        finally:
            self._waiters -= 1

    def _read(self, ready: list[ReachedShard]) -> None:
        """Read what is there; whatever happens here, one of the waiting threads polls next."""
        try:
            for shard in ready if not self._closed else ():
                self._shards_being_sent |= {shard.number}
                try:
                    if shard.link is None or shard.number in self._down:
                        raise ConnectionError("not connected")
                    self._take_all(shard, shard.link)
                except ConnectionError as error:
                    self._reconnect(shard, error)
                except ParamServeError as error:
                    if isinstance(error, ClientClosed):
                        raise
                    self._give_up(shard, error)
                self._shards_being_sent -= {shard.number}
        finally:
            if self._waiters:
                self._condition.notify_all()

    def _take_all(self, shard: ReachedShard, link: Link) -> None:
        """Take what has come from a shard."""
        header = link.receive(0.0)
        while header is not None:
            reply = _decode(header)
            if type(reply) is Done or type(reply) is Values:
                session = shard.session
                if link.payload_bytes or self.decoder.used:
                    queue = session.unanswered if type(reply) is Done else session.reads
                    request = queue[0] if queue else None
                    if request is None or request.message.seq != reply.seq:
                        request = session.pending_for(reply)
                    if request is None:  # it is repeated: its slot may be another request's by now
                        link.skip_payload()
                    else:
                        if link.payload_bytes:
                            link.read_payload()
                        if self.decoder.used:
                            self.decoder.decode(shard.number, request.message)
                self._mutating = "an answer"
                session.on_reply(reply)
                self._mutating = ""
            else:
                self._take(shard, link, reply)
            header = link.buffered() if link.more else None

    def _take(self, shard: ReachedShard, link: Link, reply: ShardReply) -> None:
        """Take a message of a shard in: an answer to a question or to a numbered request. Raises
        what a server says before it ends the link."""
        if isinstance(reply, Waiting | ServerBeat):
            for each in self._questions:
                each.take(shard.number, reply)
            return
        if isinstance(reply, Refused) and reply.seq == 0:  # the server is about to cut this link
            raise rebuild(reply.kind, reply.failed, reply.applied, reply.fix)
        if link.payload_bytes:
            link.skip_payload()
        self._mutating = "an answer"
        shard.session.on_reply(reply)
        self._mutating = ""

    def awaited_group(self) -> int | None:
        """The group that a wait is for which names none: that of the oldest unanswered step of a
        shard, else of the oldest read; None: there is neither."""
        with self._lock:
            sessions = [shard.session for shard in self.shards]
            # Steps first: a read that waits holds none of them up.
            for queue in (*(e.unanswered for e in sessions), *(e.reads for e in sessions)):
                oldest = queue[0].message if queue else None
                if isinstance(oldest, Step | Read):
                    return oldest.group
        return None

    def inquire(self, group: int, timeout_s: float) -> list[Waiting]:
        """Ask the shards that owe an answer what they wait for; what came within `timeout_s`."""
        shards = [shard for shard in self.shards if shard.session.outstanding]
        answers = self._ask(shards, Inquire(group), timeout_s)
        return [answer for answer in answers if isinstance(answer, Waiting)]

    def reports(
        self, timeout_s: float, *, notes: bool = False, saved: tuple[str, int, int] | None = None
    ) -> list[ServerBeat]:
        """Ask all shards what they have done so far; what came within `timeout_s`.

        Args:
            notes: whether the ranks' notes are wanted as well.
            saved: as in `AskReport`.
        Raises:
            ServerGone: a shard is gone.
        """
        answers = self._ask(self.shards, AskReport(notes, saved), timeout_s)
        self._check_gone()
        return [answer for answer in answers if isinstance(answer, ServerBeat)]

    def _ask(
        self, shards: Sequence[ReachedShard], question: Inquire | AskReport, timeout_s: float
    ) -> list[Waiting | ServerBeat]:
        """Ask shards something outside of the numbers; the answers of those that gave one in
        time."""
        links: dict[int, Link] = {}
        under_way = Question(question)

        def is_answered() -> bool:
            answers = under_way.answers
            waiting = [s for s in shards if s.number not in answers and self._failure is None]
            for shard in waiting:  # Not numbered: a question is lost with its link.
                if shard.link is not None and shard.link is not links.get(shard.number):
                    links[shard.number] = shard.link
                    self._question(shard, question)
            return not waiting

        try:
            with self._lock:
                self._questions.append(under_way)
            self.read_until(is_answered, self.now() + timeout_s)
        finally:
            with self._lock:
                self._questions = [each for each in self._questions if each is not under_way]
        return [under_way.answers[s.number] for s in shards if s.number in under_way.answers]

    def _question(self, shard: ReachedShard, question: Inquire | AskReport) -> None:
        self._shards_being_sent.add(shard.number)
        try:
            self._transmit(shard, (encode(question), ()))
        except ConnectionError:
            self._disconnect(shard)
        self._shards_being_sent.discard(shard.number)

    def settle(self, timeout_s: float) -> bool:
        """Wait until every request has been answered; False after `timeout_s`."""

        def settled() -> bool:
            return not any(shard.session.outstanding for shard in self.shards)

        return self.read_until(settled, self.now() + timeout_s)

    def close(self, reason: ParamServeError | None = None, *, bye: bool = True) -> None:
        """Say goodbye, close the links, release the arenas. Repeating is safe.

        Args:
            reason: what calls under way raise; None: that the client was closed.
            bye: whether the servers are told that it ends in order.
        """
        with self._lock:
            if self._closed:
                return
            self._reason = reason
            goodbye = encode(Bye(self._nothing_outstanding))
            for shard in self.shards:
                if shard.link is not None and bye and shard.number not in self._shards_being_sent:
                    with contextlib.suppress(ConnectionError, ParamServeError):
                        shard.link.send(goodbye)
                self._disconnect(shard)
            self._closed = True
            for shard in self.shards:
                shard.session.abandon(self._ended())
            for arena in self._arenas.values():
                arena.close()
            self.memory.clear()
            # The pool's slots hold on to the memory, and it to this object.
            self._pool = SlotPool(self._slot)
            self.returned.clear()
            self._condition.notify_all()

    @property
    def _nothing_outstanding(self) -> bool:
        """Whether all shards have answered all that any of them was sent."""
        whole = self._failure is None and not self._mutating and not self._shards_being_sent
        return whole and not any(shard.session.unanswered for shard in self.shards)

    def abandon(self) -> None:
        """Have calls that wait on this copy told that it is closed: this process is a fork of the
        client's."""
        self._closed = True
        self._lock = threading.RLock()  # Another thread of the parent may have held the old one.
        self._condition = threading.Condition(self._lock)


def answers_by_shard(operation: Operation) -> list[Done]:
    """The shards' answers, in shard order; the operation is complete and has no error."""
    replies = operation.replies
    return list(replies.values()) if len(replies) == 1 else [replies[k] for k in sorted(replies)]
