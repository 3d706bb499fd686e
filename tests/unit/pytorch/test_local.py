"""Optimizers that step by themselves: each exchange is what the papers' formulas say."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.pytorch.fakes import FakeCluster, on_all_ranks
from tests.unit.pytorch.test_optimizer_step import loss_of, small_model
from torch import nn

from paramserve.consistency.built_in import ElasticAverage, LocalSteps, Sync
from paramserve.errors import NonFinite
from paramserve.pytorch.optimizer import adopt
from paramserve.rules.sgd import SGD

PLAIN = SGD(lr=1.0)
Build = Callable[[nn.Module], torch.optim.Optimizer]
Params = list[torch.Tensor]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups of different learning rates."""
    return torch.optim.SGD(
        [
            {"params": model[0].parameters()},
            {"params": model[3].parameters(), "lr": 0.2, "weight_decay": 0.1},
        ],
        lr=0.05,
        momentum=0.9,
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


def build(dtype: torch.dtype) -> nn.Module:
    return small_model().to(dtype)


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def own_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    images = torch.randn(5, 1, 4, 4, generator=generator).to(dtype_of(model))
    optimizer.zero_grad()
    model(images).square().mean().backward()
    optimizer.step()


def copies(model: nn.Module) -> Params:
    return [param.detach().clone() for param in model.parameters()]


def put(model: nn.Module, values: Params) -> None:
    with torch.no_grad():
        for param, value in zip(model.parameters(), values, strict=True):
            param.copy_(value)


def center_of(cluster: FakeCluster, model: nn.Module) -> Params:
    values = cluster.result()
    return [torch.from_numpy(values[name]) for name, _ in model.named_parameters()]


def assert_close(actual: Params, expected: Params, dtype: torch.dtype) -> None:
    near = 1e-12 if dtype == torch.float64 else 1e-6
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=near, atol=near)


def train_on_all(
    cluster: FakeCluster, make: Build, steps: int, dtype: torch.dtype, **options: Any
) -> list[list[Params]]:
    """For each rank, the values after each step and, last, after the end."""

    def run(worker: Any) -> tuple[nn.Module, list[Params]]:
        model = build(dtype)
        if worker.rank:
            put(model, [torch.ones_like(param) for param in model.parameters()])
        optimizer = adopt(worker, model, make(model), **options)
        after = []
        for step in range(steps):
            own_step(model, optimizer, step, worker.rank)
            after.append(copies(model))
        return model, after

    return [[*after, copies(model)] for model, after in on_all_ranks(cluster, run)]


# --- LocalSteps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [sgd, adam])
def test_local_steps_plain_outer_rule_averages_the_models(make: Build, dtype: torch.dtype) -> None:
    cluster = FakeCluster(2, policy=LocalSteps(every=3, outer=PLAIN))
    ranks = train_on_all(cluster, make, 7, dtype)
    models = [build(dtype) for _ in range(2)]
    optimizers = [make(model) for model in models]
    for step in range(7):
        for rank in range(2):
            own_step(models[rank], optimizers[rank], step, rank)
        if step in (2, 5):
            mean = [(a + b) / 2 for a, b in zip(*map(copies, models), strict=True)]
            for model in models:
                put(model, mean)
        for rank in range(2):
            assert_close(ranks[rank][step], copies(models[rank]), dtype)
    # The seventh step is a rest, which is exchanged at the end.
    mean = [(a + b) / 2 for a, b in zip(*map(copies, models), strict=True)]
    assert_close(center_of(cluster, models[0]), mean, dtype)
    for rank in range(2):
        assert_close(ranks[rank][-1], mean, dtype)


def test_local_steps_finish_without_a_rest_sends_nothing() -> None:
    cluster = FakeCluster(2, policy=LocalSteps(every=3, outer=PLAIN))
    train_on_all(cluster, sgd, 6, torch.float32)
    assert len(cluster.steps()) == 2 * 2 * 1
    assert [sent.weight for sent in cluster.steps()] == [3.0] * 4


def test_local_steps_finish_rank_without_a_rest_is_not_waited_for() -> None:
    cluster = FakeCluster(2, policy=LocalSteps(every=2, outer=PLAIN))

    def run(worker: Any) -> nn.Module:
        model = build(torch.float64)
        optimizer = adopt(worker, model, sgd(model))
        for step in range(2 + worker.rank):
            own_step(model, optimizer, step, worker.rank)
        return model

    _, model = on_all_ranks(cluster, run)
    assert [sent.weight for sent in cluster.steps()] == [2.0, 2.0, 1.0]
    assert_close(center_of(cluster, model), copies(model), torch.float64)


def test_local_steps_weights_of_an_exchange_are_added_up() -> None:
    cluster = FakeCluster(2, policy=LocalSteps(every=2, outer=PLAIN))

    def run(worker: Any) -> Params:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        drawn: list[int] = []
        optimizer = adopt(
            worker, model, torch.optim.SGD(model.parameters(), lr=1.0), weight=lambda: drawn[-1]
        )
        for _ in range(2):
            drawn.append(1 + worker.rank + len(drawn))
            model.weight.grad = torch.full((1, 1), -1.0 - worker.rank)
            optimizer.step()
        return copies(model)

    values = on_all_ranks(cluster, run)
    assert sorted(sent.weight for sent in cluster.steps()) == [1 + 2, 2 + 3]
    for each in values:
        assert float(each[0]) == pytest.approx((3 * 2.0 + 5 * 4.0) / 8)


@pytest.mark.parametrize("policy", [LocalSteps(every=2), ElasticAverage(rho=1.0), None])
def test_weight_none_is_what_the_loader_knows(policy: Any) -> None:
    cluster = FakeCluster(policy=policy)
    worker, model = cluster.worker(), small_model()
    optimizer = adopt(worker, model, torch.optim.SGD(model.parameters(), lr=0.1))
    known = (None, None, 5.0, 7.0, 4.0)  # since the last exchange
    for step, worker.leases.step_samples in enumerate(known):
        own_step(model, optimizer, step, 0)
    worker.leases.step_samples = None  # the loop over the loader has ended
    worker.optimizers.finish()
    wanted = [2.0, 7.0, 4.0] if isinstance(policy, LocalSteps) else [1.0, 1.0, 5.0, 7.0, 4.0]
    assert [sent.weight for sent in cluster.steps()] == wanted


def test_local_steps_pushes_what_has_no_gradient_and_what_was_changed_between() -> None:
    cluster = FakeCluster(policy=LocalSteps(every=2, outer=PLAIN))
    model = small_model()
    optimizer = adopt(cluster.worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with torch.no_grad():
                model[3].bias += 1.0
            optimizer.step()
    assert_close(center_of(cluster, model), copies(model), torch.float32)
    torch.testing.assert_close(model[3].bias, small_model()[3].bias + 2.0)
    assert cluster.steps()[0].push[0].active is None


# --- ElasticAverage ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rho", "every"), [(2.25, 1), (2.25, 3), (4.5, 2)])
def test_elastic_average_equals_the_paper(rho: float, every: int, dtype: torch.dtype) -> None:
    """Algorithm 1 of Zhang et al. for two workers in turn, with alpha = lr * rho per group."""
    cluster = FakeCluster(2, policy=ElasticAverage(rho=rho, every=every))
    models, plains = ([build(dtype) for _ in range(2)] for _ in range(2))
    optimizers = [adopt(cluster.worker(r), models[r], sgd(models[r])) for r in range(2)]
    plain_optimizers = [sgd(model) for model in plains]
    alphas = [0.05 * rho] * 2 + [0.2 * rho] * 2
    center = copies(plains[0])
    for step, rank in product(range(7), range(2)):
        own_step(models[rank], optimizers[rank], step, rank)
        own_step(plains[rank], plain_optimizers[rank], step, rank)
        if (step + 1) % every == 0:
            x = copies(plains[rank])
            pulls = [a * (xi - c) for a, xi, c in zip(alphas, x, center, strict=True)]
            put(plains[rank], [xi - pull for xi, pull in zip(x, pulls, strict=True)])
            center = [c + pull for c, pull in zip(center, pulls, strict=True)]
        assert_close(copies(models[rank]), copies(plains[rank]), dtype)
        assert_close(center_of(cluster, models[rank]), center, dtype)
    assert not np.allclose(models[0][3].weight.detach(), models[1][3].weight.detach())


def test_elastic_average_finish_with_a_rest_moves_by_the_last_steps_rate() -> None:
    cluster = FakeCluster(policy=ElasticAverage(rho=5.0, every=4))
    worker, model = cluster.worker(), build(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 2 else 0.0)
    adopt(worker, model, optimizer)
    first = copies(model)
    for step in range(2):
        own_step(model, optimizer, step, 0)
        scheduler.step()
    x = copies(model)
    worker.optimizers.finish()
    assert len(cluster.steps()) == 1
    middle = [(a + b) / 2 for a, b in zip(first, x, strict=True)]
    assert_close(center_of(cluster, model), middle, torch.float64)
    assert_close(copies(model), middle, torch.float64)


def test_elastic_average_workers_of_different_rates_share_a_center() -> None:
    cluster = FakeCluster(2, policy=ElasticAverage(rho=2.0))
    for rank, lr in enumerate((0.1, 0.3)):
        model = small_model()
        plain = torch.optim.SGD(model.parameters(), lr=lr)
        own_step(model, adopt(cluster.worker(rank), model, plain), 0, rank)
    assert len(cluster.blocks) == 1
    assert [sent.push[0].hyper[0] for sent in cluster.steps()] == pytest.approx([0.2, 0.6])


def test_elastic_average_rate_of_zero_moves_nothing() -> None:
    """As a scheduler's warm-up from zero begins."""
    cluster = FakeCluster(policy=ElasticAverage(rho=5.0))
    model = build(torch.float64)
    first = copies(model)
    optimizer = adopt(cluster.worker(), model, torch.optim.SGD(model.parameters(), lr=0.0))
    own_step(model, optimizer, 0, 0)
    assert_close(copies(model), first, torch.float64)
    assert_close(center_of(cluster, model), first, torch.float64)


@pytest.mark.parametrize("lr", [0.5, 0.7, -0.1, math.nan])
def test_elastic_average_too_strong_spring_is_refused_at_adoption_and_exchange(lr: float) -> None:
    cluster = FakeCluster(policy=ElasticAverage(rho=2.0, every=2))
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match=r"lr .* rho 2"):
        adopt(cluster.worker(), model, optimizer)
    assert not cluster.blocks
    optimizer.param_groups[0]["lr"] = 0.1
    adopt(cluster.worker(), model, optimizer)
    optimizer.param_groups[0]["lr"] = lr
    own_step(model, optimizer, 0, 0)
    with pytest.raises(ValueError, match=r"lr .* rho 2"):
        own_step(model, optimizer, 1, 0)
    assert not cluster.steps()
    optimizer.param_groups[0]["lr"] = 0.1


def test_elastic_average_optimizer_without_lr_is_refused() -> None:
    class NoRate(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None: ...

    model, cluster = small_model(), FakeCluster(policy=ElasticAverage(rho=2.0))
    with pytest.raises(ValueError, match="has no lr"):
        adopt(cluster.worker(), model, NoRate(model.parameters()))
    assert not cluster.blocks


def test_elastic_average_skipped_values_start_again_from_the_center() -> None:
    cluster = FakeCluster(policy=ElasticAverage(rho=2.0, on_nonfinite="skip"))
    model = small_model()
    optimizer = adopt(cluster.worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    own_step(model, optimizer, 0, 0)
    center = center_of(cluster, model)
    model[3].bias.grad = torch.full((3,), math.nan)
    optimizer.step()
    assert_close(copies(model), center, torch.float32)
    assert_close(center_of(cluster, model), center, torch.float32)


# --- both ----------------------------------------------------------------------------------------

POLICIES = [LocalSteps(every=3, outer=PLAIN), ElasticAverage(rho=2.0, every=3)]


@pytest.fixture(params=POLICIES, ids=lambda policy: type(policy).__name__)
def policy(request: pytest.FixtureRequest) -> Any:
    return request.param


def adopted(
    policy: Any, make: Build = adam, **options: Any
) -> tuple[FakeCluster, nn.Module, torch.optim.Optimizer]:
    cluster, model = FakeCluster(), small_model()
    worker = cluster.worker()
    return cluster, model, adopt(worker, model, make(model), consistency=policy, **options)


def test_consistency_is_the_groups_own_and_goes_to_all_ranks(policy: Any) -> None:
    cluster = FakeCluster(2, sync=False)
    train_on_all(cluster, sgd, 3, torch.float32, consistency=policy)
    assert cluster.policies == {"model": policy}
    assert len(cluster.steps()) == 2
    assert all(sent.tick for sent in cluster.steps())


def test_consistency_of_a_served_optimizer_is_passed_on() -> None:
    cluster, model = FakeCluster(sync=False), small_model()
    optimizer = adopt(cluster.worker(), model, adam(model), consistency=Sync(reduce="sum"))
    own_step(model, optimizer, 0, 0)
    assert cluster.policies == {"model": Sync(reduce="sum")}
    assert cluster.block("model").rule.name == "Adam"


def test_adopt_all_ranks_start_from_rank_0(policy: Any) -> None:
    cluster = FakeCluster(2, policy=policy)
    first, second = train_on_all(cluster, sgd, 0, torch.float32)
    assert_close(first[-1], copies(small_model()), torch.float32)
    assert_close(second[-1], first[-1], torch.float32)


def test_adopt_later_worker_starts_from_the_servers(policy: Any) -> None:
    cluster, model, optimizer = adopted(policy)
    for step in range(3):
        own_step(model, optimizer, step, 0)
    other = small_model(seed=2)
    again = cluster.worker(rank=1)
    again.incarnation = 2
    adopt(again, other, adam(other), consistency=policy)
    assert_close(copies(other), center_of(cluster, model), torch.float32)
    assert not cluster.stored


def test_step_before_the_exchange_is_torchs_own(policy: Any) -> None:
    cluster, model, optimizer = adopted(policy, sgd)
    expected = small_model()
    plain = sgd(expected)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, plain)]
    for step in range(2):
        for each, opt, scheduler in zip(
            (model, expected), (optimizer, plain), schedulers, strict=True
        ):
            own_step(each, opt, step, 0)
            scheduler.step()
        assert_close(copies(model), copies(expected), torch.float64)
    assert isinstance(optimizer, torch.optim.SGD)
    assert not cluster.steps()
    assert not optimizer.zero_grad()
    assert model[0].weight.grad is None


def test_scheduler_built_before_adoption_steps_locally(policy: Any) -> None:
    model, cluster = small_model(), FakeCluster(policy=policy)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    adopt(cluster.worker(), model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            own_step(model, optimizer, step, 0)
            scheduler.step()
    assert len(cluster.steps()) == 1
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 8)


def test_step_hooks_are_called_once_around_the_exchange(policy: Any) -> None:
    cluster, model, optimizer = adopted(policy)
    seen: list[tuple[str, int]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(("before", len(cluster.steps()))))
    optimizer.register_step_post_hook(lambda *_: seen.append(("after", len(cluster.steps()))))
    for step in range(3):
        own_step(model, optimizer, step, 0)
    once = [("before", 0), ("after", 0)]
    assert seen == [*once, *once, ("before", 0), ("after", 1)]


def test_state_dict_is_torchs_own_and_loads_back(policy: Any) -> None:
    cluster, model, optimizer = adopted(policy)
    expected = small_model()
    plain = adam(expected)
    for step in range(2):
        own_step(model, optimizer, step, 0)
        own_step(expected, plain, step, 0)
    mine, theirs = optimizer.state_dict(), plain.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for key, entry in theirs["state"].items():
        for name, value in entry.items():
            assert torch.equal(mine["state"][key][name], value), name
    kept = copy.deepcopy(mine)
    own_step(model, optimizer, 2, 0)
    optimizer.load_state_dict(kept)
    assert [int(e["step"]) for e in optimizer.state_dict()["state"].values()] == [2] * 4
    assert not cluster.stored
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        pickle.dumps(optimizer)


def test_state_from_before_adoption_stays_here(policy: Any) -> None:
    model, cluster = small_model(), FakeCluster(policy=policy)
    optimizer = adam(model)
    own_step(model, optimizer, 0, 0)
    adopt(cluster.worker(), model, optimizer)
    assert [int(e["step"]) for e in optimizer.state_dict()["state"].values()] == [1] * 4
    assert not cluster.stored


def test_add_param_group_between_exchanges_is_exchanged_too(policy: Any) -> None:
    cluster = FakeCluster(2, policy=policy)

    def run(worker: Any) -> nn.Module:
        model = build(torch.float64)
        optimizer = adopt(worker, model, torch.optim.SGD(model[0].parameters(), lr=0.05))
        own_step(model, optimizer, 0, worker.rank)
        with torch.no_grad():
            model[3].bias += worker.rank
        optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.1})
        assert torch.equal(model[3].bias, small_model()[3].bias.double()), "rank 0's"
        return model

    first, second = on_all_ranks(cluster, run)
    assert [len(sent.push) for sent in cluster.steps()] == [2, 2], "at the end, with the rest"
    wanted = build(torch.float64)[3].weight
    torch.testing.assert_close(first[3].weight, wanted)
    torch.testing.assert_close(second[3].weight, wanted)


@pytest.mark.parametrize("how", ["step", "unscale_", "fused"])
def test_grad_scaler_skipped_step_counts_and_changes_nothing(policy: Any, how: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        # eps this large: with a small one Adam does the same at every scale.
        return torch.optim.Adam(model.parameters(), lr=0.02, eps=1.0, fused=how == "fused")

    cluster, model, optimizer = adopted(policy, make)
    expected = small_model()
    plain = torch.optim.Adam(expected.parameters(), lr=0.02, eps=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        before = copies(model)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 1:
            model[3].bias.grad[0] = (math.inf, math.nan)[how == "step"]
        if how == "unscale_":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert all(map(torch.equal, copies(model), before))
            assert scaler.get_scale() == 512.0
        if step == 0:
            plain.zero_grad()
            loss_of(expected, step).backward()
            plain.step()
            assert_close(copies(model), copies(expected), torch.float32)
        assert len(cluster.steps()) == (step == 2)
    assert [int(e["step"]) for e in optimizer.state_dict()["state"].values()] == [2] * 4


def test_clip_norm_clips_each_own_step(policy: Any) -> None:
    cluster, model, optimizer = adopted(policy, sgd, clip_norm=0.05)
    expected = small_model()
    plain = sgd(expected)
    for step in range(2):
        own_step(model, optimizer, step, 0)
        plain.zero_grad()
        loss_of(expected, step).backward()
        assert torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.05) > 0.05
        plain.step()
        assert_close(copies(model), copies(expected), torch.float64)
    own_step(model, optimizer, 2, 0)
    assert cluster.steps()[0].clip_norm == 0.0, "a difference is not clipped"


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_closure_of_an_optimizer_that_calls_it_many_times(
    policy: Any, clip_norm: float | None
) -> None:
    """LBFGS cannot run on the servers; here it runs as itself."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    cluster, model, optimizer = adopted(policy, make, clip_norm=clip_norm)
    expected = small_model()
    plain = make(expected)

    def closure_of(model: nn.Module, opt: torch.optim.Optimizer, norm: float | None) -> Any:
        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            if norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
            return loss

        return closure

    for _ in range(2):
        loss = optimizer.step(closure_of(model, optimizer, None))
        assert torch.equal(loss, plain.step(closure_of(expected, plain, clip_norm)))
        assert_close(copies(model), copies(expected), torch.float64)
    assert not cluster.steps()


def test_step_of_ones_own_class_is_used(policy: Any) -> None:
    class Signs(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        def step(self) -> str:  # takes no closure
            with torch.no_grad():
                for group in self.param_groups:
                    for param in group["params"]:
                        param -= group["lr"] * param.grad.sign()
            return "stepped"

    _, model, optimizer = adopted(policy, lambda model: Signs(model.parameters(), lr=0.25))
    before = copies(model)
    loss_of(model, 0).backward()
    assert optimizer.step() == "stepped"
    wanted = [
        value - 0.25 * param.grad.sign()
        for value, param in zip(before, model.parameters(), strict=True)
    ]
    assert_close(copies(model), wanted, torch.float32)


def test_nonfinite_values_raise_at_the_exchange_and_nothing_is_sent(policy: Any) -> None:
    cluster, model, optimizer = adopted(policy, sgd)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step < 2:
            optimizer.step()
    model[3].bias.grad[0] = math.nan
    with pytest.raises(NonFinite, match=r"3\.bias"):
        optimizer.step()
    assert not cluster.steps()


def test_buffers_and_untrained_parameters_are_in_the_result(policy: Any) -> None:
    class Normed(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*small_model(), nn.BatchNorm1d(3))

    cluster, model = FakeCluster(policy=policy), Normed()
    worker = cluster.worker()
    trained = [param for at in (3, 4) for param in model[at].parameters()]
    optimizer = adopt(worker, model, torch.optim.SGD(trained, lr=0.1))
    for step in range(10):
        assert not cluster.stored
        own_step(model, optimizer, step, 0)
    assert len(cluster.stored) == 2, "the buffers, in two dtypes"
    worker.optimizers.finish()
    result = cluster.result()
    assert result.keys() == model.state_dict().keys()
    pushed = {piece.name for push in cluster.steps()[0].push for piece in push.block.pieces}
    assert pushed == {"3.weight", "3.bias", "4.weight", "4.bias"}
    for name in ("0.weight", "4.running_mean", "4.num_batches_tracked"):
        assert np.array_equal(result[name], model.state_dict()[name]), name


def test_overlap_is_refused_and_nothing_defined(policy: Any) -> None:
    model, cluster = small_model(), FakeCluster()
    with pytest.raises(ValueError, match=f"overlap=True does not go with {type(policy).__name__}"):
        adopt(cluster.worker(), model, sgd(model), overlap=True, consistency=policy)
    assert not cluster.blocks


@pytest.mark.parametrize("consistency", ["local", LocalSteps, 3])
def test_consistency_that_is_no_policy_is_refused(consistency: Any) -> None:
    model, cluster = small_model(), FakeCluster()
    with pytest.raises(TypeError, match="consistency must be a policy"):
        adopt(cluster.worker(), model, sgd(model), consistency=consistency)
    assert not cluster.blocks


def test_own_steps_that_are_left_are_exchanged_when_a_loader_ends_and_not_again(
    policy: Any,
) -> None:
    cluster, model = FakeCluster(), small_model()
    worker = cluster.worker()
    optimizer = adopt(worker, model, sgd(model), consistency=policy, weight=2.0)
    (own,) = worker.optimizers.own_steps
    for step in range(policy.every + 1):
        own_step(model, optimizer, step, 0)
    assert (own.every, own.since) == (policy.every, 1)
    for end in (own.settle, own.settle, worker.optimizers.finish):
        end()
    assert [sent.weight for sent in cluster.steps()] == [2.0 * policy.every, 2.0]


def test_bad_weight_of_an_own_step_does_not_count(policy: Any) -> None:
    given = [0.0]
    cluster, model, optimizer = adopted(policy, weight=lambda: given[-1])
    with pytest.raises(ValueError, match="weight must be a finite number above 0"):
        own_step(model, optimizer, 0, 0)
    given.append(2.0)
    for step in range(3):
        own_step(model, optimizer, step, 0)
    assert [sent.weight for sent in cluster.steps()] == [6.0]


def test_strides_and_dtypes_of_parameters_are_kept(policy: Any) -> None:
    model, cluster = small_model().to(memory_format=torch.channels_last), FakeCluster()
    model[3].weight = nn.Parameter(model[3].weight.detach().t().contiguous().t())
    model.extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = adopt(
        cluster.worker(), model, torch.optim.SGD(model.parameters(), lr=0.1), consistency=policy
    )
    for step in range(3):
        optimizer.zero_grad()
        (loss_of(model[:4], step) + model.extra.square().sum()).backward()
        optimizer.step()
    assert not model[3].weight.is_contiguous()
    assert [block.dtype.name for block in cluster.blocks] == ["float32", "float64"]
    if isinstance(policy, LocalSteps):
        for name, value in model.named_parameters():
            block = cluster.blocks[name == "extra"]
            torch.testing.assert_close(value.detach(), torch.from_numpy(block.values_of(name)))
