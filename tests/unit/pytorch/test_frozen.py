"""Frozen parameters: of any dtype, on no server, equal on all ranks, and whole in the result."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.unit.pytorch.fakes import FakeCluster, on_all_ranks
from torch import nn

import paramserve as ps
from paramserve.pytorch import frozen
from paramserve.pytorch.optimizer import adopt


class Adapted(nn.Module):
    """A base of other dtypes that is frozen, with an adapter that is trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.base = nn.Linear(3, 2).bfloat16()
            self.packed = nn.Parameter(torch.randint(-9, 9, (2, 2)).char(), requires_grad=False)
        self.base.requires_grad_(False)
        self.tied = self.base
        self.adapter = nn.Linear(2, 1)
        with torch.no_grad():
            for param in self.adapter.parameters():
                param.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.base(x.bfloat16()).float() @ self.packed.float())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for number in range(times):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(number)
        model(torch.randn(4, 3, generator=generator)).square().mean().backward()
        optimizer.step()


def train(worker: Any, model: nn.Module, steps: int = 3, **options: Any) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    adopt(worker, model, optimizer, **options)
    step(model, optimizer, steps)
    return model


@pytest.mark.parametrize("policy", [ps.Sync(), ps.LocalSteps(every=2)], ids=["served", "local"])
def test_frozen_base_of_any_dtype_stays_on_the_workers_and_is_in_the_result(policy: Any) -> None:
    cluster = FakeCluster(2, policy=policy)
    models = [Adapted(), Adapted()]
    on_all_ranks(cluster, lambda worker: train(worker, models[worker.rank], 4))
    assert cluster.result().keys() == {"adapter.weight", "adapter.bias"}
    served = sum(block.size for block in cluster.blocks)
    assert served == 3 + 2 * 5, "the adapter, and a checksum beside each name of the base"

    expected = Adapted()
    plain = torch.optim.Adam([p for p in expected.parameters() if p.requires_grad], lr=0.1)
    step(expected, plain, 4)
    if type(policy) is ps.Sync:
        torch.testing.assert_close(models[0].adapter.weight, expected.adapter.weight)
    result = {name: torch.from_numpy(value) for name, value in cluster.result().items()}
    loaded = Adapted(seed=5)
    loaded.load_state_dict(result | cluster.extra["model"])
    for name, value in models[0].state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_ranks_whose_frozen_parameters_differ_are_refused_unless_told_so() -> None:
    models = [Adapted(), Adapted(seed=1)]

    def refused(worker: Any) -> str:
        if worker.rank == 0:
            train(worker, models[0], 0)
            return ""
        for _ in range(2):  # one that is tried again is compared again
            with pytest.raises(ValueError, match="frozen") as caught:
                train(worker, models[1], 0)
        return str(caught.value)

    said = on_all_ranks(FakeCluster(2), refused)[1]
    assert "'packed' of rank 1 has other values than rank 0's" in said
    assert "torch.manual_seed(worker.seed)" in said
    on_all_ranks(
        FakeCluster(2),
        lambda worker: train(worker, models[worker.rank], 0, buffers="local"),
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_parameters_that_are_unfrozen_later_are_trained_from_then_on(overlap: bool) -> None:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        model[:2].requires_grad_(False)
        return model

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        step(model, optimizer, 2)
        model[1].requires_grad_()
        step(model, optimizer, 2)
        model.requires_grad_()
        step(model, optimizer, 2)
        return model

    models = [build(), build()]
    told: list[set[str]] = []

    def work(worker: Any) -> nn.Module:
        def tell(group: str, extra: dict[str, Any]) -> None:
            told.append(set(extra))

        model = models[worker.rank]
        worker.tell_extra_state = tell
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return run(model, adopt(worker, model, optimizer, overlap=overlap))

    cluster = FakeCluster(2)
    on_all_ranks(cluster, work)
    first, second = {"0.weight", "0.bias"}, {"1.weight", "1.bias"}
    assert told == [first | second, first, set(), set()], "also at the end, in place of the first"
    counts = {p.name: n for b in cluster.blocks for p, n in zip(b.pieces, b.counts, strict=True)}
    assert [counts[f"{n}.weight"] for n in range(3)] == [2, 4, 6]
    if not overlap:
        model = build()
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        expected = run(model, plain).state_dict()
        for name, value in models[1].state_dict().items():
            torch.testing.assert_close(value, expected[name])


def test_state_that_is_loaded_for_frozen_parameters_holds_when_they_are_unfrozen() -> None:
    def build(thawed: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        model[0].requires_grad_(thawed)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    before, plain = build(True)
    step(before, plain, 2)
    kept = plain.state_dict()
    model, optimizer = build(False)
    adopt(FakeCluster().worker(), model, optimizer)
    expected, plain = build(False)
    for each in (optimizer, plain):
        each.load_state_dict(kept)
    assert optimizer.state_dict()["state"].keys() == kept["state"].keys()
    for each, opt in ((model, optimizer), (expected, plain)):
        step(each, opt)
        each.requires_grad_()
        step(each, opt)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name])
    assert optimizer.state_dict()["state"][0]["step"] == 3


def test_optimizer_of_frozen_parameters_only_is_refused() -> None:
    model = nn.Linear(2, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="all 2 parameters of the optimizer are frozen"):
        adopt(FakeCluster().worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_frozen_parameters_that_are_too_large_are_left_out_of_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frozen, "RESULT_BYTES_MAX", 10)
    cluster = FakeCluster()
    worker = cluster.worker()
    with pytest.warns(UserWarning, match="lacks 5 frozen parameters.*strict=False"):
        train(worker, Adapted())
    with pytest.warns(UserWarning, match="lacks 5 frozen parameters.*strict=False"):
        worker.optimizers.finish()
    assert "model" not in cluster.extra


# --- the wrong model ------------------------------------------------------------------------------


def test_optimizer_of_another_model_warns_with_what_is_not_trained() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    words = "2 parameters that are not the model's.*'weight', 'bias'"
    with pytest.warns(UserWarning, match=words) as warned:
        adopt(FakeCluster().worker(), model, torch.optim.SGD(other.parameters(), lr=0.1))
    assert [each.filename for each in warned] == [__file__]


def test_optimizer_from_before_a_layer_was_replaced_warns() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1] = nn.Linear(2, 3)
    with pytest.warns(UserWarning, match=r"and not '1.weight', '1.bias' \(2 in all\)"):
        adopt(FakeCluster().worker(), model, optimizer)


def test_parameters_of_a_loss_and_several_optimizers_of_one_model_do_not_warn() -> None:
    model, scale = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), nn.Parameter(torch.ones(1))
    worker = FakeCluster().worker()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adopt(worker, model, torch.optim.SGD(model[0].parameters(), lr=0.1), name="first")
        last = [*model[1].parameters(), scale]
        adopt(worker, model, torch.optim.SGD(last, lr=0.1), name="second")
