"""Where a worker's program is when it makes a collective; see `AllReduce.place`.

A rank that comes back begins its function anew. A loop over a loader leaves out what is done, and
the course knows how much of that is still to come. A loop of the program's own begins at
`worker.clock`, and no call says so: which collectives came before it, an older incarnation saves
with its first step.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from paramserve.messages import PassBy

if TYPE_CHECKING:
    from paramserve.client import Client
    from paramserve.training.course import Course
    from paramserve.training.leases import Leases
    from paramserve.training.optimizers import Optimizers

OWN_LOOP = "own loop"
"""What a worker saves that steps in a loop of its own, in no pass over a loader: the number of the
last collective before that loop."""
LOOKS_MAX = 16
"""Looks at the clock before the first step that are remembered, the newest ones."""


class Place(NamedTuple):
    """Where a program is; see `AllReduce`."""

    steps: int
    exact: bool = True
    epoch: int = 0
    inner: bool = False
    ticks: int = 0
    in_pass: bool = False
    begins: bool = False


class Position:
    """The position of one worker's program among its steps and its collectives.

    Attributes:
        seen: number of the last collective whose result is known here.
    """

    def __init__(
        self, client: Client, optimizers: Optimizers, course: Course, leases: Leases
    ) -> None:
        self._client = client
        self._optimizers = optimizers
        self._course = course
        self._leases = leases
        self._again = client.connection.incarnation > 1
        self.last_call = 0
        self._looks = deque[int](maxlen=LOOKS_MAX)
        """`last_call` when the program looked at its clock before its first step."""
        self._looks_of_round = 0
        """Looks of the program between that step and the next one."""
        self._first_step: tuple[str, int] | None = None
        """The group of the first step, and `last_call` there."""
        self._begins: int | None = None
        """`OWN_LOOP` as it was saved; None: the loop is none of the program's own."""
        self._begins_read = False
        if self._again or client.connection.restarts:
            client.saving.ask(OWN_LOOP, self._begin_steps)

    def look(self) -> None:
        """The program asks how far its rank is, as where a loop of its own begins there."""
        if self._first_step is None:
            self._looks.append(self.last_call)
        else:
            self._looks_of_round += 1

    @property
    def place(self) -> Place:
        """Steps that the function has gone through since it began, with those that loaders have
        left out or that its loop begins behind: where a rank is that was restarted or added. With
        leased loaders ranks are at other steps in the same call."""
        steps, groups = self._client.steps, self._optimizers.groups
        clocks = [steps.clocks.get(each, 0) for each in groups]
        remaining, later = 0, self._again
        begins = later and self._first_step is None
        if begins:
            remaining = self._steps_remaining()
        elif not later and all(
            clock <= steps.resumed.get(group, 0)
            for group, clock in zip(groups, clocks, strict=True)
        ):
            remaining = clocks[0]
        even = not self._leases.loader_count
        is_known = not remaining or (later and even and self._course.place_known)
        # Each optimizer steps at most once with each batch that is left.
        done = [max(clock - remaining, 0) if is_known else 0 for clock in clocks]
        epoch = self._course.epoch_behind(0)
        in_pass = self._course.in_pass or self._leases.under_way
        return Place(
            done[0],
            is_known and even,
            epoch,
            bool(self._looks) or in_pass or epoch > 0,
            sum(done),
            in_pass,
            begins,
        )

    def _steps_remaining(self) -> int:
        """Steps of older incarnations that the program has not come by yet."""
        if not self._begins_read:
            self._begins_read = True
            saved = self._client.saving.older(OWN_LOOP)
            self._begins = int(saved) if saved else None
        if self._begins is not None and self.last_call >= self._begins:
            return 0
        return self._course.look_left()

    @property
    def _in_pass(self) -> bool:
        return self._leases.present is not None or self._course.in_pass

    def _begin_steps(self) -> bytes | None:
        """State of the loop to be saved before the first step.

        The others wait no longer for this rank in calls that it has left out, if it was restarted.

        Raises:
            CollectiveMismatch: it has made some of the calls before this step, and not all.
        """
        client = self._client
        stepping = client.saving.stepping
        if self._first_step is not None:
            group, last_call = self._first_step
            if group not in stepping:
                return None  # another optimizer
            client.saving.stop_asking(OWN_LOOP)
            return self._correct_begin(last_call)
        place = self.place
        if self._again:
            terms = client.steps.terms
            policies = [terms(group).policy for group in self._optimizers.groups]
            together = all(each and each.collects and not each.partial for each in policies)
            if together and place.exact and place.ticks:
                message = PassBy(
                    0,
                    place=place.steps,
                    epoch=place.epoch,
                    seen=self.last_call,
                    ticks=place.ticks,
                )
                client.connection.begin_steps(message)
        self._first_step = (
            stepping[0],
            self.last_call,
        )  # an interrupt before this repeats the message
        if self._begins is not None or not self._looks or self._in_pass:
            client.saving.stop_asking(OWN_LOOP)
            return None
        self._begins = self._looks[-1]
        return b"%d" % self._begins

    def _correct_begin(self, first_step_call: int) -> bytes | None:
        """State of the loop to be saved before the second step; None: it began as assumed.

        Where the program looks in each round, its last look before the first step may have been
        one of that round. The loop then began with one before it, if the calls of a round lie
        between that one and the step. Else the last look began it.

        Args:
            first_step_call: at the first step.
        """
        looks, of_round = list(self._looks), self._looks_of_round
        calls = self.last_call - first_step_call
        for begins in looks[-1 - of_round : -1] if of_round and calls else ():
            if first_step_call - begins == calls:
                self._begins = begins
                return b"%d" % begins
        return None
