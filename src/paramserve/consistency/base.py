"""What a consistency policy is asked, what it may look at, and what it may answer.

A policy is a frozen value object without state: all that it decides from is an argument, so that it
can be tested without a cluster, and sent to a server by name and options. The built-in policies are
in `consistency.built_in`; a user's own derives from `Policy`, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, cast

OnNonFinite = Literal["refuse", "skip"]


class Push(NamedTuple):
    """A gradient that has arrived."""

    worker: int
    """Rank of the worker; -1: of a client that belongs to no rank."""
    clock: int
    """Steps that the worker had finished before."""
    staleness: int
    """Updates of the group on this shard since the values from which it was computed."""
    weight: float = 1.0
    """Samples behind it."""
    factor: float = 1.0
    """What this worker has its gradients multiplied by (`Worker.factor`)."""


class Pull(NamedTuple):
    """A worker wants to read."""

    worker: int
    clock: int
    """Steps that it has finished, with the one that this very request ends."""


new_push: Callable[[tuple[int, int, int, float, float]], Push]
new_push = cast(Any, partial(tuple.__new__, Push))
new_pull: Callable[[tuple[int, int]], Pull]
new_pull = cast(Any, partial(tuple.__new__, Pull))
"""These of their fields, made without a Python function."""


class GroupView(Protocol):
    """How a group stands on a shard. A policy reads it and changes nothing."""

    @property
    def clocks(self) -> Mapping[int, int]:
        """Steps that each worker has finished, of those that are live or waited for."""
        ...

    @property
    def slowest(self) -> int:
        """The smallest of `clocks`; if there are none any more, what it was last."""
        ...

    @property
    def version(self) -> int:
        """Updates so far."""
        ...

    @property
    def buffered(self) -> int:
        """Gradients in the buffer (`Buffer`)."""
        ...

    @property
    def arrived(self) -> Collection[int]:
        """Ranks whose gradients of the clock that is not decided yet are here (`collects`)."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds since the first of `arrived` came; 0.0 if there are none."""
        ...

    @property
    def step_s(self) -> float:
        """Median time from a clock's commit to a worker's next gradients, of late;
        0.0: not known yet."""
        ...


class Apply(NamedTuple):
    """Update the values with this gradient now.

    Attributes:
        scale: multiplies the gradient, finite and not negative.
        momentum_reduction: is subtracted from the rule's momentum (SGD's `momentum`, Adam's
            `beta1`), not below 0.
        compensate: lambda of the correction g + lambda * g * g * (value now - value that the worker
            read).
        lr_scale: multiplies the rule's learning rate, finite and not negative; of a rule without
            `lr`, the gradient.
    """

    scale: float = 1.0
    momentum_reduction: float = 0.0
    compensate: float = 0.0
    lr_scale: float = 1.0


class Buffer(NamedTuple):
    """Add it to a sum; with the `size`-th one, update the values with sum / number."""

    size: int
    weight: float = 1.0
    """Multiplies the gradient, finite and not negative."""


class Drop(NamedTuple):
    """Never apply this gradient; the shard counts it and tells the worker."""


class Admit(NamedTuple):
    """Let the worker read, or decide the clock."""


class Wait(NamedTuple):
    """Not yet; the shard asks again after each change of the group."""

    workers: tuple[int, ...]
    """Ranks that are waited for, for messages."""
    until_s: float | None = None
    """Ask again when `GroupView.waited_s` reaches this, too. Only from `on_clock`."""


APPLY = Apply()
DROP = Drop()
ADMIT = Admit()
OnPush = Apply | Buffer | Drop
Admission = Admit | Wait


class Policy:
    """Base of all consistency policies: each gradient is applied when it arrives.

    A subclass is a frozen dataclass whose fields are numbers, texts, bools or objects like these.
    It defines what differs. A shard asks for each request; the methods must be fast, and must not
    keep or change what they are given. Their arguments and answers are in `paramserve.consistency`.

    Attributes:
        collects: gradients are kept, unapplied, until `on_clock` admits their clock; then their
            sum times `scale` is applied on all shards, or on none. `on_push` is not asked.
        keeps_reads: the shard keeps what each worker read last, for `Apply.compensate`: up to three
            copies of the group's values for each worker.
        skips_alone: where it `collects`, "skip" leaves out the workers that send NaN or Inf, and
            the clock has the others; else the clock has none. Asked for with one of some.
        on_nonfinite: "refuse" raises `NonFinite` in the worker that sends NaN or Inf; "skip"
            applies nothing of it, and counts it.
    """

    collects: ClassVar[bool] = False
    skips_alone: ClassVar[bool] = False
    keeps_reads: ClassVar[bool] = False
    on_nonfinite: OnNonFinite = "refuse"

    @property
    def partial(self) -> bool:
        """Whether a clock may be decided without the gradients of some live workers."""
        return type(self).on_clock is not Policy.on_clock

    def on_push(self, push: Push, group: GroupView) -> OnPush:
        """What to do with a gradient."""
        return APPLY if push.factor == 1.0 else Apply(push.factor)

    def on_pull(self, pull: Pull, group: GroupView) -> Admission:
        """Whether a worker may read now. A client without a rank always may."""
        return ADMIT

    def on_clock(self, group: GroupView) -> Admission:
        """Whether a clock may be decided with the gradients that are here: only if it `collects`.

        Asked when one has come, when a worker has left, and at `Wait.until_s`.
        """
        missing = tuple(rank for rank in group.clocks if rank not in group.arrived)
        return Wait(missing) if missing else ADMIT

    def on_membership(self, group: GroupView) -> bool:
        """Workers have come or gone: whether to update with what is in the buffer now.

        Without this, a buffer that no worker fills any more would never be applied.
        """
        return not group.clocks

    def scale(self, weight: float) -> float:
        """What the sum of a clock's gradients is multiplied by; `weight` is their total weight."""
        return 1.0 / weight

    def check(self, workers: int) -> None:
        """Raise `ValueError` if it cannot work with this many workers."""
