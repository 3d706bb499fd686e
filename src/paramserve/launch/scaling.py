"""Changes the number of workers of a run while it goes on.

A change has three parts: the caller's thread waits for room, then the one that watches the
processes asks the coordinator, and starts or dismisses processes when that has agreed.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from paramserve.errors import CoordinatorGone, ParamServeError, Timeout, rebuild
from paramserve.launch.entries import Key
from paramserve.launch.overview import Overview
from paramserve.launch.processes import Processes
from paramserve.launch.roster import Roster
from paramserve.launch.waiting import SIGNAL_S
from paramserve.messages import Failed


@dataclass
class _Change:
    """Another number of workers, that a caller waits for."""

    workers: int
    done: Future[None] = field(default_factory=Future)
    call: int | None = None
    """Call to the coordinator; None: not made yet."""
    answer_by: float = 0.0


class Scaling:
    """The changes of a run's number of workers, one after the other.

    Args:
        request_s: how long the coordinator may take to answer.
        why_not: says why the number can no longer be changed; empty: it can.
    """

    def __init__(
        self,
        processes: Processes,
        roster: Roster,
        overview: Overview,
        request_s: float,
        why_not: Callable[[], str],
    ) -> None:
        self._processes = processes
        self._roster = roster
        self._overview = overview
        self._request_s = request_s
        self._why_not = why_not
        self._changes: deque[_Change] = deque()
        """More than one only where a caller has given up waiting."""
        self._changes_lock = threading.Lock()
        """None is added once `refuse` has begun."""
        self._one_at_a_time = threading.Lock()

    # --- for any thread -------------------------------------------------------------------------

    def require_open(self, workers: int) -> None:
        """Raise `ParamServeError` unless the number of workers can still be changed."""
        why = self._why_not()
        if why:
            raise ParamServeError(
                f"the run was not scaled to {workers} workers: {why}",
                fix="scale a run while it trains, or start another one",
            )

    def scale(self, workers: int) -> None:
        """Have this many workers from now on; returns when the coordinator has agreed and the
        processes of new ranks are launched.

        Raises:
            CannotPlace: the engine has no room for more. All is as before.
            Timeout: the coordinator has not answered; it may have agreed.
            ParamServeError: the run is over or ends, or a process could not be started. All is as
                before.
        """
        with self._one_at_a_time:
            self.require_open(workers)
            added = _ranks(self._roster.target, workers)
            try:
                self._processes.make_room(added)
            except RuntimeError:  # it was closed meanwhile
                self.require_open(workers)
                raise
            change = _Change(workers)
            try:
                with self._changes_lock:
                    self.require_open(workers)
                    self._changes.append(change)
                while not change.done.done():
                    wait([change.done], SIGNAL_S)
                change.done.result()
            except ParamServeError:
                self._processes.give_back(added)
                raise

    # --- for the thread that watches ------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """Whether a caller waits for a change."""
        return bool(self._changes)

    def go_on(self, now: float) -> None:
        """One step of the change that is under way."""
        if not self._changes:
            return
        change = self._changes[0]
        try:
            agreed = self._agreed(change, now)
            if agreed:
                self._carry_out(change.workers, now)
        except Exception as error:
            self._changes.popleft()
            change.done.set_exception(error)
            return
        if agreed:
            self._changes.popleft()
            change.done.set_result(None)

    def refuse(self) -> None:
        """The run is over, and `why_not` says so already: fail the changes that callers wait
        for."""
        with self._changes_lock:  # a caller that passed `require_open` has added its change by now
            waiting = tuple(self._changes)
        for change in waiting:
            try:
                self.require_open(change.workers)
            except ParamServeError as error:
                change.done.set_exception(error)

    def _agreed(self, change: _Change, now: float) -> bool:
        """Whether the coordinator has agreed; it is asked first."""
        self.require_open(change.workers)
        overview = self._overview
        try:
            if change.call is None:
                change.call = overview.scale(change.workers)
                change.answer_by = now + self._request_s
            answer = overview.answer(change.call)
        except ConnectionError as error:
            raise CoordinatorGone(
                f"the run was not scaled to {change.workers} workers: the coordinator is gone",
                applied="unknown",
                fix="the run ends, and tells why",
            ) from error
        if answer is None and now > change.answer_by:
            overview.forget(change.call)
            raise Timeout(
                f"the coordinator has not agreed to {change.workers} workers in "
                f"{self._request_s} s",
                applied="unknown",
                fix="scale again: the last number holds",
            )
        if isinstance(answer, Failed):
            raise rebuild(answer.kind, answer.failed, answer.applied, answer.fix)
        return answer is not None

    def _carry_out(self, workers: int, now: float) -> None:
        """Start or retire processes; where one cannot be started, all is as it was and the call
        raises."""
        before = self._roster.target
        keys = self._roster.scale(workers, now)
        try:
            self._processes.launch(keys)
        except (OSError, ParamServeError) as error:
            for key in keys:
                self._processes.forget(key)
            self._roster.take_back()
            with contextlib.suppress(ConnectionError, ParamServeError):
                self._overview.forget(self._overview.scale(before))
            raise ParamServeError(
                f"the run was not scaled to {workers} workers: a process could not be started: "
                f"{error}",
                fix="look at what the machine is short of, and scale again",
            ) from error
        self._processes.give_back(_ranks(workers, before))


def _ranks(first: int, end: int) -> list[Key]:
    return [Key("worker", rank) for rank in range(first, end)]
