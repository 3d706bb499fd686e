"""Sync over several shards: collect on each, one decision by the lead, commit on all.

A shard that holds a clock's gradients tells the lead shard (`Vote`); the lead appends one `Commit`
to the decision log (`core.decisions`); only then does a value change. Whatever could differ between
shards (a worker that died between two of its messages, a NaN, clipping by the global norm, a
hyper-parameter that does not match, a step that a shard refuses) is decided here, once. One shard
is its own lead.

A `Vote` may be lost, repeated or late: it is repeated until its `Commit` arrives, and ignored when
its clock is decided.

A worker that is started again may find its own gradients of the present clock on some shards and
not on others. Then it pushes them again to all. A shard that has told the lead of the older ones
keeps both until the lead has decided: each rank is in a clock once, whichever of the two it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any, NamedTuple

from msgspec import Struct, structs

from paramserve.core import policy_calls
from paramserve.core.policy_epochs import PolicyEpoch
from paramserve.core.shard_sessions import ShardSession
from paramserve.core.shard_storage import Keep, ShardStorage
from paramserve.core.table.block import KeyedBlock
from paramserve.errors import PolicyFailed
from paramserve.messages import Commit, Gradient, Prepare, ShardRequest, Step, Vote

NONFINITE_FIX = "lower the learning rate, clip each worker's gradient, or use on_nonfinite='skip'"
CLIP_EPSILON = 1e-6
"""Epsilon that torch.nn.utils.clip_grad_norm_ adds to the norm."""


class Contribution(Struct, eq=False):
    """One worker's gradients of one clock, unapplied, still in the memory where they arrived."""

    step: Step
    session: ShardSession
    gradients: dict[int, tuple[Gradient, Any]]
    """Header part and this shard's elements, by block."""
    finite: bool
    weight: float
    """What its gradients count for in the clock's sum."""
    large: bool = False
    """Whether a sum with its gradients may overflow."""
    refusal: tuple[str, str, str] | None = None
    """Why this shard refuses the step, if it does: (kind, failed, fix). Then it has no gradients
    here."""
    unapplied: bool = False
    """Whether that is `GroupState.unapplied`: a clock that is not decided is in no checkpoint."""


class PreparedUpdates(NamedTuple):
    """Updates of those blocks that may fail, ready before the clock is decided."""

    scale: float
    clients: tuple[int, ...]
    keep: Mapping[int, Keep]
    """What to keep of each block."""


@dataclass
class Collect:
    """What one shard has of its group's present clock, undecided."""

    pending: dict[int, Contribution] = field(default_factory=dict)
    """Contributions by rank."""
    reported: list[tuple[int, Contribution]] = field(default_factory=list)
    """Contributions by rank that a newer incarnation has pushed again after this shard had reported
    the older to the lead: the lead may still decide for it."""
    last_vote: Vote | None = None
    """Waiting for the lead's answer since it was sent."""
    repeat_at: float = 0.0
    since: float | None = None
    """When the first gradients arrived that the clock waits for; None: none has."""
    due: float | None = None
    """When its policy is to be asked again, whichever ranks have come."""
    missing: tuple[int, ...] = ()
    """Ranks that its policy waits for."""
    prepared: PreparedUpdates | None = None
    """The update, if the clock is decided with what was reported."""
    reserved: list[KeyedBlock] = field(default_factory=list)
    """Tables that keep room for it."""

    def has(self, ranks: Collection[int]) -> bool:
        """Whether all of these ranks have pushed."""
        return all(rank in self.pending for rank in ranks)

    def clients(self) -> tuple[int, ...]:
        """Clients that pushed, in the order of their ranks."""
        return tuple([self.pending[rank].session.client for rank in sorted(self.pending)])

    def has_step(self, request: ShardRequest) -> bool:
        """Whether this very request is kept here."""
        return any(each.step is request for each in self.everything())

    def everything(self) -> list[Contribution]:
        """All that is kept, those first that a newer incarnation has pushed again."""
        pending = [self.pending[rank] for rank in sorted(self.pending)]
        return [*(each for _, each in self.reported), *pending] if self.reported else pending

    def supersede(self, rank: int) -> None:
        """A newer incarnation pushes its own for this clock: forget the older one's, unless the
        lead was told of it."""
        older = self.pending.pop(rank)
        if self.last_vote is not None:
            self.reported.append((rank, older))

    def forget(self, rank: int, client: int) -> Contribution | None:
        """A rank that was no member is one again by this client, and steps this clock: what an
        older one has pushed for it is in the clock on no shard. What was kept of it, if anything.
        """
        self.reported = [each for each in self.reported if each[0] != rank]
        older = self.pending.get(rank)
        if older is None or older.session.client == client:
            return None
        del self.pending[rank]
        if not self.pending:  # the clock begins with the next gradients
            self.since, self.due, self.missing = None, None, ()
        return older

    def of_clients(self, clients: Collection[int]) -> dict[int, Contribution]:
        """What these clients pushed, by rank; they are of different ranks."""
        both = [*self.pending.items(), *self.reported]
        return {rank: each for rank, each in both if each.session.client in clients}

    def clear(self) -> None:
        self.pending = {}
        self.reported = []
        self.last_vote = None
        self.since = None
        self.due = None
        self.missing = ()
        self.forget_prepared()

    def forget_prepared(self) -> None:
        """Another update is to come, or none; or this one now."""
        self.prepared = None
        for block in self.reserved:
            block.release()
        self.reserved = []


class Lead:
    """The lead's side: gathers `Vote` of all shards for one clock and decides."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._votes: dict[int, Vote] = {}
        self.last: Commit | None = None
        """The last decision."""

    def on_vote(
        self, vote: Vote, clock: int, epoch: PolicyEpoch, enough: Callable[[frozenset[int]], bool]
    ) -> Commit | list[tuple[int, Prepare]]:
        """Take one shard's `Vote`.

        Args:
            vote: from any shard, this one included.
            clock: the first clock that is not decided yet.
            epoch: the policy of that clock.
            enough: whether it may be decided with only these contributors, where the shards have
                more, but not the same. If not, more of them are on their way to all.
        Returns:
            The decision, or what to send to which shard before there can be one.
        """
        if vote.clock != clock:
            return []
        repeated = vote.shard in self._votes
        self._votes[vote.shard] = vote
        if len(self._votes) < self._shards:
            missing = [shard for shard in range(self._shards) if shard not in self._votes]
            # The clock's last workers may have died on their way to these: they would never ask.
            proposal = Prepare(vote.group, clock, vote.contributors)
            return [(shard, proposal) for shard in missing] if repeated else []
        sets = [frozenset(each.contributors) for each in self._votes.values()]
        agreed = frozenset.intersection(*sets)
        if sets.count(agreed) == len(sets):
            parts = [self._votes[shard] for shard in sorted(self._votes)]
            self._votes = {}
            self.last = decide(parts, epoch)
            return self.last
        if not enough(agreed):
            return []
        proposal = Prepare(vote.group, clock, tuple(sorted(agreed)))
        differing = [s for s, each in self._votes.items() if set(each.contributors) != agreed]
        for shard in differing:
            del self._votes[shard]
        return [(shard, proposal) for shard in sorted(differing)]

    def forget_votes(self) -> None:
        """Forget all votes: the group has other members, and all shards vote again."""
        self._votes = {}


def decide(parts: Sequence[Vote], epoch: PolicyEpoch) -> Commit:
    """The one decision about a clock, from what all shards hold of it."""
    first = parts[0]
    nothing = Commit(first.group, first.clock, (), 0.0)
    refusal, good = None, bool(first.contributors)
    for part in parts:
        refusal = refusal or part.refusal
        good = good and part.finite and not part.skip
    if refusal:
        return structs.replace(nothing, refusal=refusal)
    contributors, weight = _ranks_of(parts)
    if not good or not contributors:
        return nothing
    try:
        scale = policy_calls.scale(epoch, weight)
    except PolicyFailed as error:
        refusal = (type(error).__name__, error.failed, error.fix)
        return structs.replace(nothing, refusal=refusal)
    if first.clip_norm > 0.0:
        norm = sqrt(sum(part.squared_norm for part in parts)) * scale
        if not isfinite(norm) and epoch.policy.on_nonfinite == "refuse":
            failed = f"the norm of the gradients of clock {first.clock} is not finite"
            return structs.replace(nothing, refusal=("NonFinite", failed, NONFINITE_FIX))
        if not isfinite(norm):
            return nothing
        scale *= min(1.0, first.clip_norm / (norm + CLIP_EPSILON))
    return structs.replace(nothing, contributors=contributors, scale=scale)


def _ranks_of(parts: Sequence[Vote]) -> tuple[tuple[int, ...], float]:
    """Ranks whose gradients make a clock, and their weights together: those that no shard leaves
    out. None, where they would be clipped by the norm of others."""
    first = parts[0]
    if not any(part.others for part in parts):
        return first.contributors, first.weight
    if first.clip_norm > 0.0 and any(part.others != first.others for part in parts):
        return (), 0.0
    lists = [dict(part.others) for part in parts if part.others]
    ranks = [each for each in first.contributors if all(each in others for others in lists)]
    return tuple(ranks), sum([lists[0][each] for each in ranks])


_CLIPPING = -1
"""Stands for the clipping where the number of a block would."""
RANKS_SHOWN_MAX = 8
"""Most ranks with one value that an error names."""


def refusal_of(
    steps: Sequence[Step], ranks: Sequence[int], blocks: Mapping[int, ShardStorage]
) -> tuple[str, str, str] | None:
    """Why these contributions cannot be one update: (kind, failed, fix).

    Args:
        blocks: of the group, by number.
    """
    if _alike(steps):
        return None
    pushing = [(rank, step) for rank, step in zip(ranks, steps, strict=True) if step.push]
    values_of: dict[int, list[tuple[int, Any]]] = {
        _CLIPPING: [(rank, step.clip_norm) for rank, step in pushing]
    }
    for rank, step in pushing:
        for header in step.push:
            values_of.setdefault(header.block, []).append((rank, header.hyper))
    for number, values in values_of.items():
        if any(value != values[0][1] for _, value in values):
            difference = _different(values, blocks.get(number))
            if difference:
                return (
                    "HyperMismatch",
                    f"the workers sent different hyper-parameters to one clock: {difference}",
                    "give all ranks the same schedule; where it follows a metric, as that of "
                    "ReduceLROnPlateau, let them agree on it: loss = worker.all_reduce(loss). A "
                    "rate that the function computes goes by worker.clock, which counts the "
                    "clocks that were decided without a rank",
                )
    return None


def _alike(steps: Sequence[Step]) -> bool:
    """Whether all that push have the same clipping, and for each block the same
    hyper-parameters."""
    alike, clip_norm, hypers = True, None, dict[int, Any]()
    for step in steps:
        if step.push:
            clip_norm = step.clip_norm if clip_norm is None else clip_norm
            alike = alike and step.clip_norm == clip_norm
        for header in step.push:
            if header.block in hypers:
                alike = alike and header.hyper == hypers[header.block]
            else:
                hypers[header.block] = header.hyper
    return alike


def _different(values: Sequence[tuple[int, Any]], block: ShardStorage | None) -> str:
    """What the ranks differ in, by name; empty: in nothing.

    Args:
        values: of each rank, its hyper-parameters for the block, or without one its clipping.
    """
    if block is None or block.rule is None:
        return _by_value("clip_norm", values)
    names = block.rule.hyper_names
    whole = [(rank, block.hyper if hyper is None else hyper) for rank, hyper in values]
    differences = []
    for at, name in enumerate(names):
        each = [(rank, hyper[at]) for rank, hyper in whole]
        if any(value != each[0][1] for _, value in each):
            differences.append(_by_value(name, each))
    return f"{'; '.join(differences)} (for {block.names})" if differences else ""


def _by_value(name: str, values: Sequence[tuple[int, Any]]) -> str:
    """Values by rank, such as "lr: rank 0 has 0.1, ranks 1, 2 have 0.01"."""
    having: dict[Any, list[int]] = {}
    for rank, value in values:
        having.setdefault(value, []).append(rank)
    sides = []
    for value, ranks in having.items():
        listed = ", ".join(map(str, ranks[:RANKS_SHOWN_MAX]))
        if len(ranks) > RANKS_SHOWN_MAX:
            listed += f" and {len(ranks) - RANKS_SHOWN_MAX} more"
        who = f"rank {listed} has" if len(ranks) == 1 else f"ranks {listed} have"
        sides.append(f"{who} {value}")
    return f"{name}: {', '.join(sides)}"
