"""Values written between two steps, through `.data` too, are replaced, with a warning."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from tests.unit.pytorch.fakes import FakeCluster, on_all_ranks
from tests.unit.pytorch.test_optimizer_step import assert_same, loss_of, small_model, train
from torch import nn

from paramserve.pytorch.assigning import assign
from paramserve.pytorch.embedding import Rows
from paramserve.pytorch.optimizer import adopt


def clamp(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.01, 0.01)


def from_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.5, model.parameters())


def one_element(model: nn.Module) -> None:
    model[3].bias.data[2] += 1e-7


def other_memory(model: nn.Module) -> None:
    model[3].weight.data = model[3].weight.data * 2


def to_nan(model: nn.Module) -> None:
    model[0].bias.data.fill_(float("nan"))


WRITES = [clamp, from_vector, one_element, other_memory, to_nan]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_step_after_a_write_that_torch_does_not_count_warns_once(
    write: Callable[[nn.Module], None], overlap
) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adopt(FakeCluster().worker(), model, optimizer, overlap=overlap)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    write(model)
    with pytest.warns(UserWarning, match="was changed outside") as caught:
        optimizer.step()
    assert [each.filename for each in caught] == [__file__], "the user's line, not torch's"
    write(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_step_after_a_write_to_many_values_of_a_large_model_warns() -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2))
    optimizer = adopt(FakeCluster().worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    for param in model[1].parameters():
        param.data.clamp_(-1e-4, 1e-4)
    with pytest.warns(UserWarning, match=r"'1\.weight' was changed outside"):
        optimizer.step()


def nothing(model: nn.Module) -> None:
    pass


def there_and_back(model: nn.Module) -> None:
    kept = [param.detach().clone() for param in model.parameters()]
    clamp(model)
    for param, values in zip(model.parameters(), kept, strict=True):
        param.data.copy_(values)


def as_sam_does(model: nn.Module) -> None:
    kept = [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        for param, values in zip(model.parameters(), kept, strict=True):
            param.add_(1.0)
            param.data = values


def copied(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


def other_layout(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("value", [None, float("nan")], ids=["", "nan"])
@pytest.mark.parametrize("touch", [nothing, there_and_back, as_sam_does, copied, other_layout])
def test_step_with_the_values_of_the_last_one_does_not_warn(
    touch: Callable[[nn.Module], None], value
) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 2, 2), nn.PReLU(init=0.2), nn.Flatten(), nn.Linear(8, 3, dtype=torch.float64)
    )
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
    model.register_parameter("column", nn.Parameter(torch.randn(4, 4)[:, 1:3]))
    if value is not None:
        with torch.no_grad():
            model[0].bias.fill_(value)
    optimizer = adopt(FakeCluster().worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        touch(model)
        optimizer.step()


def test_step_after_a_change_of_dtype_does_not_warn() -> None:
    model = small_model()
    optimizer = adopt(FakeCluster().worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    for change in (model.double, model.float):
        change()
        optimizer.step()


# --- values that are to stay ---------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_assign_goes_back_to_the_best_model_on_servers_and_ranks_without_a_warning(overlap) -> None:
    """Rank 0 alone has the values that all go on from."""
    cluster, together = FakeCluster(2), threading.Barrier(2)

    def work(worker):
        worker.barrier = together.wait
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        adopt(worker, model, optimizer, overlap=overlap)
        best = {name: value.clone() for name, value in model.state_dict().items()}
        train(model, optimizer, 2)
        if worker.rank == 0:
            model.load_state_dict(best)
        assign(worker, worker.registry)
        present = {name: value.clone() for name, value in model.state_dict().items()}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, optimizer, 1)
        return best, present

    for best, present in on_all_ranks(cluster, work):
        torch.testing.assert_close(present, best, rtol=0, atol=0)


def test_assign_by_a_rank_that_was_started_again_writes_nothing_before_its_first_step() -> None:
    cluster, model = FakeCluster(), small_model()
    worker = cluster.worker()
    worker.incarnation, worker.barrier = 2, lambda: None
    adopt(worker, model, torch.optim.SGD(model.parameters(), lr=0.1))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    clamp(model)
    with pytest.warns(UserWarning, match="rank 0 was started again, and worker.assign.. before"):
        assign(worker, worker.registry)
    torch.testing.assert_close(dict(model.state_dict()), kept, rtol=0, atol=0)
    assert cluster.stored == []


# --- other defaults of torch ---------------------------------------------------------------------


@pytest.fixture
def bfloat16_by_default():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.NAdam])
def test_steps_under_another_default_device_equal_torchs(kind) -> None:
    model, expected = small_model(), small_model()
    with torch.device("meta"):
        optimizer = adopt(FakeCluster().worker(), model, kind(model.parameters(), lr=0.01))
    plain = kind(expected.parameters(), lr=0.01)
    for _ in range(2):
        for each, steps in ((model, optimizer), (expected, plain)):
            steps.zero_grad()
            loss_of(each, 0).backward()
        with torch.device("meta"):
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        plain.step()
    assert_same(model, expected)


def test_rows_of_no_key_are_float32_under_another_default_dtype(bfloat16_by_default) -> None:
    keys, values = Rows.empty("users", 3).collected()
    assert (keys.dtype, values.dtype, values.shape) == (torch.int64, torch.float32, (0, 3))
