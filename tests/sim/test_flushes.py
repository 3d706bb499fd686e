"""Clusters with codecs are lost in simulations, and go on from a checkpoint behind a flush."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.sim.flushed_resumes import resumed_with_flushes

from paramserve.client.encoding import Encoder
from paramserve.client.step_parts import BlockPush
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Sync
from paramserve.core import shard as shard_module
from paramserve.core.cut import CutAgreement
from paramserve.core.flush import Flush
from paramserve.core.shard_sessions import Answer, ShardSession
from paramserve.messages import Done, Step
from paramserve_testing import Violation

SEEDS = 6
FOUND_WITHIN = 40
"""Seeds after which a planted bug has been found, from the one that stands with it."""
RARE = {"async-drop": (61,)}
"""A worker is lost before it is told that one shard has dropped its gradient, and another not."""
POLICIES: Mapping[str, Policy] = {
    "async": Async(),
    "async-drop": Async(drop_after=1),
    "bounded": BoundedStaleness(2),
    "sync": Sync("sum"),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_applied_is_the_gradients_less_the_residuals_also_behind_a_loss(
    policy: str,
) -> None:
    seen: Counter[str] = Counter()
    for seed in (*range(SEEDS), *RARE.get(policy, ())):
        cluster = resumed_with_flushes(seed, consistency=POLICIES[policy])
        seen += cluster.seen
        seen["committed"] += len(cluster.committed)
        seen["failed"] += cluster.failed
    assert seen["committed"] > 0
    assert seen["failed"] == 0
    assert seen["flushes"] > 0
    assert seen["flushed"] > 0


def test_cut_of_a_synchronous_cluster_has_nothing_that_is_left_out() -> None:
    """Where no worker stands still, each checkpoint lies right behind a flush."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen += resumed_with_flushes(seed, all_flush=True, consistency=Sync("sum")).seen
    assert seen["flushed"] > 0


def the_cut_waits_for_no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut is taken as soon as clients are asked."""
    monkeypatch.setattr(Flush, "is_over", lambda flush: True)


def steps_behind_the_flush_are_in_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard 0 goes on behind the clock of a flush, and then takes the cut."""

    def is_over(flush: Flush) -> bool:
        _, group, clock = flush.request
        return group < 0 or flush._groups[group].state.committed > clock + 1

    monkeypatch.setattr(Flush, "is_over", is_over)
    monkeypatch.setattr(CutAgreement, "stop_behind", lambda cuts, flush, now: None)


def a_flush_does_not_wait_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts with what gradients on their way leave out, which may not be applied."""
    monkeypatch.setattr(Encoder, "waits", False)


def a_flushed_step_keeps_its_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left out stays so behind a gradient that had it."""
    whole = Encoder.whole

    def keeps(encoder: Encoder, push: BlockPush, taken: list[Any]) -> Any:
        encoded = whole(encoder, push, taken)
        if encoded is not None:
            encoded.change.fill(0.0)
        return encoded

    monkeypatch.setattr(Encoder, "whole", keeps)


def a_flush_that_was_dropped_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that its policy has dropped has flushed what was left out."""
    note = shard_module.note

    def counts(session: ShardSession, step: Step, answer: Answer, now: float) -> None:
        done = answer.message
        if isinstance(done, Done) and done.skipped and step.flush:
            answer = Answer(Done(step.seq))
        note(session, step, answer, now)

    monkeypatch.setattr(shard_module, "note", counts)


PLANTED: tuple[Any, ...] = (
    (the_cut_waits_for_no_flush, {"all_flush": True, "consistency": Sync("sum")}, 0),
    (steps_behind_the_flush_are_in_the_cut, {"all_flush": True, "consistency": Sync("sum")}, 0),
    (a_flush_does_not_wait_for_answers, {"all_flush": True, "consistency": Sync("sum")}, 5045),
    (a_flushed_step_keeps_its_residual, {"consistency": Sync("sum")}, 0),
    pytest.param(
        a_flush_that_was_dropped_counts,
        {"consistency": Async(drop_after=1)},
        0,
        marks=pytest.mark.slow,
    ),
)


@pytest.mark.parametrize(
    ("plant", "options", "first"), PLANTED, ids=lambda given: getattr(given, "__name__", "")
)
def test_planted_bug_of_flushes_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    options: Mapping[str, Any],
    first: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    found = any(is_found(seed, options) for seed in range(first, first + FOUND_WITHIN))
    assert found, f"not in {FOUND_WITHIN}"


def is_found(seed: int, options: Mapping[str, Any]) -> bool:
    try:
        resumed_with_flushes(seed, **options)
    except Violation as violation:
        return any(word in str(violation) for word in ("residual", "less", "is told"))
    return False
