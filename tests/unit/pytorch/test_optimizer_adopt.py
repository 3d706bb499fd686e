"""Adoption: what it takes and refuses, and what keeps working on the same object."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import cloudpickle
import pytest
import torch
from tests.unit.pytorch.fakes import FakeCluster
from tests.unit.pytorch.test_optimizer_step import assert_same, loss_of, small_model, train
from torch import nn

import paramserve as ps
from paramserve.pytorch.loading import load_given
from paramserve.pytorch.naming import Names
from paramserve.pytorch.optimizer import adopt
from paramserve.pytorch.pickling import dumped


class Renamed(torch.optim.SGD):
    """A subclass that leaves step alone."""


class OwnStep(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


SCHEDULERS = [
    lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.1),
    lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.3, total_steps=10),
    lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 1 / (epoch + 1)),
    lambda opt: torch.optim.lr_scheduler.SequentialLR(
        opt,
        [
            torch.optim.lr_scheduler.ConstantLR(opt, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(opt, 0.5),
        ],
        milestones=[2],
    ),
]


@pytest.mark.parametrize("build", SCHEDULERS)
def test_scheduler_built_before_or_after_steps_through_the_servers(build) -> None:
    for when in ("before", "after", "both"):
        step_with_schedulers(build, when)


def step_with_schedulers(build, when: str) -> None:
    model, expected = small_model(), small_model()
    cluster = FakeCluster()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    plain = torch.optim.SGD(expected.parameters(), lr=0.2, momentum=0.9)
    schedulers = [build(optimizer)] if when != "after" else []
    adopt(cluster.worker(), model, optimizer)
    schedulers += [build(optimizer)] if when != "before" else []
    plain_schedulers = [build(plain) for _ in schedulers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(5):
            for each, opt, following in (
                (model, optimizer, schedulers),
                (expected, plain, plain_schedulers),
            ):
                opt.zero_grad()
                loss_of(each, step).backward()
                opt.step()
                for scheduler in following:
                    scheduler.step()
    assert len(cluster.steps()) == 5
    assert_same(model, expected)


def test_scheduler_stepped_first_still_warns() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    adopt(FakeCluster().worker(), model, optimizer)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


def test_reduce_on_plateau_lowers_the_rate_on_the_servers() -> None:
    model = small_model()
    cluster = FakeCluster()
    optimizer = adopt(cluster.worker(), model, torch.optim.SGD(model.parameters(), lr=0.2))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for _ in range(3):
        train(model, optimizer, 1)
        scheduler.step(1.0)
    assert [sent.push[0].hyper[0] for sent in cluster.steps()] == [0.2, 0.2, 0.1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_step_hooks_registered_before_or_after_run_once_each_step(when) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    seen = []

    def register() -> None:
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append("pre"))
        optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append("post"))

    if when == "before":
        register()
    adopt(FakeCluster().worker(), model, optimizer)
    if when == "after":
        register()
    train(model, optimizer, 2)
    assert seen == ["pre", "post"] * 2


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_unscales_and_skips_as_torch(clip, fused) -> None:
    model, expected = small_model(), small_model()
    cluster = FakeCluster()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    adopt(cluster.worker(), model, optimizer)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    scales = []
    for each, opt in ((model, optimizer), (expected, plain)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=2)
        for step in range(5):
            opt.zero_grad()
            scaler.scale(loss_of(each, step)).backward()
            if step == 2:
                each[3].bias.grad[0] = float("inf")
            if clip:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
        scales.append(scaler.get_scale())
    assert_same(model, expected)
    assert scales[0] == scales[1]
    assert [sent.skip for sent in cluster.steps()] == [False, False, True, False, False]


def test_grad_scaler_without_gradients_or_disabled_steps() -> None:
    model = small_model()
    cluster = FakeCluster()
    optimizer = adopt(cluster.worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert len(cluster.steps()) == 1


def test_zero_grad_and_autocast_work_as_in_torch() -> None:
    model = small_model()
    optimizer = adopt(FakeCluster().worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, 0)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(not param.grad.any() for param in model.parameters())
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def test_add_param_group_refused_leaves_the_optimizer_as_it_was() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adopt(FakeCluster().worker(), model, optimizer)
    with pytest.raises(TypeError, match="complex64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).to(torch.complex64))]})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, 1)


def test_add_param_group_of_a_module_that_replaces_a_trained_one_is_refused() -> None:
    """Also where the old one is all of a block, which the new one would fit."""
    model = small_model()
    groups = [{"params": model[:3].parameters()}, {"params": model[3].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    cluster = FakeCluster()
    adopt(cluster.worker(), model, optimizer)
    train(model, optimizer, 1)
    model[3] = nn.Linear(model[3].in_features, model[3].out_features)
    with pytest.raises(ValueError, match=r"'3\.weight' is another one .*worker\.assign"):
        optimizer.add_param_group({"params": model[3].parameters()})
    assert (len(optimizer.param_groups), len(cluster.blocks)) == (2, 2)


def test_adopt_subclass_without_its_own_step_is_taken() -> None:
    model, expected = small_model(), small_model()
    train(model, adopt(FakeCluster().worker(), model, Renamed(model.parameters(), lr=0.1)))
    train(expected, torch.optim.SGD(expected.parameters(), lr=0.1))
    assert_same(model, expected)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS: it calls the closure several times"),
        (lambda p: torch.optim.SparseAdam(list(p)), "SparseAdam: it takes sparse.*use Adam"),
        (lambda p: OwnStep(p, lr=0.1), "do not override step"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "differentiable"),
        (lambda p: "sgd", "takes a torch optimizer"),
    ],
)
def test_adopt_optimizer_that_no_rule_stands_for_is_refused(build, text) -> None:
    model = small_model()
    cluster = FakeCluster()
    optimizer = build(model.parameters())
    kind = type(optimizer)
    with pytest.raises(TypeError, match=text):
        adopt(cluster.worker(), model, optimizer)
    assert cluster.blocks == []
    assert type(optimizer) is kind


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64], ids=lambda d: str(d))
def test_adopt_parameter_of_another_dtype_is_refused(dtype) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=dtype))])
    with pytest.raises(TypeError, match="float32 and float64"):
        adopt(FakeCluster().worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_adopt_lazy_or_meta_parameter_is_refused() -> None:
    for model, text in (
        (nn.LazyLinear(2), "no shape yet"),
        (nn.Linear(2, 2, device="meta"), "meta"),
    ):
        with pytest.raises(TypeError, match=text):
            adopt(FakeCluster().worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_adopt_embedding_with_sparse_gradients_is_refused(kind) -> None:
    model, cluster = nn.Sequential(kind(5, 2, sparse=True)), FakeCluster()
    with pytest.raises(TypeError, match=r"module '0' is a .* with sparse=True.*Applied: no"):
        adopt(cluster.worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert cluster.blocks == []


def test_adopt_sparse_gradient_is_refused_at_the_step() -> None:
    model = nn.Embedding(5, 2)
    cluster = FakeCluster()
    optimizer = adopt(cluster.worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    nn.functional.embedding(torch.tensor([1, 2]), model.weight, sparse=True).sum().backward()
    with pytest.raises(TypeError, match="'weight' is sparse"):
        optimizer.step()
    assert cluster.steps() == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"name": ""}, ValueError),
        ({"buffers": "all"}, ValueError),
        ({"clip_norm": 0.0}, ValueError),
        ({"clip_norm": float("inf")}, ValueError),
        ({"weight": "three"}, ValueError),
    ],
)
def test_adopt_bad_option_is_refused(options, error) -> None:
    model = small_model()
    cluster = FakeCluster()
    with pytest.raises(error):
        adopt(cluster.worker(), model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    assert cluster.blocks == []


def test_adopt_twice_or_under_a_used_name_is_refused() -> None:
    model = small_model()
    worker = FakeCluster().worker()
    optimizer = adopt(worker, model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    with pytest.raises(TypeError, match="already"):
        adopt(worker, model, optimizer, name="second")
    second = torch.optim.SGD(model[3].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="name="):
        adopt(worker, model, second)
    adopt(worker, model, second, name="second")


def test_adopt_step_replaced_by_another_library_is_refused() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = lambda closure=None: None
    with pytest.raises(TypeError, match="replaced on this instance"):
        adopt(FakeCluster().worker(), model, optimizer)


def test_adopt_model_that_is_no_module_is_refused() -> None:
    model = small_model()
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        adopt(
            FakeCluster().worker(),
            model.parameters(),
            torch.optim.SGD(model.parameters(), lr=0.1),
        )


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copy_of_an_adopted_optimizer_is_refused(duplicate) -> None:
    model = small_model()
    optimizer = adopt(FakeCluster().worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="state_dict"):
        duplicate(optimizer)


class Counted(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"calls": 3}


def wrapped_inside(model: nn.Sequential) -> nn.Module:
    model[0] = torch.compile(model[0], backend="eager")
    return model


WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "a part of it": wrapped_inside,
    "DataParallel": nn.DataParallel,
    "both": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
}


def build() -> nn.Sequential:
    model = nn.Sequential(Counted(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1).requires_grad_(False))
    model.append(model[0])
    return model


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
def test_names_of_a_wrapped_model_are_those_of_the_plain_one(wrap: Any) -> None:
    cluster = FakeCluster()
    worker, model = cluster.worker(), wrap(build())
    adopt(worker, model, torch.optim.SGD(build_trained(model), lr=0.1))
    (block,) = (each for each in cluster.blocks if each.group_name == "model")
    result = {name: torch.from_numpy(value) for name, value in cluster.result().items()}
    result |= {other: result[first] for other, first in block.aliases.items()}
    result |= cluster.extra["model"]
    assert result.keys() == build().state_dict().keys(), "also the extra state of both places"
    build().load_state_dict(result)


def build_trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


@pytest.mark.parametrize("wrap", [*WRAPPERS.values(), lambda model: model])
def test_load_state_fits_with_wrappers_and_without(wrap: Any) -> None:
    for before in ("", "_orig_mod.", "module.", "module._orig_mod."):
        worker, model, given = FakeCluster().worker(), wrap(build()), build()
        state = {before + name: value for name, value in given.state_dict().items()}
        worker.load_state = {"": state}
        load_given(worker, "model", model)
        assert worker.load_state == {}
        for mine, theirs in zip(model.parameters(), given.parameters(), strict=True):
            assert torch.equal(mine, theirs), before


@pytest.mark.parametrize(
    ("names", "fix"),
    [
        ("model.{}", r"by 'model.' only: give load_state={name.removeprefix\('model.'\): value"),
        ("{}_", "no name in this one is in the model"),
    ],
)
def test_load_state_with_no_name_that_fits_is_not_told_to_load_a_part(names: str, fix: str) -> None:
    worker, state = FakeCluster().worker(), nn.Linear(2, 1).state_dict()
    worker.load_state = {"": {names.format(name): value for name, value in state.items()}}
    with pytest.raises(ValueError, match=fix) as caught:
        load_given(worker, "model", nn.Linear(2, 1))
    assert "strict=False" not in str(caught.value)


def test_frozen_parameters_of_newer_dtypes_come_back_from_a_pickle() -> None:
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.int8, torch.bfloat16, torch.complex64):
        value = torch.ones(2, 2).to(dtype)
        found = cloudpickle.loads(dumped({"base": value, "scalar": value[0, 0], "n": [1]}))
        assert found["n"] == [1]
        for name, given in (("base", value), ("scalar", value[0, 0])):
            assert found[name].dtype == dtype
            assert torch.equal(found[name].to(torch.complex64), given.to(torch.complex64))


def test_aliases_cover_parameters_and_buffers_of_shared_modules() -> None:
    norm = nn.BatchNorm1d(2)
    model = nn.ModuleDict({"a": norm, "b": norm})
    assert Names(model).aliases() == {
        f"b.{name}": f"a.{name}"
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }


def test_amsgrad_switched_on_later_is_a_type_error() -> None:
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    adopt(FakeCluster().worker(), model, optimizer)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(TypeError, match=r"amsgrad is True now.*before worker\.optimizer"):
        optimizer.step()


# --- a scaler after a step that raised ------------------------------------------------------------


POLICIES = [ps.Sync(), ps.LocalSteps(every=1, outer=ps.SGD(lr=1.0))]


@pytest.mark.parametrize("unscales", [False, True], ids=["", "unscaled by hand"])
@pytest.mark.parametrize("policy", POLICIES, ids=["served", "local"])
def test_grad_scaler_scales_once_after_a_step_that_raised(policy, unscales) -> None:
    model, expected = small_model(), small_model()
    weights = [1.0, 1.0, 0.0, 1.0]

    def weight() -> float:
        return weights.pop()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adopt(FakeCluster(policy=policy).worker(), model, optimizer, weight=weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        if step == 1:
            before = [param.clone() for param in model.parameters()]
            with pytest.raises(ValueError, match="weight must be"):
                scaler.step(optimizer)
            if isinstance(policy, ps.LocalSteps):  # made its own step before it asked
                torch._foreach_copy_([param.detach() for param in model.parameters()], before)
            optimizer.zero_grad()
            scaler.update()
            scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(2):
        plain.zero_grad()
        loss_of(expected, step).backward()
        plain.step()
    assert_same(model, expected)


# --- starting from given values ------------------------------------------------------------------


def test_state_that_was_given_is_what_rank_0_defines() -> None:
    given = {name: value + 1.0 for name, value in small_model().state_dict().items()}
    cluster = FakeCluster()
    worker = cluster.worker()
    worker.load_state = {"critic": {}, "": {name: each.numpy() for name, each in given.items()}}
    model = small_model()
    adopt(worker, model, torch.optim.SGD(model.parameters(), lr=0.1), name="actor")
    assert all(torch.equal(model.state_dict()[name], given[name]) for name in given)
    assert cluster.result("actor").keys() == given.keys()
    for name, value in cluster.result("actor").items():
        assert torch.equal(torch.from_numpy(value), given[name])
    assert worker.load_state == {"critic": {}}, "each is loaded once"


def test_state_that_does_not_fit_says_what_as_torch_does_and_defines_nothing() -> None:
    cluster = FakeCluster()
    worker = cluster.worker()
    worker.load_state = {"model": {"0.weight": torch.ones(7, 7), "other": torch.ones(1)}}
    model = small_model()
    with pytest.raises(ValueError) as caught:
        adopt(worker, model, torch.optim.SGD(model.parameters(), lr=0.1))
    told = str(caught.value)
    for part in (
        "optimizer 'model'",
        "size mismatch for 0.weight",
        "Unexpected key",
        "Applied: no",
    ):
        assert part in told
    assert cluster.blocks == []
