"""The built-in policies: when a gradient is applied, and when a worker may read.

They differ in whom they wait for and in what a stale gradient counts; `docs/consistency.md` says
which pays when. What each may see and answer is in `consistency.base`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp
from typing import ClassVar, Literal

from paramserve.codecs.base import Codec
from paramserve.codecs.registry import as_codec
from paramserve.codecs.registry import is_built_in as is_built_in_codec
from paramserve.config import check_count, check_number
from paramserve.consistency.base import (
    ADMIT,
    APPLY,
    DROP,
    Admission,
    Apply,
    Buffer,
    GroupView,
    OnNonFinite,
    OnPush,
    Policy,
    Pull,
    Push,
    Wait,
)
from paramserve.rules.base import Rule
from paramserve.rules.registry import is_built_in
from paramserve.rules.sgd import SGD


@dataclass(frozen=True)
class Inverse:
    """1 / (1 + alpha * staleness).

    Source: Zhang, Gupta, Lian, Liu, *Staleness-aware async-SGD*, IJCAI 2016, divides the learning
    rate by the staleness; alpha = 1 does so.
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        check_number("alpha of Inverse", self.alpha)

    def __call__(self, staleness: int) -> float:
        return 1.0 / (1.0 + self.alpha * staleness)


@dataclass(frozen=True)
class Exponential:
    """exp(-alpha * staleness)."""

    alpha: float = 0.1

    def __post_init__(self) -> None:
        check_number("alpha of Exponential", self.alpha)

    def __call__(self, staleness: int) -> float:
        return exp(-self.alpha * staleness)


@dataclass(frozen=True)
class Polynomial:
    """(1 + staleness) ** -exponent.

    Source: Nguyen et al., *Federated Learning with Buffered Asynchronous Aggregation*, AISTATS
    2022, use exponent = 1/2.
    """

    exponent: float = 0.5

    def __post_init__(self) -> None:
        check_number("exponent of Polynomial", self.exponent)

    def __call__(self, staleness: int) -> float:
        return float((1.0 + staleness) ** -self.exponent)


DAMPINGS = (Inverse, Exponential, Polynomial)


Damping = Callable[[int], float]


def _check_nonfinite(value: str) -> None:
    if value not in ("refuse", "skip"):
        raise ValueError(f'on_nonfinite must be "refuse" or "skip", not {value!r}')


def _check_damping(value: object) -> None:
    if value is not None and (isinstance(value, type) or not callable(value)):
        raise TypeError(f"damping must be ps.Inverse(...) or a function, not {value!r}")


@dataclass(frozen=True)
class Adaptive:
    """A deadline that follows the workers: `factor` times the median time of their late steps.

    Args:
        factor: of the median, above 0.
        least_s: never sooner than this, in seconds. Until a median is known, no worker is left
            behind.
    """

    factor: float = 2.0
    least_s: float = 0.05

    def __post_init__(self) -> None:
        check_number("factor of Adaptive", self.factor, above=0.0)
        check_number("least_s of Adaptive", self.least_s, above=0.0)


@dataclass(frozen=True)
class Sync(Policy):
    """All live workers' gradients of a clock are applied together, or none of them.

    A run without `backup` and `timeout_s` is bit-for-bit repeatable: sums are taken in rank order.
    Each gradient is multiplied by its weight: 1 unless the worker says otherwise, or its loader
    knows how many samples it comes from (`shards="dynamic"`, `adaptive_batch`). With "mean" the
    sum is divided by the sum of the weights.

    With `backup` or `timeout_s` a clock does not wait for its last workers. Gradients that come
    after its decision are dropped and counted; their worker is told, and goes on with the clock
    that is then under way.

    Args:
        reduce: "mean" or "sum" over the workers. Where the weights are samples, "mean" is the mean
            over the samples of all workers, and "sum" the sum over the samples.
        on_nonfinite: "refuse" raises `NonFinite` in the worker that sends NaN or Inf, or in all
            where the gradients are finite and their sum (not a mean) overflows; "skip" applies
            nothing at that clock, on all shards alike, and counts it.
        backup: a clock is decided when the gradients of all but this many workers are there.
        timeout_s: it is decided this long after its first gradients came, with those that are
            there; seconds, or `ps.Adaptive(...)`. None: it waits.
    Source: Chen, Pan, Monga, Bengio, Jozefowicz, *Revisiting Distributed Synchronous SGD*, 2016.
    """

    collects: ClassVar[bool] = True
    reduce: Literal["mean", "sum"] = "mean"
    on_nonfinite: OnNonFinite = "refuse"
    backup: int = 0
    timeout_s: float | Adaptive | None = None

    def __post_init__(self) -> None:
        if self.reduce not in ("mean", "sum"):
            raise ValueError(f'reduce must be "mean" or "sum", not {self.reduce!r}')
        _check_nonfinite(self.on_nonfinite)
        check_count("backup of Sync", self.backup, least=0)
        if self.timeout_s is not None and not isinstance(self.timeout_s, Adaptive):
            check_number("timeout_s of Sync", self.timeout_s, above=0.0)

    def check(self, workers: int) -> None:
        if workers and self.backup >= workers:
            raise ValueError(
                f"backup of Sync must be below the number of workers, {workers}, not "
                f"{self.backup}: a clock needs the gradients of at least one worker"
            )

    @property
    def partial(self) -> bool:
        return self.backup > 0 or self.timeout_s is not None

    def on_clock(self, group: GroupView) -> Admission:
        arrived = group.arrived
        missing = [rank for rank in group.clocks if rank not in arrived]
        if arrived and (not missing or len(missing) <= self.backup):
            return ADMIT
        limit = self._limit_s(group) if self.timeout_s is not None else None
        if arrived and limit is not None and group.waited_s >= limit:
            return ADMIT
        return Wait(tuple(missing), limit)

    def _limit_s(self, group: GroupView) -> float | None:
        if isinstance(self.timeout_s, Adaptive):
            if group.step_s == 0.0:
                return None
            return max(self.timeout_s.least_s, self.timeout_s.factor * group.step_s)
        return self.timeout_s

    def on_pull(self, pull: Pull, group: GroupView) -> Admission:
        if group.slowest >= pull.clock:
            return ADMIT
        return Wait(tuple(rank for rank, clock in group.clocks.items() if clock < pull.clock))

    def scale(self, weight: float) -> float:
        return 1.0 / weight if self.reduce == "mean" else 1.0


@dataclass(frozen=True)
class Async(Policy):
    """Each gradient is applied when it arrives; no worker waits for another.

    Args:
        on_nonfinite: "refuse" raises `NonFinite` in the worker that sends NaN or Inf; "skip"
            drops that gradient and counts it.
        damping: what the learning rate is multiplied by, from the gradient's staleness (an int):
            `ps.Inverse`, `ps.Exponential`, `ps.Polynomial`, or a function that was registered with
            `rules=[...]`. What it returns is finite and not negative. None: 1. Under a rule
            without a learning rate (`ps.Add`) the gradient is multiplied.
        drop_after: a gradient of more staleness than this is dropped and counted. Each shard
            counts its own updates, so that one may drop its part where another applies it.
        momentum: "corrected": the rule's momentum is lowered by 1 - 1 / workers, which that many
            asynchronous workers cause by themselves, not below 0; "given": it stays.
    Source: momentum: Mitliagkas, Zhang, Hadjis, Re, *Asynchrony begets Momentum*, Allerton 2016.
    """

    on_nonfinite: OnNonFinite = "refuse"
    damping: Damping | None = None
    drop_after: int | None = None
    momentum: Literal["given", "corrected"] = "given"

    def __post_init__(self) -> None:
        _check_nonfinite(self.on_nonfinite)
        _check_damping(self.damping)
        if self.drop_after is not None:
            check_count("drop_after of Async", self.drop_after, least=0)
        if self.momentum not in ("given", "corrected"):
            raise ValueError(f'momentum must be "given" or "corrected", not {self.momentum!r}')

    def on_push(self, push: Push, group: GroupView) -> OnPush:
        if self.drop_after is not None and push.staleness > self.drop_after:
            return DROP
        if self.damping is None and self.momentum == "given":
            return APPLY if push.factor == 1.0 else Apply(push.factor)
        less = 1.0 - 1.0 / max(1, len(group.clocks)) if self.momentum == "corrected" else 0.0
        damped = self.damping(push.staleness) if self.damping is not None else 1.0
        return Apply(push.factor, less, lr_scale=damped)


@dataclass(frozen=True)
class BoundedStaleness(Policy):
    """Apply gradients as Async does, but hold a read more than `bound` clocks ahead of a worker.

    A read at clock c waits until all live workers have finished c - bound, so it contains every
    update of clock <= c - bound - 1.

    Args:
        bound: clocks, at least 0; 0 gives Sync's schedule, not its sums.
        on_nonfinite: as for `Async`.
    Source: Ho et al., *More Effective Distributed ML via a Stale Synchronous Parallel Parameter
        Server*, NIPS 2013.
    """

    bound: int
    on_nonfinite: OnNonFinite = "refuse"

    def __post_init__(self) -> None:
        check_count("bound of BoundedStaleness", self.bound, least=0)
        _check_nonfinite(self.on_nonfinite)

    def on_pull(self, pull: Pull, group: GroupView) -> Admission:
        needed = pull.clock - self.bound
        if group.slowest >= needed:
            return ADMIT
        return Wait(tuple(rank for rank, clock in group.clocks.items() if clock < needed))


@dataclass(frozen=True)
class DelayCompensated(Policy):
    """Apply gradients as Async does, each corrected by how the values changed since it was read.

    g + lam * g * g * (value now - value that the worker read), element by element: a diagonal
    guess of the Hessian carries the gradient to the present values. The servers keep up to three
    copies of the group's values for each worker, and each read writes one.

    Args:
        lam: weight of the correction, at least 0.
        on_nonfinite: as for `Async`.
    Source: Zheng et al., *Asynchronous Stochastic Gradient Descent with Delay Compensation*, ICML
        2017: DC-ASGD with constant lambda, for which the paper uses 0.04.
    """

    keeps_reads: ClassVar[bool] = True
    lam: float = 0.04
    on_nonfinite: OnNonFinite = "refuse"

    def __post_init__(self) -> None:
        check_number("lam of DelayCompensated", self.lam)
        _check_nonfinite(self.on_nonfinite)

    def on_push(self, push: Push, group: GroupView) -> OnPush:
        return Apply(push.factor, compensate=self.lam)


@dataclass(frozen=True)
class Buffered(Policy):
    """The mean of each `size` gradients is applied as one update; no worker waits for another.

    What is in the buffer when the last worker leaves is applied then. In a cluster without workers
    each gradient is applied at once: no worker would empty the buffer.

    Args:
        size: gradients of one update, at least 1, from any workers.
        damping: what each counts for by its staleness, as for `Async`; `ps.Polynomial(0.5)` unless
            told. None: all count alike.
        on_nonfinite: as for `Async`.
    Source: Nguyen et al., *Federated Learning with Buffered Asynchronous Aggregation* (FedBuff),
        AISTATS 2022: the weighted sum is divided by `size`.
    """

    size: int
    damping: Damping | None = field(default_factory=Polynomial)
    on_nonfinite: OnNonFinite = "refuse"

    def __post_init__(self) -> None:
        check_count("size of Buffered", self.size)
        _check_damping(self.damping)
        _check_nonfinite(self.on_nonfinite)

    def on_push(self, push: Push, group: GroupView) -> OnPush:
        weight = push.factor
        if self.damping is not None:
            weight *= self.damping(push.staleness)
        return Buffer(self.size if group.clocks else 1, weight)


@dataclass(frozen=True)
class LocalSteps(Sync):
    """Each worker makes `every` steps by itself; then the mean of what they changed is applied.

    A worker steps with its own torch optimizer, and pushes the difference (values before - values
    now); `outer` is the rule of the servers. One clock is `every` steps. All else is as for `Sync`,
    but `reduce`, which is "mean", and `on_nonfinite="skip"`: it leaves out, and counts as dropped,
    what a worker has changed to NaN or Inf; the mean is that of the others, from whose values this
    worker then goes on, with its own optimizer's state begun anew where that is not finite.

    `worker.optimizer` makes the own steps; those that are left over at the end of the run, or of a
    leased loader, are exchanged then. Loaders of the worker that are iterated after it count a
    clock as `every` steps. For parameters of `client.define` the servers do their part, with the
    rule given there: make the steps, and push the differences.

    Args:
        every: own steps between two pushes, at least 1.
        outer: the servers' rule. lr=1.0 without momentum is the plain average.
        fragments: in how many parts the model is exchanged: one of them after each
            `every / fragments` own steps, in turn, so that each is exchanged once in `every`. That
            is one clock then, and its peak of bytes is so much smaller.
        delay: own steps between an exchange's sending and its values' coming into the model, which
            communication overlaps with; below `every / fragments`.
        merge: what part of the worker's own values stays when those of an exchange come, at least 0
            and below 1. With a delay 0.5 keeps half of what the steps meanwhile have learned.
        push, pull: codecs of the differences and of the values that come back, for servers on other
            hosts, where `worker.optimizer` is not given its own.
    Source: local SGD: Stich, ICLR 2019. DiLoCo: Douillard et al., 2023, with Nesterov's momentum
        0.9 and lr 0.7, the default here. Fragments, delay and merge: Streaming DiLoCo, Douillard et
        al., 2025 (arXiv 2501.18512).
    """

    skips_alone: ClassVar[bool] = True
    reduce: Literal["mean", "sum"] = field(default="mean", kw_only=True)
    on_nonfinite: OnNonFinite = field(default="refuse", kw_only=True)
    backup: int = field(default=0, kw_only=True)
    timeout_s: float | Adaptive | None = field(default=None, kw_only=True)
    every: int = 1
    outer: Rule = field(default_factory=lambda: SGD(lr=0.7, momentum=0.9, nesterov=True))
    fragments: int = field(default=1, kw_only=True)
    delay: int = field(default=0, kw_only=True)
    merge: float = field(default=0.0, kw_only=True)
    push: Codec | None = field(default=None, kw_only=True)
    pull: Codec | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_own_steps(self)
        if self.reduce != "mean":
            raise ValueError(
                "reduce of LocalSteps must be 'mean': its differences are weighted by the samples "
                f"behind them; not {self.reduce!r}"
            )

    @property
    def steps_per_clock(self) -> int:
        """Own steps between two exchanges."""
        return self.every // self.fragments


@dataclass(frozen=True)
class AsyncLocalSteps(Async):
    """Exchange the change of `every` own steps, as `LocalSteps`, but without waiting for others.

    A change is applied when it arrives, and the worker goes on from the values of that moment.

    All else is as for `Async`. Where workers have different speeds, the fast ones make more steps:
    let them share the data with `shards="dynamic"` of `worker.loader`.

    Args:
        every: own steps between two pushes, at least 1; with `scale_steps`, of the fastest worker.
        outer: the servers' rule. `ps.DelayedNesterov(pushes=workers)` is what its paper found to
            train as well as `LocalSteps` does; plain momentum amplifies what is stale.
        fragments, delay, merge: as of `LocalSteps`. Each fragment is applied when it arrives; with
            `DelayedNesterov` each has `pushes` of its own. The staleness of a push counts from the
            worker's last exchange, whichever fragment's that was.
        scale_steps: each worker makes so many of these steps as it does while the fastest one makes
            all: `every * v / max(v)`, rounded down, at least 1, with v its steps a second. So what
            a slow worker pushes is no staler than the others'. The number changes at exchanges
            only, and is `every` until two workers' speeds are known.
        push, pull: as of `LocalSteps`.
    Source: Liu et al., *Asynchronous Local-SGD Training for Language Modeling*, 2024 (arXiv
        2401.09135), whose dynamic local updates are `scale_steps`. The paper trains best with them
        where speeds differ. They are off here unless asked for: a clock then no longer tells how
        many steps a worker has made, by which a loader with `shards="static"` finds its place when
        a worker is started again; and equal workers, whose speeds always differ a little, would
        make fewer steps than `every`.
    """

    on_nonfinite: OnNonFinite = field(default="refuse", kw_only=True)
    damping: Damping | None = field(default=None, kw_only=True)
    drop_after: int | None = field(default=None, kw_only=True)
    momentum: Literal["given", "corrected"] = field(default="given", kw_only=True)
    every: int
    outer: Rule
    fragments: int = field(default=1, kw_only=True)
    delay: int = field(default=0, kw_only=True)
    merge: float = field(default=0.0, kw_only=True)
    scale_steps: bool = field(default=False, kw_only=True)
    push: Codec | None = field(default=None, kw_only=True)
    pull: Codec | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_own_steps(self)
        if not isinstance(self.scale_steps, bool):
            raise TypeError(
                f"scale_steps of AsyncLocalSteps is True or False, not {self.scale_steps!r}"
            )

    @property
    def steps_per_clock(self) -> int:
        """Own steps between two exchanges; at most, with `scale_steps`."""
        return self.every // self.fragments

    def steps_at(self, speed: float, fastest: float) -> int:
        """Own steps until the next exchange of a worker with this speed.

        Args:
            speed: steps a second, above 0.
            fastest: of the fastest worker; another one may be slower than this one by now.
        """
        return max(1, int(self.steps_per_clock * min(speed / fastest, 1.0)))


def _check_own_steps(policy: LocalSteps | AsyncLocalSteps) -> None:
    name, outer = type(policy).__name__, policy.outer
    check_count(f"every of {name}", policy.every)
    outer_rule: object = outer
    if not (isinstance(outer_rule, Rule) and is_built_in(outer_rule)):
        raise TypeError(
            f"outer of {name} must be a built-in rule, as in ps.SGD(lr=0.7), not {outer!r}"
        )
    _check_fragments(policy)
    for what, codec in (("push", policy.push), ("pull", policy.pull)):
        if codec is not None and not is_built_in_codec(as_codec(codec, what)):
            raise TypeError(
                f"{what} of {name} is a built-in codec: give one of your own to "
                f"worker.optimizer(..., {what}=), and register it with rules=, not {codec!r}"
            )


def _check_fragments(policy: LocalSteps | AsyncLocalSteps) -> None:
    name, every = type(policy).__name__, policy.every
    check_count(f"fragments of {name}", policy.fragments)
    check_count(f"delay of {name}", policy.delay, least=0)
    check_number(f"merge of {name}", policy.merge)
    if every % policy.fragments:
        raise ValueError(
            f"every of {name} must be a multiple of fragments={policy.fragments}, each of which is "
            f"exchanged once in as many own steps, not {every}"
        )
    if policy.delay >= policy.steps_per_clock:
        raise ValueError(
            f"delay of {name} must be below every / fragments = {policy.steps_per_clock}, after "
            f"which the next exchange is sent, not {policy.delay}"
        )
    if policy.merge >= 1.0:
        raise ValueError(f"merge of {name} must be below 1, not {policy.merge!r}")


@dataclass(frozen=True)
class ElasticAverage(Policy):
    """Each worker trains values of its own, tied to the servers' by a spring; no worker waits.

    After each `every` own steps, with alpha = lr * rho: the servers' values c and the worker's x
    move towards each other by alpha * (x - c). `worker.optimizer` does that, with the lr of each
    parameter group; for parameters of `client.define` push alpha * (c - x) yourself, to
    `ps.SGD(lr=1.0)`. Workers send no gradients, so that `Worker.factor` has no meaning here.
    `Result.state_dict()` is c, and it is what to evaluate: a model on a worker has that worker's
    own values, also at the end.

    Args:
        rho: strength of the spring, above 0; lr * rho must be below 1. The paper takes
            lr * rho = 0.9 / workers.
        every: own steps between two exchanges, at least 1.
        on_nonfinite: as for `Async`.
    Source: Zhang, Choromanska, LeCun, *Deep learning with Elastic Averaging SGD*, NIPS 2015,
        algorithm 1 (asynchronous EASGD).
    """

    rho: float
    every: int = 1
    on_nonfinite: OnNonFinite = "refuse"

    def __post_init__(self) -> None:
        check_number("rho of ElasticAverage", self.rho, above=0.0)
        check_count("every of ElasticAverage", self.every)
        _check_nonfinite(self.on_nonfinite)

    @property
    def steps_per_clock(self) -> int:
        """Own steps between two exchanges."""
        return self.every

    def on_push(self, push: Push, group: GroupView) -> OnPush:
        return APPLY


OWN_STEPS = (LocalSteps, AsyncLocalSteps, ElasticAverage)
"""Policies under which `worker.optimizer` has the workers' own optimizers step, and exchanges after
some of their steps."""
