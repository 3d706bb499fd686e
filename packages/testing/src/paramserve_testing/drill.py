"""One group of workers in memory, under random schedules: is each one admitted in the end?

Also how a policy is asked, and which answers are allowed. `policy_suite.py` makes tests of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

from paramserve.consistency.base import (
    Admission,
    Admit,
    Apply,
    Buffer,
    Drop,
    OnPush,
    Policy,
    Pull,
    Push,
    Wait,
)

MOVES = 40
"""Random moves of a drill before all must be admitted."""
STEPS = 3
"""Steps that each worker then makes."""
LATER_MAX = 50
"""Times that a policy may put off the decision of a clock while no worker can move."""


@dataclass
class PlainGroupView:
    """How a group stands, as plain data (`paramserve.consistency.base.GroupView`)."""

    clocks: dict[int, int]
    version: int = 0
    buffered: int = 0
    arrived: tuple[int, ...] = ()
    waited_s: float = 0.0
    step_s: float = 0.0

    @property
    def slowest(self) -> int:
        return min(self.clocks.values(), default=0)

    def copy(self) -> PlainGroupView:
        return replace(self, clocks=dict(self.clocks))


class Question(NamedTuple):
    """One call of a policy's method."""

    method: str
    arguments: tuple[Any, ...]
    """The last one is the standing."""

    def ask(self, policy: Policy) -> Any:
        """The answer, asked with a copy of the standing.

        Raises:
            AssertionError: the method changed what it was given.
        """
        *event, standing = self.arguments
        given = standing.copy()
        answer = getattr(policy, self.method)(*event, given)
        assert given == standing, f"{self.method} of {policy} changed the standing to {given}"
        return answer


def check_push(answer: Any, policy: Policy, why: str) -> None:
    """Require an answer that `on_push` may give."""
    assert isinstance(answer, Apply | Buffer | Drop), f"{why} {answer!r}: no Apply, Buffer or Drop"
    if isinstance(answer, Apply):
        for number in answer:
            check_factor(number, f"{why} {answer}")
        keeps = policy.keeps_reads or not answer.compensate
        assert keeps, f"{why} {answer}: compensate needs keeps_reads = True on the class"
    elif isinstance(answer, Buffer):
        whole = isinstance(answer.size, int) and not isinstance(answer.size, bool)
        good = whole and answer.size >= 1
        assert good, f"{why} {answer}: size is no int of at least 1"
        check_factor(answer.weight, f"{why} {answer}")


def check_admission(answer: Any, standing: PlainGroupView, why: str) -> None:
    """Require an answer that `on_pull` and `on_clock` may give."""
    assert isinstance(answer, Admit | Wait), f"{why} {answer!r}: neither Admit nor Wait"
    if isinstance(answer, Admit):
        return
    assert isinstance(answer.workers, tuple), f"{why} {answer}: workers is no tuple"
    strange = [rank for rank in answer.workers if rank not in standing.clocks]
    assert not strange, f"{why} {answer}: waits for ranks {strange}, which are not there"
    if answer.until_s is not None:
        late = isinstance(answer.until_s, int | float) and answer.until_s > standing.waited_s
        assert late, f"{why} {answer}: until_s does not lie after {standing.waited_s}, which is now"


def check_factor(value: Any, why: str) -> None:
    """Require what a gradient may be multiplied by."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    good = number and math.isfinite(value) and value >= 0.0
    assert good, f"{why}: {value!r} is no finite number of at least 0"


@dataclass
class Drill:
    """One group on one shard, in memory, under a schedule that follows from the seed.

    First the workers push and read in any order, at any speed, and come and go. Then all move on in
    turn, and all must be admitted. What is sent, lost or applied is not looked at.

    Raises:
        AssertionError: an answer is not allowed, or a worker was never admitted; the text says who
            waited for whom, and the seed.
    """

    policy: Policy
    seed: int
    workers: int
    patience: int = 100
    held: dict[int, Pull] = field(default_factory=dict)
    """Reads that wait, by rank."""
    waits: dict[int, Wait] = field(default_factory=dict)
    """And what for."""
    late: Wait | None = None
    """Why the clock is not decided."""

    def __post_init__(self) -> None:
        self.random = random = Random(self.seed)
        first = random.randrange(20)
        spread = 0 if self.policy.collects else random.choice((0, 1, 12))
        clocks = {rank: first + random.randint(0, spread) for rank in range(self.workers)}
        step_s = random.choice((0.0, 0.01, 0.2))
        self.group = PlainGroupView(clocks, sum(clocks.values()), step_s=step_s)
        self.own = dict(clocks)
        """The clock at which each worker is by itself; a late one is behind the group's."""
        self.read_at = dict.fromkeys(clocks, 0)
        self.steps = dict.fromkeys(clocks, 0)
        """Reads that were admitted."""
        self._speed = {rank: random.choice((0.05, 1.0)) for rank in clocks}

    def run(self) -> None:
        for _ in range(MOVES):
            draw = self.random.random()
            if draw < 0.04 and len(self.group.clocks) > 1:
                self._leave(self.random.choice(list(self.group.clocks)))
            elif draw < 0.06:
                self._join()
            elif able := self._able():
                (rank,) = self.random.choices(able, [self._speed[each] for each in able])
                self._move(rank)
            else:
                self._pass_time()
        self._let_all_move()
        for rank in list(self.group.clocks):
            self._leave(rank)
        assert self.group.buffered == 0, self._text("the last worker left a buffer behind")

    def _let_all_move(self) -> None:
        wanted = {rank: count + STEPS for rank, count in self.steps.items()}
        for _ in range(self.patience):
            if all(self.steps[rank] >= wanted[rank] for rank in self.group.clocks):
                return
            able = self._able()
            if not able:
                self._pass_time()
            for rank in able:
                if rank in self._able():
                    self._move(rank)
        short = [rank for rank in self.group.clocks if self.steps[rank] < wanted[rank]]
        raise AssertionError(self._text(f"workers {short} were not admitted in the end"))

    def _able(self) -> list[int]:
        """Clients that wait for nothing."""
        stuck = {*self.held, *self.group.arrived}
        return [rank for rank in self.group.clocks if rank not in stuck]

    def _move(self, rank: int) -> None:
        """A worker pushes its gradients and wants to read."""
        if self.group.arrived:
            self.group.waited_s += self.random.choice((0.0, 0.001, 0.1))
        if self.policy.collects:
            self._bring(rank)
        else:
            self._push(rank)
        self._settle()

    def _push(self, rank: int) -> None:
        group = self.group
        push = Push(
            rank,
            self.own[rank],
            group.version - self.read_at[rank],
            self.random.choice((1.0, 8.0)),
            self.random.choice((1.0, 0.5)),
        )
        answer: OnPush = Question("on_push", (push, group)).ask(self.policy)
        check_push(answer, self.policy, self._text(f"{push} was answered"))
        if isinstance(answer, Apply):
            group.version += 1
        elif isinstance(answer, Buffer):
            group.buffered += 1
            if group.buffered >= answer.size:
                self._flush()
        self.own[rank] = group.clocks[rank] = self.own[rank] + 1
        self._pull(rank)

    def _bring(self, rank: int) -> None:
        now = max(self.group.clocks.values())
        if self.own[rank] < now:  # too late: dropped
            self.own[rank] = now
            self._pull(rank)
            return
        self.group.arrived = (*self.group.arrived, rank)
        self._decide()

    def _decide(self) -> None:
        group = self.group
        if not group.arrived:
            return
        answer = self._admission("on_clock", (group,))
        if isinstance(answer, Wait):
            self.late = answer
            return
        self.late = None
        absent = [rank for rank in group.clocks if rank not in group.arrived]
        if absent and not self.policy.partial:
            text = f"{group} is decided without {absent}, although partial is False"
            raise AssertionError(self._text(text))
        there = [rank for rank in group.arrived if rank in group.clocks]
        group.clocks = {rank: clock + 1 for rank, clock in group.clocks.items()}
        group.version += 1
        group.arrived, group.waited_s = (), 0.0
        for rank in there:
            self.own[rank] = group.clocks[rank]
            self._pull(rank)

    def _pull(self, rank: int) -> None:
        pull = Pull(rank, self.own[rank])
        answer = self._admission("on_pull", (pull, self.group))
        if isinstance(answer, Wait):
            self.held[rank], self.waits[rank] = pull, answer
            return
        self.held.pop(rank, None)
        self.read_at[rank] = self.group.version
        self.steps[rank] += 1

    def _admission(self, method: str, arguments: tuple[Any, ...]) -> Admission:
        question = Question(method, arguments)
        answer: Admission = question.ask(self.policy)
        check_admission(answer, self.group, self._text(f"{question} was answered"))
        return answer

    def _settle(self) -> None:
        """Ask again, as a shard does whenever something has changed."""
        if self.group.arrived:
            self._decide()
        for rank in list(self.held):
            self._pull(rank)

    def _pass_time(self) -> None:
        """No worker can move before the policy's own deadline."""
        for _ in range(LATER_MAX):
            if self.late is None or self.late.until_s is None:
                break
            self.group.waited_s = self.late.until_s
            self._settle()
            if self._able():
                return
        raise AssertionError(self._text("no worker can move"))

    def _leave(self, rank: int) -> None:
        del self.group.clocks[rank]
        self.held.pop(rank, None)
        if rank in self.group.arrived and self.random.random() < 0.5:
            self.group.arrived = tuple(each for each in self.group.arrived if each != rank)
            self.group.waited_s *= bool(self.group.arrived)
        self._changed()

    def _join(self) -> None:
        rank = max((*self.own, *self.group.clocks)) + 1
        clocks = self.group.clocks.values()
        self.own[rank] = max(clocks) if self.policy.collects else min(clocks)
        self.group.clocks[rank] = self.own[rank]
        self.read_at[rank], self.steps[rank], self._speed[rank] = self.group.version, 0, 1.0
        self._changed()

    def _changed(self) -> None:
        if Question("on_membership", (self.group,)).ask(self.policy) and self.group.buffered:
            self._flush()
        if self.group.clocks:
            self._settle()

    def _flush(self) -> None:
        self.group.buffered = 0
        self.group.version += 1

    def _text(self, what: str) -> str:
        """Waits of all clients, for a message."""
        waiting = [
            f"worker {rank} (clock {pull.clock}) waits for {_with_clocks(self.waits[rank], self)}"
            for rank, pull in self.held.items()
        ]
        if self.group.arrived:
            waits = _with_clocks(self.late, self) if self.late is not None else "no worker"
            waiting.append(f"the clock has {sorted(self.group.arrived)} and waits for {waits}")
        return (
            f"Drill({self.policy}, seed={self.seed}, workers={self.workers}): {what}; "
            f"{'; '.join(waiting) if waiting else 'no worker waits'}; {self.group}"
        )


def _with_clocks(wait: Wait, drill: Drill) -> Mapping[int, int | None]:
    return {rank: drill.group.clocks.get(rank) for rank in wait.workers}
