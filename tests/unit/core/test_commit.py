from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
from msgspec import structs
from tests.suites import each_case
from tests.unit.core.rig import block_spec

from paramserve.consistency.built_in import LocalSteps, Sync
from paramserve.core.block import ShardBlock
from paramserve.core.commit import (
    CLIP_EPSILON,
    Lead,
    decide,
    refusal_of,
)
from paramserve.core.policy_epochs import epoch_from
from paramserve.messages import Commit, Gradient, Prepare, Step, Vote
from paramserve.rules import SGD

SUM = Sync(reduce="sum")
OWN = SGD(lr=0.5, momentum=0.9)
BLOCKS = {each: ShardBlock(block_spec((1,), number=each, rule=OWN), 0, OWN, 1) for each in (0, 1)}


def ready(shard: int, *contributors: int, clock: int = 0, **changes: Any) -> Vote:
    plain = Vote(0, clock, shard, contributors, True, False, float(len(contributors)), 0)
    return structs.replace(plain, **changes)


def commit(*contributors: int, clock: int = 0, scale: float = 1.0) -> Commit:
    return Commit(0, clock, contributors, scale)


def vote(lead: Lead, message: Vote, clock: int) -> Commit | list[tuple[int, Prepare]]:
    return lead.on_vote(message, clock, epoch_from(0, SUM), lambda clients: True)


# --- who is left out


def test_clock_has_those_that_no_shard_leaves_out() -> None:
    first = ready(0, 5, 6, 7, others=((5, 2.0), (7, 1.0)), weight=3.0)
    second = ready(1, 5, 6, 7, others=((6, 4.0), (7, 1.0)), weight=5.0)
    mean = epoch_from(0, LocalSteps(2, on_nonfinite="skip"))
    assert decide([first, second], mean) == commit(7, scale=1.0)
    plain = ready(2, 5, 6, 7, weight=7.0)
    assert decide([plain, first], mean) == commit(5, 7, scale=1.0 / 3.0)
    assert decide([first, ready(1, 5, 6, 7, others=((6, 4.0),))], mean) == commit(scale=0.0)
    clipped = [structs.replace(each, clip_norm=1.0) for each in (first, plain)]
    assert decide(clipped, mean) == commit(scale=0.0), "the norm is of others"


# --- who decides, and when


def test_lead_decides_once_when_all_shards_have_voted_alike() -> None:
    lead = Lead(2)
    assert vote(lead, ready(1, 5, 6), 0) == []
    assert vote(lead, ready(0, 5, 6), 0) == commit(5, 6)
    assert vote(lead, ready(1, 5, 6), 1) == [], "its shard has the decision from the log"


def test_lead_ready_of_another_clock_is_ignored() -> None:
    lead = Lead(2)
    assert vote(lead, ready(0, 5, clock=3), 4) == []
    assert vote(lead, ready(0, 5, clock=5), 4) == []
    assert vote(lead, ready(1, 5, clock=4), 4) == []


def test_lead_differing_shards_are_asked_for_the_intersection() -> None:
    lead = Lead(3)
    vote(lead, ready(0, 5, 6), 0)
    vote(lead, ready(1, 5), 0)
    proposal = Prepare(0, 0, (5,))
    assert vote(lead, ready(2, 5, 7), 0) == [(0, proposal), (2, proposal)]
    assert vote(lead, ready(2, 5), 0) == []
    assert vote(lead, ready(0, 5), 0) == commit(5)


def test_lead_late_copy_of_an_older_ready_is_asked_again() -> None:
    lead = Lead(2)
    vote(lead, ready(0, 5), 0)
    proposal = [(1, Prepare(0, 0, (5,)))]
    assert vote(lead, ready(1, 5, 6), 0) == proposal
    assert vote(lead, ready(1, 5, 6), 0) == proposal
    assert vote(lead, ready(1, 5), 0) == commit(5)


def test_lead_repeated_ready_asks_the_shards_that_are_silent() -> None:
    lead = Lead(3)
    assert vote(lead, ready(1, 5), 0) == []
    proposal = Prepare(0, 0, (5,))
    assert vote(lead, ready(1, 5), 0) == [(0, proposal), (2, proposal)]


def test_lead_shard_that_holds_nothing_leaves_an_empty_commit() -> None:
    lead = Lead(2)
    vote(lead, ready(1, 5), 0)
    assert vote(lead, ready(0), 0) == [(1, Prepare(0, 0, ()))]
    assert vote(lead, ready(1), 0) == commit(scale=0.0)


def test_lead_that_forgets_the_votes_decides_when_all_shards_vote_again() -> None:
    lead = Lead(2)
    vote(lead, ready(1, 5), 0)
    lead.forget_votes()
    assert vote(lead, ready(0, 5), 0) == []
    assert vote(lead, ready(1, 5, 6), 0) == [(1, Prepare(0, 0, (5,)))]


# --- what is decided


def test_decide_scale_is_the_policys() -> None:
    part = ready(0, 5, 6, weight=4.0)
    assert decide([part], epoch_from(0, Sync(reduce="mean"))) == commit(5, 6, scale=0.25)
    assert decide([part], epoch_from(0, SUM)) == commit(5, 6)


def test_decide_refusal_of_one_shard_is_everyones() -> None:
    refusal = ("HyperMismatch", "why", "fix")
    decided = decide([ready(0, 5, skip=True), ready(1, 5, refusal=refusal)], epoch_from(0, SUM))
    assert (decided.contributors, decided.refusal) == ((), refusal)


def test_decide_skip_of_one_worker_skips_the_clock() -> None:
    assert decide([ready(0, 5), ready(1, 5, skip=True)], epoch_from(0, SUM)) == commit(scale=0.0)


def test_decide_nan_on_one_shard_is_refused_or_skipped_everywhere() -> None:
    why = ("NonFinite", "the gradients of ranks [3] hold NaN", "do not")
    refused = decide([ready(0, 5), ready(1, 5, finite=False, refusal=why)], epoch_from(0, SUM))
    assert refused.contributors == ()
    assert refused.refusal == why
    parts = [ready(0, 5), ready(1, 5, finite=False)]
    assert decide(parts, epoch_from(0, Sync(on_nonfinite="skip"))) == commit(scale=0.0)


@each_case("reduce", ["sum", "mean"])
def test_decide_clips_by_the_norm_over_all_shards(reduce: Any) -> None:
    squared = 9.0, 16.0
    parts = [
        ready(shard, 5, 6, clip_norm=2.0, squared_norm=each) for shard, each in enumerate(squared)
    ]
    plain = 0.5 if reduce == "mean" else 1.0
    norm = sqrt(sum(squared)) * plain
    assert decide(parts, epoch_from(0, Sync(reduce=reduce))).scale == pytest.approx(
        plain * 2.0 / (norm + CLIP_EPSILON)
    )


def test_decide_small_norm_is_not_clipped() -> None:
    part = ready(0, 5, clip_norm=2.0, squared_norm=1.0)
    assert decide([part], epoch_from(0, SUM)).scale == 1.0


# --- what cannot be one update


def step(*headers: Gradient, **changes: Any) -> Step:
    return structs.replace(Step(1, 0, 0, True, headers, ()), **changes)


def header(block: int = 0, hyper: tuple[float, ...] | None = None) -> Gradient:
    return Gradient(block, 0, 0, None, hyper)


def test_refusal_different_hyper_parameters_are_named_by_rank() -> None:
    slow, fast = SGD(lr=0.01, momentum=0.9).hyper(), SGD(lr=0.1, momentum=0.9).hyper()
    steps = [step(header(hyper=each)) for each in (slow, fast, slow)]
    kind, failed, fix = refusal_of(steps, [3, 7, 8], BLOCKS)
    assert kind == "HyperMismatch"
    assert "lr: ranks 3, 8 have 0.01, rank 7 has 0.1 (for 'b0.0')" in failed
    assert "momentum" not in failed
    assert "worker.all_reduce" in fix


def test_refusal_hyper_parameters_that_are_the_blocks_own_may_be_left_out() -> None:
    steps = [step(header(hyper=OWN.hyper())), step(header())]
    assert refusal_of(steps, [0, 1], BLOCKS) is None
    _, failed, _ = refusal_of(
        [step(header(hyper=SGD(lr=0.1, momentum=0.9).hyper())), *steps], [0, 1, 2], BLOCKS
    )
    assert "lr: rank 0 has 0.1, ranks 1, 2 have 0.5" in failed


def test_refusal_different_clipping_is_named() -> None:
    steps = [step(header()), step(header(), clip_norm=1.0)]
    kind, failed, _ = refusal_of(steps, [0, 1], BLOCKS)
    assert (kind, failed.endswith("clip_norm: rank 0 has 0.0, rank 1 has 1.0")) == (
        "HyperMismatch",
        True,
    )


def test_refusal_equal_or_absent_pushes_fit() -> None:
    same = step(header(0, SGD(lr=0.1).hyper()), header(1))
    assert (
        refusal_of([same, same, step(skip=True), step(clip_norm=5.0)], [0, 1, 2, 3], BLOCKS) is None
    )
    assert refusal_of([], [], BLOCKS) is None


def test_refusal_pushes_to_different_blocks_fit() -> None:
    assert (
        refusal_of([step(header(0)), step(header(1, SGD(lr=0.1).hyper()))], [0, 1], BLOCKS) is None
    )
