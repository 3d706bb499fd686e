"""Models of several ranks, buffers while they are trained, and one optimizer after another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from torch import nn
from torch.nn.utils import remove_spectral_norm, spectral_norm
from torch.optim import SGD
from torch.utils.data import TensorDataset

import paramserve as ps
from paramserve.errors import DefineMismatch, ShapeMismatch
from paramserve.launch.reading import Reader


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


class Counts(nn.Linear):
    def __init__(self, name: str) -> None:
        super().__init__(2, 1)
        self.register_buffer(name, torch.zeros(1))


def adopting(build: Callable[[int], nn.Module]) -> Callable[[ps.Worker], None]:
    def train(worker: ps.Worker) -> None:
        model = build(worker.rank)
        worker.optimizer(model, SGD(model.parameters(), lr=0.1))

    return train


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
@pytest.mark.parametrize("wrapped", [0, 1])
def test_model_that_one_rank_wraps_is_refused_with_the_names(
    make_cluster: MakeCluster, wrapped: int, ranks: tuple[int, int]
) -> None:
    def build(rank: int) -> nn.Module:
        return Wrapped(nn.Linear(2, 1)) if rank == wrapped else nn.Linear(2, 1)

    with pytest.raises(DefineMismatch, match=r"block 0 of group 'model': .*'weight'.* came") as e:
        Ranks(make_cluster(workers=2), adopting(build)).start(*ranks).end()
    assert "'module.weight'" in str(e.value)
    assert "on all or on none" in str(e.value)


def test_buffer_of_another_name_on_one_rank_is_refused(make_cluster: MakeCluster) -> None:
    train = adopting(lambda rank: Counts(f"calls{rank}"))
    with pytest.raises(DefineMismatch, match="'calls0', now 'calls1' came"):
        Ranks(make_cluster(workers=2), train).start(0, 1).end()


def test_parameters_that_the_function_defines_in_the_group_first_are_no_mismatch(
    make_cluster: MakeCluster,
) -> None:
    def train(worker: ps.Worker) -> None:
        worker.client.define("temperature", [1.0], group="model")
        model = nn.Linear(2, 1)
        worker.optimizer(model, SGD(model.parameters(), lr=0.1))

    Ranks(make_cluster(workers=2), train).start(0, 1).end()


# --- buffers that change while a model is trained -------------------------------------------------


def step(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 2)).square().mean().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:buffer '0.weight_v'", "ignore:parameter '0.weight_orig'")
def test_buffer_that_is_removed_keeps_its_last_value_in_the_result(
    make_cluster: MakeCluster,
) -> None:
    kept = {}

    def train(worker: ps.Worker) -> None:
        model = nn.Sequential(spectral_norm(nn.Linear(2, 3)), nn.BatchNorm1d(3))
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.1))
        for _ in range(10):  # after which buffers are assigned
            step(optimizer, model)
        kept.update({name: value.clone() for name, value in model.named_buffers()})
        remove_spectral_norm(model[0])
        model[1].running_mean.fill_(7.0)

    cluster = make_cluster(workers=1)
    with pytest.warns(UserWarning, match="buffer '0.weight_u' is no longer in the model"):
        Ranks(cluster, train).start(0).end()
    found = cluster.client().pull()
    assert (found["0.weight_u"] == kept["0.weight_u"].numpy()).all()
    assert (found["1.running_mean"] == 7.0).all(), "the others are those of the end"


def test_buffer_that_grows_is_refused_at_once_with_what_to_do(make_cluster: MakeCluster) -> None:
    class Growing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.register_buffer("seen", torch.zeros(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, torch.ones(1)])
            return super().forward(x)

    def train(worker: ps.Worker) -> None:
        model = Growing()
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.1))
        step(optimizer, model)

    with pytest.raises(ShapeMismatch, match=r"'seen' has shape \[1\].* \[0\].*buffers=\"local\""):
        Ranks(make_cluster(workers=1), train).start(0).end()


@pytest.mark.parametrize("steps", [10, 13])
def test_mean_of_buffers_is_that_of_what_each_rank_told_last(
    make_cluster: MakeCluster, steps: int
) -> None:
    cluster, kept = make_cluster(workers=3), dict[str, torch.Tensor]()
    models = [nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(3)]

    def train(worker: ps.Worker) -> None:
        model = models[worker.rank]
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.01), buffers="mean")
        inputs = torch.arange(8.0).view(4, 2) * (worker.rank + 1)
        for number in range(1, steps - worker.rank + 1):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            if worker.rank == 2 and number == 10:
                kept.update({key: value.clone() for key, value in model[1].named_buffers()})
        if worker.rank == 2:
            raise Killed  # what it has told after ten steps counts, if it came so far

    Ranks(cluster, train, again=False).start(0, 1, 2).end()
    told = models if steps - 2 >= 10 else models[:2]
    state = Reader(cluster.client()).read("model")
    assert state.keys() == models[0].state_dict().keys()
    for name in ("running_mean", "running_var"):
        values = torch.stack([getattr(model[1], name) for model in told[:2]])
        if len(told) == 2:
            torch.testing.assert_close(torch.from_numpy(state[f"1.{name}"]), values.mean(0))
        else:
            three = torch.from_numpy(state[f"1.{name}"]) * 3 - values.sum(0)
            torch.testing.assert_close(three, kept[name])
    assert state["1.num_batches_tracked"] == steps


# --- layers that are unfrozen while a model is trained --------------------------------------------


def test_worker_that_comes_back_finds_layers_that_were_unfrozen_one_after_the_other(
    make_cluster: MakeCluster,
) -> None:
    """Its next incarnation unfreezes both before its first step."""

    def train(worker: ps.Worker) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
        torch.manual_seed(worker.seed)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn(param.shape))
        model[:2].requires_grad_(False)
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.01, momentum=0.9))
        while worker.clock < 6:
            if worker.incarnation == 1 and worker.clock == 5:
                raise Killed
            for layer, at in ((1, 2), (0, 4)):
                if worker.clock >= at:
                    model[layer].requires_grad_()
            step(optimizer, model)
        counts = {
            block.pieces[0].name: worker.client.dense.fetch(block, 0)[1]
            for block in worker.client.blocks()
            if block.rule is not None
        }
        assert counts == {"0.weight": (2, 2), "1.weight": (4, 4), "2.weight": (6, 6)}

    ranks = Ranks(make_cluster(workers=1, restarts=True), train).start(0)
    ranks.end()
    assert ranks.restarts == [0]


# --- one optimizer after another ------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 4, 6, 8])
def test_worker_that_dies_in_a_later_phase_repeats_no_batch(
    make_cluster: MakeCluster, at: int
) -> None:
    """Two phases of five batches each; it dies before its batch number `at`, counted over both."""
    used: list[tuple[str, list[float]]] = []

    def train(worker: ps.Worker) -> None:
        data = TensorDataset(torch.arange(20.0))
        for name in ("warmup", "main"):
            model = nn.Linear(1, 1)
            own = SGD(model.parameters(), lr=0.001)
            optimizer = worker.optimizer(model, own, name=name)
            for (batch,) in worker.loader(data, batch_size=4):
                if worker.incarnation == 1 and len(used) == at:
                    raise Killed
                optimizer.zero_grad()
                model(batch.view(-1, 1)).square().mean().backward()
                optimizer.step()
                used.append((name, batch.tolist()))

    ranks = Ranks(make_cluster(workers=1, restarts=True), train).start(0)
    ranks.end()
    assert ranks.restarts == [0]
    assert [name for name, _ in used] == ["warmup"] * 5 + ["main"] * 5
    for phase in (used[:5], used[5:]):
        assert sorted(i for _, batch in phase for i in batch) == list(range(20))


@pytest.mark.parametrize("exchanges", [0, 1, 2])
def test_worker_that_dies_in_a_later_phase_repeats_no_exchange(
    make_cluster: MakeCluster, exchanges: int
) -> None:
    """Six own steps of the first phase are two exchanges of up to four: the second phase's count
    from its own beginning."""
    used: list[tuple[str, float]] = []

    def train(worker: ps.Worker) -> None:
        data, model = TensorDataset(torch.arange(16.0)), nn.Linear(1, 1)
        for name, steps in (("warmup", 6), ("main", 16)):
            own = SGD(model.parameters(), lr=0.001)
            optimizer = worker.optimizer(model, own, name=name)
            for (batch,) in worker.loader(data, batch_size=1, steps=steps, shuffle=False):
                if worker.incarnation == 1 and len(used) == 6 + 4 * exchanges:
                    worker.client.drain()
                    raise Killed
                optimizer.zero_grad()
                model(batch.view(-1, 1)).square().mean().backward()
                optimizer.step()
                used.append((name, batch.item()))

    policy = ps.LocalSteps(every=4)
    ranks = Ranks(make_cluster(workers=1, restarts=True, policy=policy), train).start(0)
    ranks.end()
    assert ranks.restarts == [0]
    assert used[:6] == [("warmup", float(i)) for i in range(6)]
    assert used[6:] == [("main", float(i)) for i in range(16)]
