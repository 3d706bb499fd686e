"""A client's connection to a cluster: it joins, tells that it lives, and leaves.

What it sends in between is made by the parts above this one; `control` reaches the coordinator and
`exchange` the shards.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Self, TypeVar
from weakref import WeakMethod

from msgspec import structs

from paramserve.client import timeouts
from paramserve.client.exchange import Connect, Exchange, copy_error
from paramserve.client.heartbeat import Heartbeat
from paramserve.config import NO_CREDENTIALS, NO_RANK, Credentials, Deadlines, Limits
from paramserve.errors import (
    ClientClosed,
    CollectiveMismatch,
    ConnectTimeout,
    ParamServeError,
    ServerGone,
    Timeout,
    warn_user,
)
from paramserve.messages import (
    AskStatus,
    Hello,
    Join,
    Joined,
    Leave,
    Member,
    Ok,
    OpenCollective,
    PassBy,
    Reconnect,
    SentGradients,
    ServerBeat,
    Status,
    WorkerUsage,
)
from paramserve.transport import forks
from paramserve.transport.control import ControlLink
from paramserve.transport.link import Link

T = TypeVar("T")

NO_RECORDS = 1 << 62
"""Past the number of every record of `worker.log`."""
LEAST_S = 1e-3
"""A wait of 0 s, as a message says it, would mean something else."""
CLOSE_S = 1.0
"""How long `close` waits for what was sent, and for the coordinator's goodbye."""
FIRST_STEP_S = 1.0
"""How long the first step of a restarted rank waits for the coordinator."""


class _Arrival:
    """A wait for a cluster to be there, with one limit for its parts.

    Args:
        tells: whether the user is told after `SAY_S` what each part waits for.
    """

    def __init__(self, rank: int, addresses: Sequence[str], limit_s: float, tells: bool) -> None:
        self._who = f"rank {rank}" if rank != NO_RANK else "the client"
        self._where = ", ".join(address.removeprefix("tcp:") for address in addresses)
        self._limit_s = limit_s
        self._tells = tells
        self._until = time.monotonic() + limit_s

    def wait_for(self, part: Callable[[float], T]) -> T:
        """Call a part of the join (reach the coordinator, then `Join`) with the seconds that are
        left; its result. With `tells`: for `SAY_S` first, then the user is told and it is called
        again."""
        left_s = self.left_s
        try:
            try:
                return part(min(left_s, timeouts.SAY_S) if self._tells else left_s)
            except ConnectTimeout as error:
                if not self._tells or left_s <= timeouts.SAY_S:
                    raise
                self._tell(error)
            return part(self.left_s)
        except ConnectTimeout as error:
            error.failed = f"{error.failed.partition('; waited')[0]}; waited {self._limit_s:.1f} s"
            raise

    @property
    def left_s(self) -> float:
        return max(self._until - time.monotonic(), 0.0)

    def _tell(self, error: ConnectTimeout) -> None:
        cause = error.__cause__
        if cause is None:
            finding = error.failed
        elif isinstance(cause, ConnectionRefusedError | FileNotFoundError):
            finding = f"nothing listens there ({cause})"
        else:
            finding = f"no answer from there ({cause})"
        waited_s = self._limit_s - self.left_s
        warn_user(
            f"{self._who} has waited {waited_s:.0f} s for the cluster at {self._where}: {finding}; "
            f"it {timeouts.up_to(self._limit_s, 'timeout_s=...')}"
        )


def _weak(method: Callable[[], None]) -> Callable[[], None]:
    """Calls a method as long as its object lives, which a thread that calls it does not keep."""
    weak = WeakMethod(method)

    def call() -> None:
        bound = weak()
        if bound is not None:
            bound()

    return call


class Connection:
    """A client's place in a cluster, until it is closed.

    Args:
        start_s: until all shards are reached and have said what they have done, for which they
            have `deadlines.reconnect_s` at least; `deadlines.start_s` if None.
    Attributes:
        id: given out by the coordinator.
        rank: of the worker; -1 for a client that no worker waits for.
        incarnation: counts the restarts of this rank, from 1; 0 without a rank.
        workers: how many workers the cluster expects.
        added_late: whether it joined while the others were under way, as a rank that was not there
            before.
        restarts: whether another incarnation may go on for this one.
        consistency: the cluster's policy.
        deadlines: how long each wait may take.
        excluded: whether the others had gone on without this rank.
        first: how many workers the cluster was started for.
        before: how many the checkpoint is of that it has gone on from; 0: of none.
        keeps: whether its cluster writes checkpoints.
        resume_reports: what the shards had done when it joined, in shard order, if it has to go on
            from there; else nothing.
        control: to the coordinator.
        exchange: with the shards.
        lock: held by each call that changes what the client knows of its session.
        closed: whether it was left or lost, or belongs to the process that this one was forked
            from.
        checks: whether `check` has something to do: it is closed, or has no rank and has sent a
            heartbeat since the last call.
    Raises:
        ServerGone, Timeout: the shards did not say how far this rank was. The links are closed.
    """

    def __init__(
        self,
        control: ControlLink,
        joined: Joined,
        *,
        rank: int,
        credentials: Credentials,
        limits: Limits,
        deadlines: Deadlines,
        connect: Connect = Link.connect,
        start_s: float | None = None,
    ) -> None:
        start_s = start_s if start_s is not None else deadlines.start_s
        until = time.monotonic() + start_s
        self.id = joined.client
        self.rank = rank
        self.incarnation = joined.incarnation
        self.workers = joined.workers
        self.added_late = joined.late and joined.incarnation == 1
        self.restarts = joined.restarts
        self.consistency = joined.consistency
        self.deadlines = deadlines
        self.excluded = joined.excluded
        self.first = joined.first
        self.before = joined.before
        self.keeps = joined.keeps
        self.resume_reports: list[ServerBeat] = []
        self.control = control
        self.lock = threading.RLock()
        self.closed = False
        self.checks = False
        self._leaves = False
        """Whether `close` has begun."""
        self._cluster = joined.cluster
        self._credentials = credentials
        self._pid = os.getpid()
        self._reason: ParamServeError | None = None
        """Why it was closed, if not by a call of `close` without a reason."""
        identity = Reconnect(0, joined.cluster, joined.client, joined.incarnation, rank)
        control.identify(identity, deadlines)
        # Before all that may take long: the coordinator counts from the join on.
        told_s = joined.heartbeat_s
        every_s = min(deadlines.heartbeat_s, told_s) if told_s > 0 else deadlines.heartbeat_s
        self._heartbeat = Heartbeat(control, rank, every_s, limits)
        if rank == NO_RANK:
            self._heartbeat.beaten = _weak(self._beaten)
        try:
            reach = structs.replace(deadlines, start_s=start_s)
            self.exchange = Exchange(joined, rank, credentials, limits, reach, connect)
            if joined.incarnation > 1 or joined.late:
                self.resume_reports = self._ask_all(
                    max(until - time.monotonic(), deadlines.reconnect_s)
                )
        except BaseException:
            self._heartbeat.stop()
            raise
        forks.watch(self)

    def _ask_all(self, limit_s: float) -> list[ServerBeat]:
        """What all shards have done so far."""
        try:
            reports = self.exchange.reports(limit_s)
            if len(reports) < len(self.exchange.shards):
                raise Timeout(
                    f"rank {self.rank} (incarnation {self.incarnation}) asked where to go on: "
                    f"{len(reports)} of {len(self.exchange.shards)} shards answered in "
                    f"{limit_s:.1f} s",
                    fix="look at the servers; a new worker of this rank may join",
                )
        except BaseException:
            self.exchange.close()
            raise
        return reports

    @classmethod
    def join(
        cls,
        addresses: str | Sequence[str],
        credentials: Credentials = NO_CREDENTIALS,
        *,
        rank: int = NO_RANK,
        workers: int = 0,
        timeout_s: float | None = None,
        limits: Limits | None = None,
        deadlines: Deadlines | None = None,
        tells: bool = False,
        may_retry: Callable[[], bool] = lambda: True,
    ) -> Self:
        """Join a cluster.

        Args:
            addresses: the coordinator's, `unix:<path>` or `tcp:<host>:<port>`.
            credentials: the cluster's; needed for TCP only.
            rank: of a worker; -1 for a client that no worker waits for.
            workers: how many a worker takes there to be; checked by the cluster. 0: not checked.
            timeout_s: until the coordinator answers and all servers are up and reached.
            tells: whether the user is told, after 10 s, what is waited for.
            may_retry: asked before the coordinator is tried again: whether it is to be.
        Raises:
            ConnectTimeout: no coordinator answered in time: the error has a cause; or not all
                servers have registered: it has none. The rank stays as it was. Or a server that
                has registered was not reached: the rank has ended again.
            ParamServeError: the rank is taken, or the cluster has another number of workers. The
                rank stays as it was.
        """
        limits = limits if limits is not None else Limits()
        deadlines = deadlines if deadlines is not None else Deadlines()
        limit = timeout_s if timeout_s is not None else deadlines.start_s
        if isinstance(addresses, str):
            addresses = (addresses,)
        arrival = _Arrival(rank, addresses, limit, tells)

        def reach(limit_s: float) -> ControlLink:
            return ControlLink.connect(
                addresses,
                Hello("join"),
                credentials=credentials,
                limits=limits,
                timeout_s=limit_s,
                lost_s=deadlines.lost_s,
                may_retry=may_retry,
            )

        def join(limit_s: float) -> Joined:
            call = Join(0, rank, os.getpid(), workers, max(limit_s, LEAST_S))
            return control.call(call, Joined, timeout_s=limit_s)

        control = arrival.wait_for(reach)
        try:
            joined = arrival.wait_for(join)
            return cls(
                control,
                joined,
                rank=rank,
                credentials=credentials,
                limits=limits,
                deadlines=deadlines,
                connect=partial(Link.connect, lost_s=deadlines.lost_s),
                start_s=max(arrival.left_s, deadlines.reconnect_s),
            )
        except BaseException:
            control.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).join, (self.control.addresses, self._credentials)

    def is_dead(self, ranks: Iterable[int]) -> bool:
        """Whether the coordinator counts all of these ranks as dead, and no other incarnation of
        them comes; False where it cannot be asked."""
        states = self._states()
        return all(states.get(rank) == "dead" for rank in ranks)

    def all_live(self, ranks: Iterable[int]) -> bool:
        """Whether the coordinator counts all of these ranks as live."""
        states = self._states()
        return all(states.get(rank) in ("live", "retiring") for rank in ranks)

    def open_collective(self, ranks: Collection[int]) -> OpenCollective | None:
        """The collective in which all of these ranks wait for this one; None: there is none, or the
        coordinator cannot be asked."""
        status = self._status() if ranks else None
        if (
            status is None
            or status.collective is None
            or self.rank not in status.collective.missing
        ):
            return None
        return status.collective if set(status.collective.waiting).issuperset(ranks) else None

    def pass_by(self, collective: OpenCollective) -> bool:
        """Have the others wait no longer for this rank in a collective, if it was restarted: what
        it waits for is behind that in its program."""
        if self.incarnation < 2:
            return False
        try:
            self.control.call(PassBy(0, collective.number), Ok, timeout_s=self.timeout_s)
        except ParamServeError:
            return False
        return True

    def begin_steps(self, message: PassBy) -> None:
        """Have the others wait no longer for this restarted rank in collectives up to its first
        step, if the coordinator can be asked.

        Raises:
            CollectiveMismatch: it has made some of those before this step, and not all.
        """
        try:
            self.control.call(message, Ok, timeout_s=FIRST_STEP_S)
        except CollectiveMismatch:
            raise
        except ParamServeError:
            return

    def members(self) -> Sequence[Member]:
        """All ranks, as the coordinator knows them; nothing where it cannot be asked."""
        status = self._status()
        return status.members if status is not None else ()

    def _states(self) -> dict[int, str]:
        """State of each rank, as in `members`."""
        return {each.rank: each.state for each in self.members()}

    def _status(self) -> Status | None:
        try:
            call = AskStatus(0, after_record=NO_RECORDS)
            return self.control.call(call, Status, timeout_s=self.timeout_s)
        except ParamServeError:
            return None

    @property
    def timeout_s(self) -> float:
        """Deadline of every call that names none, in seconds; may be changed."""
        return self.exchange.io_timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        if not value > 0:
            raise ValueError(f"timeout_s must be > 0, got {value}")
        self.exchange.io_timeout_s = value

    def limit(self, timeout_s: float | None) -> float:
        """The deadline of a call that was given this one, in seconds."""
        return timeout_s if timeout_s is not None else self.timeout_s

    @property
    def addresses(self) -> tuple[str, ...]:
        """The coordinator's; the one that was reached is the first."""
        reached = self.control.address
        return (reached, *(each for each in self.control.addresses if each != reached))

    @property
    def waited_s(self) -> float:
        """Seconds that calls of this client have waited for the servers' answers."""
        return self.exchange.waited_s

    def reports(self, timeout_s: float | None = None) -> list[ServerBeat]:
        """What each shard has done so far, in shard order: versions, clocks, staleness; what came
        in time."""
        self.check()
        with self.lock:
            return self.exchange.reports(self.limit(timeout_s))

    def log(self, clock: int, values: dict[str, float]) -> None:
        """Record numbers of a clock; they reach the driver with the next heartbeat."""
        self.check()
        self._heartbeat.log(clock, {name: float(value) for name, value in values.items()})

    def tell_sent(self, read: Callable[[], tuple[SentGradients, ...]]) -> None:
        """Let each heartbeat tell what this method says of the gradients that were sent encoded."""
        method = WeakMethod(read)  # the thread keeps alive no client that is left unclosed

        def current() -> tuple[SentGradients, ...]:
            bound = method()
            return () if bound is None else bound()

        self._heartbeat.sent_gradients = current

    def tell_usage(self, read: Callable[[], WorkerUsage]) -> None:
        """Let each heartbeat tell what this method says of the client's time and memory."""
        method = WeakMethod(read)

        def current() -> WorkerUsage | None:
            bound = method()
            return None if bound is None else bound()

        self._heartbeat.usage = current

    def send_log(self) -> None:
        """Send what was logged now, and not with the next heartbeat: for a process that is about to
        end, which no longer waits long for a coordinator that takes nothing."""
        self.control.hurry()
        self._heartbeat.send_all()

    def check(self) -> None:
        """Refuse a call of a client that is closed, or in a child of its process.

        One without a rank that was idle while its links ended begins a new session, if need be.

        Raises:
            ClientClosed, or the reason why it was closed. ParamServeError: no new session could be
                begun. Nothing was applied.
        """
        if not self.checks:
            return
        self.checks = False  # first: another thread may close the client now
        if self.closed:
            self.checks = True
            raise self._ended()
        if self.rank == NO_RANK and not self._leaves and not self.exchange.refresh():
            self.checks = True
            self._begin_anew()

    def _beaten(self) -> None:
        """A heartbeat was sent: time has passed, in which a link may have ended."""
        self.checks = True

    def _begin_anew(self) -> None:
        """Join as a new client, which knows what this one knew: no request of it is under way."""
        with self.lock:
            if self.exchange.refresh():  # another thread has done it
                return
            limit_s = self.timeout_s
            call = Join(0, self.rank, os.getpid(), 0, max(limit_s, LEAST_S))
            self.control.begin_anew(limit_s)
            joined = self.control.call(call, Joined, timeout_s=limit_s)
            if joined.cluster != self._cluster:
                error = ServerGone(
                    f"client {self.id} came back after a pause, to another cluster: that which it "
                    "knew at this address has ended",
                    fix="make a new client",
                )
                self.close(error, leave=False)
                raise self._ended()
            identity = Reconnect(0, joined.cluster, joined.client, joined.incarnation, self.rank)
            self.control.identify(identity, self.deadlines)
            self.exchange.begin_anew(joined, limit_s)
            self.id = joined.client

    def _ended(self) -> ParamServeError:
        """Make the error of a call on a client that has ended, or was made before a fork."""
        if os.getpid() != self._pid:
            return ClientClosed(
                f"client {self.id} was made in process {self._pid}, before a fork",
                fix="connect anew in the child process",
            )
        if self._reason is not None:
            return copy_error(self._reason)
        return ClientClosed(
            f"client {self.id} was closed", fix="make a new one with cluster.client()"
        )

    def abandon(self) -> None:
        """Let no call use this copy: this process is a fork of the client's."""
        self.closed = self.checks = True

    def close(
        self,
        reason: ParamServeError | None = None,
        *,
        leave: bool = True,
        drain: Callable[[float], None] | None = None,
    ) -> None:
        """Leave the cluster. Idempotent. In a forked child this only marks the child's copy.

        Args:
            reason: why the cluster is lost: calls under way and later ones raise this. One that is
                `ClientClosed`: it has ended in order. None: they raise a `ClientClosed` that says
                no more.
            leave: False: end without a word, as a process that dies; a worker counts as dead.
            drain: waits for so many seconds until what was sent is answered.
        """
        if self.closed:
            return
        self._leaves = True
        in_order = reason is None or isinstance(reason, ClientClosed)
        if in_order and leave and drain is not None:
            # An error here was raised before, or is lost with the run that this client belongs to.
            with contextlib.suppress(ParamServeError, ConnectionError):
                drain(CLOSE_S)
        self._reason = reason
        self.closed = self.checks = True
        self.exchange.close(reason, bye=leave)
        self.control.hurry()
        self._heartbeat.stop()
        if leave:
            # Where the coordinator is gone, there is nothing to leave.
            with contextlib.suppress(ParamServeError):
                self.control.call(Leave(0), Ok, timeout_s=CLOSE_S, slack_s=0.0)
        self.control.close()
