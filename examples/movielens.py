"""Learn how users rate films, with their embeddings in keyed tables on the servers.

Two models. `--model mf` is matrix factorisation: a row for each user and each film, and nothing
else. `--model dlrm` is a recommender as they are built today: rows for five fields in one table, a
tower of linear layers for the dense traits, their dot products, and a tower over these. Rows and
dense layers travel in one message to each server. No vocabulary is made: keys are hashes.

    python examples/movielens.py --model mf --serial
    python examples/movielens.py --model dlrm --batch-size 4096 --workers 2 --serial

`--serial` also trains the same model in one process with one thread, with `nn.Embedding`.
MovieLens 100K is for research; it is fetched when this runs (see `table_data.py`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserve as ps
import table_data
from arguments import count
from ending import exit_code
from engines import ENGINES, engine_of
from meeting import meet
from table_data import Split

MEAN = 3.5
"""Stars, where the models begin."""

Rows = Callable[[str, int, float], nn.Module]
"""Makes what looks up rows, of a name, their width and the deviation of their initial values."""


class Factorisation(nn.Module):
    """Stars as a mean, what the user and the film add to it, and the product of their tastes.

    Source: Koren, Bell, Volinsky, IEEE Computer 42 (8), 2009.
    """

    DIM, STD, PENALTY, RATE, EPOCHS = 16, 0.1, 0.08, 0.1, 8

    def __init__(self, rows: Rows, options: argparse.Namespace) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.tensor(MEAN))
        self.users = rows("users", self.DIM + 1, self.STD)
        self.films = rows("films", self.DIM + 1, self.STD)

    def forward(self, keys: torch.Tensor, traits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        user, film = self.users(keys[:, 0]), self.films(keys[:, 1])
        tastes = (user[:, 1:] * film[:, 1:]).sum(1)
        return self.mean + user[:, 0] + film[:, 0] + tastes, torch.stack([user, film], 1)


class DLRM(nn.Module):
    """Dot products of every field's row with every other's, and towers before and behind them.

    The widths are those of the authors' run on Criteo's data. Here the upper tower sees the rows
    themselves too, which spares the first epochs the wait until their products are of any size.

    Source: Naumov et al., Deep Learning Recommendation Model, arXiv 1906.00091, 2019.
    """

    DIM, STD, PENALTY, RATE, EPOCHS = 16, 0.03, 0.1, 0.02, 4

    def __init__(self, rows: Rows, options: argparse.Namespace) -> None:
        super().__init__()
        units, fields = options.units, len(table_data.RATING_FIELDS)
        self.fields = rows("fields", self.DIM, self.STD)
        self.bottom = tower([table_data.RATING_TRAITS, units, units // 2, self.DIM])
        first, second = torch.triu_indices(1 + fields, 1 + fields, 1)
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("second", second, persistent=False)
        self.top = tower([(1 + fields) * self.DIM + len(first), units, units // 2])
        self.last = nn.Linear(units // 2, 1)
        nn.init.constant_(self.last.bias, MEAN)

    def forward(self, keys: torch.Tensor, traits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.fields(keys)
        vectors = torch.cat([self.bottom(traits)[:, None], found], 1)
        products = (vectors @ vectors.transpose(1, 2))[:, self.first, self.second]
        seen = torch.cat([vectors.flatten(1), products], 1)
        return self.last(self.top(seen))[:, 0], found


def tower(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers of these widths, each with a ReLU behind it."""
    parts = ((nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths))
    return nn.Sequential(*chain.from_iterable(parts))


MODELS = {"mf": Factorisation, "dlrm": DLRM}


class Outcome(NamedTuple):
    """Outcome of one worker: its time, by the machine's clock, the samples that it trained on, and
    the error with the values at its end."""

    began: float
    ended: float
    samples: int
    rmse: float


def train(worker: ps.Worker, data: Split, options: argparse.Namespace) -> Outcome:
    """What each worker does. The data comes with it, so that it may run on another machine."""
    kind = MODELS[options.model]

    def rows(name: str, dim: int, std: float) -> nn.Module:
        rule, init = ps.Adagrad(lr=kind.RATE), ps.Normal(std=std)
        table = worker.client.table(name, dim=dim, rule=rule, init=init, seed=worker.seed)
        return ps.pytorch.Embedding(table)

    model = kind(rows, options)
    optimizer = worker.optimizer(model, torch.optim.Adam(model.parameters(), lr=options.lr))
    dataset = TensorDataset(*map(torch.from_numpy, data.train))
    batches = worker.loader(dataset, batch_size=options.batch_size, epochs=epochs(options))
    meet(worker)
    began = time.monotonic()
    for batch in batches:
        optimizer.zero_grad()
        loss = penalised(model, *batch)
        loss.backward()
        optimizer.step()  # push gradients of rows and layers, pull the layers' values
        worker.log(loss=loss)
    ended = time.monotonic()
    samples = len(batches) * options.batch_size
    return Outcome(began, ended, samples, error(model, data.held_out))


def serial(data: Split, options: argparse.Namespace) -> Outcome:
    """Train in this process, with torch's own modules and rules."""
    torch.manual_seed(options.seed)
    kind = MODELS[options.model]
    data, size = data.numbered()

    def rows(name: str, dim: int, std: float) -> nn.Module:
        return nn.Embedding(size, dim, _weight=torch.randn(size, dim) * std)

    model = kind(rows, options)
    tables = [each.weight for each in model.modules() if isinstance(each, nn.Embedding)]
    dense = [each for each in model.parameters() if all(each is not one for one in tables)]
    optimizers = torch.optim.Adagrad(tables, lr=kind.RATE), torch.optim.Adam(dense, lr=options.lr)
    tensors = [*map(torch.from_numpy, data.train)]
    began = time.monotonic()
    for _ in range(epochs(options)):
        for index in torch.randperm(len(tensors[0])).split(options.batch_size):
            model.zero_grad()
            penalised(model, *(each[index] for each in tensors)).backward()
            for optimizer in optimizers:
                optimizer.step()
    ended = time.monotonic()
    samples = epochs(options) * len(tensors[0])
    return Outcome(began, ended, samples, error(model, data.held_out))


def penalised(
    model: nn.Module, keys: torch.Tensor, traits: torch.Tensor, stars: torch.Tensor
) -> torch.Tensor:
    """The mean squared error, plus a penalty for large values in the rows of each sample."""
    found, rows = model(keys, traits)
    return F.mse_loss(found, stars) + model.PENALTY * rows.square().sum((1, 2)).mean()


def error(model: nn.Module, held_out: Iterable[np.ndarray]) -> float:
    """Root of the mean squared error. A user or film never seen reads as its initial row."""
    keys, traits, stars = map(torch.from_numpy, held_out)
    model.eval()
    with torch.inference_mode():
        found = model(keys, traits)[0].clamp(1, 5)
    return F.mse_loss(found, stars).sqrt().item()


def epochs(options: argparse.Namespace) -> int:
    return options.epochs if options.epochs is not None else MODELS[options.model].EPOCHS


def speed(outcomes: Sequence[Outcome]) -> float:
    """Samples a second over all workers, from the first one's beginning to the last one's end."""
    seconds = max(each.ended for each in outcomes) - min(each.began for each in outcomes)
    return sum(each.samples for each in outcomes) / seconds


def load(options: argparse.Namespace) -> Split:
    """The ratings: keys [n, 5], traits [n, 23], stars [n]."""
    ratings = table_data.read_movielens(table_data.fetch_movielens(options.data))
    return table_data.held_out(ratings, options.seed)


def compare(options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """The runs of the table: RMSE and samples a second of each, by name."""
    data = load(options)
    found = {}
    if options.serial:
        alone = serial(data, options)
        found["one process, nn.Embedding"] = alone.rmse, speed([alone])
    result = ps.run(
        train,
        args=(data, options),
        workers=options.workers,
        servers=options.servers,
        engine=engine_of(options.engine),
        consistency=ps.Async(),
        seed=options.seed,
    )
    outcomes = [Outcome(*each) for each in result.returns.values()]
    last = max(outcomes, key=lambda each: each.ended)  # its rows and layers have all updates
    found[f"{options.workers} workers, tables"] = last.rmse, speed(outcomes)
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="mf")
    add("--workers", type=count, default=2)
    add("--servers", type=count, default=1)
    add("--engine", choices=ENGINES, default="local")
    add("--epochs", type=count, help="over the ratings; default: 8 for mf, 4 for dlrm")
    add("--batch-size", type=count, default=1024, help="of each worker (default 1024)")
    add("--units", type=count, default=512, help="of DLRM's widest layers (default 512)")
    add("--lr", type=float, default=1e-3, help="of the dense layers (default 0.001)")
    add("--data", help="folder with the files; default: find or fetch them")
    add("--seed", type=int, default=0)
    add("--serial", action="store_true", help="add a run in one process without a server")
    return parser.parse_args(argv)


@exit_code
def main(argv: list[str] | None = None) -> None:
    """Train and print how well the held-out ratings are predicted, and how fast it went."""
    options = parse(argv)
    torch.set_num_threads(1)
    console = Console()
    found = compare(options)
    table = Table(title=f"MovieLens 100K, {options.model}", title_justify="left")
    for column in ("run", "held-out RMSE", "samples a second"):
        table.add_column(column, justify="right" if column != "run" else "left")
    for name, (rmse, speed) in found.items():
        table.add_row(name, f"{rmse:.4f}", f"{speed:,.0f}")
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
