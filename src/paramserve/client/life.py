"""A client's life: it joins a cluster, takes over where it is to go on, works, and leaves.

What it sends in between is in the modules above this one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

from paramserve.client.exchange import Connect, Exchange, again
from paramserve.client.gradients import Gradients
from paramserve.client.heartbeat import Heartbeat
from paramserve.client.names import Names
from paramserve.client.steps import Steps
from paramserve.config import NO_CREDENTIALS, Credentials, Deadlines, Limits
from paramserve.consistency.base import number
from paramserve.core.group import outside, resume, undecided
from paramserve.core.partition import Block
from paramserve.core.policy_traits import GroupTraits
from paramserve.errors import ClientClosed, ParamServeError, Timeout
from paramserve.ids import NO_RANK
from paramserve.messages import (
    AskStatus,
    GroupReport,
    Hello,
    Join,
    Joined,
    Leave,
    Ok,
    Reconnect,
    ServerBeat,
    Status,
)
from paramserve.transport.control import ControlLink
from paramserve.transport.link import Link

NO_RECORDS = 1 << 62
"""Past the number of every record of `worker.log`."""
CLOSE_S = 1.0
"""How long `close` waits for what was sent, and for the coordinator's goodbye."""


class ClientLife:
    """The part of a client that joins and leaves; see `client.Client`.

    Attributes:
        id: given out by the coordinator.
        rank: of the worker; -1 for a client that holds up nobody.
        incarnation: counts the restarts of this rank, from 1; 0 without a rank.
        workers: how many workers the cluster expects.
        late: whether it joined while the others were under way, as a rank that was not there
            before.
        restarts: whether another incarnation may go on for this one.
        repeated: Async: how many steps of an older incarnation some shard has had that this one
            takes again, since another had not.
        resumed: the clock of each group where it began, if not at 0.

    `missed`, `retiring` and `waited_s` change while it works.
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
    ) -> None:
        self.id = joined.client
        self.rank = rank
        self.incarnation = joined.incarnation
        self.workers = joined.workers
        self.late = joined.late and joined.incarnation == 1
        self.restarts = joined.restarts
        self._control = control
        self._credentials = credentials
        self._pid = os.getpid()
        self._closed = False
        self._reason: ParamServeError | None = None
        """Why it was closed, if not because somebody wanted it."""
        self._lock = threading.RLock()
        self.repeated = 0
        self.resumed: dict[str, int] = {}
        identity = Reconnect(0, joined.cluster, joined.client, joined.incarnation, rank)
        control.identify(identity, deadlines)
        # Before all that may take long: the coordinator counts from the join on.
        told_s = joined.heartbeat_s
        every_s = min(deadlines.heartbeat_s, told_s) if told_s > 0 else deadlines.heartbeat_s
        self._heartbeat = Heartbeat(control, rank, every_s, limits)
        try:
            self._exchange = Exchange(joined, rank, credentials, limits, deadlines, connect)
            self._names = Names()
            self._terms = GroupTraits(joined.consistency)
            self._steps = Steps(self._exchange, rank, deadlines.request_s, self._terms)
            self._steps.busy_s, self._steps.stall_s = deadlines.busy_s, deadlines.stall_s
            self._steps.all_live = self._all_live
            self._gradients = Gradients(self._exchange, self._names, self._refuses, rank)
            if joined.incarnation > 1 or joined.late:
                self._resume(deadlines.start_s, joined.returned)
        except BaseException:
            self._heartbeat.stop()
            raise

    def _resume(self, limit_s: float, returned: bool) -> None:
        """Take over the clocks of this rank from its older incarnations, or the others' for a new
        one, and the groups' policies.

        Args:
            returned: whether the others have gone on without this rank.
        Raises:
            ServerGone, Timeout: the shards did not say how far it was. The links are closed.
        """
        try:
            told = self._exchange.reports(limit_s)
            if len(told) < len(self._exchange.shards):
                raise Timeout(
                    f"rank {self.rank} (incarnation {self.incarnation}) asked where to go on: "
                    f"{len(told)} of {len(self._exchange.shards)} shards answered in {limit_s:.1f}"
                    " s",
                    fix="look at the servers; a new worker of this rank may join",
                )
        except BaseException:
            self._exchange.close()
            raise
        reports = [beat.groups for beat in told]
        by_name: dict[str, list[GroupReport]] = {}
        for beat in told:
            for report in beat.groups:
                by_name.setdefault(report.name, []).append(report)
        for name, found in resume(reports, self.rank).items():
            for news in {n.number: n for each in by_name[name] for n in each.changes}.values():
                self._steps.learn(news)
            self._steps.go_on(name, found.clock)
            self.resumed[name] = found.clock
            self.repeated = max(self.repeated, found.repeated)
        for name in outside(reports, self.rank):
            self._steps.came_late(name)
        for name in undecided(reports, self.rank) if returned else ():
            self._steps.came_back(name)

    @classmethod
    def connect(
        cls,
        addresses: str | Sequence[str],
        credentials: Credentials = NO_CREDENTIALS,
        *,
        rank: int = NO_RANK,
        workers: int = 0,
        timeout_s: float | None = None,
        limits: Limits | None = None,
        deadlines: Deadlines | None = None,
    ) -> Self:
        """Join a cluster.

        Args:
            addresses: the coordinator's, `unix:<path>` or `tcp:<host>:<port>`.
            credentials: the cluster's; needed for TCP only.
            rank: of a worker; -1 for a client that holds up nobody.
            workers: how many a worker takes there to be; checked by the cluster. 0: not checked.
            timeout_s: until the coordinator answers and all servers are up.
        Raises:
            ConnectTimeout: nobody answered in time.
            ParamServeError: the rank is taken, the cluster has another number of workers, or is
                not complete in time. The rank stays as it was.
        """
        limits = limits if limits is not None else Limits()
        deadlines = deadlines if deadlines is not None else Deadlines()
        limit = timeout_s if timeout_s is not None else deadlines.start_s
        if isinstance(addresses, str):
            addresses = (addresses,)
        control = ControlLink.connect(
            addresses,
            Hello("join"),
            credentials=credentials,
            limits=limits,
            timeout_s=limit,
            lost_s=deadlines.lost_s,
        )
        try:
            join = Join(0, rank, os.getpid(), workers)
            joined = control.call(join, Joined, timeout_s=limit)
            return cls(
                control,
                joined,
                rank=rank,
                credentials=credentials,
                limits=limits,
                deadlines=deadlines,
                connect=partial(Link.connect, lost_s=deadlines.lost_s),
            )
        except BaseException:
            control.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).connect, (self._control.addresses, self._credentials)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(id={self.id}, rank={self.rank}, at={self._control.address!r})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def is_dead(self, ranks: Iterable[int]) -> bool:
        """Whether the coordinator counts all of these ranks as dead, and no other incarnation of
        them comes; False where it cannot be asked."""
        states = self._states()
        return all(states.get(rank) == "dead" for rank in ranks)

    def _all_live(self, ranks: Iterable[int]) -> bool:
        states = self._states()
        return all(states.get(rank) in ("live", "retiring") for rank in ranks)

    def _states(self) -> dict[int, str]:
        """Of each rank, as the coordinator knows it; nothing where it cannot be asked."""
        try:
            call = AskStatus(0, after_record=NO_RECORDS)
            told = self._control.call(call, Status, timeout_s=self.timeout_s)
        except ParamServeError:
            return {}
        return {each.rank: each.state for each in told.members}

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def timeout_s(self) -> float:
        """Deadline of every call that names none, in seconds; may be changed. Until then, live
        workers that do not step are waited for longer, `Deadlines.busy_s`."""
        return self._steps.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        if not value > 0:
            raise ValueError(f"timeout_s must be > 0, got {value}")
        self._steps.timeout_s = self._exchange.io_timeout_s = value
        self._steps.busy_s = 0.0  # the caller's limit is one for all

    @property
    def patience_s(self) -> float:
        """How long live workers are waited for by what names no limit, in seconds."""
        return max(self._steps.timeout_s, self._steps.busy_s)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The coordinator's; the one that was reached is the first."""
        reached = self._control.address
        return (reached, *(each for each in self._control.addresses if each != reached))

    def clock(self, group: str = "default") -> int:
        """Steps that this client has ended on a group, with those of older incarnations of its
        rank."""
        return self._steps.clocks.get(group, 0)

    @property
    def missed(self) -> int:
        """Clocks, over all groups, that the others decided without this worker, and that it left
        out: it came too late, as `ps.Sync(backup=, timeout_s=)` allows."""
        return self._steps.missed

    @property
    def retiring(self) -> bool:
        """Whether the run wants this worker to end its function."""
        return self._steps.retiring

    @property
    def waited_s(self) -> float:
        """Seconds that calls of this client have waited for the servers' answers."""
        return self._exchange.waited_s

    @property
    def factor(self) -> float:
        """What the servers multiply this client's gradients by, above 0; may be changed."""
        return self._steps.factor

    @factor.setter
    def factor(self, value: float) -> None:
        number("factor", value, above=0.0)
        self._steps.factor = float(value)

    @property
    def next_mark(self) -> Callable[[], tuple[int, int] | None] | None:
        """Is called once for each step that ends a clock, in order, and gives its mark (lease,
        samples); None: there are none."""
        return self._steps.next_mark

    @next_mark.setter
    def next_mark(self, value: Callable[[], tuple[int, int] | None] | None) -> None:
        self._steps.next_mark = value

    def _refuses(self, block: Block) -> bool:
        return self._steps.traits_of(block).refuses

    def reports(self) -> list[ServerBeat]:
        """What each shard has done so far, in shard order: versions, clocks, staleness."""
        self._check()
        with self._lock:
            return self._exchange.reports(self.timeout_s)

    def log(self, values: dict[str, float]) -> None:
        """Record numbers; they reach the driver with the next heartbeat."""
        self._check()
        values = {name: float(value) for name, value in values.items()}
        clock = max(self._steps.clocks.values(), default=0)
        self._heartbeat.log(clock, values)

    def send_log(self) -> None:
        """Send what was logged now, and not with the next heartbeat: for one who is about to end,
        which no longer waits long for a coordinator that takes nothing."""
        self._control.hurry()
        self._heartbeat.send_all()

    def _limit(self, timeout_s: float | None) -> float:
        return timeout_s if timeout_s is not None else self.timeout_s

    def _check(self) -> None:
        self._check_fork()
        if self._closed:
            if self._reason is not None:
                raise again(self._reason)
            raise ClientClosed(
                f"client {self.id} was closed", fix="make a new one with cluster.client()"
            )

    def _check_fork(self) -> None:
        if os.getpid() != self._pid:
            raise ClientClosed(
                f"client {self.id} was made in process {self._pid}, before a fork",
                fix="connect anew in the child process",
            )

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until everything sent has been answered, and raise what was refused unread.

        Raises:
            PushTimeout: something is unanswered after `timeout_s`.
        """
        self._check()
        limit = self._limit(timeout_s)
        if not self._lock.acquire(timeout=limit):  # Another thread's call is under way.
            raise self._steps.timed_out("drain", None, limit)
        try:
            self._steps.wait_for(self._exchange.settle, "drain", None, timeout_s)
            self._steps.raise_unread()
        finally:
            self._lock.release()

    def close(self, reason: ParamServeError | None = None, *, leave: bool = True) -> None:
        """Leave the cluster: what was sent is answered first (for up to a second). Idempotent.

        In a forked child this only marks the child's copy.

        Args:
            reason: why the cluster is lost: nothing is answered any more, and calls under way and
                later ones raise this. None: they raise `ClientClosed`.
            leave: False: end without a word, as a process that dies; a worker counts as dead.
        """
        if self._closed:
            return
        if os.getpid() != self._pid:
            self._closed = True
            return
        if reason is None and leave:
            # An error here was raised before, or is lost with the run that this client belongs to.
            with contextlib.suppress(ParamServeError, ConnectionError):
                self.drain(timeout_s=CLOSE_S)
        self._reason = reason
        self._closed = True
        self._exchange.close(reason, bye=leave)
        self._control.hurry()
        self._heartbeat.stop()
        if leave:
            # Where the coordinator is gone, there is nothing to leave.
            with contextlib.suppress(ParamServeError):
                self._control.call(Leave(0), Ok, timeout_s=CLOSE_S, slack_s=0.0)
        self._control.close()
