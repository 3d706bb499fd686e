"""Steps of `worker.optimizer` with modules on tables in the model."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.unit.pytorch.fake_tables import LR, FakeTable, TableCluster
from torch import Tensor, nn

from paramserve.consistency.built_in import Async, LocalSteps
from paramserve.errors import NonFinite
from paramserve.pytorch import Embedding, EmbeddingBag
from paramserve.pytorch.optimizer import adopt
from paramserve.pytorch.tables import Tables, clip

DIM = 3
SIZE = 10
BATCHES = [
    (torch.tensor([1, 2, 1]), torch.tensor([[4, 2], [0, 9], [9, 9]])),
    (torch.tensor([7, 7, 2]), torch.tensor([[4, 4], [1, 3], [3, 5]])),
    (torch.tensor([1, 8, 0]), torch.tensor([[2, 6], [6, 6], [0, 1]])),
]


class Net(nn.Module):
    """Two embeddings and a head."""

    def __init__(self, users: nn.Module, items: nn.Module, *, head: bool = True) -> None:
        super().__init__()
        self.users, self.items = users, items
        if head:
            self.head = nn.Linear(2 * DIM, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        found = torch.cat([self.users(users), self.items(items)], dim=1)
        return (self.head(found) if hasattr(self, "head") else found).square().mean()


def make(worker: Any, *, head: bool = True) -> tuple[Net, Net]:
    """The same net on tables, and on torch's embeddings."""
    torch.manual_seed(3)
    theirs = Net(nn.Embedding(SIZE, DIM), nn.EmbeddingBag(SIZE, DIM, mode="sum"), head=head)
    tables = [worker.client.table(name, DIM) for name in ("users", "items")]
    for table, module in zip(tables, (theirs.users, theirs.items), strict=True):
        table.put(torch.arange(SIZE).numpy(), module.weight.detach().numpy())
    ours = Net(Embedding(tables[0]), EmbeddingBag(tables[1], mode="sum"), head=head)
    if head:
        ours.head.load_state_dict(theirs.head.state_dict())
    return ours, theirs


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def assert_same(ours: Net, theirs: Net) -> None:
    for mine, module in ((ours.users, theirs.users), (ours.items, theirs.items)):
        torch.testing.assert_close(mine.to_embedding(SIZE).weight, module.weight)
    if hasattr(theirs, "head"):
        torch.testing.assert_close(ours.head.weight, theirs.head.weight)


def tables_of(worker: Any) -> list[FakeTable]:
    return list(worker.client.tables.values())


@pytest.mark.parametrize("dense", ["servers", "local"])
@pytest.mark.parametrize("given", [True, False], ids=["all parameters", "dense parameters"])
def test_step_equals_torch(dense: str, given: bool) -> None:
    worker = TableCluster().worker()
    ours, theirs = make(worker)
    params = ours.parameters() if given else ours.head.parameters()
    optimizer = adopt(worker, ours, torch.optim.SGD(params, lr=LR), dense=dense)
    expected = sgd(theirs)
    for batch in BATCHES:
        for model, each in ((ours, optimizer), (theirs, expected)):
            each.zero_grad()
            model(*batch).backward()
            each.step()
    assert_same(ours, theirs)
    for table in tables_of(worker):
        assert [push.together for push in table.pushes] == [dense == "servers"] * 3
        assert all(push.tick for push in table.pushes)


def test_step_of_tables_alone_needs_no_block_on_the_servers() -> None:
    cluster = TableCluster()
    worker = cluster.worker()
    ours, theirs = make(worker, head=False)
    optimizer, expected = adopt(worker, ours, sgd(ours)), sgd(theirs)
    for batch in BATCHES:
        for model, each in ((ours, optimizer), (theirs, expected)):
            each.zero_grad()
            model(*batch).backward()
            each.step()
    assert_same(ours, theirs)
    assert cluster.blocks == []
    assert [*worker.optimizers.groups] == ["users", "items"]


def test_step_ends_the_clock_of_tables_without_gradients() -> None:
    worker = TableCluster().worker()
    ours, _ = make(worker)
    optimizer = adopt(worker, ours, sgd(ours))
    ours.users(torch.tensor([3])).sum().backward()
    optimizer.step()
    users, items = tables_of(worker)
    assert [(push.keys, push.tick) for push in users.pushes] == [([3], True)]
    assert [(push.keys, push.tick) for push in items.pushes] == [([], True)]
    assert [*worker.optimizers.groups] == ["model", "users", "items"]


@pytest.mark.parametrize("dense", ["servers", "local"])
@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_ and clip"])
def test_step_with_grad_scaler_equals_torch(dense: str, explicit: bool) -> None:
    worker = TableCluster().worker()
    ours, theirs = make(worker)
    params = ours.head.parameters()  # the rows are shown to unscale_ all the same
    optimizer = adopt(worker, ours, torch.optim.SGD(params, lr=LR), dense=dense)
    expected = sgd(theirs)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for batch in BATCHES:
        optimizer.zero_grad()
        scaler.scale(ours(*batch)).backward()
        expected.zero_grad()
        theirs(*batch).backward()
        if explicit:
            scaler.unscale_(optimizer)
            for model in (ours, theirs):
                assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.01
        scaler.step(optimizer)
        scaler.update()
        expected.step()
    assert_same(ours, theirs)


@pytest.mark.parametrize("dense", ["servers", "local"])
def test_step_that_the_scaler_skips_pushes_and_keeps_nothing(dense: str) -> None:
    worker = TableCluster().worker()
    ours, _ = make(worker)
    optimizer = adopt(worker, ours, sgd(ours), dense=dense)
    head = ours.head.weight.clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    before = copy.deepcopy([table.values for table in tables_of(worker)])
    scaler.scale(ours(*BATCHES[0]) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0
    assert [push.keys for table in tables_of(worker) for push in table.pushes] == [[], []]
    assert all(
        (table.values[1] == old[1]).all()
        for table, old in zip(tables_of(worker), before, strict=True)
    )
    assert torch.equal(ours.head.weight, head)
    assert len(ours.users.rows.collected().keys) == 0


def clipped(theirs: Net, *, alone: bool) -> None:
    """As `worker.optimizer` says: together, or the rows by their own norm."""
    rows = [theirs.users.weight, theirs.items.weight]
    for params in (rows, list(theirs.head.parameters())) if alone else (theirs.parameters(),):
        assert nn.utils.clip_grad_norm_(params, 0.02) > 0.02


@pytest.mark.parametrize(
    ("sync", "dense", "alone"),
    [(True, "servers", True), (False, "servers", False), (False, "local", False)],
)
def test_step_clip_norm_has_the_rows_in_its_norm_where_the_worker_clips(
    sync: bool, dense: str, alone: bool
) -> None:
    worker = TableCluster(sync=sync).worker()
    ours, theirs = make(worker)
    optimizer = adopt(worker, ours, sgd(ours), dense=dense, clip_norm=0.02)
    expected = sgd(theirs)
    for batch in BATCHES:
        optimizer.zero_grad()
        ours(*batch).backward()
        optimizer.step()
        expected.zero_grad()
        theirs(*batch).backward()
        clipped(theirs, alone=alone)
        expected.step()
    assert_same(ours, theirs)


def test_clip_leaves_what_is_below_the_norm_or_not_finite() -> None:
    small, bad = torch.tensor([3.0, 4.0]), torch.tensor([[30.0, float("inf")]])
    clip([small, torch.empty(0, DIM)], 5.1)
    clip([bad], 5.1)
    assert small.tolist() == [3.0, 4.0]
    assert bad.tolist() == [[30.0, float("inf")]]
    clip([small], 0.5)
    torch.testing.assert_close(small, torch.tensor([0.3, 0.4]))


@pytest.mark.parametrize("dense", ["servers", "local"])
def test_step_with_closure_and_momentum_equals_torch(dense: str) -> None:
    worker = TableCluster().worker()
    ours, theirs = make(worker)
    options: dict[str, Any] = {"lr": LR, "momentum": 0.5}
    optimizer = adopt(worker, ours, torch.optim.SGD(ours.parameters(), **options), dense=dense)
    rows = [theirs.users.weight, theirs.items.weight]
    expected = [torch.optim.SGD(rows, lr=LR), torch.optim.SGD(theirs.head.parameters(), **options)]
    for batch in BATCHES:

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss = ours(*batch)
            loss.backward()
            return loss

        theirs.zero_grad()
        loss = theirs(*batch)
        loss.backward()
        torch.testing.assert_close(optimizer.step(closure), loss)
        for each in expected:
            each.step()
    assert_same(ours, theirs)


def test_step_overlap_pushes_rows_at_once() -> None:
    worker = TableCluster().worker()
    ours, _ = make(worker)
    optimizer = adopt(worker, ours, sgd(ours), overlap=True)
    ours(*BATCHES[0]).backward()
    optimizer.step()
    assert tables_of(worker)[0].pushes[0].keys == [1, 2]
    worker.optimizers.finish()


def test_step_weight_goes_to_the_tables() -> None:
    for dense in ("servers", "local"):
        worker = TableCluster().worker()
        ours, _ = make(worker)
        optimizer = adopt(worker, ours, sgd(ours), dense=dense, weight=32)
        optimizer.step()
        assert [t.pushes[0].weight for t in tables_of(worker)] == [32.0, 32.0]


def test_optimizer_state_has_the_parameters_that_it_was_given() -> None:
    worker = TableCluster().worker()
    ours, theirs = make(worker)
    plain = torch.optim.SGD(theirs.head.parameters(), lr=LR, momentum=0.5)
    optimizer = torch.optim.SGD(ours.head.parameters(), lr=LR, momentum=0.5)
    adopt(worker, ours, optimizer, dense="local")
    assert len(optimizer.param_groups[0]["params"]) == 4
    ours(*BATCHES[0]).backward()
    optimizer.step()
    plain.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    assert len(optimizer.param_groups[0]["params"]) == 4
    assert optimizer.state_dict()["state"].keys() == {0, 1}


def test_result_has_the_dense_layers_under_their_names() -> None:
    for dense in ("servers", "local"):
        cluster = TableCluster()
        worker = cluster.worker()
        ours, _ = make(worker)
        ours.norm = nn.BatchNorm1d(2)
        ours.again = ours.users  # the rows have a second name, and the result has neither
        optimizer = adopt(worker, ours, sgd(ours), dense=dense)
        ours(*BATCHES[0]).backward()
        optimizer.step()
        worker.optimizers.finish()
        result = {name: torch.from_numpy(value) for name, value in cluster.result().items()}
        assert result.keys() == ours.state_dict().keys()
        assert torch.equal(result["head.weight"], ours.head.weight)
        assert list(worker.optimizers.histories) == ["model"]


def test_module_added_later_comes_with_its_group() -> None:
    worker = TableCluster().worker()
    ours, _ = make(worker)
    optimizer = adopt(worker, ours, sgd(ours))
    ours.more = nn.Sequential(Embedding(worker.client.table("more", DIM)), nn.Linear(DIM, 1))
    optimizer.add_param_group({"params": list(ours.more.parameters())})
    ours.more(torch.tensor([5])).sum().backward()
    optimizer.step()
    assert worker.client.tables["more"].pushes[0].keys == [5]
    assert worker.optimizers.groups[-1] == "more"


def test_adopt_second_optimizer_leaves_the_first_ones_tables() -> None:
    worker = TableCluster().worker()
    ours, _ = make(worker)
    adopt(worker, ours, torch.optim.SGD([ours.head.weight], lr=LR), name="first")
    second = adopt(worker, ours, torch.optim.SGD([ours.head.bias], lr=LR), name="second")
    assert len(second.param_groups[0]["params"]) == 1
    third = torch.optim.SGD([*ours.users.parameters()], lr=LR)
    with pytest.raises(ValueError, match="'users' is stepped already"):
        adopt(worker, ours, third, name="third")


def test_adopt_what_does_not_go_together_is_refused() -> None:
    cluster = TableCluster(2)
    worker, other = cluster.worker(0), cluster.worker(1)
    ours, _ = make(worker)
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (worker, ours, {"consistency": LocalSteps(every=2)}, "LocalSteps does not step tables"),
        (worker, ours, {"dense": "here"}, "'here'"),
        (worker, ours, {"dense": "local", "overlap": True}, "overlap and consistency"),
        (worker, ours, {"dense": "local", "consistency": Async()}, "overlap and consistency"),
        (worker, ours, {"dense": "local"}, r"worker\.process_group"),
        (other, ours, {}, "belongs to"),
        (worker, ours.head, {}, "no module of the model"),
    ]
    for who, model, options, match in cases:
        with pytest.raises(ValueError, match=match):
            adopt(who, model, sgd(ours), **options)
        assert cluster.blocks == []
        assert not ours.users.rows.stepped


# --- steps that are not sent ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dense", "head", "clip_norm"),
    [
        ("servers", True, None),
        ("servers", True, 0.02),
        ("servers", False, None),
        ("servers", False, 0.02),
        ("local", False, 0.02),
    ],
)
def test_step_that_was_not_sent_keeps_the_rows_for_the_next_try(
    monkeypatch: pytest.MonkeyPatch, dense: str, head: bool, clip_norm: float | None
) -> None:
    worker = TableCluster(sync=False).worker()
    ours, theirs = make(worker, head=head)
    optimizer = adopt(worker, ours, sgd(ours), dense=dense, clip_norm=clip_norm)
    expected = sgd(theirs)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for batch in BATCHES:
        ours(*batch).backward()
        with monkeypatch.context() as patch:
            patch.setattr(worker.client, "push_tables", interrupted)
            patch.setattr(worker.client.dense, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        expected.zero_grad()
        theirs(*batch).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm)
        expected.step()
    assert_same(ours, theirs)
    assert [len(table.pushes) for table in tables_of(worker)] == [3, 3]


def test_hybrid_own_step_that_raises_keeps_the_rows_for_the_next_try() -> None:
    worker = TableCluster().worker()
    ours, theirs = make(worker)
    optimizer, expected = adopt(worker, ours, sgd(ours), dense="local"), sgd(theirs)
    for model in (ours, theirs):
        model(*BATCHES[0]).backward()
    lr, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], None
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()
    expected.step()
    assert_same(ours, theirs)


def test_hybrid_rows_that_an_interrupt_left_aside_are_held_until_they_are_sent_or_zeroed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(self: Tables) -> None:
        raise KeyboardInterrupt

    worker = TableCluster().worker()
    ours, _ = make(worker)
    optimizer = adopt(worker, ours, sgd(ours), dense="local")

    def step() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Tables, "bring_back", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()

    ours(*BATCHES[0]).backward()
    step()
    optimizer.zero_grad()
    assert len(ours.users.rows.collected().keys) == 0
    ours(*BATCHES[0]).backward()
    step()
    ours(*BATCHES[1]).backward()
    optimizer.step()
    (push,) = tables_of(worker)[0].pushes
    assert sorted(push.keys) == [1, 2, 7]


def test_hybrid_closure_counts_the_rows_of_its_last_evaluation() -> None:
    worker = TableCluster().worker()
    ours, _ = make(worker)
    dense = torch.optim.LBFGS(ours.head.parameters(), lr=LR, max_iter=3)
    optimizer = adopt(worker, ours, dense, dense="local")
    evaluated = []

    def closure() -> Tensor:
        ours.head.zero_grad()
        loss = ours(*BATCHES[0])
        loss.backward()
        evaluated.append(ours.users.rows.collected().values.clone())
        return loss

    before = copy.deepcopy(tables_of(worker)[0].values)
    optimizer.step(closure)
    assert len(evaluated) > 1
    last = before[2] - np.float32(LR) * evaluated[-1][1].numpy()
    np.testing.assert_array_equal(tables_of(worker)[0].values[2], last)
    assert len(ours.users.rows.collected().keys) == 0


# --- dense layers of several workers -------------------------------------------------------------


@pytest.fixture
def of_two(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The first of two workers, in a process group."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    return TableCluster(2, sync=False).worker()


def test_hybrid_rows_are_no_part_of_a_norm_that_workers_must_agree_on(of_two: Any) -> None:
    ours, theirs = make(of_two)
    optimizer = adopt(of_two, ours, sgd(ours), dense="local", clip_norm=0.02)
    assert len(list(ours.parameters())) == 2
    ours(*BATCHES[0]).backward()
    optimizer.step()
    theirs(*BATCHES[0]).backward()
    clipped(theirs, alone=True)
    sgd(theirs).step()
    assert_same(ours, theirs)


def test_hybrid_rows_that_are_not_finite_do_not_skip_a_scaled_step(of_two: Any) -> None:
    ours, _ = make(of_two)
    optimizer = adopt(of_two, ours, sgd(ours), dense="local")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    before = ours.head.bias.clone()
    rows = ours.users(torch.tensor([1, 2]))
    loss = ours.head.bias.sum() + (rows * torch.tensor([[float("inf")], [1.0]])).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 64.0
    assert not torch.equal(ours.head.bias, before)
    assert tables_of(of_two)[0].pushes[0].keys == [2]


def test_hybrid_rows_that_are_not_finite_are_refused_without_a_scaler(of_two: Any) -> None:
    ours, _ = make(of_two)
    optimizer = adopt(of_two, ours, sgd(ours), dense="local")
    before = ours.head.bias.clone()
    (ours(*BATCHES[0]) * float("nan")).backward()
    with pytest.raises(NonFinite, match="key 1 of table 'users' on rank 0"):
        optimizer.step()
    assert torch.equal(ours.head.bias, before)
    assert tables_of(of_two)[0].pushes == []
    optimizer.zero_grad()
    ours(*BATCHES[0]).backward()
    optimizer.step()
    assert tables_of(of_two)[0].pushes[0].keys == [1, 2]
