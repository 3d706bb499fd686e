"""Each tensor of a model has one owner: what several optimizers, no optimizer or the loop change is
what readers find, and what a worker that comes back goes on from."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from tests.contract.role_cluster import wait_until
from torch import nn
from torch.optim import SGD, Adam

import paramserve as ps
from paramserve.launch.reading import Reader
from paramserve.pytorch import Embedding, changing

State = dict[str, torch.Tensor]
Train = Callable[[ps.Worker], Any]

STEPS = 6


def filled(model: nn.Module) -> Any:
    """The model with the same values on all ranks, which are threads with one global generator."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 2)
    return model


def two_layers() -> nn.ModuleDict:
    return filled(nn.ModuleDict({"body": nn.Linear(3, 4), "head": nn.Linear(4, 1)}))


def loss_of(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(100 * rank + number))
    return (model["head"](torch.tanh(model["body"](x))) - x.sum(1, keepdim=True)).square().mean()


def read(cluster: Any, name: str = "model") -> State:
    return {
        key: torch.from_numpy(each) for key, each in Reader(cluster.client()).read(name).items()
    }


def own(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal(first: State, second: State) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def ended(make_cluster: MakeCluster, train: Train, workers: int = 2) -> tuple[Any, Ranks]:
    """A run of a training function to its end."""
    cluster = make_cluster(workers=workers, restarts=True, policy=ps.Sync())
    ranks = Ranks(cluster, train).start(*range(workers))
    ranks.end()
    return cluster, ranks


def dies(worker: ps.Worker, rank: int | None, clock: int) -> None:
    if (worker.rank, worker.incarnation, worker.clock) == (rank, 1, clock):
        worker.client.drain()
        raise Killed


# --- several optimizers over one model ------------------------------------------------------------


@pytest.mark.parametrize("loads", [False, True], ids=["", "load_state"])
def test_two_optimizers_of_one_model_end_as_without_a_death(
    make_cluster: MakeCluster, loads: bool
) -> None:
    def training(victim: int | None) -> Train:
        def train(worker: ps.Worker) -> State:
            model = two_layers()
            if loads:
                worker.load_state = {"model": own(model), "head": own(model)}
            optimizers = [
                worker.optimizer(model, SGD(model["body"].parameters(), lr=0.1)),
                worker.optimizer(model, SGD(model["head"].parameters(), lr=0.1), name="head"),
            ]
            for number in range(worker.clock, STEPS):
                dies(worker, victim, 3)
                loss = loss_of(model, worker.rank, number)
                for each in optimizers:
                    each.zero_grad()
                loss.backward()
                for each in optimizers:
                    each.step()
                if number == 4 and victim is None and worker.rank == 0:
                    assert_equal(read(clusters[0]), own(model))
                    assert_equal(read(clusters[0], "head"), own(model))
            return own(model)

        return train

    cluster = make_cluster(workers=2, restarts=True, policy=ps.Sync())
    clusters = [cluster]
    expected = Ranks(cluster, training(None)).start(0, 1).end()[0]
    for victim in (0, 1):
        cluster, ranks = ended(make_cluster, training(victim))
        assert ranks.restarts == [victim]
        assert_equal(ranks.returned[0], expected)
        assert_equal(ranks.returned[1], expected)
        assert_equal(read(cluster), expected)
        assert_equal(read(cluster, "head"), expected)


def test_optimizer_of_a_submodule_owns_its_tensors_under_all_their_names(
    make_cluster: MakeCluster,
) -> None:
    def train(worker: ps.Worker) -> State:
        model = two_layers()
        model["tied"] = model["head"]
        first = worker.optimizer(model, SGD(model["body"].parameters(), lr=0.1))
        last = worker.optimizer(model["head"], SGD(model["head"].parameters(), lr=0.1), name="head")
        for number in range(2):
            loss_of(model, 0, number).backward()
            first.step()
            last.step()
            if number == 1:
                assert_equal(read(clusters[0]), own(model))
        return own(model)

    clusters = [make_cluster(workers=1)]
    expected = Ranks(clusters[0], train).start(0).end()[0]
    assert_equal(read(clusters[0]), expected)
    assert read(clusters[0], "head").keys() == {"weight", "bias"}


def test_two_models_with_the_same_names_stay_apart(make_cluster: MakeCluster) -> None:
    def train(worker: ps.Worker) -> list[State]:
        models = [two_layers(), two_layers()]
        for model, name in zip(models, ("first", "second"), strict=True):
            layer = model["body" if name == "first" else "head"]
            optimizer = worker.optimizer(model, SGD(layer.parameters(), lr=0.1), name=name)
            loss_of(model, 0, 0).backward()
            optimizer.step()
        return [own(model) for model in models]

    cluster = make_cluster(workers=1)
    first, second = Ranks(cluster, train).start(0).end()[0]
    assert_equal(read(cluster, "first"), first)
    assert_equal(read(cluster, "second"), second)


# --- what changes without an optimizer ------------------------------------------------------------


class WithTarget(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.online = filled(nn.Linear(3, 1))
        self.target = copy.deepcopy(self.online)
        if kind == "frozen":
            self.target.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(2, 2), persistent=False)

    def move(self) -> None:
        self.seen += self.online.weight.detach().sum()
        for mine, theirs in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mine.data.copy_(0.8 * mine.data + 0.2 * theirs.data)


@pytest.mark.parametrize("kind", ["frozen", "left out"])
def test_target_network_and_hidden_buffer_come_back(make_cluster: MakeCluster, kind: str) -> None:
    def training(victim: int | None) -> Train:
        def train(worker: ps.Worker) -> State:
            model = WithTarget(kind)
            optimizer = worker.optimizer(model, SGD(model.online.parameters(), lr=0.1))
            for number in range(worker.clock, 12):
                dies(worker, victim, 5)
                if number:
                    model.move()
                generator = torch.Generator().manual_seed(100 * worker.rank + number)
                x = torch.randn(8, 3, generator=generator)
                optimizer.zero_grad()
                goal = 1 + 0.9 * model.target(x).detach() + model.seen.mean()
                (model.online(x) - goal).square().mean().backward()
                optimizer.step()
            return own(model) | {"seen": model.seen.clone()}

        return train

    expected = ended(make_cluster, training(None))[1].returned
    for victim in (0, 1):
        cluster, ranks = ended(make_cluster, training(victim))
        assert ranks.restarts == [victim]
        for rank in (0, 1):
            assert_equal(ranks.returned[rank], expected[rank])
        result = read(cluster)
        assert torch.equal(result["target.weight"], expected[0]["target.weight"])


def test_changes_that_are_too_large_to_be_saved_warn_once(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changing, "BYTES_MAX", 8)
    monkeypatch.setattr("paramserve.client.saving.BYTES_MAX", 8)

    def train(worker: ps.Worker) -> None:
        model = WithTarget("frozen")
        optimizer = worker.optimizer(model, SGD(model.online.parameters(), lr=0.1))
        for _ in range(20):
            model.move()
            model.online(torch.ones(1, 3)).sum().backward()
            optimizer.step()

    with pytest.warns(UserWarning, match=r"rank 0 has tensors that change.*'seen' \(3 in all") as w:
        ended(make_cluster, train, workers=1)
    assert len(w) == 1


class Codebook(nn.Module):
    """As public code has it: `forward` makes a new parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight = nn.Parameter(0.9 * self.weight + 0.1 * x.detach().mean(0))
        return x * self.weight.detach()


@pytest.mark.filterwarnings("ignore:parameter 'book.weight' is stepped by")
def test_parameter_that_is_replaced_is_in_the_result_as_the_model_has_it(
    make_cluster: MakeCluster,
) -> None:
    def training(victim: int | None) -> Train:
        def train(worker: ps.Worker) -> State:
            model = nn.ModuleDict({"layer": nn.Linear(3, 1), "book": Codebook()})
            filled(model["layer"])
            optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.01))
            for number in range(worker.clock, STEPS):
                dies(worker, victim, 3)
                generator = torch.Generator().manual_seed(number)
                optimizer.zero_grad()
                x = torch.randn(4, 3, generator=generator)
                model["layer"](model["book"](x)).square().mean().backward()
                optimizer.step()
            return own(model)

        return train

    for victim in (None, 0):
        cluster, ranks = ended(make_cluster, training(victim), workers=1)
        if victim is None:
            expected = ranks.returned[0]
            assert not torch.equal(expected["book.weight"], torch.ones(3))
        assert_equal(ranks.returned[0], expected)
        assert_equal(read(cluster), expected)


@pytest.mark.filterwarnings("ignore:parameter 'book.weight' is stepped by")
def test_parameter_that_was_replaced_right_before_a_death_comes_back(
    make_cluster: MakeCluster,
) -> None:
    def training(victim: int | None) -> Train:
        def train(worker: ps.Worker) -> State:
            model = nn.ModuleDict({"layer": nn.Linear(3, 1), "book": nn.Linear(3, 1, bias=False)})
            optimizer = worker.optimizer(filled(model), SGD(model.parameters(), lr=0.01))
            for number in range(worker.clock, STEPS):
                dies(worker, victim, 4)
                if number == 3:
                    model["book"].weight = nn.Parameter(0.5 * model["book"].weight.detach())
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
                optimizer.zero_grad()
                model["layer"](x * model["book"].weight.detach()).square().mean().backward()
                optimizer.step()
            return own(model)

        return train

    expected = ended(make_cluster, training(None), workers=1)[1].returned[0]
    cluster, ranks = ended(make_cluster, training(0), workers=1)
    assert ranks.restarts == [0]
    assert_equal(ranks.returned[0], expected)
    assert_equal(read(cluster), expected)


@pytest.mark.filterwarnings("ignore:parameter 'book.weight' is stepped by")
@pytest.mark.filterwarnings("ignore:rank 0 joined a run whose optimizer")
def test_parameter_that_was_added_and_replaced_comes_back(make_cluster: MakeCluster) -> None:
    def training(victim: int | None) -> Train:
        def train(worker: ps.Worker) -> State:
            model = nn.ModuleDict({"layer": filled(nn.Linear(3, 1))})
            if worker.clock > 1:
                model["book"] = Codebook()
            optimizer = worker.optimizer(model, SGD(model["layer"].parameters(), lr=0.01))
            for number in range(worker.clock, 14):
                dies(worker, victim, 12)
                if number == 1:
                    model["book"] = Codebook()
                    optimizer.add_param_group({"params": list(model["book"].parameters())})
                optimizer.zero_grad()
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
                model["layer"](model["book"](x) if number else x).square().mean().backward()
                optimizer.step()
            return own(model)

        return train

    expected = ended(make_cluster, training(None), workers=1)[1].returned[0]
    _, ranks = ended(make_cluster, training(0), workers=1)
    assert ranks.restarts == [0]
    assert_equal(ranks.returned[0], expected)


def test_replaced_parameter_warns(make_cluster: MakeCluster) -> None:
    def train(worker: ps.Worker) -> None:
        model = nn.ModuleDict({"layer": nn.Linear(3, 1), "book": Codebook()})
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.01))
        for _ in range(12):
            model["layer"](model["book"](torch.ones(2, 3))).mean().backward()
            optimizer.step()

    with pytest.warns(UserWarning, match="'book.weight' is stepped by.*another object") as warned:
        ended(make_cluster, train, workers=1)
    assert len(warned) == 1


@pytest.mark.filterwarnings("ignore:parameter 'head.0.weight' .and 3 more. is stepped by")
@pytest.mark.parametrize("how", ["left alone", "adopted"])
def test_module_that_is_replaced_is_in_the_result_as_the_model_has_it(
    make_cluster: MakeCluster, how: str
) -> None:
    def training(victim: int | None) -> Train:
        def train(worker: ps.Worker) -> State:
            model, start = two_layers(), worker.clock
            model["head"] = nn.Sequential(model["head"], nn.BatchNorm1d(1))
            new = filled(nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1)))
            if start > 2 and how == "left alone":
                model["head"] = new
            optimizers = [worker.optimizer(model, SGD(model.parameters(), lr=0.1))]
            for number in range(start, 14):
                dies(worker, victim, 12)
                if number == max(start, 2):
                    model["head"] = new
                    if how == "adopted":
                        head = SGD(new.parameters(), lr=0.1)
                        optimizers.append(worker.optimizer(model, head, name="head"))
                if how == "left alone" and number >= 2:
                    with torch.no_grad():
                        new[0].weight.mul_(0.9)
                model.zero_grad()
                loss_of(model, worker.rank, number).backward()
                for each in optimizers:
                    each.step()
                if how == "adopted" and number == 4:
                    found = read(clusters[-1])
                    assert torch.equal(found["head.0.weight"], new[0].weight.detach())
            return own(model)

        return train

    clusters = []
    for victim in (None, 0):
        clusters.append(make_cluster(workers=1, restarts=True, policy=ps.Sync()))
        ranks = Ranks(clusters[-1], training(victim)).start(0)
        ranks.end()
        if victim is None:
            expected = ranks.returned[0]
        assert_equal(ranks.returned[0], expected)
        assert_equal(read(clusters[-1]), expected)


@pytest.mark.parametrize(
    ("new", "has"), [(nn.Linear(4, 1), "another object"), (nn.Identity(), "no such name")]
)
def test_module_that_is_replaced_warns_once(
    make_cluster: MakeCluster, new: nn.Module, has: str
) -> None:
    def train(worker: ps.Worker) -> None:
        model = two_layers()
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.01))
        for _ in range(12):
            model["head"] = new
            loss_of(model, 0, 0).backward()
            optimizer.step()

    text = rf"'head.weight' \(and 1 more\) is stepped by.*{has}"
    with pytest.warns(UserWarning, match=text) as warned:
        ended(make_cluster, train, workers=1)
    assert len(warned) == 1


@pytest.mark.parametrize(
    "how", ["in no optimizer", "frozen", "in a group", "in a group, replaced", "in an optimizer"]
)
def test_module_that_is_added_warns_once_where_no_optimizer_has_it(
    make_cluster: MakeCluster, how: str
) -> None:
    def train(worker: ps.Worker) -> None:
        model = two_layers()
        parts = [model["body"], model["head"]]
        optimizers = [
            worker.optimizer(model, SGD(each.parameters(), lr=0.01), name=f"part {number}")
            for number, each in enumerate(parts)
        ]
        for number in range(22):
            if number == 2:
                model["extra"] = new = nn.Linear(2, 2).requires_grad_(how != "frozen")
                if how.startswith("in a group"):
                    optimizers[1].add_param_group({"params": list(new.parameters())})
                if how == "in an optimizer":
                    extra = worker.optimizer(model, SGD(new.parameters(), lr=0.1), name="extra")
                    optimizers.append(extra)
                if "replaced" in how:
                    new.weight = nn.Parameter(torch.ones(2, 2))
            loss_of(model, 0, 0).backward()
            for each in optimizers:
                each.step()

    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        cluster, _ = ended(make_cluster, train, workers=1)
    told = [str(each.message) for each in raised]
    if how == "in no optimizer":
        (text,) = told
        assert "'extra.weight' (and 1 more) was added" in text
        assert not any("extra" in name for name in read(cluster, "part 0"))
    else:
        assert not any("was added" in text for text in told)
        assert len(told) == ("replaced" in how)


# --- layers that are trained later ----------------------------------------------------------------


@pytest.mark.parametrize("how", ["unfreeze", "add"])
@pytest.mark.parametrize("again", [True, False], ids=["trains it again", "does not"])
def test_worker_that_comes_back_has_the_values_of_layers_that_were_added(
    make_cluster: MakeCluster, how: str, again: bool
) -> None:
    clusters = [make_cluster(workers=2, restarts=True, policy=ps.Sync())]

    def train(worker: ps.Worker) -> State:
        model = two_layers()
        first = model["body"].weight.detach().clone()
        params = model.parameters() if how == "unfreeze" else model["head"].parameters()
        if how == "unfreeze":
            model["body"].requires_grad_(False)
        optimizer = worker.optimizer(model, SGD(params, lr=0.1))
        if worker.incarnation > 1:
            assert not torch.equal(model["body"].weight, first)
            assert torch.equal(model["body"].weight, read(clusters[0])["body.weight"])
        for number in range(worker.clock, STEPS):
            dies(worker, 1, 4)
            if number == 2 or (worker.incarnation > 1 and number == 4 and again):
                if how == "unfreeze":
                    model["body"].requires_grad_(True)
                else:
                    optimizer.add_param_group({"params": list(model["body"].parameters())})
            optimizer.zero_grad()
            loss_of(model, worker.rank, number).backward()
            optimizer.step()
        return own(model)

    ranks = Ranks(clusters[0], train).start(0, 1)
    if again:
        ranks.end()
        assert_equal(ranks.returned[1], ranks.returned[0])
    else:
        with pytest.warns(UserWarning, match="rank 1 joined a run .* has trained 'body.weight'"):
            ranks.end()


def three_layers() -> nn.ModuleDict:
    layers = {"body": nn.Linear(3, 4), "head": nn.Linear(4, 1), "extra": nn.Linear(3, 1)}
    return filled(nn.ModuleDict(layers))


def unfrozen_before(worker: ps.Worker, at: Callable[[int], None]) -> State:
    """A layer that is trained from a clock on requires gradients there when it is adopted."""
    model, start = two_layers(), worker.clock
    model["body"].requires_grad_(start > 2)
    optimizer = worker.optimizer(model, Adam(model.parameters(), lr=0.02))
    halved = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    worker.track("halved", halved)
    for number in range(start, STEPS):
        at(number)
        if number == 2:
            model["body"].requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model, worker.rank, number).backward()
        optimizer.step()
        halved.step()
    return own(model)


def frozen_again_before_more(worker: ps.Worker, at: Callable[[int], None]) -> State:
    """A layer is trained for two steps; later another one is added."""
    model, start = three_layers(), worker.clock
    model["body"].requires_grad_(False)
    params = [*model["body"].parameters(), *model["head"].parameters()]
    optimizer = worker.optimizer(model, Adam(params, lr=0.02))
    for number in range(start, STEPS):
        at(number)
        if number in (1, 3):
            model["body"].requires_grad_(number == 1)
        if number == 4:
            optimizer.add_param_group({"params": list(model["extra"].parameters())})
        optimizer.zero_grad()
        loss = loss_of(model, worker.rank, number)
        (loss + model["extra"](torch.ones(1, 3)).square().sum()).backward()
        optimizer.step()
    return own(model)


def adopted_after_a_replacement(worker: ps.Worker, at: Callable[[int], None]) -> State:
    model, start = two_layers(), worker.clock
    model["book"] = filled(nn.Linear(3, 1, bias=False))
    params = [*model["body"].parameters(), *model["book"].parameters()]
    optimizers = [worker.optimizer(model, SGD(params, lr=0.1))]
    for number in range(start, STEPS):
        at(number)
        if number == 0:
            model["book"].weight = nn.Parameter(torch.full((1, 3), 0.5))
        with torch.no_grad():
            model["book"].weight.mul_(0.9)
        if number >= 2 and len(optimizers) == 1:
            head = SGD(model["head"].parameters(), lr=0.1)
            optimizers.append(worker.optimizer(model, head, name="head"))
        model.zero_grad()
        (loss_of(model, worker.rank, number) * model["book"].weight.detach().sum()).backward()
        for each in optimizers:
            each.step()
    return own(model)


def frozen_outside_the_model(worker: ps.Worker, at: Callable[[int], None]) -> State:
    """A scale is no part of the model; it is frozen at a step."""
    model, begin = two_layers(), worker.clock
    scale = nn.Parameter(torch.ones(1), requires_grad=begin <= 2)
    optimizer = worker.optimizer(model, SGD([*model.parameters(), scale], lr=0.02))
    for number in range(begin, STEPS):
        at(number)
        if number == 2:
            scale.requires_grad_(False)
        optimizer.zero_grad()
        (scale * loss_of(model, worker.rank, number)).sum().backward()
        optimizer.step()
    return {**own(model), "scale": scale.detach().clone()}


def added_right_behind_the_adoption(worker: ps.Worker, at: Callable[[int], None]) -> State:
    """A layer that is added later requires gradients when the rest is adopted."""
    model, begin = two_layers(), worker.clock
    model["body"].requires_grad_(begin > 2)
    if begin > 2 and worker.rank == 1:
        model["body"].register_buffer("seen", torch.zeros(1))
    optimizer = worker.optimizer(model, SGD(model["head"].parameters(), lr=0.1))
    for number in range(begin, STEPS):
        at(number)
        if number == max(begin, 2):
            model["body"].requires_grad_(True)
            optimizer.add_param_group({"params": list(model["body"].parameters())})
        optimizer.zero_grad()
        loss_of(model, worker.rank, number).backward()
        optimizer.step()
    return {name: value for name, value in own(model).items() if name != "body.seen"}


def adopted_before_more_is_added(worker: ps.Worker, at: Callable[[int], None]) -> State:
    """A second optimizer is adopted while a layer of the first one is not added again yet."""
    model, begin = three_layers(), worker.clock
    model.register_buffer("seen", torch.zeros(1))
    optimizers = [worker.optimizer(model, SGD(model["head"].parameters(), lr=0.1))]

    def adopt() -> None:
        extra = SGD(model["extra"].parameters(), lr=0.1)
        optimizers.append(worker.optimizer(model, extra, name="extra"))

    if begin == 4:
        adopt()
    for number in range(begin, STEPS):
        at(number)
        if number == max(begin, 2):
            optimizers[0].add_param_group({"params": list(model["body"].parameters())})
        if number == 4 and begin < 4:
            adopt()
        model.zero_grad()
        loss = loss_of(model, worker.rank, number)
        (loss + model["extra"](torch.ones(1, 3)).square().sum()).backward()
        for each in optimizers:
            each.step()
    return own(model)


def layers_removed(worker: ps.Worker, at: Callable[[int], None]) -> State:
    """Layers with buffers, and one that no optimizer is given, are removed at a step."""
    model, begin = three_layers(), worker.clock
    for name in ("old", "norm") if begin <= 2 else ("norm",):
        model[name] = nn.BatchNorm1d(1, affine=False)
    if begin > 2:
        del model["extra"]
    params = [*model["body"].parameters(), *model["head"].parameters()]
    optimizer = worker.optimizer(model, SGD(params, lr=0.1))
    for number in range(begin, STEPS):
        at(number)
        if number == 2:
            del model["extra"], model["old"]
        optimizer.zero_grad()
        loss = loss_of(model, worker.rank, number)
        (loss + model["norm"](model["body"](torch.ones(2, 3))[:, :1]).sum()).backward()
        optimizer.step()
    return own(model)


def steps_of_a_table_only(worker: ps.Worker, at: Callable[[int], None]) -> State:
    """A layer that no optimizer is given requires gradients from a clock on."""
    model = two_layers()
    rows = Embedding(worker.client.table("rows", 3, rule=ps.SGD(lr=0.1)))
    model["rows"] = rows
    model["body"].requires_grad_(worker.incarnation > 1)
    optimizer = worker.optimizer(model, SGD(rows.parameters(), lr=0.1))
    for number in range(worker.clock, STEPS):
        at(number)
        model["body"].requires_grad_(number >= 2)
        optimizer.zero_grad()
        loss_of(model, worker.rank, number).backward()
        (rows(torch.arange(4)) - worker.rank).square().sum().backward()
        optimizer.step()
    worker.barrier()
    return {"rows": torch.from_numpy(rows.table.pull(range(4))), **own(two_layers())}


@pytest.mark.filterwarnings("ignore:parameter 'book.weight' is stepped by")
@pytest.mark.filterwarnings("ignore:buffer '.*' is no longer in the model")
@pytest.mark.usefixtures("tables_ready")
@pytest.mark.parametrize(
    "program",
    [
        *(unfrozen_before, frozen_again_before_more, adopted_after_a_replacement),
        *(frozen_outside_the_model, added_right_behind_the_adoption, adopted_before_more_is_added),
        *(layers_removed, steps_of_a_table_only),
    ],
)
def test_rank_that_came_back_takes_the_blocks_as_the_servers_have_them(
    make_cluster: MakeCluster, program: Callable[..., State]
) -> None:
    def training(victim: int | None) -> Train:
        def train(worker: ps.Worker) -> State:
            def at(number: int) -> None:
                if (worker.rank, worker.incarnation, number) == (victim, 1, 4):
                    worker.client.drain()
                    raise Killed

            return program(worker, at)

        return train

    first, unbroken = ended(make_cluster, training(None))
    for victim in (0, 1):
        cluster, ranks = ended(make_cluster, training(victim))
        assert ranks.restarts == [victim]
        for rank in (0, 1):
            assert_equal(ranks.returned[rank], unbroken.returned[rank])
        assert_equal(read(cluster), read(first))
        if program is adopted_after_a_replacement:
            assert_equal(read(cluster, "head"), read(first, "head"))


@pytest.mark.usefixtures("tables_ready")
@pytest.mark.parametrize("victim", [0, 1])
def test_steps_of_a_table_before_the_adoption_are_none_of_the_optimizer(
    make_cluster: MakeCluster, victim: int
) -> None:
    """A rank dies behind them: the optimizer's buffers and frozen parameters are not there yet."""

    def train(worker: ps.Worker) -> State:
        model = two_layers()
        model["norm"] = nn.BatchNorm1d(1)
        if worker.rank == 0:
            model["norm"].running_mean.fill_(3.0)
        model["body"].requires_grad_(False)
        table = worker.client.table("rows", 3, rule=ps.SGD(lr=0.1))
        if worker.incarnation == 1:
            worker.client.tick("rows").result()
            if worker.rank == victim:
                worker.client.drain()
                raise Killed
        model["rows"] = rows = Embedding(table)
        params = [*model["head"].parameters(), *model["norm"].parameters(), *rows.parameters()]
        worker.optimizer(model, SGD(params, lr=0.1))
        return {"norm": model["norm"].running_mean.clone()}

    _, ranks = ended(make_cluster, train)
    assert ranks.restarts == [victim]
    for rank in (0, 1):
        assert torch.equal(ranks.returned[rank]["norm"], torch.full((1,), 3.0))


def test_added_rank_takes_the_blocks_as_the_servers_have_them(make_cluster: MakeCluster) -> None:
    cluster, clocks = make_cluster(workers=1, restarts=True, policy=ps.Sync()), list[int]()

    def train(worker: ps.Worker) -> State:
        def at(number: int) -> None:
            if worker.rank == 0:
                clocks.append(number)
                wait_until(lambda: number < 4 or worker.client.connection.all_live([1]))
                if number == 4:
                    wait_until(lambda: came)
            else:
                came.append(number)

        return unfrozen_before(worker, at)

    came = list[int]()
    ranks = Ranks(cluster, train).start(0)
    ranks.until(lambda: 4 in clocks)
    cluster.scale(2)
    ranks.start(1).end()
    assert came[0] >= 4
    assert_equal(ranks.returned[1], ranks.returned[0])


def test_optimizer_that_is_adopted_later_leaves_the_buffers_of_each_rank(
    make_cluster: MakeCluster,
) -> None:
    def train(worker: ps.Worker) -> float:
        model = two_layers()
        model.register_buffer("seen", torch.zeros(1))
        optimizers = [worker.optimizer(model, SGD(model["body"].parameters(), lr=0.1))]
        for number in range(3):
            if number == 1:
                head = SGD(model["head"].parameters(), lr=0.1)
                optimizers.append(worker.optimizer(model, head, name="head"))
            model.seen += worker.rank + 1
            loss_of(model, worker.rank, number).backward()
            for each in optimizers:
                each.step()
        return float(model.seen)

    _, ranks = ended(make_cluster, train)
    assert ranks.returned == {0: 3.0, 1: 6.0}
