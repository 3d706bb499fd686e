"""An adopted optimizer changes a model as the plain torch optimizer does."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.unit.pytorch.fakes import FakeCluster
from torch import nn

from paramserve.pytorch.optimizer import adopt

CASES = [
    (torch.optim.SGD, {"foreach": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True, "fused": True}),
]
"""How torch computes does not count; other options are drawn in test_optimizer_machine."""


def small_model(seed: int = 1) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model


def loss_of(model: nn.Module, step: int, rank: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    images = torch.randn(5, 1, 4, 4, generator=generator)
    return model(images).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def assert_same(model: nn.Module, expected: nn.Module, rtol: float = 1e-5) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_step_every_option_equals_torch(kind, options) -> None:
    model, expected = small_model(), small_model()
    optimizer = kind(model.parameters(), lr=0.05, **options)
    adopted = adopt(FakeCluster().worker(), model, optimizer)
    assert adopted is optimizer
    assert isinstance(optimizer, kind)
    train(model, optimizer)
    train(expected, kind(expected.parameters(), lr=0.05, **options))
    assert_same(model, expected)


def test_step_groups_and_dtypes_become_blocks_with_their_own_options() -> None:
    def build(model):
        return torch.optim.SGD(
            [
                {"params": model[0].parameters()},
                {"params": model[3].parameters(), "lr": 0.5, "weight_decay": 0.1},
            ],
            lr=0.05,
        )

    model, expected = small_model(), small_model()
    for each in (model, expected):
        each[3].double()
        each[2] = nn.Sequential(nn.Flatten(), Double())
        each[3].bias = nn.Parameter(torch.ones(3, dtype=torch.float64))
    cluster = FakeCluster()
    optimizer = adopt(cluster.worker(), model, build(model))
    train(model, optimizer)
    train(expected, build(expected))
    assert_same(model, expected)
    assert [block.dtype.name for block in cluster.blocks] == ["float32", "float64"]
    assert [p.name for p in cluster.blocks[1].pieces] == ["3.weight", "3.bias"]


class Double(nn.Module):
    def forward(self, x):
        return x.double()


def test_step_mixed_dtypes_in_one_group_are_two_blocks() -> None:
    model, expected = small_model(), small_model()
    for each in (model, expected):
        each.extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
    cluster = FakeCluster()
    optimizer = adopt(cluster.worker(), model, torch.optim.Adam(model.parameters()))
    plain = torch.optim.Adam(expected.parameters())
    for each, opt in ((model, optimizer), (expected, plain)):
        (loss_of(each[:4], 0) + each.extra.square().sum()).backward()
        opt.step()
    assert_same(model, expected)
    assert [block.size for block in cluster.blocks] == [47, 2]


def test_step_parameters_and_gradients_stay_ordinary_tensors() -> None:
    model = small_model()
    before = [param.data_ptr() for param in model.parameters()]
    optimizer = adopt(FakeCluster().worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, 3)
    assert [param.data_ptr() for param in model.parameters()] == before
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert all(torch.isfinite(param.grad).all() for param in model.parameters())


def test_step_in_place_change_is_seen_by_autograd() -> None:
    model = small_model()
    optimizer = adopt(FakeCluster().worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_step_any_stride_equals_torch() -> None:
    def build():
        model = small_model().to(memory_format=torch.channels_last)
        model[3].weight = nn.Parameter(model[3].weight.detach().t().contiguous().t())
        return model

    model, expected = build(), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, adopt(FakeCluster().worker(), model, optimizer))
    train(expected, torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9))
    assert_same(model, expected)
    assert not model[3].weight.is_contiguous()


def test_step_parameter_moved_after_adoption_still_gets_its_values() -> None:
    model, expected = small_model(), small_model()
    optimizer = adopt(FakeCluster().worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    for param in model.parameters():
        param.data = param.data.clone()
    train(model, optimizer)
    train(expected, torch.optim.SGD(expected.parameters(), lr=0.1))
    assert_same(model, expected)


def test_step_without_any_gradient_still_ends_the_clock() -> None:
    model, expected = small_model(), small_model()
    cluster = FakeCluster()
    optimizer = adopt(cluster.worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.step()
    assert_same(model, expected, rtol=0)
    assert len(cluster.steps()) == 1


def test_step_tied_parameter_is_one_piece_with_an_alias() -> None:
    def build():
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape))
        model[2].weight = model[0].weight
        return model

    model, expected = build(), build()
    cluster = FakeCluster()
    worker = cluster.worker()
    optimizer = adopt(worker, model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for each, opt in ((model, optimizer), (expected, plain)):
        each(torch.ones(2, 3)).square().sum().backward()
        opt.step()
    assert_same(model, expected)
    assert [piece.name for piece in cluster.block("model").pieces] == [
        "0.weight",
        "0.bias",
        "2.bias",
    ]
    result = {name: torch.from_numpy(value) for name, value in cluster.result().items()}
    assert cluster.block("model").aliases == {"2.weight": "0.weight"}
    result |= {alias: result[name] for alias, name in cluster.block("model").aliases.items()}
    build().load_state_dict(result)


def test_step_parameter_outside_the_model_is_extra() -> None:
    model = small_model()
    scale = nn.Parameter(torch.ones(2))
    cluster = FakeCluster()
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.5)
    adopt(cluster.worker(), model, optimizer)
    scale.sum().backward()
    optimizer.step()
    assert scale.tolist() == [0.5, 0.5]
    assert cluster.block("model").pieces[-1].name == ".extra.0.4"


def test_step_closure_runs_with_grad_and_its_loss_comes_back() -> None:
    model, expected = small_model(), small_model()
    optimizer = adopt(FakeCluster().worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    losses = []
    for each, opt in ((model, optimizer), (expected, plain)):

        def closure(each=each, opt=opt):
            opt.zero_grad()
            loss = loss_of(each, 0)
            loss.backward()
            return loss

        with torch.no_grad():
            losses.append(float(opt.step(closure)))
    assert losses[0] == losses[1]
    assert_same(model, expected)


def test_overlap_gradients_come_from_the_values_two_steps_back() -> None:
    model = small_model()
    cluster = FakeCluster(sync=False)
    worker = cluster.worker()
    optimizer = adopt(worker, model, torch.optim.SGD(model.parameters(), lr=0.1), overlap=True)
    train(model, optimizer, 4)
    # Stated again: after k pushes a worker holds the values of push k - 1.
    expected = small_model()
    history = [copy.deepcopy(expected)]
    for step in range(4):
        seen = history[max(step - 1, 0)]
        seen.zero_grad()
        loss_of(seen, step).backward()
        following = copy.deepcopy(history[-1])
        with torch.no_grad():
            for target, source in zip(following.parameters(), seen.parameters(), strict=True):
                target -= 0.1 * source.grad
        history.append(following)
    assert_same(model, history[3])
    worker.optimizers.finish()
    assert_same(model, history[4])


def test_weight_number_or_function_travels_with_each_step() -> None:
    cluster = FakeCluster()
    sizes = iter([3, 5])
    for name, weight in (("a", None), ("b", 32), ("c", lambda: next(sizes))):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        adopt(cluster.worker(), model, optimizer, name=name, weight=weight)
        train(model, optimizer, 2)
    weights = [[sent.weight for sent in cluster.steps(name)] for name in "abc"]
    assert weights == [[1.0, 1.0], [32.0, 32.0], [3.0, 5.0]]


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), lambda: 0.0])
def test_weight_not_positive_is_refused_before_anything_is_sent(weight) -> None:
    model = small_model()
    cluster = FakeCluster()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="weight must be"):
        train(model, adopt(cluster.worker(), model, optimizer, weight=weight))
    assert cluster.steps() == []


def test_clip_norm_travels_and_clips_as_torch() -> None:
    model, expected = small_model(), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    train(model, adopt(FakeCluster().worker(), model, optimizer, clip_norm=0.01), 2)
    plain = torch.optim.SGD(expected.parameters(), lr=1.0)
    for step in range(2):
        plain.zero_grad()
        loss_of(expected, step).backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
        plain.step()
    assert_same(model, expected)


def test_options_out_of_range_later_are_refused_and_nothing_is_sent() -> None:
    model = small_model()
    cluster = FakeCluster()
    optimizer = adopt(cluster.worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        train(model, optimizer, 1)
    optimizer.param_groups[0].update(lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="momentum_buffer"):
        train(model, optimizer, 1)
    assert cluster.steps() == []
    optimizer.param_groups[0]["momentum"] = 0
    train(model, optimizer, 1)
    assert len(cluster.steps()) == 1
