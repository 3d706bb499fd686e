"""A client's waits for answers: how long, what is said meanwhile, and why one has failed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from paramserve.client import timeouts
from paramserve.client.exchange import Exchange, is_complete
from paramserve.core.client_session import Operation
from paramserve.errors import ParamServeError, warn_user
from paramserve.messages import OpenCollective


@dataclass
class _Looks:
    """The looks of one wait at whether those that it is for wait for this rank."""

    began: float
    """When the wait did."""
    due: float
    """When the next one is."""
    before: int = 0
    """Number of the collective that was met at the last one; 0: none."""


class Waits:
    """Waits of one client, with one limit for calls that name none.

    Attributes:
        timeout_s: deadline of every call that names none.
        busy_s: how long live workers are waited for, where no call says how long.
        stall_s: how long a shard that lives may take to say whom a wait is for.
        all_live: whether the coordinator counts all of these ranks as live.
        met: the collective in which all of these ranks wait for this one, if they do.
        now: the time, in seconds, of the exchange's clock.
    """

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        timeout_s: float,
        *,
        busy_s: float = 0.0,
        stall_s: float = 0.0,
        all_live: Callable[[Collection[int]], bool] = lambda ranks: False,
        open_collective: Callable[[Collection[int]], OpenCollective | None] = lambda ranks: None,
        pass_by: Callable[[OpenCollective], bool] = lambda collective: False,
    ) -> None:
        self.timeout_s = timeout_s
        self.busy_s = busy_s
        self.stall_s = stall_s
        self.all_live = all_live
        self.open_collective = open_collective
        self.pass_by = pass_by
        self.now = exchange.now
        self._exchange = exchange
        self._rank = rank

    @property
    def patience_s(self) -> float:
        """How long live workers are waited for by what names no limit, in seconds."""
        return max(self.timeout_s, self.busy_s)

    def until_complete(
        self, operation: Operation, what: str, group: int | None, timeout_s: float | None
    ) -> None:
        """Wait for an operation's answers; as `until`."""
        began, kind = self.now(), (what, group)
        first_s = timeout_s if timeout_s is not None else self.timeout_s
        if first_s > timeouts.SAY_S:
            first_s = timeouts.SAY_S
        if not self._exchange.read_until(partial(is_complete, operation), began + first_s, kind):
            wait = partial(self._exchange.wait, operation, kind=kind)
            self._wait_longer(wait, began, what, group, timeout_s)

    def until(
        self, wait: Callable[[float], bool], what: str, group: int | None, timeout_s: float | None
    ) -> None:
        """Wait for answers; with None `self.timeout_s`, or `busy_s` where they depend on live
        workers only.

        Args:
            wait: waits this long; whether they are there.
            group: of the step that is waited for; None: of the steps unanswered longest.
        Raises:
            PushTimeout, PullTimeout: they are not there in time. Applied: unknown.
        """
        began = self.now()
        limit_s = timeout_s if timeout_s is not None else self.timeout_s
        if not wait(min(limit_s, timeouts.SAY_S)):
            self._wait_longer(wait, began, what, group, timeout_s)

    def _wait_longer(
        self,
        wait: Callable[[float], bool],
        began: float,
        what: str,
        group: int | None,
        timeout_s: float | None,
    ) -> None:
        """Wait as `until` does, where the answers were not there in the first `timeouts.SAY_S`.

        Args:
            began: when the wait did.
        """
        limit_s = timeout_s if timeout_s is not None else self.timeout_s
        first_s = min(limit_s, timeouts.SAY_S)
        warned = first_s < limit_s and self._announce(what, group, first_s, timeout_s)
        if timeout_s is not None:
            if not wait(began + timeout_s - self.now()):
                raise self.timed_out(what, group, timeout_s)
            return
        limit_s -= self.now() - began
        looks = _Looks(began, self.now() + timeouts.LOOK_S)
        while not self._wait_on(wait, what, group, looks, limit_s):
            left_s = began + self.busy_s - self.now()
            awaited = group if group is not None else self._exchange.awaited_group()
            busy = self._waits_for(awaited, left_s) if awaited is not None else ()
            waited_s = self.now() - began
            if wait(0.0):
                return
            if not busy or left_s <= 0.0 or not self.all_live(busy):
                raise self.timed_out(what, awaited, waited_s, busy=busy)
            if not warned:
                warned = True
                self._warn(what, busy, waited_s, None)
            limit_s = min(self.timeout_s, max(self.busy_s - waited_s, 0.0))

    def _wait_on(
        self, wait: Callable[[float], bool], what: str, group: int | None, looks: _Looks, s: float
    ) -> bool:
        """Wait for `s` seconds more. Where those that it waits for wait for this rank in one
        collective, at two looks in a row, neither goes on.

        Raises:
            PushTimeout, PullTimeout: so it is.
        """
        until = self.now() + s
        while looks.due < until:
            if wait(max(looks.due - self.now(), 0.0)):
                return True
            awaited = group if group is not None else self._exchange.awaited_group()
            answers = (
                self._exchange.inquire(awaited, timeouts.INQUIRE_S) if awaited is not None else ()
            )
            missing = {rank for each in answers if each.held for rank, _ in each.missing}
            collective = self.open_collective(missing - {self._rank})
            if (
                collective is not None
                and collective.number == looks.before
                and not self.pass_by(collective)
            ):
                raise timeouts.cannot_end(self._rank, what, collective, self.now() - looks.began)
            looks.before = collective.number if collective is not None else 0
            looks.due = self.now() + timeouts.LOOK_S
        return wait(max(until - self.now(), 0.0))

    def _announce(
        self, what: str, group: int | None, waited_s: float, timeout_s: float | None
    ) -> bool:
        """Say for whom a wait is, if it is for other ranks; whether it was said."""
        awaited = group if group is not None else self._exchange.awaited_group()
        missing = self._waits_for(awaited, timeouts.INQUIRE_S) if awaited is not None else ()
        if missing:
            self._warn(what, missing, waited_s, timeout_s)
        return bool(missing)

    def _warn(
        self, what: str, missing: Sequence[int], waited_s: float, timeout_s: float | None
    ) -> None:
        limit_s = timeout_s if timeout_s is not None else self.patience_s
        knob = "timeout_s=..." if timeout_s is not None else timeouts.knob_of(True)
        warn_user(
            f"rank {self._rank} has waited {waited_s:.0f} s in {what} for a step of "
            f"{timeouts.ranks(missing)}; as long as they live it "
            f"{timeouts.up_to(limit_s, knob)}"
        )

    def _waits_for(self, group: int, left_s: float) -> tuple[int, ...]:
        """The ranks that a group's unanswered steps wait for; empty: something else, too.

        A shard that has not answered yet proves nothing: it has up to `stall_s`, if the wait has.
        """
        answers = self._exchange.inquire(group, min(self.stall_s, max(timeouts.INQUIRE_S, left_s)))
        missing = {rank for each in answers for rank, _ in each.missing}
        return tuple(sorted(missing - {self._rank}))

    def timed_out(
        self, what: str, group: int | None, waited_s: float, *, busy: Collection[int] | None = None
    ) -> ParamServeError:
        """The error of a wait that has failed; asks the shards who is missing.

        Args:
            busy: where no call has said how long: the ranks that were waited for.
        """
        return timeouts.timed_out(self._exchange, self._rank, what, group, waited_s, busy)
