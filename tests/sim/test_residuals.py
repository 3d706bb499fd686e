"""Clusters with codecs are lost in simulations, and go on with the residuals of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.sim.residual_resumes import resumed_with_residuals

from paramserve.checkpoint.residuals import SavedResiduals
from paramserve.client.encoding import Captured, Encoder
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Sync
from paramserve.core.shard import Shard
from paramserve.core.shard_sessions import Answer, ShardSession
from paramserve.messages import Step
from paramserve_testing import Violation

SEEDS = 6
FOUND_WITHIN = 20
"""Seeds after which a planted bug has been found, from the one that stands with it."""
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
    for seed in range(SEEDS):
        cluster = resumed_with_residuals(seed, consistency=POLICIES[policy])
        seen += cluster.seen
        seen["committed"] += len(cluster.committed)
        seen["failed"] += cluster.failed
    assert seen["committed"] > 0
    assert seen["failed"] == 0
    assert seen["taken over"] > 0


def with_what_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual of a checkpoint has what pushes behind the cut have left out."""

    def capture(encoder: Encoder, cut: int) -> None:
        encoder._cut, encoder._awaited = cut, None
        left = []
        for number in encoder._residuals:
            into = encoder._memory(encoder._blocks[number])
            encoder._left_out(encoder._blocks[number], into)
            left.append((encoder._blocks[number], into))
        assert encoder.captured is not None
        encoder.captured(Captured(cut, tuple(left)))

    monkeypatch.setattr(Encoder, "_capture", capture)


def of_an_earlier_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that come when a cut is taken say that it lies before them, though it does not."""
    after_cut = Shard._after_cut

    def before_it(shard: Shard, session: ShardSession, answer: Answer) -> Answer:
        assert session.cut is not None
        session.cut = session.cut[0], 0
        return after_cut(shard, session, answer)

    monkeypatch.setattr(Shard, "_after_cut", before_it)


def of_a_later_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers do not say that a cut lies before them."""
    monkeypatch.setattr(Shard, "_after_cut", lambda shard, session, answer: answer)


def before_answers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that hears of a cut copies what it has, though answers of before are unread."""
    monkeypatch.setattr(
        Encoder, "_capture_awaited", lambda encoder, cut, seq: encoder._capture(cut)
    )


def loaded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is started again begins once more with the residual of the checkpoint."""

    def feeds_back(shard: Shard, session: ShardSession, step: Step) -> None:
        session.feeds_back = session.feeds_back or any(each.extent for each in step.push)

    monkeypatch.setattr(Shard, "_feeds_back", feeds_back)


def without_ranks_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks have left out that the run goes on without is lost."""

    def own(saved: SavedResiduals, block: int, rank: int) -> list[str]:
        return [path for key, path in saved._paths.items() if key == (block, rank)]

    monkeypatch.setattr(SavedResiduals, "_for", own)


PLANTED: tuple[tuple[Callable[[pytest.MonkeyPatch], Any], Policy, int], ...] = (
    (with_what_is_on_its_way, Async(), 0),
    # Steps that wait to read are answered behind a cut that has them.
    (of_an_earlier_push, BoundedStaleness(1), 0),
    (of_a_later_push, Async(), 4),
    (before_answers_are_read, Async(), 6),
    (loaded_twice, Async(), 27),
    (without_ranks_that_are_gone, Async(), 38),
)


@pytest.mark.parametrize(
    ("plant", "policy", "first"), PLANTED, ids=[plant.__name__ for plant, *_ in PLANTED]
)
def test_planted_bug_of_saved_residuals_is_found(
    plant: Callable[[pytest.MonkeyPatch], Any],
    policy: Policy,
    first: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    seeds = range(first, first + FOUND_WITHIN)
    assert any(is_found(seed, policy) for seed in seeds), f"not in {seeds}"


def is_found(seed: int, policy: Policy) -> bool:
    try:
        resumed_with_residuals(seed, consistency=policy)
    except Violation as violation:
        return "residual" in str(violation)
    return False
