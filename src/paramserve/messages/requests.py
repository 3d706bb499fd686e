"""Client to shard: numbered requests, each of which changes something, and questions."""

from __future__ import annotations

from msgspec import Struct

from paramserve.config import ConsistencySpec
from paramserve.messages.blocks import BlockSpec


class Gradient(Struct, frozen=True, array_like=True):
    """One block's gradient. `active`: its pieces (None: all); `hyper` None: as defined."""

    block: int
    arena: int
    offset: int
    active: tuple[int, ...] | None = None
    hyper: tuple[float, ...] | None = None


class Place(Struct, frozen=True, array_like=True):
    """Where a block's values are to be written."""

    block: int
    arena: int
    offset: int


class Define(Struct, frozen=True, array_like=True, tag="define"):
    """Create a block with these values. Of two attempts the higher one's values stand."""

    seq: int
    spec: BlockSpec
    attempt: int
    arena: int
    offset: int


class Step(Struct, frozen=True, array_like=True, tag="step"):
    """Push, tick and pull of one group in one message; each may be absent.

    `clock` is the client's clock before this step. `base` is the version that the gradients were
    computed from. With `tick` the step ends the clock. `skip` says that this worker has no usable
    gradient for this clock. `clip_norm` 0: no clipping. `factor` is the worker's own, from
    `worker_weight`. `mark` (lease, samples): what this worker has taken of the samples that were
    leased to it, with this step.
    """

    seq: int
    group: int
    clock: int
    tick: bool
    push: tuple[Gradient, ...]
    pull: tuple[Place, ...]
    base: int = 0
    weight: float = 1.0
    skip: bool = False
    clip_norm: float = 0.0
    factor: float = 1.0
    mark: tuple[int, int] | None = None


class Rest(Struct, frozen=True, array_like=True, tag="rest"):
    """This worker takes no further steps of a group until its next one: nobody waits for it."""

    seq: int
    group: int


class SetPolicy(Struct, frozen=True, array_like=True, tag="set-policy"):
    """Give a group another policy, from a clock on that the shards agree on. The answer says that
    it is known; `Done.news` and `GroupReport.change` say when it is decided."""

    seq: int
    group: int
    policy: ConsistencySpec


class Assign(Struct, frozen=True, array_like=True, tag="assign"):
    """Overwrite values or state. `counts`, if given, sets the update count of each piece."""

    seq: int
    block: int
    field: int
    arena: int
    offset: int
    active: tuple[int, ...] | None = None
    counts: tuple[int, ...] | None = None


class Fetch(Struct, frozen=True, array_like=True, tag="fetch"):
    """Read one field of one block: values or rule state."""

    seq: int
    block: int
    field: int
    arena: int
    offset: int


class Watch(Struct, frozen=True, array_like=True, tag="watch"):
    """Keep a snapshot of a group at every `every`-th version, at most `keep`; 0 ends it."""

    seq: int
    group: int
    every: int
    keep: int


class TakeSnapshot(Struct, frozen=True, array_like=True, tag="take"):
    """Read the oldest kept snapshot of a version past `after`, if there is one."""

    seq: int
    group: int
    after: int
    pull: tuple[Place, ...]


ShardRequest = Define | Step | Rest | SetPolicy | Assign | Fetch | Watch | TakeSnapshot


class Inquire(Struct, frozen=True, array_like=True, tag="inquire"):
    """Ask why a group's steps are waiting. Not numbered: it changes nothing."""

    group: int


class AskReport(Struct, frozen=True, array_like=True, tag="ask-report"):
    """Ask what a shard has done so far; the answer is a `ServerBeat`. Not numbered."""


class Bye(Struct, frozen=True, array_like=True, tag="bye"):
    """The client ends by its own wish; its session is forgotten."""
