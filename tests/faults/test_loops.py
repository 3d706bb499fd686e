"""Every form of loop with real processes: samples are in the values as often as there are epochs,
and all ranks end at one clock, whatever dies, goes on or is missed."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults import loop_victims as victims
from tests.faults.loop_victims import BATCH, EPOCHS, OF_EPOCH, SIZE, WORKERS, Loop

import paramserve as ps
from paramserve.errors import WorkerFailed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("leaves_nothing"),
    pytest.mark.filterwarnings("ignore:.* ended without rank 1, which was started again"),
]

FORMS = ["one loop", "steps", "range", "a new loader", "epochs"]
SHARDS = ["static", "own", "dynamic"]
OPTIMIZERS = ["one", "both", "in turn"]
POLICIES = {
    "sync": ps.Sync(reduce="sum"),
    "async": ps.Async(),
    "bounded": ps.BoundedStaleness(bound=2),
}


def run(loop: Loop, policy: Any, workers: int = WORKERS, **options: Any) -> ps.Result:
    # One server: under `Async` samples that only some servers have are done again, and counted.
    return ps.run(
        victims.train,
        args=(loop,),
        workers=workers,
        servers=1,
        seed=5,
        consistency=policy,
        on_worker_death=ps.Restart(1),
        timeout_s=120,
        **options,
    )


def counted(result: ps.Result, loop: Loop) -> list[np.ndarray]:
    """How often each sample is in the values: of each optimizer that steps with each batch."""
    names = ["first"] if loop.optimizers == "one" else ["first", "second"]
    found = [np.concatenate([*result.values[name].values()]).ravel() for name in names]
    return [sum(found)] if loop.optimizers == "in turn" else found


def check(result: ps.Result, loop: Loop, epochs: int = EPOCHS) -> None:
    for each in counted(result, loop):
        np.testing.assert_array_equal(each, np.full(SIZE, float(epochs)))
    if loop.shards != "dynamic":
        steps = {sum(each["clocks"]) for each in result.returns.values()}
        several = 2 if loop.optimizers == "both" else 1
        assert steps == {epochs * OF_EPOCH * several}
    if loop.reduces:
        for each in result.returns.values():
            assert set(each["reduced"]) <= {0.0, 1.0}


def optimizers_of(*about: str) -> str:
    """One way to step of several; where ranks have unequal batches and wait for each other, all of
    them step with each batch."""
    waits = "dynamic" in about and "async" not in about
    return random.Random(" ".join(about)).choice(OPTIMIZERS[: 2 if waits else 3])


RESTARTS = [
    (*about, optimizers_of(*about), number % 2 == 0 or about[:2] == ("epochs", "dynamic"))
    for number, about in enumerate(product(FORMS, SHARDS, POLICIES))
]
OF_FORMS = [(*about, optimizers_of(*about)) for about in product(FORMS, SHARDS)]


@pytest.mark.parametrize(("form", "shards", "policy", "optimizers", "reduces"), RESTARTS)
def test_loop_of_a_rank_that_is_killed(
    form: str, shards: str, policy: str, optimizers: str, reduces: bool
) -> None:
    dies_at = random.Random(f"{form} {shards} {policy}").randrange(1, EPOCHS * OF_EPOCH - 3)
    loop = Loop(form, shards, optimizers, reduces, dies_at)
    result = run(loop, POLICIES[policy])
    check(result, loop)
    if shards != "dynamic":
        assert [each.rank for each in result.restarts] == [1]


@pytest.mark.parametrize(("shards", "optimizers"), [("static", "both"), ("own", "one")])
@pytest.mark.parametrize("form", FORMS)
def test_loop_under_a_partial_policy_ends_at_one_clock(
    form: str, shards: str, optimizers: str
) -> None:
    """The slow rank misses clocks, and is killed in the middle."""
    loop = Loop(form, shards, optimizers, dies_at=5, slow=1)
    result = run(loop, ps.Sync(reduce="sum", backup=1))
    ends = [each["clocks"] for each in result.returns.values()]
    assert ends == [[EPOCHS * OF_EPOCH] * len(ends[0])] * WORKERS
    for each in counted(result, loop):
        assert each.max() <= EPOCHS
        assert each.sum() >= EPOCHS * OF_EPOCH * BATCH


@pytest.mark.parametrize(("form", "shards", "optimizers"), OF_FORMS)
def test_loop_that_goes_on_from_a_checkpoint(
    tmp_path: Path, form: str, shards: str, optimizers: str
) -> None:
    """With more epochs. With another batch size it is refused, but for leases: of these none is
    left here."""
    policy = POLICIES["sync"]
    run(Loop(form, shards, optimizers), policy, checkpoint=tmp_path)
    other = Loop(form, shards, optimizers, options={"batch_size": BATCH // 2})
    if shards == "dynamic" and form != "steps":
        check(run(other, policy, checkpoint=tmp_path, resume=True), other)
    else:
        with pytest.raises(WorkerFailed, match=r"in batches of 4|batch=2"):
            run(other, policy, checkpoint=tmp_path, resume=True)
    longer = Loop(form, shards, optimizers, epochs=EPOCHS + 2)
    result = run(longer, policy, checkpoint=tmp_path, resume=True)
    check(result, longer, EPOCHS + 2)
