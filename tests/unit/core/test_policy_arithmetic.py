"""What a shard computes under each policy equals the plain sequential reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tests.suites import each_case
from tests.unit.core import reference
from tests.unit.core.reference import (
    Entry,
    Live,
    Plain,
    PlainAdam,
    PlainSGD,
    Pushed,
    Read,
    asynchronous,
    buffered,
    local_steps,
    synchronous,
)
from tests.unit.core.rig import Rig, block_spec, done, refused

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import (
    Async,
    BoundedStaleness,
    Buffered,
    DelayCompensated,
    ElasticAverage,
    Exponential,
    Inverse,
    LocalSteps,
    Polynomial,
    Sync,
)
from paramserve.errors import PolicyFailed
from paramserve.messages import Done
from paramserve.rules import SGD, Adam, Rule

Array = reference.Array
WORKERS = 3
SIZE = 7
ENTRIES = 60
EXACT: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
DTYPES = ("float32", "float64")
PLAIN, MOMENTUM, NESTEROV, ADAM = "plain", "momentum", "nesterov", "adam"
RULES: dict[str, tuple[Rule, Callable[[], Plain]]] = {
    PLAIN: (SGD(lr=0.05), lambda: PlainSGD(0.05)),
    MOMENTUM: (SGD(lr=0.02, momentum=0.9), lambda: PlainSGD(0.02, 0.9)),
    NESTEROV: (
        SGD(lr=0.02, momentum=0.8, nesterov=True),
        lambda: PlainSGD(0.02, 0.8, nesterov=True),
    ),
    ADAM: (Adam(lr=0.02, betas=(0.9, 0.99)), lambda: PlainAdam(0.02, (0.9, 0.99))),
}
ASYNC: list[tuple[Policy, dict[str, Any]]] = [
    (Async(), {}),
    (Async(damping=Inverse(0.5)), {"damping": lambda staleness: 1 / (1 + 0.5 * staleness)}),
    (Async(damping=Exponential(0.3)), {"damping": lambda staleness: math.exp(-0.3 * staleness)}),
    (Async(drop_after=2), {"drop_after": 2}),
    (
        Async(damping=Polynomial(), drop_after=3),
        {"damping": lambda staleness: 1 / math.sqrt(1 + staleness), "drop_after": 3},
    ),
    (Async(momentum="corrected"), {"corrected": True}),
    (BoundedStaleness(1000), {}),
    (DelayCompensated(), {"lam": 0.04}),
    (DelayCompensated(lam=0.7), {"lam": 0.7}),
]
BUFFERED: list[tuple[Policy, dict[str, Any]]] = [
    (Buffered(1), {"size": 1, "damping": lambda staleness: 1 / math.sqrt(1 + staleness)}),
    (Buffered(4), {"size": 4, "damping": lambda staleness: 1 / math.sqrt(1 + staleness)}),
    (
        Buffered(5, damping=Inverse(1.0)),
        {"size": 5, "damping": lambda staleness: 1 / (1 + staleness)},
    ),
]
SYNC: list[tuple[Policy, dict[str, Any]]] = [
    (Sync(), {}),
    (Sync(reduce="sum"), {"reduce": "sum"}),
    (Sync(backup=1), {"backup": 1}),
    (Sync(reduce="sum", backup=2), {"reduce": "sum", "backup": 2}),
]


def per_case(cases: Iterable[tuple[Policy, dict[str, Any]]]) -> Any:
    return each_case(("policy", "options"), [pytest.param(p, o, id=str(p)) for p, o in cases])


each_rule_in_a_dtype = each_case(
    ("rule", "dtype"), [(rule, DTYPES[number % 2]) for number, rule in enumerate(RULES)]
)
"""That each is torch's in both is proved in `tests/unit/rules`."""
each_dtype = each_case("dtype", DTYPES)


class Recorder:
    """A shard with three workers; what happens to it is written down for the reference."""

    def __init__(self, policy: Policy, rule: Rule, dtype: str, seed: int = 0) -> None:
        self.random, self.draw = Random(seed), np.random.default_rng(seed)
        self.dtype = np.dtype(dtype)
        self.first: Array = self.normal()
        self.rig = Rig(policy, workers=WORKERS)
        for rank in range(WORKERS):
            self.rig.join(100 + rank, rank)
        self.rig.define(100, block_spec((SIZE,), rule=rule, dtype=dtype), self.first)
        self.schedule: list[Entry] = []
        self.values: list[Array] = []
        """After each entry."""
        self.clocks = [0] * WORKERS
        self.base = [0] * WORKERS
        self.there = list(range(WORKERS))
        self._note(Live(WORKERS))

    def normal(self) -> Array:
        return self.draw.standard_normal(SIZE).astype(self.dtype)

    def value(self) -> Array:
        return np.asarray(self.rig.value(), self.dtype)

    def _note(self, entry: Entry) -> None:
        self.schedule.append(entry)
        self.values.append(self.value())

    def read(self, rank: int) -> None:
        answer = done(self.rig.step(100 + rank, pull=[0], tick=False, clock=self.clocks[rank]))
        self.base[rank] = answer.version
        self._note(Read(rank))

    def push(self, rank: int, *, read: bool, **options: Any) -> Done | None:
        """One step; None if it waits for its clock."""
        gradient = self.normal()
        arrived = Pushed(rank, gradient.copy(), clock=self.clocks[rank], **options)
        effects = self.rig.step(
            100 + rank,
            {0: gradient},
            [0] if read else [],
            clock=self.clocks[rank],
            base=self.base[rank],
            **options,
        )
        self.clocks[rank] += 1
        self._note(arrived)
        if not effects.replies:
            return None
        answer = self.rig.answers(100 + rank)[-1]
        assert isinstance(answer, Done), answer
        if answer.at >= 0:
            self.clocks[rank] = answer.at
        if read:
            self.base[rank] = answer.version
            self._note(Read(rank))
        return answer

    def leave(self, rank: int) -> None:
        self.there.remove(rank)
        states = [
            (100 + each, 1, "live" if each in self.there else "left") for each in range(WORKERS)
        ]
        self.rig.tell(self.rig.members(*states))
        self._note(Live(len(self.there)))

    def weights(self) -> dict[str, float]:
        return {
            "weight": self.random.choice((1.0, 1.0, 4.0, 0.5)),
            "factor": self.random.choice((1.0, 1.0, 0.3, 2.0)),
        }

    def go_on(self, entries: int) -> None:
        """Reads and pushes in any order; a worker may push twice from one read."""
        for _ in range(entries):
            rank = self.random.choice(self.there)
            if self.random.random() < 0.2:
                self.read(rank)
            else:
                self.push(rank, read=self.random.random() < 0.6, **self.weights())

    def equal(self, expected: Sequence[Array]) -> None:
        np.testing.assert_allclose(self.values, expected, **EXACT)
        moved = [(a != b).any() for a, b in zip(self.values, self.values[1:], strict=False)]
        assert sum(moved) >= 5


def record(policy: Policy, rule: str, dtype: str, *, leaves: bool = True) -> Recorder:
    found = Recorder(policy, RULES[rule][0], dtype)
    for rank in range(WORKERS):
        found.read(rank)
    found.go_on(ENTRIES)
    if leaves:
        found.leave(1)
        found.go_on(ENTRIES // 3)
    return found


@each_rule_in_a_dtype
@per_case(ASYNC)
def test_async_policies_apply_what_the_reference_does(
    policy: Policy, options: dict[str, Any], rule: str, dtype: str
) -> None:
    found = record(policy, rule, dtype)
    found.equal(asynchronous(found.first, found.schedule, RULES[rule][1](), **options))


@each_rule_in_a_dtype
@per_case(BUFFERED)
def test_buffered_applies_what_the_reference_does(
    policy: Policy, options: dict[str, Any], rule: str, dtype: str
) -> None:
    found = record(policy, rule, dtype)
    found.push(found.there[0], read=False)  # before it, none is left over of 4 or of 5
    before = found.value()
    assert found.rig.shards[0].report()[0].buffered == (options["size"] > 1)
    for rank in list(found.there):
        found.leave(rank)
    found.equal(buffered(found.first, found.schedule, RULES[rule][1](), **options))
    left = sum(isinstance(entry, Pushed) for entry in found.schedule) % options["size"]
    assert (found.value() != before).any() == (left > 0)  # the remainder


@each_rule_in_a_dtype
@per_case(SYNC)
def test_sync_applies_what_the_reference_does(
    policy: Policy, options: dict[str, Any], rule: str, dtype: str
) -> None:
    found = Recorder(policy, RULES[rule][0], dtype)
    late = 0
    for _ in range(20):
        order = list(found.there)
        found.random.shuffle(order)
        for rank in order:
            answer = found.push(rank, read=True, **found.weights())
            late += answer is not None and answer.skipped
    found.equal(synchronous(found.first, found.schedule, RULES[rule][1](), **options))
    assert bool(late) == bool(options.get("backup"))


@each_dtype
@each_case("rule", [PLAIN, MOMENTUM, NESTEROV])
def test_local_steps_average_and_step_as_the_reference_does(rule: str, dtype: str) -> None:
    outer, plain = RULES[rule]
    rounds, every, lr = 12, 3, 0.1
    found = Recorder(LocalSteps(every=every, outer=outer), outer, dtype)
    gradients = [
        [[found.normal() for _ in range(every)] for _ in range(WORKERS)] for _ in range(rounds)
    ]
    values = []
    for clock, of_workers in enumerate(gradients):
        start = found.value()
        for rank, own in enumerate(of_workers):
            mine = start.copy()
            for gradient in own:
                mine -= found.dtype.type(lr) * gradient
            found.rig.step(100 + rank, {0: start - mine}, [0], clock=clock)
        values.append(found.value())
    expected = local_steps(found.first, gradients, plain(), lr=lr)
    np.testing.assert_allclose(values, expected, **EXACT)


@each_dtype
@each_case("alpha", [0.05, 0.3, 0.9])
def test_elastic_average_moves_both_as_the_reference_does(alpha: float, dtype: str) -> None:
    spring = SGD(lr=alpha, weight_decay=1.0, maximize=True)
    found = Recorder(ElasticAverage(rho=alpha), spring, dtype)
    plain = reference.Elastic(found.first.astype("float64"), alpha)
    own = [found.first.copy() for _ in range(WORKERS)]
    for _ in range(ENTRIES):
        rank, moved = found.random.randrange(WORKERS), found.normal() * found.dtype.type(0.1)
        own[rank] += moved
        found.rig.step(100 + rank, {0: own[rank]}, [0], clock=found.clocks[rank])
        found.clocks[rank] += 1
        after = found.value()
        centre = (after - alpha * own[rank]) / (1 - alpha)
        own[rank] -= (alpha * (own[rank] - centre)).astype(found.dtype)
        plain.exchange(rank, moved)
        # A worker finds the centre again by a division by 1 - alpha, which costs digits.
        loose = 1e-6 / (1 - alpha)
        np.testing.assert_allclose(after, plain.centre, rtol=1e-6, atol=loose)
        np.testing.assert_allclose(own[rank], plain.workers[rank], rtol=1e-6, atol=loose)


# --- a policy that fails ------------------------------------------------------------------------


def not_a_number(staleness: int) -> float:
    return math.nan if staleness else 1.0


def negative(staleness: int) -> float:
    return -0.5 if staleness else 1.0


def infinite(staleness: int) -> float:
    return math.inf if staleness else 1.0


def a_text(staleness: int) -> Any:
    return "a half" if staleness else 1.0


def nothing(staleness: int) -> Any:
    return None if staleness else 1.0


def raises(staleness: int) -> float:
    return 1.0 if not staleness else 1 / 0


@each_case("damping", [not_a_number, negative, infinite, a_text, nothing, raises])
@each_case("kind", [Async, lambda damping: Buffered(2, damping=damping)])
def test_damping_that_fails_is_refused_and_nothing_is_applied(
    kind: Callable[..., Policy], damping: Callable[[int], Any]
) -> None:
    found = Recorder(kind(damping=damping), RULES[MOMENTUM][0], "float64")
    for rank in (0, 1, 0):
        found.read(rank)
        found.push(rank, read=False)
    shard = found.rig.shards[0]
    group, block = shard.groups[0].state, shard.blocks[0]
    before = found.value(), group.version, group.buffered, tuple(block.counts)
    assert group.version >= 1
    effects = found.rig.step(102, {0: found.normal()}, [0], clock=found.clocks[2], base=0)
    error = refused(effects)
    assert isinstance(error, PolicyFailed)
    assert error.applied == "no"
    assert damping.__name__ in str(error)
    after = found.value(), group.version, group.buffered, tuple(block.counts)
    np.testing.assert_array_equal(after[0], before[0])
    assert after[1:] == before[1:]
    fresh = found.rig.step(102, {0: found.normal()}, clock=found.clocks[2], base=group.version)
    assert done(fresh).skipped is False


# --- the reference itself, by hand --------------------------------------------------------------

ONE = np.ones(1)


def flat(values: Sequence[Array]) -> list[float]:
    return [float(value[0]) for value in values]


def test_reference_async_by_hand() -> None:
    schedule = [Read(0), Read(1), Pushed(0, ONE), Pushed(1, ONE), Pushed(0, ONE)]
    assert flat(asynchronous(ONE, schedule, PlainSGD(0.5))) == [1.0, 1.0, 0.5, 0.0, -0.5]
    halves = asynchronous(ONE, schedule, PlainSGD(0.5), damping=lambda s: 0.5**s)
    assert flat(halves) == [1.0, 1.0, 0.5, 0.25, 0.125]
    assert flat(asynchronous(ONE, schedule, PlainSGD(0.5), drop_after=0))[2:] == [0.5, 0.5, 0.5]
    corrected = asynchronous(ONE, schedule, PlainSGD(0.5), lam=0.5)
    assert flat(corrected)[2:] == [0.5, 0.125, -0.15625]  # 1 - 0.5 * 0.5, 1 - 0.5 * 0.875


def test_reference_momentum_by_hand() -> None:
    schedule = [Live(2), *[Pushed(0, ONE)] * 2, Live(4), Pushed(0, ONE)]
    values = asynchronous(0 * ONE, schedule, PlainSGD(1.0, 0.75), corrected=True)
    assert flat(values) == [0.0, -1.0, -2.25, -2.25, -3.25]  # momentum 0.25, then 0


def test_reference_buffer_by_hand() -> None:
    schedule = [Read(0), *[Pushed(0, ONE, factor=3.0), Pushed(1, ONE)] * 2, Pushed(0, ONE)]
    values = buffered(0 * ONE, [*schedule, Live(0)], PlainSGD(1.0), size=2)
    assert flat(values) == [0.0, 0.0, -2.0, -2.0, -4.0, -4.0, -5.0]
    damped = buffered(0 * ONE, schedule, PlainSGD(1.0), size=2, damping=lambda s: 0.5**s)
    assert flat(damped)[4] == -3.0


def test_reference_sync_by_hand() -> None:
    first = [Pushed(1, 4 * ONE, weight=3.0), Pushed(0, 0 * ONE)]
    schedule = [Live(2), *first, Pushed(0, ONE, clock=1), Pushed(1, ONE, factor=3.0, clock=1)]
    assert flat(synchronous(0 * ONE, schedule, PlainSGD(1.0)))[2::2] == [-3.0, -4.0]
    values = synchronous(0 * ONE, schedule, PlainSGD(1.0), reduce="sum")
    assert flat(values)[2::2] == [-12.0, -16.0]
    late = synchronous(0 * ONE, schedule, PlainSGD(1.0), backup=1)
    assert flat(late) == [0.0, -4.0, -4.0, -5.0, -5.0]


def test_reference_local_steps_and_elastic_average_by_hand() -> None:
    rounds = [[[ONE, ONE], [ONE, 3 * ONE]]] * 2
    assert flat(local_steps(0 * ONE, rounds, PlainSGD(1.0), lr=0.5)) == [-1.5, -3.0]
    both = reference.Elastic(0 * ONE, 0.25)
    both.exchange(0, 4 * ONE)
    assert (float(both.centre[0]), float(both.workers[0][0])) == (1.0, 3.0)
    both.exchange(1, 0 * ONE)
    assert (float(both.centre[0]), float(both.workers[1][0])) == (0.75, 0.25)


@each_case("rule", RULES)
def test_reference_rules_step_as_torch_does(rule: str) -> None:
    described, plain = RULES[rule][0], RULES[rule][1]()
    value = np.linspace(-1.0, 1.0, SIZE)
    tensor = torch.nn.Parameter(torch.tensor(value))
    if isinstance(described, SGD):
        optimizer = torch.optim.SGD(
            [tensor],
            lr=described.lr,
            momentum=described.momentum,
            nesterov=described.nesterov,
        )
    else:
        assert isinstance(described, Adam)
        optimizer = torch.optim.Adam([tensor], lr=described.lr, betas=described.betas)
    for step in range(10):
        gradient = np.cos(np.arange(SIZE) + step)
        tensor.grad = torch.tensor(gradient)
        optimizer.step()
        value = plain.step(value, gradient)
    np.testing.assert_allclose(value, tensor.detach().numpy(), rtol=1e-12)
