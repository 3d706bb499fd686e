"""What the driver knows of a run through the coordinator: status, log records, silent processes.

It never waits: a request is sent when it is due, and its answer is taken when it has come. So the
thread that watches the processes is never held up by a coordinator that hangs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from paramserve.config import Credentials, Deadlines, Limits
from paramserve.errors import ConnectTimeout, CoordinatorGone, ParamServeError, rebuild
from paramserve.launch.entries import COORDINATOR, Key
from paramserve.messages import (
    AskStatus,
    CoordinatorReply,
    Failed,
    Hello,
    MarkDead,
    Members,
    Ok,
    OwnSpeed,
    Record,
    Refused,
    Scale,
    SentGradients,
    ServerBeat,
    Status,
    WorkerUsage,
    encode,
)
from paramserve.transport.link import Link

logger = logging.getLogger("paramserve")

EVERY_S = 0.25
CONNECT_S = 1.0
"""The coordinator is listening when this is called, and accepts at once."""
PAUSE_S = 0.5
"""Seconds without a tick after which the driver counts as stopped, or busy."""
NO_RECORDS = 1 << 62
"""Asks for what comes after all records."""
CONNECT_AGAIN_S = 0.25
"""Seconds for one attempt to connect after an error."""
AGAIN_S = 1.0
"""Seconds between a broken connection and the next attempt."""
RECORDS_S = 10.0
"""How long the last records may take to be fetched."""
RECORDS_MAX = 1_000_000
"""Log records kept for the result; the oldest go first."""
ENDED_FIX = (
    "a handle lives as long as its run or cluster: read what a run has left by job.wait() and its "
    "result; if it should still run, look why its first server does not"
)
SERVED_FIX = (
    "look whether the first `paramserve serve` of the cluster runs, and what it has printed; the "
    "values end with their servers: save them before, with `paramserve get`"
)

_ANSWERS: msgspec.msgpack.Decoder[CoordinatorReply | Members | Refused] = msgspec.msgpack.Decoder(
    CoordinatorReply | Members | Refused
)


class Overview:
    """The driver's line to the coordinator. For one thread; others may read its attributes.

    Args:
        records: whether log records are fetched as well.
        served: whether `paramserve serve` runs the cluster, so that no driver has what it left.

    Attributes:
        status: the last answer, or None before the first.
        latest: the last value of each name that workers logged.
        logged: the same by rank.
        records: everything that workers logged, in the order in which the coordinator had it.
        followers: are called with records as they come in, in this line's thread.
        dropped_records: how many were lost because they came too fast: in workers, at the
            coordinator or here.
        error: why the line is broken; None: it is not.
    """

    def __init__(
        self,
        addresses: tuple[str, ...],
        credentials: Credentials,
        limits: Limits,
        deadlines: Deadlines,
        *,
        records: bool = True,
        served: bool = False,
    ) -> None:
        self.status: Status | None = None
        self.records: deque[Record] = deque(maxlen=RECORDS_MAX)
        self.latest: dict[str, float] = {}
        self.logged: dict[int, dict[str, float]] = {}
        self.followers: list[Callable[[Sequence[Record]], None]] = []
        self.dropped_records = 0
        self.error: Exception | None = None
        self.addresses = addresses
        """The coordinator's; empty: not known yet."""
        self._credentials = credentials
        self._ended_fix = SERVED_FIX if served else ENDED_FIX
        self._limits = limits
        self._stall_s = deadlines.stall_s
        self._lost_s = deadlines.lost_s
        self._link: Link | None = None
        self._call = 0
        self._asked_at: float | None = None
        self._mute_since: float | None = None
        """When the coordinator became unreachable, or stopped answering."""
        self._next_at = 0.0
        self._ticked_at: float | None = None
        self._next_record = 0 if records else NO_RECORDS
        self._end_record = self._next_record
        self._missed = 0
        """Records that were not kept until they were asked for, or are not kept here."""
        self._dropped = 0
        self._answers: dict[int, Ok | Failed | None] = {}
        """Answer of each call that waits for one; None: it has not arrived."""
        self._unconfirmed: dict[int, MarkDead] = {}
        """Ends of workers that the coordinator may not know of yet."""

    def begin_anew(self) -> None:
        """Begin anew with another coordinator, which has nothing of the one before; records that
        had not arrived from there are lost."""
        self.close()
        self._link, self.status, self.error = None, None, None
        self.addresses = ()
        self._asked_at = self._mute_since = None
        self._next_at = 0.0
        self._missed = self._dropped + self._end_record - self._next_record
        self._next_record = self._end_record = 0
        self._answers.clear()
        self._unconfirmed.clear()

    @property
    def beats(self) -> tuple[ServerBeat, ...]:
        return self.status.servers if self.status is not None else ()

    @property
    def sent(self) -> tuple[tuple[int, SentGradients], ...]:
        """Gradients that each rank has reported as sent encoded."""
        return self.status.sent if self.status is not None else ()

    @property
    def speeds(self) -> tuple[tuple[int, OwnSpeed], ...]:
        """Speed of each live rank that scales its own steps."""
        return self.status.speeds if self.status is not None else ()

    @property
    def usage(self) -> tuple[tuple[int, WorkerUsage], ...]:
        """Time and memory that each live rank has reported."""
        return self.status.usage if self.status is not None else ()

    def tick(self, now: float) -> None:
        """Ask if it is time, and take what has come. A broken line is made anew with a later one;
        why it broke is told elsewhere, if the coordinator's process has ended."""
        paused_s = now - self._ticked_at if self._ticked_at is not None else 0.0
        self._ticked_at = now
        if paused_s > PAUSE_S:  # nothing was read meanwhile, and all may have stood still
            if self._asked_at is not None:
                self._asked_at += paused_s
            if self._mute_since is not None:
                self._mute_since += paused_s
        try:
            if self._asked_at is None and now >= self._next_at:
                self._ask(now, CONNECT_S if self.error is None else CONNECT_AGAIN_S)
            if self._link is not None:
                self._take(0.0)
        except (ConnectionError, ParamServeError) as error:
            self._broke(error, now)

    def ask_now(self, now: float, timeout_s: float, *, raised: bool = False) -> None:
        """A fresh status and all records, as far as each answer comes within `timeout_s`, and all
        of them within `RECORDS_S`. What is missing then counts as dropped.

        Args:
            raised: the caller raises `error`: it is not logged as well.
        """
        until = time.monotonic() + RECORDS_S
        try:
            if self._asked_at is not None:  # that answer may be older than this question
                self._take(timeout_s)
            fresh = False
            while self._asked_at is None and not (fresh and self._next_record >= self._end_record):
                if fresh and time.monotonic() > until:
                    break
                self._ask(now, max(timeout_s, CONNECT_AGAIN_S))
                self._take(timeout_s)
                fresh = True
        except (ConnectionError, ParamServeError) as error:
            self._broke(error, now, raised=raised)
        self.dropped_records = self._dropped + self._end_record - self._next_record

    def fresh(self, timeout_s: float) -> Status:
        """How the cluster stands now; all records that it has are here then.

        Raises:
            CoordinatorGone: no answer in `timeout_s`, or the line was closed. ParamServeError: the
                cluster refuses this peer.
        """
        before = self.status
        self.ask_now(time.monotonic(), timeout_s, raised=True)
        where = ", ".join(address.removeprefix("tcp:") for address in self.addresses)
        if isinstance(self.error, ConnectionError | ConnectTimeout):
            why = getattr(self.error, "failed", self.error)
            raise CoordinatorGone(
                f"the run or cluster at {where} has ended, or cannot be reached: its coordinator "
                f"has closed the connection or listens no more ({why})",
                applied="no",
                fix=self._ended_fix,
            ) from self.error
        if self.error is not None:
            raise self.error
        if self.status is None or self.status is before:
            raise CoordinatorGone(
                f"the coordinator at {where} did not answer in {timeout_s} s",
                applied="unknown",
                fix="look whether it runs, and whether a firewall is in between",
            )
        return self.status

    def _broke(self, error: Exception, now: float | None = None, *, raised: bool = False) -> None:
        """Close the line, which is of no further use; the next tick that is due makes another one.

        Args:
            raised: the caller raises the error: it is not logged as well.
        """
        if now is None:
            now = self._ticked_at if self._ticked_at is not None else time.monotonic()
        if not isinstance(error, ConnectionError | ConnectTimeout):
            if not raised:
                logger.warning("the driver's line to the coordinator failed: %s", error)
        elif self._mute_since is None:
            self._mute_since = self._asked_at if self._asked_at is not None else now
        self.error = error
        self._asked_at, self._next_at = None, now + AGAIN_S
        self._answers.clear()
        if self._link is not None:
            self._link.close()
            self._link = None

    def _ask(self, now: float, connect_s: float) -> None:
        self._send(AskStatus(self._number(), self._next_record), connect_s)
        self._asked_at, self._next_at = now, now + EVERY_S

    def mark_dead(self, rank: int, *, final: bool = True, incarnation: int = 0) -> None:
        """Tell the coordinator that a worker's process has ended.

        Args:
            final: whether no other one will be started in its place.
            incarnation: of the process; a later one is not meant. 0: unknown.
        """
        message = MarkDead(self._number(), "worker", rank, final, incarnation)
        try:
            self._send(message)
        except (ConnectionError, ParamServeError) as error:
            self._broke(error)
        else:
            if not incarnation:  # if it were said again, a successor could be meant by it
                return
        self._unconfirmed[message.call] = message

    def scale(self, workers: int) -> int:
        """Tell the coordinator how many workers there are to be.

        Returns:
            The number of the call, for `answer`.
        Raises:
            ConnectionError, ParamServeError: the line is broken.
        """
        call = self._number()
        try:
            self._send(Scale(call, workers))
        except (ConnectionError, ParamServeError) as error:
            self._broke(error, raised=True)
            raise
        self._answers[call] = None
        return call

    def answer(self, call: int, timeout_s: float = 0.0) -> Ok | Failed | None:
        """The answer to a call, once; None: it has not come. What came besides is taken as well.

        Raises:
            ConnectionError, ParamServeError: the line is broken.
        """
        if call not in self._answers:
            raise ConnectionAbortedError("the line to the coordinator broke before it answered")
        try:
            self._take(timeout_s)
        except (ConnectionError, ParamServeError) as error:
            self._broke(error, raised=True)
            raise
        return self._answers.pop(call) if self._answers.get(call) is not None else None

    def forget(self, call: int) -> None:
        """The answer to a call is no longer wanted."""
        self._answers.pop(call, None)

    def silent(self, now: float) -> dict[Key, int]:
        """Processes that were not heard of for too long, or that the cluster counts as dead, each
        with its incarnation (0 for those that have none)."""
        attempts: dict[Key, int] = {}
        if self.status is not None:
            attempts |= {Key("server", shard): 0 for shard in self.status.silent_servers}
            for member in self.status.members:
                if member.state in ("dead", "restarting"):
                    attempts[Key("worker", member.rank)] = member.incarnation
        since = self._mute_since if self._mute_since is not None else self._asked_at
        if since is not None and now - since > self._stall_s:
            attempts[COORDINATOR] = 0
        return attempts

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def _number(self) -> int:
        self._call += 1
        return self._call

    def _send(self, message: AskStatus | MarkDead | Scale, connect_s: float = CONNECT_S) -> None:
        if self._link is None:
            self._link = Link.connect(
                self.addresses,
                Hello("driver"),
                credentials=self._credentials,
                timeout_s=connect_s,
                lost_s=self._lost_s,
                limits=self._limits,
            )
            for dead in self._unconfirmed.values():
                self._link.send(encode(dead))
        self._link.send(encode(message))

    def _take(self, timeout_s: float) -> None:
        """Take in what the coordinator has answered, for up to so many seconds."""
        assert self._link is not None
        while self._asked_at is not None or None in self._answers.values():
            header = self._link.receive(timeout_s)
            if header is None:
                return
            answer = _ANSWERS.decode(header)
            if isinstance(answer, Refused):  # and the coordinator has ended the connection
                kind = "CoordinatorGone" if answer.kind == "ServerGone" else answer.kind
                raise rebuild(kind, answer.failed, answer.applied, answer.fix)
            if isinstance(answer, Ok | Failed):
                self._unconfirmed.pop(answer.call, None)
            if isinstance(answer, Ok | Failed) and answer.call in self._answers:
                self._answers[answer.call] = answer
            if isinstance(answer, Status):
                self._asked_at = self._mute_since = self.error = None
                self.status = answer
                self._keep(answer)

    def _keep(self, answer: Status) -> None:
        """Keep the records of an answer, and count those that are lost."""
        first = answer.next_record - len(answer.records)
        self._missed += max(first - self._next_record, 0)
        self._missed += max(len(self.records) + len(answer.records) - RECORDS_MAX, 0)
        self.records.extend(answer.records)
        for follower in self.followers:
            follower(answer.records)
        for record in answer.records:
            self.latest.update(record.values)
            self.logged.setdefault(record.rank, {}).update(record.values)
        self._next_record, self._end_record = answer.next_record, answer.end_record
        if self._next_record < self._end_record:
            self._next_at = 0.0  # there are more
        self._dropped = self.dropped_records = self._missed + answer.lost_records
