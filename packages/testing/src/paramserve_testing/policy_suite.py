"""The conformance suite of consistency policies: what shards rely on, for built-in ones and yours.

    class TestMine(PolicySuite):
        policy = Mine(bound=3)

pytest then runs every test below on that policy: what its methods answer, that each worker that
waits is admitted in the end (`Drill`: a group in memory under random schedules), and that whole
simulated clusters keep their invariants under it. Whether it trains well is not tested here.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import msgspec

from paramserve.config import ConsistencySpec
from paramserve.consistency.base import (
    Admit,
    Apply,
    Buffer,
    GroupView,
    OnPush,
    Policy,
    Pull,
    Push,
    Wait,
)
from paramserve.consistency.built_in import Buffered
from paramserve.consistency.registry import build, registered, spec
from paramserve_testing.drill import (
    Drill,
    PlainGroupView,
    Question,
    check_admission,
    check_factor,
    check_push,
)

__all__ = [
    "PolicySuite",
    "Drill",
    "PlainGroupView",
    "Question",
    "check_admission",
    "check_push",
    "counted",
]

WEIGHTS = (1e-6, 0.5, 1.0, 3.0, 1e9)
FACTORS = (1e-3, 0.25, 1.0, 1.5)
STALENESSES = (0, 1, 2, 7, 1000, 10**9)


class PolicySuite:
    """Tests that every policy passes. Set `policy` in a subclass.

    Attributes:
        policy: to be tested.
        registered: functions in its fields that are not found there (as in `rules=[...]`).
        flushes_early: it may update with a part of its buffer while there are workers.
        workers: of the drills and simulated clusters, at most.
        schedules: drills, for each number of workers.
        seeds: simulated clusters: how many, or which, as in `(7,)` to run that one again.
        patience: clocks that others may move on while one worker is held.
    """

    policy: Policy
    registered: Sequence[Any] = ()
    flushes_early: bool = False
    workers: int = 4
    schedules: int = 100
    seeds: int | Sequence[int] = 10
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
            check_factor(self.policy.scale(weight), f"scale({weight})")

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
                standing = replace(question.arguments[0], arrived=(), waited_s=0.0)
                answer = self.policy.on_clock(standing)
                assert isinstance(answer, Wait), f"{standing}: decided with no worker's gradients"

    def test_partial_is_a_bool(self) -> None:
        assert isinstance(self.policy.partial, bool), f"partial is {self.policy.partial!r}"

    def test_worker_alone_never_waits(self) -> None:
        random = Random(2)
        for _ in range(50):
            rank, clock = random.randrange(5), random.randrange(50)
            alone = PlainGroupView({rank: clock}, random.randrange(50))
            answer = self.policy.on_pull(Pull(rank, clock), alone)
            assert isinstance(answer, Admit), f"worker {rank} alone at clock {clock}: {answer}"
            if self.policy.collects:
                answer = self.policy.on_clock(replace(alone, arrived=(rank,)))
                assert isinstance(answer, Admit), f"worker {rank} alone has pushed all: {answer}"

    # What its buffer is used for.

    def test_buffer_is_applied_when_no_worker_is_there(self) -> None:
        for buffered in (1, 2, 50):
            left = PlainGroupView({}, version=7, buffered=buffered)
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
        from paramserve_testing.checkers import ALL, bounded_staleness, check, sessions_in_order
        from paramserve_testing.scenario import Scenario
        from paramserve_testing.simulated import SimulatedCluster

        counts = self._counts()
        workers = max(count for count in counts if count <= max(3, counts[0]))
        buffers = not isinstance(self.policy, Buffered) and any(
            isinstance(each.ask(self.policy), Buffer)
            for each in self.questions()
            if each.method == "on_push"
        )
        # The checkers do not know when a buffer of a user's is full, and what a read may lack.
        left_out = (sessions_in_order, bounded_staleness) if buffers else ()
        checkers = tuple(each for each in ALL if each not in left_out)
        scenario = Scenario(servers=2, workers=workers, consistency=counted(self.policy))
        for seed in range(self.seeds) if isinstance(self.seeds, int) else self.seeds:
            history = SimulatedCluster(seed, scenario).run()
            check(history, self._again(seed, workers), checkers)

    def _again(self, seed: int, workers: int) -> str:
        """How a user runs one simulated seed again."""
        if self.policy.collects:
            return (
                f"paramserve_testing.replay(seed={seed}, workers={workers}, "
                f"consistency={self.policy!r})"
            )
        # Its pushes are counted under a class that has no name outside.
        return (
            f"{self.policy!r} with {workers} workers, seed {seed}: to run only this again, set "
            f"`seeds = ({seed},)` in {type(self).__name__}"
        )

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
                if standing.arrived:
                    yield Question("on_clock", (standing,))

    def _standing(self, random: Random, count: int) -> PlainGroupView:
        ranks = sorted(random.sample(range(self.workers + 2), count))
        version = random.choice((0, 1, 50, 10**9))
        if not self.policy.collects:
            clocks = {rank: random.choice((0, 3, 4, random.randrange(50))) for rank in ranks}
            return PlainGroupView(clocks, version, random.randrange(4))
        clock = random.randrange(50)
        # One that has left may have pushed before.
        arrived = tuple(r for r in range(self.workers + 2) if random.random() < 0.5 and count)
        waited_s = random.choice((0.0, 0.01, 1.0, 1e6)) if arrived else 0.0
        step_s = random.choice((0.0, 0.02, 10.0))
        return PlainGroupView(dict.fromkeys(ranks, clock), version, 0, arrived, waited_s, step_s)

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

    def _known(self) -> Mapping[str, Any]:
        return registered(self.registered, self.policy).all


def counted(policy: Policy) -> Policy:
    """Policy with the same decisions whose gradients are multiplied by nothing: a simulated cluster
    finds out from the sums which of them were applied."""
    kind = type(policy)
    if policy.collects:
        return policy  # the cluster's rule leaves out the sum's scale

    def on_push(self: Policy, push: Push, group: GroupView) -> OnPush:
        answer = kind.on_push(self, push, group)
        if isinstance(answer, Apply):
            return Apply()
        return Buffer(answer.size) if isinstance(answer, Buffer) else answer

    # In texts it is called by the name that its user knows.
    body = {"on_push": on_push, "__qualname__": kind.__qualname__}
    like: Any = type(f"Counted{kind.__name__}", (kind,), body)
    values = {each.name: getattr(policy, each.name) for each in fields(like) if each.init}
    made: Policy = dataclass(frozen=True)(like)(**values)
    return made
