"""What simulated clients do: workers that step, and a reader that belongs to no rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from paramserve.consistency.built_in import Sync
from paramserve.core.membership import DEAD, LEFT, LIVE
from paramserve.errors import WorkerFenced
from paramserve.messages import AllReduce, AllReduced, Failed, Lease, Leased, Member, Ok, PassBy
from paramserve_testing.history import Agreed, Call, Company

if TYPE_CHECKING:
    from paramserve_testing.client import SimulatedClient
    from paramserve_testing.scenario import Scenario

LEASE_WAIT_S = 5.0
"""The coordinator keeps a worker without samples waiting for so long."""
COLLECTIVE_EVERY = 3
PROGRAMS = ("anew", "clock", "behind")
"""How a worker that is started again goes on with its collectives; see `AgreeingScript`."""
IN_TURN = 0.4
"""Share of the programs whose two optimizers take turns."""
RESTS_FROM = 0.985
"""Draw for a worker's next call from which on it rests."""
PAUSE_S = 0.002
"""A client computes for up to this between two calls."""
LONG_PAUSE_S = 0.01
"""Longest pause of a client that does not read meanwhile: answers arrive sooner than this."""
EVALUATIONS = 6
"""Reads of a worker that evaluates while it rests."""
EVALUATES_S = 2.0
"""Longest seconds of computing, from half of it on, between two: so the others would wait for it
longer than `MOVE_S`, if they did."""


class Script(ABC):
    """What one client does, call by call, once the blocks are defined.

    Args:
        client: that makes its calls.
    """

    def __init__(self, client: SimulatedClient) -> None:
        self.client = client
        self.cluster = client.cluster

    @property
    def every(self) -> list[Any]:
        """All that it pushes to and reads, or some."""
        return self.cluster.workload.every(self.client)

    def pause_s(self) -> float:
        """How long it computes until its next call."""
        longest_s = LONG_PAUSE_S if self.cluster.scenario.slow_readers else PAUSE_S
        return self.cluster.random.random() * longest_s * self.cluster.slowness(self.client.rank)

    @abstractmethod
    def next(self) -> bool:
        """Begin the next call, if one is left; whether another may follow at once."""

    def step(self, push: Sequence[Any] = (), pull: Sequence[Any] = (), **options: Any) -> bool:
        """One step; its answer lets the client go on, if no `then` is given. Whether it was
        sent."""
        return self.client.step(push, pull, **{"then": self.client.answered, **options})

    def shown(self, call: Call, group: str) -> int | None:
        """How many synchronous clocks a call's reads contain; None: not known."""
        return None


class WorkerScript(Script):
    """Steps through its clocks: pushes, ticks and pulls in changing company, and sometimes a rest.

    A later incarnation goes on at the clock that its rank has reached, and repeats the step that
    not all shards have. Before its first step, what it reads may have one clock more: that was
    being decided without its rank, which had ended for good.
    """

    def __init__(self, client: SimulatedClient) -> None:
        super().__init__(client)
        self._evaluates = self.cluster.evaluates
        """Whether it will in its next rest."""
        self._evaluations: list[float] = []
        """How long it computes after each of its reads that are left but the last."""

    def pause_s(self) -> float:
        return self._evaluations[-1] if self._evaluations else super().pause_s()

    def shown(self, call: Call, group: str) -> int | None:
        """A read without a step shows whole clocks if the others do not go on without it."""
        if call.pending or not (call.tick or call.push is None):
            return None
        clocks = (call.clock, max(0, call.clock + call.tick - 1))
        known = [self.client.traits_at(clock, group).policy for clock in clocks]
        if not all(isinstance(policy, Sync) for policy in known):
            return None
        alone = not call.tick and any(
            isinstance(policy, Sync) and (policy.backup or policy.timeout_s is not None)
            for policy in known
        )
        return None if alone else call.clock + call.tick

    def next(self) -> bool:
        if self.client.left <= 0:
            return False
        if self._evaluations:
            self._evaluations.pop()
            self.step(pull=self.every)
            return False
        self.client.left -= 1
        kind = self.cluster.random.random()
        if kind >= RESTS_FROM:
            self._rest()
            return False
        self._step_of(kind)
        return True

    def _rest(self) -> None:
        """Let no clock wait for it until its next step, before which it may evaluate once."""
        self.client.suspend()
        if self._evaluates and self.client.steps.membership.pending(self.client.block.group_name):
            self._evaluates = False
            random = Random(f"evaluations {self.cluster.seed} {self.client.writer}")
            times = range(EVALUATIONS)
            self._evaluations = [random.uniform(EVALUATES_S / 2, EVALUATES_S) for _ in times]

    def _step_of(self, kind: float) -> None:
        every, collects = self.every, self.client.traits_at(self.client.clock).collects
        if kind < 0.68:
            self.step(every, every, tick=True)
        elif kind < 0.78:
            self.step(every, tick=True)
        elif kind < 0.88:
            self.step(pull=every)
        elif kind < 0.92:
            self.step(pull=every, tick=True)
        elif kind < 0.96:
            self.step(every, every, tick=True, skip=True)
        elif kind < 0.965:
            self.step(every, every, tick=True, wrong=True)
        elif collects or kind < 0.97:
            self.step(every, every, tick=True, spoiled=True)
        else:
            self.step(every[1:], every[:1])


class GroupsScript(WorkerScript):
    """Steps two groups, in one call or one after the other; sometimes one of them rests a while.

    After each step of the first group comes one of the second: all workers step them in this order.
    It steps both before one rests again: what was suspended with no step in between is joined
    together, so that a step of one group alone would make it a member of both. Until then it reads
    with each step: else it would get ahead in one group of workers that it waits for later, and
    which wait for it in the other one.
    """

    def __init__(self, client: SimulatedClient) -> None:
        super().__init__(client)
        self._groups = self.cluster.workload.in_order
        self._owes = False
        """Whether the second group's step is to follow."""
        self._out: dict[str, int] = {}
        """Steps of the other group for which each group rests."""
        self._rested = False
        """Whether a group has rested since the last step of both."""

    def next(self) -> bool:
        if self.client.left <= 0:
            return False
        first, second = self._groups
        if self._owes:
            self._owes = not self._step(second)
            return True
        self.client.left -= 1
        draw = self.cluster.random.random
        if draw() < 0.08 and not self._rested:
            out = self.cluster.random.choice(((first,), (second,), (first, second)))
            self.client.suspend(*out)
            self._out, self._rested = dict.fromkeys(out, 1 + int(3 * draw())), True
            return False
        here = [group for group in self._groups if group not in self._out]
        self._out = {group: left - 1 for group, left in self._out.items() if left > 1}
        if draw() < 0.1:
            self.step(pull=self.every, groups=self._groups)
        elif len(here) == 2 and draw() < 0.4:
            self._owes = self._step(first)
            self._rested = self._rested and not self._owes
        elif here and self._step(*here):
            self._rested = self._rested and len(here) < 2
        return True

    def _step(self, *groups: str) -> bool:
        own = [each for each in self.every if each.group_name in groups]
        draw = self.cluster.random.random
        pull, skip = own if draw() < 0.7 or self._rested else [], draw() < 0.05
        if self.client.rank % 2:  # the client has to send them in one order
            groups = groups[::-1]
        return self.step(own, pull, tick=True, skip=skip, groups=groups)


class LeasingScript(WorkerScript):
    """A worker that steps through samples which it draws by lease, until none are left."""

    def __init__(self, client: SimulatedClient) -> None:
        super().__init__(client)
        self.client.left = self.cluster.scenario.samples
        """More steps than it may get."""
        self._leased: Leased | None = None
        self._used = 0
        """Samples of it that it has taken."""
        self._mark: tuple[int, int] | None = None
        self._seen = 0
        self._asking = False
        self._dry = False
        """No sample is free, but others may give some of theirs back."""
        self._rests = False

    def next(self) -> bool:
        if self.client.left <= 0 or self._asking:
            return False
        leased = self._leased
        if leased is not None and self._used < leased.stop - leased.start:
            self.client.left -= 1
            self._use(leased)
            return True
        if self._dry:
            if not self.client.in_flight:
                self._draw_idle()
        else:
            self._draw(wait_s=0.0, idle=False)
        return False

    def _use(self, leased: Leased) -> None:
        start = leased.start + self._used
        stop = min(start + leased.batch, leased.stop)
        mark, self._rests = (leased.lease, stop - leased.start), False
        self.client.steps.next_mark = lambda: mark
        every, both = self.every, self.cluster.random.random() < 0.8
        pull = every if both else ()
        if self.step(every, pull, tick=True, samples=(start, stop)):
            self._mark, self._used = mark, stop - leased.start

    def _draw_idle(self) -> None:
        """Let no clock wait for this worker, and wait for what others give back."""
        if self._rests:
            self._draw(wait_s=LEASE_WAIT_S, idle=True)
            return
        self._rests = True
        self.client.suspend()  # and again, when it goes on

    def _draw(self, wait_s: float, idle: bool) -> None:
        self._asking = True
        taken = self._mark if idle else None
        message = Lease(0, "samples", self.cluster.plan, 0, self._seen, wait_s, 0.0, idle, taken)
        self.client.call(message, self._given)

    def _given(self, reply: Leased | Failed) -> None:
        self._asking = False
        if isinstance(reply, Failed):
            self.client.fence(reply.failed)
            return
        if reply.over:
            self.client.left = 0
            self.cluster.recorder.samples_over(self.client)
        self._dry = not reply.lease
        if reply.lease:
            self._leased, self._used, self._seen = reply, 0, reply.lease
        self.client.go_on()


class AgreeingScript(WorkerScript):
    """A worker that makes a collective after each `COLLECTIVE_EVERY` clocks, and never rests.

    Its value is a bit for its rank, so that the sum says whose values are in it. A later
    incarnation begins with the first collective, as a program does that runs its epochs again; or
    with that of its clock, as one whose loop begins there; or it leaves that one out, as one that
    goes on behind an epoch. Before its first step under Sync it says that it has made those up to
    there. All workers run the same program. In some, two optimizers take turns between collectives:
    the clock of the first one is the same in two of them.
    """

    def __init__(self, client: SimulatedClient) -> None:
        super().__init__(client)
        self._seen = 0
        self._made = 0
        """Collectives of this incarnation."""
        self._others: dict[int, Member] = {}
        """Other workers by rank when it made its present call."""
        self._deserted = False
        """Whether the others have returned, so that it makes no collective any more."""
        self._program = Random(f"program {self.cluster.seed}").choice(PROGRAMS)
        self._in_turn = Random(f"turns {self.cluster.seed}").random() < IN_TURN
        self._begun = False
        """Whether it has gone on from where its rank was."""
        self._stepping = False
        """Whether the coordinator knows that it makes no call of before its first step."""

    def _go_on_at(self, clock: int) -> None:
        """The first collective of a later incarnation."""
        self._begun = True
        if self._program == "clock" and clock:
            self._made = -(-clock // COLLECTIVE_EVERY) - 1
        elif self._program == "behind" and self.client.traits_at(clock).collects:
            self._made = clock // COLLECTIVE_EVERY

    def _tell_first_step(self) -> None:
        def begun(reply: Ok | Failed) -> None:
            if isinstance(reply, Failed):
                self.client.fence(reply.failed)
            else:
                self._stepping = True
                self.client.go_on()

        clock = self.client.clock
        place = self._place_at(clock)
        self.client.call(PassBy(0, place=place, seen=self._seen, ticks=clock), begun)

    def _place_at(self, clock: int) -> int:
        """Steps of the first optimizer at a clock of the program."""
        if not self._in_turn:
            return clock
        rounds, rest = divmod(clock, 2 * COLLECTIVE_EVERY)
        return rounds * COLLECTIVE_EVERY + min(rest, COLLECTIVE_EVERY)

    def next(self) -> bool:
        if self.client.left <= 0 or self.client.calling:
            return False
        group = self.cluster.workload.group
        again = self.client.incarnation > 1
        if again and not self._begun:
            self._go_on_at(self.client.clock)
        began = 0 if again else self.client.steps.resumed.get(group, 0)
        if (self.client.clock - began) // COLLECTIVE_EVERY > self._made and not self._deserted:
            if not self.client.in_flight:
                self._others = self._present_others()
                self._agree()
            return False
        if again and not self._stepping and self.client.traits_at(self.client.clock).collects:
            self._tell_first_step()
            return False
        self.client.left -= 1
        self._step_of(self.cluster.random.random() * RESTS_FROM)
        return True

    def _agree(self) -> None:
        dtype = "float64" if self.client.writer % 3 == 1 else "int64"
        value = np.array(1 << self.client.rank, dtype).tobytes()
        ticks, wait_s = (self._made + 1) * COLLECTIVE_EVERY, LEASE_WAIT_S
        place = self._place_at(ticks)
        message = AllReduce(0, "sum", dtype, (), value, self._seen, place, wait_s, number=True)
        message = structs.replace(message, ticks=ticks)
        self.client.call(message, self._told)

    def _told(self, reply: AllReduced | Failed) -> None:
        if isinstance(reply, Failed):
            self._refused(reply)
            return
        if not reply.ended:
            self._agree()
            return
        if reply.number > self._seen:  # else it is to end, and has got its own value
            ranks = int(np.frombuffer(reply.value, reply.dtype)[0])
            again = self.client.late or self.client.incarnation > 1
            nth = self._made + 1
            agreed = Agreed(self.client.writer, self.client.rank, reply.number, ranks, again, nth)
            self.cluster.history.agreed.append(agreed)
            self._tell_company(alone=ranks == 1 << self.client.rank and not again)
        self._seen, self._made = reply.number, self._made + 1
        self.cluster.recorder.moved(self.client)
        self.client.go_on()

    def _refused(self, reply: Failed) -> None:
        """Take a refusal: the client is fenced, or the others have returned."""
        if reply.kind == WorkerFenced.__name__:
            self.client.fence(reply.failed)
            return
        self._tell_company(refused=True)
        self._deserted = True
        self.client.go_on()

    def _present_others(self) -> dict[int, Member]:
        members = self.cluster.coordinator.coordination.membership.members
        return {rank: member for rank, member in members.items() if rank != self.client.rank}

    def _tell_company(self, *, refused: bool = False, alone: bool = False) -> None:
        before, now = self._others, self._present_others()
        live = tuple(r for r, each in before.items() if each.state == LIVE and now[r] == each)
        returned = {
            each.rank
            for each in self.cluster.clients
            if each.finished and not each.retiring and each.rank < self.cluster.least_wanted
        }
        over = all(each.state in (LEFT, DEAD) for each in before.values()) and before == now
        gone = tuple(r for r in before if over and r in returned and before[r].state == LEFT)
        number = self._made + 1
        company = Company(self.client.writer, self.client.rank, number, refused, alone, live, gone)
        self.cluster.history.company.append(company)


class ReaderScript(Script):
    """A client without a rank: it reads, and under Async pushes single blocks without a clock."""

    def next(self) -> bool:
        if self.client.left <= 0:
            return False
        self.client.left -= 1
        draw = self.cluster.random.random
        chosen = [block for block in self.every if draw() < 0.5]
        if chosen and self.cluster.counts_updates:
            chosen = self.every  # A push without elements on some shard would not show there.
        kind, groups = draw(), tuple(self.cluster.histories)
        if kind < 0.4 or not chosen:
            self.step(pull=self.every, groups=groups)
        elif kind < 0.7:
            self.step(chosen, groups=groups)
        else:
            self.step(chosen, self.every, groups=groups)
        return True


def script_of(scenario: Scenario) -> type[Script]:
    """What the workers of a scenario do."""
    if scenario.second is not None:
        return GroupsScript
    if scenario.samples:
        return LeasingScript
    return AgreeingScript if scenario.collectives else WorkerScript
