"""Values written between two steps, through `.data` too, are replaced, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from tests.unit.pytorch.fakes import FakeCluster
from tests.unit.pytorch.test_optimizer_step import small_model, train
from torch import nn

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


def copied(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


def other_layout(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("value", [None, float("nan")], ids=["", "nan"])
@pytest.mark.parametrize("touch", [nothing, there_and_back, copied, other_layout])
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
