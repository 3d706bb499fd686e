"""The conformance suite of consistency policies: what shards rely on, for built-in ones and yours.

    class TestMine(PolicySuite):
        policy = Mine(bound=3)

pytest then runs every test below on that policy: what its methods answer, that everybody who waits
is admitted in the end (`Drill`: a group in memory under random schedules), and that whole simulated
clusters keep their invariants under it. Whether it trains well is not tested here.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any, NamedTuple

import msgspec

from paramserve.config import ConsistencySpec
from paramserve.core.consistency import Buffered
from paramserve.core.decisions import (
    Admission,
    Admit,
    Apply,
    Buffer,
    Drop,
    OnPush,
    Policy,
    Pull,
    Push,
    Standing,
    Wait,
)
from paramserve.core.policies import Registered, build, check_registered, spec

MOVES = 40
"""Random moves of a drill before everybody must be admitted."""
STEPS = 3
"""Steps that each worker then makes."""
LATER_MAX = 50
"""Times that a policy may put off the decision of a clock while nobody else can move."""
WEIGHTS = (1e-6, 0.5, 1.0, 3.0, 1e9)
FACTORS = (1e-3, 0.25, 1.0, 1.5)
STALENESSES = (0, 1, 2, 7, 1000, 10**9)


@dataclass
class PlainStanding:
    """How a group stands, as plain data (`paramserve.core.decisions.Standing`)."""

    clocks: dict[int, int]
    version: int = 0
    buffered: int = 0
    brought: tuple[int, ...] = ()
    waited_s: float = 0.0
    step_s: float = 0.0

    @property
    def slowest(self) -> int:
        return min(self.clocks.values(), default=0)

    def copy(self) -> PlainStanding:
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


class PolicySuite:
    """Tests that every policy passes. Set `policy` in a subclass.

    Attributes:
        policy: to be tested.
        registered: functions in its fields that are not found there (as in `policies=[...]`).
        flushes_early: it may update with a part of its buffer while there are workers.
        workers: of the drills and simulated clusters, at most.
        schedules: drills, for each number of workers.
        seeds: simulated clusters.
        patience: clocks that others may move on while one worker is held.
    """

    policy: Policy
    registered: Sequence[Any] = ()
    flushes_early: bool = False
    workers: int = 4
    schedules: int = 100
    seeds: int = 10
    patience: int = 100

    # What it is.

    def test_class_can_be_registered(self) -> None:
        assert isinstance(self.policy, Policy), f"{self.policy!r} does not derive from ps.Policy"
        settings: Any = getattr(type(self.policy), "__dataclass_params__", None)
        frozen = settings is not None and settings.frozen and settings.eq
        assert frozen, f"{type(self.policy).__name__} is no frozen dataclass"
        self._known()

    def test_instance_is_a_frozen_value(self) -> None:
        again: Any = pickle.loads(pickle.dumps(self.policy))
        assert again == self.policy
        assert hash(again) == hash(self.policy)
        for each in fields(again):
            try:
                setattr(again, each.name, getattr(again, each.name))
            except AttributeError:
                continue
            raise AssertionError(f"{each.name} of {again} can be set: use frozen=True")

    def test_spec_builds_an_equal_policy_after_the_wire(self) -> None:
        described = spec(self.policy)
        arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(described), type=ConsistencySpec)
        again = build(arrived, self._known())
        assert type(again) is type(self.policy)
        assert again == self.policy, f"{again} was built from the spec of {self.policy}"
        assert spec(again) == described

    def test_check_accepts_or_raises_value_error(self) -> None:
        assert self._counts(), f"{self.policy} refuses every number of workers up to {self.workers}"

    # What it answers.

    def test_answers_are_of_the_allowed_kinds(self) -> None:
        for question in self.questions():
            why = f"{question} was answered"
            answer = question.ask(self.policy)
            if question.method == "on_push":
                check_push(answer, self.policy, why)
            elif question.method == "on_membership":
                assert isinstance(answer, bool), f"{why} {answer!r}, which is no bool"
            else:
                check_admission(answer, question.arguments[-1], why)

    def test_scale_is_finite_and_not_negative(self) -> None:
        for weight in WEIGHTS:
            _check_factor(self.policy.scale(weight), f"scale({weight})")

    def test_same_question_gets_the_same_answer(self) -> None:
        asked = [(each, each.ask(self.policy)) for each in self.questions()]
        again = build(spec(self.policy), self._known())
        Random(1).shuffle(asked)
        for policy in (self.policy, again):
            for question, before in asked:
                answer = question.ask(policy)
                assert answer == before, f"{question} was answered {before}, later {answer}"

    def test_clock_without_gradients_is_not_decided(self) -> None:
        if not self.policy.collects:
            return
        for question in self.questions():
            if question.method == "on_clock":
                standing = replace(question.arguments[0], brought=(), waited_s=0.0)
                answer = self.policy.on_clock(standing)
                assert isinstance(answer, Wait), f"{standing}: decided with nobody's gradients"

    def test_partial_is_a_bool(self) -> None:
        assert isinstance(self.policy.partial, bool), f"partial is {self.policy.partial!r}"

    def test_worker_alone_never_waits(self) -> None:
        random = Random(2)
        for _ in range(50):
            rank, clock = random.randrange(5), random.randrange(50)
            alone = PlainStanding({rank: clock}, random.randrange(50))
            answer = self.policy.on_pull(Pull(rank, clock), alone)
            assert isinstance(answer, Admit), f"worker {rank} alone at clock {clock}: {answer}"
            if self.policy.collects:
                answer = self.policy.on_clock(replace(alone, brought=(rank,)))
                assert isinstance(answer, Admit), f"worker {rank} alone has brought all: {answer}"

    # What becomes of its buffer.

    def test_buffer_is_applied_when_nobody_is_there(self) -> None:
        for buffered in (1, 2, 50):
            left = PlainStanding({}, version=7, buffered=buffered)
            assert self.policy.on_membership(left), f"{left}: the buffer is never applied"

    def test_buffer_is_kept_while_workers_are_there(self) -> None:
        if self.flushes_early:
            return
        for question in self.questions():
            if question.method == "on_membership" and question.arguments[0].clocks:
                assert not question.ask(self.policy), f"{question}: flushed (see flushes_early)"

    # Who waits for how long.

    def test_everybody_is_admitted_in_the_end(self) -> None:
        for count in self._counts():
            for seed in range(self.schedules):
                Drill(self.policy, seed, count, self.patience).run()

    def test_simulated_cluster_keeps_its_invariants(self) -> None:
        from paramserve.testing.checkers import ALL, bounded_staleness, check, sessions_in_order
        from paramserve.testing.simulated import Scenario, SimulatedCluster

        counts = self._counts()
        workers = max(count for count in counts if count <= max(3, counts[0]))
        buffers = not isinstance(self.policy, Buffered) and any(
            isinstance(each.ask(self.policy), Buffer)
            for each in self.questions()
            if each.method == "on_push"
        )
        # Nobody outside knows when a buffer of a user's is full, and what a read may lack.
        left_out = (sessions_in_order, bounded_staleness) if buffers else ()
        checkers = tuple(each for each in ALL if each not in left_out)
        scenario = Scenario(servers=2, workers=workers, consistency=counted(self.policy))
        for seed in range(self.seeds):
            history = SimulatedCluster(seed, scenario).run()
            check(history, f"SimulatedCluster({seed}, Scenario({scenario!r}))", checkers)

    # What the tests ask.

    def questions(self) -> Iterator[Question]:
        """Calls as a shard makes them, by chance and at the edges."""
        random = Random(0)
        for count in (0, *self._counts()):
            for _ in range(60):
                standing = self._standing(random, count)
                yield Question("on_membership", (standing,))
                for worker, clock in (*standing.clocks.items(), (-1, 0)):
                    if worker >= 0:
                        yield Question("on_pull", (Pull(worker, clock), standing))
                    push = Push(
                        worker,
                        clock,
                        random.choice(STALENESSES),
                        random.choice(WEIGHTS),
                        random.choice(FACTORS),
                    )
                    if not self.policy.collects:
                        yield Question("on_push", (push, standing))
                if standing.brought:
                    yield Question("on_clock", (standing,))

    def _standing(self, random: Random, count: int) -> PlainStanding:
        ranks = sorted(random.sample(range(self.workers + 2), count))
        version = random.choice((0, 1, 50, 10**9))
        if not self.policy.collects:
            clocks = {rank: random.choice((0, 3, 4, random.randrange(50))) for rank in ranks}
            return PlainStanding(clocks, version, random.randrange(4))
        clock = random.randrange(50)
        # One that has left may have brought its gradients before.
        brought = tuple(r for r in range(self.workers + 2) if random.random() < 0.5 and count)
        waited_s = random.choice((0.0, 0.01, 1.0, 1e6)) if brought else 0.0
        step_s = random.choice((0.0, 0.02, 10.0))
        return PlainStanding(dict.fromkeys(ranks, clock), version, 0, brought, waited_s, step_s)

    def _counts(self) -> list[int]:
        """Numbers of workers that it can work with."""
        found = []
        for count in range(1, self.workers + 1):
            try:
                answer: Any = self.policy.check(count)  # type: ignore[func-returns-value]  # must not
            except ValueError:
                continue
            assert answer is None, f"check returned {answer!r}: it raises ValueError, or nothing"
            found.append(count)
        return found

    def _known(self) -> Registered:
        return check_registered(self.registered, self.policy)


def counted(policy: Policy) -> Policy:
    """The same decisions, but gradients are multiplied by nothing: a simulated cluster finds out
    from the sums which of them were applied."""
    kind = type(policy)
    if policy.collects:
        return policy  # the cluster's rule leaves out the sum's scale

    def on_push(self: Policy, push: Push, group: Standing) -> OnPush:
        answer = kind.on_push(self, push, group)
        if isinstance(answer, Apply):
            return Apply()
        return Buffer(answer.size) if isinstance(answer, Buffer) else answer

    like: Any = type(f"Counted{kind.__name__}", (kind,), {"on_push": on_push})
    values = {each.name: getattr(policy, each.name) for each in fields(like) if each.init}
    made: Policy = dataclass(frozen=True)(like)(**values)
    return made


def check_push(answer: Any, policy: Policy, why: str) -> None:
    """Require an answer that `on_push` may give."""
    assert isinstance(answer, Apply | Buffer | Drop), f"{why} {answer!r}: no Apply, Buffer or Drop"
    if isinstance(answer, Apply):
        for number in answer:
            _check_factor(number, f"{why} {answer}")
        keeps = policy.keeps_reads or not answer.compensate
        assert keeps, f"{why} {answer}: compensate needs keeps_reads = True on the class"
    elif isinstance(answer, Buffer):
        whole = isinstance(answer.size, int) and not isinstance(answer.size, bool)
        good = whole and answer.size >= 1
        assert good, f"{why} {answer}: size is no int of at least 1"
        _check_factor(answer.weight, f"{why} {answer}")


def check_admission(answer: Any, standing: PlainStanding, why: str) -> None:
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


def _check_factor(value: Any, why: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    good = number and math.isfinite(value) and value >= 0.0
    assert good, f"{why}: {value!r} is no finite number of at least 0"


@dataclass
class Drill:
    """One group on one shard, in memory, under a schedule that follows from the seed.

    First the workers push and read in any order, at any speed, and come and go. Then all move on in
    turn, and everybody must be admitted. What is sent, lost or applied is not looked at.

    Raises:
        AssertionError: an answer is not allowed, or somebody was never admitted; the text says who
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
        self.group = PlainStanding(clocks, sum(clocks.values()), step_s=step_s)
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
        """Who waits for nothing."""
        stuck = {*self.held, *self.group.brought}
        return [rank for rank in self.group.clocks if rank not in stuck]

    def _move(self, rank: int) -> None:
        """A worker brings its gradients and wants to read."""
        if self.group.brought:
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
        self.group.brought = (*self.group.brought, rank)
        self._decide()

    def _decide(self) -> None:
        group = self.group
        if not group.brought:
            return
        answer = self._admission("on_clock", (group,))
        if isinstance(answer, Wait):
            self.late = answer
            return
        self.late = None
        absent = [rank for rank in group.clocks if rank not in group.brought]
        if absent and not self.policy.partial:
            text = f"{group} is decided without {absent}, although partial is False"
            raise AssertionError(self._text(text))
        there = [rank for rank in group.brought if rank in group.clocks]
        group.clocks = {rank: clock + 1 for rank, clock in group.clocks.items()}
        group.version += 1
        group.brought, group.waited_s = (), 0.0
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
        if self.group.brought:
            self._decide()
        for rank in list(self.held):
            self._pull(rank)

    def _pass_time(self) -> None:
        """Nobody can move before the policy's own deadline."""
        for _ in range(LATER_MAX):
            if self.late is None or self.late.until_s is None:
                break
            self.group.waited_s = self.late.until_s
            self._settle()
            if self._able():
                return
        raise AssertionError(self._text("nobody can move"))

    def _leave(self, rank: int) -> None:
        del self.group.clocks[rank]
        self.held.pop(rank, None)
        if rank in self.group.brought and self.random.random() < 0.5:
            self.group.brought = tuple(each for each in self.group.brought if each != rank)
            self.group.waited_s *= bool(self.group.brought)
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
        """Who waits for whom, for a message."""
        waiting = [
            f"worker {rank} (clock {pull.clock}) waits for {_with_clocks(self.waits[rank], self)}"
            for rank, pull in self.held.items()
        ]
        if self.group.brought:
            waits = _with_clocks(self.late, self) if self.late is not None else "nobody"
            waiting.append(f"the clock has {sorted(self.group.brought)} and waits for {waits}")
        return (
            f"Drill({self.policy}, seed={self.seed}, workers={self.workers}): {what}; "
            f"{'; '.join(waiting) if waiting else 'nobody waits'}; {self.group}"
        )


def _with_clocks(wait: Wait, drill: Drill) -> Mapping[int, int | None]:
    return {rank: drill.group.clocks.get(rank) for rank in wait.workers}
