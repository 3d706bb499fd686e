"""Predict which flights arrive late: keyed tables on the servers beside layers that are averaged.

The hybrid way. Each worker has the dense layers; `DistributedDataParallel` averages their gradients
in every step, and torch's own Adam steps them. Rows of carriers, tail numbers, flight numbers,
origins and destinations live in tables on the servers. The loader asks for those of the next batch
while this one is computed.

    python examples/flights.py --workers 2 --serial

`--serial` also trains the same model in one process with `nn.Embedding`. What is measured is the
area under the ROC curve (AUC) on a tenth of the flights: how often a flight that was late gets a
higher score than one that was not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.distributed
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import TensorDataset

import paramserve as ps
import table_data
from arguments import count
from ending import exit_code
from engines import ENGINES, engine_of
from table_data import Split

DIM = 16
STD = 0.01
"""Deviation of the rows' initial values."""
RATE = 0.01
"""Learning rate of Adagrad on the rows."""


class Lateness(nn.Module):
    """A score for being late: rows of the five fields and the timetable's traits, three layers."""

    def __init__(self, rows: Callable[[str], nn.Module], units: int) -> None:
        super().__init__()
        self.fields = nn.ModuleList(map(rows, table_data.FLIGHT_FIELDS))
        self.layers = nn.Sequential(
            nn.Linear(len(self.fields) * DIM + table_data.FLIGHT_TRAITS, units),
            nn.ReLU(),
            nn.Linear(units, units // 2),
            nn.ReLU(),
            nn.Linear(units // 2, 1),
        )

    def forward(self, keys: torch.Tensor, traits: torch.Tensor) -> torch.Tensor:
        found = [field(keys[:, number]) for number, field in enumerate(self.fields)]
        return self.layers(torch.cat([traits, *found], 1))[:, 0]


def train(worker: ps.Worker, data: Split, options: argparse.Namespace) -> float:
    """What each worker does; returns the AUC at the end."""

    def rows(field: str) -> nn.Module:
        rule, init = ps.Adagrad(lr=RATE), ps.Normal(std=STD)
        table = worker.client.table(
            field, dim=DIM, rule=rule, init=init, seed=worker.seed, consistency=ps.Async()
        )
        return ps.pytorch.Embedding(table)

    worker.process_group()
    model = DistributedDataParallel(Lateness(rows, options.units))
    adam = torch.optim.Adam(model.parameters(), lr=options.lr)
    optimizer = worker.optimizer(model, adam, dense="local")
    dataset = TensorDataset(*map(torch.from_numpy, data.train))
    batches = worker.loader(
        dataset,
        batch_size=options.batch_size,
        epochs=options.epochs,
        prefetch=lambda batch: zip(model.module.fields, batch[0].T, strict=True),
    )
    schedule = LinearLR(optimizer, 1.0, 0.0, total_iters=len(batches))
    for keys, traits, late in batches:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(keys, traits), late)
        loss.backward()  # averages the layers' gradients over the workers
        optimizer.step()  # steps the layers here, pushes the rows' gradients
        schedule.step()
        worker.log(loss=loss)
    worker.client.drain()
    torch.distributed.barrier()  # all rows have had all gradients
    return area(model.module, data.held_out)


def serial(data: Split, options: argparse.Namespace) -> float:
    """Train in this process, with torch's own modules and rules."""
    torch.manual_seed(options.seed)
    data, size = data.numbered()
    model = Lateness(
        lambda field: nn.Embedding(size, DIM, _weight=torch.randn(size, DIM) * STD), options.units
    )
    adam = torch.optim.Adam(model.layers.parameters(), lr=options.lr)
    adagrad = torch.optim.Adagrad(model.fields.parameters(), lr=RATE)
    tensors = [*map(torch.from_numpy, data.train)]
    samples, batch_size = len(tensors[0]), options.batch_size * options.workers
    steps = options.epochs * (samples // batch_size)
    schedule = LinearLR(adam, 1.0, 0.0, total_iters=steps)
    for _ in range(options.epochs):
        for index in torch.randperm(samples)[: steps * batch_size].split(batch_size):
            keys, traits, late = (each[index] for each in tensors)
            model.zero_grad()
            F.binary_cross_entropy_with_logits(model(keys, traits), late).backward()
            adam.step()
            adagrad.step()
            schedule.step()
    return area(model, data.held_out)


def area(model: nn.Module, held_out: Iterable[np.ndarray]) -> float:
    """AUC on flights that were not trained on. What was never seen reads as its initial row."""
    from sklearn.metrics import roc_auc_score

    keys, traits, late = held_out
    model.eval()
    with torch.inference_mode():
        scores = model(torch.from_numpy(keys), torch.from_numpy(traits))
    return float(roc_auc_score(late, scores.numpy()))


def load(options: argparse.Namespace) -> Split:
    """The flights that arrived: keys [n, 5], traits [n, 14], late [n]."""
    flights = table_data.read_flights(table_data.fetch_flights(options.data))
    return table_data.held_out(flights, options.seed, options.flights)


def learn(options: argparse.Namespace, console: Console) -> None:
    """Train both ways and print the AUC of each."""
    data = load(options)
    console.print(f"{len(data.train[0]):,} flights to train on, {len(data.held_out[0]):,} held out")
    if options.serial:
        console.print(f"One process, nn.Embedding: AUC {serial(data, options):.4f}")
    result = ps.run(
        train,
        args=(data, options),
        workers=options.workers,
        servers=options.servers,
        engine=engine_of(options.engine),
        seed=options.seed,
    )
    console.print(f"{options.workers} workers, tables: AUC {result.returns[0]:.4f}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workers", type=count, default=2)
    add("--servers", type=count, default=1)
    add("--engine", choices=ENGINES, default="local")
    add("--epochs", type=count, default=2, help="over the flights (default 2)")
    add("--batch-size", type=count, default=512, help="of each worker (default 512)")
    add("--units", type=count, default=128, help="of the first layer (default 128)")
    add("--lr", type=float, default=4e-3, help="of the layers, at the beginning (default 0.004)")
    add("--flights", type=count, help="use only so many of them, drawn at random")
    add("--data", help="folder with flights.csv.zip; default: find or fetch it")
    add("--seed", type=int, default=0)
    add("--serial", action="store_true", help="add a run in one process without a server")
    return parser.parse_args(argv)


@exit_code
def main(argv: list[str] | None = None) -> None:
    """Train and print how well late flights are told from others."""
    options = parse(argv)
    torch.set_num_threads(1)
    learn(options, Console())


if __name__ == "__main__":
    raise SystemExit(main())
