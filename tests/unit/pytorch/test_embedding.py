"""`Embedding` and `EmbeddingBag` give what torch's modules give on the same rows."""

from __future__ import annotations

import copy
import pickle
import warnings
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.pytorch.fake_tables import FakeTable, TableCluster
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paramserve as ps
from paramserve.pytorch import Embedding, EmbeddingBag, from_embedding
from paramserve.pytorch.optimizer import adopt

pytestmark = pytest.mark.filterwarnings("ignore:table .* has collected gradients")
"""The tests take them from the rows themselves."""

DIM = 3
SIZE = 12
PADDING = 4
MODES = ("sum", "mean", "max")


@pytest.fixture
def table() -> FakeTable:
    return make_table()


def make_table() -> FakeTable:
    """With rows for the keys 0 to 11."""
    made = TableCluster().worker().client.table("users", DIM)
    values = torch.randn(SIZE, DIM, generator=torch.Generator().manual_seed(1))
    made.put(np.arange(SIZE), values.numpy())
    return made


def weight_of(table: FakeTable, padding: int | None = None) -> Tensor:
    weight = torch.stack([torch.from_numpy(table.values[key]) for key in range(SIZE)])
    if padding is not None:
        weight[padding] = 0
    return weight


def dense(module: Embedding | EmbeddingBag) -> Tensor:
    """The gradients that were collected, as torch's weight would have them."""
    gradient = torch.zeros(SIZE, DIM)
    keys, values = module.rows.collected()
    gradient[keys] = values
    return gradient


def loss_of(out: Tensor) -> Tensor:
    """Each element counts for something of its own."""
    return (out * torch.linspace(-1, 2, out.numel()).reshape(out.shape)).sum()


# --- Embedding -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([5, 1, 5, 4, 0]),
        torch.tensor([[4, 4], [2, 11]], dtype=torch.int32),
        torch.tensor(7),
        torch.tensor([4]),
        torch.zeros(0, 2, dtype=torch.long),
    ],
    ids=["repeated", "2-D int32", "scalar", "only padding", "empty"],
)
def test_embedding_gives_torchs_values_and_gradients(ids: Tensor) -> None:
    for padding in (None, PADDING):
        table = make_table()
        theirs = nn.Embedding(SIZE, DIM, padding_idx=padding, _weight=weight_of(table, padding))
        ours = Embedding(table, padding_idx=padding)
        out = ours(ids)
        assert torch.equal(out, theirs(ids)), padding
        loss_of(out).backward()
        loss_of(theirs(ids)).backward()
        torch.testing.assert_close(dense(ours), theirs.weight.grad)


def test_embedding_pulls_each_key_once_without_the_padding(table: FakeTable) -> None:
    Embedding(table, padding_idx=PADDING)(torch.tensor([9, 4, 2, 9, 4]))
    assert table.pulls == [([9, 2], True)]


def test_embedding_unknown_keys_any_int64_read_alike_and_get_no_rows(table: FakeTable) -> None:
    module = Embedding(table)
    ids = torch.tensor([-(2**63), 2**63 - 1, -1])
    with torch.no_grad():
        read = module(ids)
    assert len(table.keys()) == SIZE, "nothing was created"
    assert torch.equal(module.eval()(ids), read)
    assert len(table.keys()) == SIZE
    assert torch.equal(module.train()(ids), read)
    assert len(table.keys()) == SIZE


@pytest.mark.parametrize("freeze", ["module", "parameters"])
def test_embedding_frozen_creates_and_collects_nothing(table: FakeTable, freeze: str) -> None:
    module = Embedding(table)
    if freeze == "module":
        module.requires_grad_(False)
    else:
        for param in module.parameters():
            param.requires_grad = False
    assert not module(torch.tensor([77])).requires_grad
    assert len(table.keys()) == SIZE
    module.requires_grad_(True)
    assert module(torch.tensor([77])).requires_grad
    assert not module.rows.requires_grad, "DistributedDataParallel would wait for it"


def test_embedding_follows_the_models_dtype(table: FakeTable) -> None:
    module = nn.Sequential(Embedding(table), nn.Linear(DIM, 2)).double()
    module(torch.tensor([1, 2, 1])).sum().backward()
    assert module[0].rows.grad.dtype == torch.float64
    assert module[0].rows.collected().values.dtype == torch.float32


def test_embedding_of_strings_is_that_of_their_keys(table: FakeTable) -> None:
    module, names = Embedding(table), [["anna", "bo"], ["bo", "anna"]]
    rows = module(names)
    assert rows.shape == (2, 2, DIM)
    assert torch.equal(rows, module(torch.from_numpy(ps.keys_of(names))))
    rows.sum().backward()
    assert module.rows.collected().keys.tolist() == ps.keys_of(names[0]).tolist()
    assert [learns for _, learns in table.pulls] == [True, True]
    with torch.no_grad():
        assert torch.equal(EmbeddingBag(table, mode="sum")(names), rows.sum(1))
    with pytest.raises(TypeError, match="position 1 is None"):
        module(["anna", None])


@pytest.mark.parametrize(
    "ids", [torch.tensor([1.0]), torch.tensor([True]), [1, 2]], ids=["float", "bool", "list"]
)
def test_embedding_ids_that_are_no_integers_are_refused(table: FakeTable, ids: Any) -> None:
    with pytest.raises(TypeError, match="integers"):
        Embedding(table)(ids)
    assert table.pulls == []


@pytest.mark.parametrize(
    ("padding", "error"), [(1.0, TypeError), (True, TypeError), (2**63, ValueError)]
)
def test_embedding_padding_that_is_no_key_is_refused(
    table: FakeTable, padding: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="padding_idx"):
        Embedding(table, padding_idx=padding)


# --- EmbeddingBag --------------------------------------------------------------------------------

FLAT = torch.tensor([5, 1, 5, 4, 0, 11, 4])
BAGS: dict[str, dict[str, Any]] = {
    "offsets": {"input": FLAT, "offsets": torch.tensor([0, 3, 4])},
    "empty bags": {"input": FLAT, "offsets": torch.tensor([0, 0, 2, 7, 7])},
    "int32": {"input": FLAT.int(), "offsets": torch.tensor([0, 3], dtype=torch.int32)},
    "2-D": {"input": torch.tensor([[4, 4, 4], [2, 11, 2]])},
    "no ids": {"input": FLAT[:0], "offsets": torch.tensor([0, 0])},
    "only padding": {"input": torch.tensor([[4, 4]])},
}


def call(module: Any, bags: dict[str, Any]) -> Tensor:
    return module(bags["input"], *[value for name, value in bags.items() if name != "input"])


@pytest.mark.parametrize("bags", BAGS.values(), ids=BAGS)
def test_bag_gives_torchs_values_and_gradients(bags: dict[str, Any]) -> None:
    for mode, padding in product(MODES, (None, PADDING)):
        options: dict[str, Any] = {"mode": mode, "padding_idx": padding}
        table = make_table()
        theirs = nn.EmbeddingBag(SIZE, DIM, _weight=weight_of(table, padding), **options)
        ours = EmbeddingBag(table, **options)
        out = call(ours, bags)
        torch.testing.assert_close(out, call(theirs, bags))
        loss_of(out).backward()
        loss_of(call(theirs, bags)).backward()
        torch.testing.assert_close(dense(ours), theirs.weight.grad)


@pytest.mark.parametrize("padding", [None, PADDING])
def test_bag_per_sample_weights_and_last_offset_are_torchs(
    table: FakeTable, padding: int | None
) -> None:
    weights = torch.linspace(-1, 2, len(FLAT)).requires_grad_()
    offsets = torch.tensor([0, 2, 2, 7])
    options: dict[str, Any] = {
        "mode": "sum",
        "padding_idx": padding,
        "include_last_offset": True,
    }
    theirs = nn.EmbeddingBag(SIZE, DIM, _weight=weight_of(table, padding), **options)
    ours = EmbeddingBag(table, **options)
    out = ours(FLAT, offsets, weights)
    torch.testing.assert_close(out, theirs(FLAT, offsets, weights))
    (grad,) = torch.autograd.grad(loss_of(out), weights, retain_graph=True)
    loss_of(out).backward()
    weights.grad = None
    loss_of(theirs(FLAT, offsets, weights)).backward()
    torch.testing.assert_close(grad, weights.grad)
    torch.testing.assert_close(dense(ours), theirs.weight.grad)


def test_bag_default_mode_is_torchs_and_others_are_refused(table: FakeTable) -> None:
    assert EmbeddingBag(table).mode == nn.EmbeddingBag(1, 1).mode
    with pytest.raises(ValueError, match="median"):
        EmbeddingBag(table, mode="median")


# --- state, copies, taking over ------------------------------------------------------------------


def test_state_dict_has_no_rows_and_loads_where_there_are_some(table: FakeTable) -> None:
    model = nn.Sequential(Embedding(table), nn.Linear(DIM, 2))
    model(torch.tensor([1, 2])).sum().backward()
    state = model.state_dict()
    assert list(state) == ["1.weight", "1.bias"]
    assert model.load_state_dict(state) == nn.Sequential(nn.Identity()).load_state_dict({})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.weight"):
        model.load_state_dict({**state, "0.weight": torch.zeros(SIZE, DIM)})


def test_copy_is_on_the_same_table_and_a_pickle_is_refused(table: FakeTable) -> None:
    model = nn.Sequential(Embedding(table, padding_idx=PADDING), nn.Linear(DIM, 2))
    copied = copy.deepcopy(model)
    assert copied[0] is not model[0]
    assert copied[0].table is table
    assert copied[0].rows is model[0].rows
    assert copied[0].padding_idx == PADDING
    assert copied[1].weight is not model[1].weight
    with pytest.raises(TypeError, match="'users' cannot be pickled"):
        pickle.dumps(model)


def test_modules_on_one_table_share_its_rows(table: FakeTable) -> None:
    model = nn.ModuleList([Embedding(table), EmbeddingBag(table, mode="sum")])
    assert len(list(model.parameters())) == 1
    model[0](torch.tensor([3])).sum().backward()
    model[1](torch.tensor([[3, 5]])).sum().backward()
    assert dense(model[0])[[3, 5]].tolist() == [[2.0] * DIM, [1.0] * DIM]


def test_to_embedding_gives_the_rows_and_creates_none(table: FakeTable) -> None:
    back = Embedding(table, padding_idx=PADDING).to_embedding()
    assert torch.equal(back.weight, weight_of(table, PADDING))
    assert back.padding_idx == PADDING
    assert back.weight.requires_grad
    more = EmbeddingBag(table, mode="max", include_last_offset=True).to_embedding(SIZE + 2)
    assert (more.num_embeddings, more.mode, more.include_last_offset) == (SIZE + 2, "max", True)
    assert len(table.keys()) == SIZE


def test_to_embedding_without_a_range_of_indices_is_refused(table: FakeTable) -> None:
    with pytest.raises(ValueError, match="padding_idx 40"):
        Embedding(table, padding_idx=40).to_embedding()
    table.put(np.array([-3]), np.zeros((1, DIM), np.float32))
    with pytest.raises(ValueError, match="the key -3"):
        Embedding(table).to_embedding()
    table.values.clear()
    with pytest.raises(ValueError, match="has no rows"):
        Embedding(table).to_embedding()
    assert Embedding(table).to_embedding(2).num_embeddings == 2


@pytest.mark.parametrize("bag", [False, True])
def test_from_embedding_puts_all_rows_once(bag: bool) -> None:
    client = TableCluster().worker().client
    theirs: Any = (
        nn.EmbeddingBag(SIZE, DIM, mode="max", padding_idx=PADDING)
        if bag
        else nn.Embedding(SIZE, DIM, padding_idx=PADDING)
    )
    ours = from_embedding(client, "items", theirs, rule=None)
    ids = torch.tensor([[1, 4], [11, 2]])
    assert torch.equal(ours(ids), theirs(ids))
    assert sorted(ours.table.keys()) == [key for key in range(SIZE) if key != PADDING]
    assert torch.equal(ours.to_embedding(SIZE).weight, theirs.weight)
    ours.table.put(np.array([1]), np.ones((1, DIM), np.float32))
    from_embedding(client, "items", theirs, rule=None)
    assert ours.table.values[1].tolist() == [1.0] * DIM, "it was taken over before"


def test_from_embedding_other_ranks_wait_for_rank_0() -> None:
    cluster = TableCluster(2)
    theirs = nn.Embedding(SIZE, DIM)
    client, waited = cluster.worker(1).client, []
    client.await_block = lambda shapes, **_: waited.append(list(shapes))
    ours = from_embedding(client, "items", theirs, rule=None)
    from_embedding(cluster.worker(0).client, "items", theirs, rule=None)
    assert waited == [[piece.name for block in cluster.blocks for piece in block.pieces]]
    assert len(ours.table.keys()) == 0, "they are rank 0's to put"


def test_from_embedding_what_a_table_cannot_do_is_refused() -> None:
    client = TableCluster().worker().client
    padded = nn.Embedding(SIZE, DIM, padding_idx=0)
    nn.init.ones_(padded.weight)
    for module, match in (
        (nn.Embedding(SIZE, DIM, max_norm=1.0), "max_norm"),
        (nn.EmbeddingBag(SIZE, DIM, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (padded, "not zeros"),
        (nn.Embedding(SIZE, DIM, dtype=torch.float64), "the weight is torch.float64"),
    ):
        with pytest.raises(ValueError, match=match):
            from_embedding(client, "items", module, rule=None)
    with pytest.raises(TypeError, match="Linear"):
        from_embedding(client, "items", nn.Linear(1, 1), rule=None)
    assert client.tables == {}
    narrow = nn.Embedding(SIZE, DIM, dtype=torch.bfloat16)
    ours = from_embedding(client, "items", narrow, rule=None)
    assert torch.equal(ours(torch.arange(SIZE)), narrow.weight.float())


class Net(nn.Module):
    def __init__(self, worker) -> None:
        super().__init__()
        self.words = Embedding(worker.client.table("words", 2))
        self.head = nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids))


def collected() -> tuple[Net, torch.optim.Optimizer]:
    worker = TableCluster().worker()
    model = Net(worker)
    optimizer = adopt(worker, model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.tensor([1, 2, 3, 4, 5])).sum().backward()
    return model, optimizer


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.5)], ids=["mean", "ema"])
def test_averaged_model_between_backward_and_step_averages_the_dense_layers(average) -> None:
    model, optimizer = collected()
    averaged = AveragedModel(model, multi_avg_fn=average)
    for _ in range(2):
        averaged.update_parameters(model)
        optimizer.step()
        model(torch.tensor([6, 7])).sum().backward()
    averaged.update_parameters(model)
    assert averaged.module.head.weight.shape == (1, 2)
    assert not torch.equal(averaged.module.head.weight, model.head.weight)


def test_parameters_as_a_vector_have_no_rows_in_them() -> None:
    model, optimizer = collected()
    vector = nn.utils.parameters_to_vector(model.parameters())
    assert vector.shape == (3,)
    assert sum(param.numel() for param in model.parameters()) == 3
    nn.utils.vector_to_parameters(vector, model.parameters())
    optimizer.step()
    assert model.words.table.pushes[-1].keys == [1, 2, 3, 4, 5]


def test_tools_that_go_over_gradients_find_those_of_rows() -> None:
    model, optimizer = collected()
    expected = torch.cat([param.grad.flatten() for param in model.parameters()]).norm()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.testing.assert_close(norm, expected)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    assert model.words.rows.grad.shape == (5, 2)
    assert model.words.rows.grad.abs().max() <= 0.01
    model.double()
    assert model.words.rows.grad.dtype == torch.float64
    model.float()
    assert copy.deepcopy(model).words.rows is model.words.rows
    optimizer.step()
    assert model.words.rows.grad is None
    assert model.words.rows.shape == (0, 2)


def test_backward_without_worker_optimizer_warns_with_what_to_do(table) -> None:
    module = Embedding(table)
    words = r"table 'users' .* give the model to worker\.optimizer"
    with pytest.warns(UserWarning, match=words) as warned:
        module(torch.tensor([1, 2])).sum().backward()
    assert [each.filename for each in warned] == [__file__], "the line of backward()"


def test_backward_that_an_optimizer_sends_or_of_frozen_rows_does_not_warn(table) -> None:
    frozen = Embedding(table).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collected()
        (frozen(torch.tensor([1, 2])).sum() * torch.ones((), requires_grad=True)).backward()


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_transforms_of_torch_func_are_refused_with_what_to_do(transform) -> None:
    model, _ = collected()
    pulls = len(model.words.table.pulls)
    head = dict(model.head.named_parameters(prefix="head"))

    def loss(params: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, params, (ids,)).sum()

    through = {
        "grad": lambda: torch.func.grad(loss)(head, torch.tensor([1, 2])),
        "vmap": lambda: torch.func.vmap(model)(torch.tensor([[1, 2], [3, 4]])),
    }
    with pytest.raises(TypeError, match=r"inside torch\.func"):
        through[transform]()
    assert len(model.words.table.pulls) == pulls
    assert loss(head, torch.tensor([1, 2])).requires_grad
