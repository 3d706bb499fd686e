"""Complete a graph of facts: rows of entities and relations in keyed tables, two workers training.

UMLS has facts such as (vitamin, affects, cell function): 135 entities, 46 relations. DistMult gives
each entity and each relation a row, and a fact the sum of the products of its three rows. A worker
takes true facts, and for each of them entities drawn at random, and learns to tell the true one.

    python examples/knowledge_graph.py --workers 2 --serial

What is measured is the mean reciprocal rank (MRR): 1 if of all entities that could complete a
held-out fact the right one always comes first, 1/2 if it comes second. `--serial` also trains the
same model in one process with `nn.Embedding`.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserve as ps
import table_data
from arguments import count
from ending import exit_code
from engines import ENGINES, engine_of
from meeting import meet
from table_data import Triples

STD = 0.1
"""Deviation of the rows' initial values."""


class DistMult(nn.Module):
    """Scores of facts: the sum over the products of the rows of head, relation and tail.

    Each relation has a second row for the way back, from tail to head, so that both questions of a
    fact are asked alike: what completes (head, relation, ?), and what (tail, back, ?).

    Source: Yang et al., ICLR 2015; the way back: Lacroix, Usunier, Obozinski, ICML 2018.
    """

    def __init__(self, entities: nn.Module, relations: nn.Module) -> None:
        super().__init__()
        self.entities, self.relations = entities, relations

    def forward(self, questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """Scores [n, m] of `answers` [n, m] to `questions` [n, 2], head and relation each."""
        found = self.entities(torch.cat([questions[:, :1], answers], 1))
        asked = found[:, :1] * self.relations(questions[:, 1:])
        return (asked * found[:, 1:]).sum(2)

    def loss(self, facts: torch.Tensor, entities: int, wrong: int) -> torch.Tensor:
        """How badly the tails of `facts` [n, 3] are told from `wrong` entities drawn for each."""
        drawn = torch.randint(entities, (len(facts), wrong))
        scores = self(facts[:, :2], torch.cat([facts[:, 2:], drawn], 1))
        return F.cross_entropy(scores, torch.zeros(len(facts), dtype=torch.int64))


def train(worker: ps.Worker, graph: Triples, options: argparse.Namespace) -> float:
    """What each worker does; returns the MRR with the values at the end of all."""

    def rows(name: str) -> nn.Module:
        rule, init = ps.Adagrad(lr=options.lr), ps.Normal(std=STD)
        table = worker.client.table(name, dim=options.dim, rule=rule, init=init, seed=worker.seed)
        return ps.pytorch.Embedding(table)

    model = DistMult(rows("entities"), rows("relations"))
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=options.lr))
    dataset = TensorDataset(both_ways(graph, graph.train))
    for (facts,) in worker.loader(dataset, batch_size=options.batch_size, epochs=options.epochs):
        optimizer.zero_grad()
        loss = model.loss(facts, len(graph.entities), options.wrong)
        loss.backward()
        optimizer.step()  # pushes the gradients of the rows
        worker.log(loss=loss)
    worker.client.drain()
    meet(worker, "done")  # all rows have had all gradients
    return reciprocal_rank(model, graph)


def serial(graph: Triples, options: argparse.Namespace) -> float:
    """Train in this process, with torch's own modules and rules."""
    torch.manual_seed(options.seed)
    sizes = len(graph.entities), 2 * len(graph.relations)
    shapes = [(size, options.dim) for size in sizes]
    model = DistMult(*(nn.Embedding(*each, _weight=STD * torch.randn(*each)) for each in shapes))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=options.lr)
    known = both_ways(graph, graph.train)
    for _ in range(options.epochs):
        for index in torch.randperm(len(known)).split(options.batch_size):
            optimizer.zero_grad()
            model.loss(known[index], len(graph.entities), options.wrong).backward()
            optimizer.step()
    return reciprocal_rank(model, graph)


def both_ways(graph: Triples, facts: np.ndarray) -> torch.Tensor:
    """Facts [n, 3] and the same from tail to head, [2 * n, 3]."""
    head, relation, tail = facts.T
    back = np.stack([tail, relation + len(graph.relations), head], 1)
    return torch.from_numpy(np.concatenate([facts, back]))


def reciprocal_rank(model: nn.Module, graph: Triples) -> float:
    """MRR of the test facts, both ways. Other entities that are right as well do not count (the
    "filtered" ranks of Bordes et al., NeurIPS 2013); of equals the middle rank does."""
    entities = len(graph.entities)
    facts = both_ways(graph, np.concatenate([graph.test, graph.train, graph.valid]))
    right = torch.zeros(entities, 2 * len(graph.relations), entities, dtype=torch.bool)
    right[tuple(facts.T)] = True
    head, relation, tail = both_ways(graph, graph.test).T
    model.eval()
    with torch.inference_mode():
        every = torch.arange(entities).expand(len(head), -1)
        scores = model(torch.stack([head, relation], 1), every)
    own = scores.gather(1, tail[:, None])
    scores = scores.masked_fill(right[head, relation], -torch.inf)
    rank = 1 + (scores > own).sum(1) + (scores == own).sum(1) / 2
    return (1 / rank).mean().item()


def learn(options: argparse.Namespace, console: Console) -> None:
    """Train both ways and print the MRR of each."""
    graph = table_data.read_umls(table_data.fetch_umls(options.data))
    console.print(
        f"{len(graph.entities)} entities, {len(graph.relations)} relations; {len(graph.train):,} "
        f"facts to train on, {len(graph.test)} to test"
    )
    if options.serial:
        console.print(f"One process, nn.Embedding: MRR {serial(graph, options):.3f}")
    result = ps.run(
        train,
        args=(graph, options),
        workers=options.workers,
        servers=options.servers,
        engine=engine_of(options.engine),
        consistency=ps.Async(),
        seed=options.seed,
    )
    console.print(f"{options.workers} workers, tables: MRR {result.returns[0]:.3f}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workers", type=count, default=2)
    add("--servers", type=count, default=1)
    add("--engine", choices=ENGINES, default="local")
    add("--epochs", type=count, default=15, help="over the facts, both ways (default 15)")
    add("--dim", type=count, default=256, help="of a row (default 256)")
    add("--batch-size", type=count, default=256, help="facts of each worker (default 256)")
    add("--wrong", type=count, default=32, help="entities drawn for each fact (default 32)")
    add("--lr", type=float, default=0.1, help="of Adagrad (default 0.1)")
    add("--data", help="folder with the three files; default: find or fetch them")
    add("--seed", type=int, default=0)
    add("--serial", action="store_true", help="add a run in one process without a server")
    return parser.parse_args(argv)


@exit_code
def main(argv: list[str] | None = None) -> None:
    """Train and print how well held-out facts are completed."""
    options = parse(argv)
    torch.set_num_threads(1)
    learn(options, Console())


if __name__ == "__main__":
    raise SystemExit(main())
