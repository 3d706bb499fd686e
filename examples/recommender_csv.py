"""A recommender from a CSV file with string ids: split, train, evaluate, save, load, neighbours.

Matrix factorisation with a pairwise ranking loss (BPR): a row for each reader and each book, in two
keyed tables. No vocabulary is made: keys are hashes of the strings (`ps.keys_of`), and the table of
books keeps their titles (`labels=True`), so that nearest neighbours have names.

    python examples/recommender_csv.py --workers 2
    python examples/recommender_csv.py --csv my.csv  # columns user, item and time (a number)

Without `--csv` a file is made: who read which book on which day, for readers with one or two
favourite kinds of books. The last book of each reader is held out. The figures are those of a
ranking of all books that the reader has not read: how often the held-out one is among the first 10
(hit rate), and how far up (NDCG), beside a ranking by popularity.

Source: Rendle et al., BPR: Bayesian personalized ranking from implicit feedback, UAI 2009.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserve as ps
from arguments import count
from ending import exit_code
from engines import ENGINES, engine_of

DIM, STD, RATE, PENALTY = 16, 0.1, 0.1, 0.01
TOP = 10


# --- the data ------------------------------------------------------------------------------------


class Split(NamedTuple):
    """Who read what, by the strings of the file: all but the last book of each reader, and that."""

    users: list[str]
    items: list[str]
    held_out: dict[str, str]

    @property
    def seen(self) -> dict[str, set[str]]:
        """What each reader has read before."""
        found: dict[str, set[str]] = {}
        for user, item in zip(self.users, self.items, strict=True):
            found.setdefault(user, set()).add(item)
        return found


def read(path: Path) -> Split:
    """Split a file with the columns user, item and time (a number): the last item of each user is
    held out. Users and items that no other line has are left out."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.DictReader(file)
        lacking = {"user", "item", "time"}.difference(lines.fieldnames or ())
        if lacking:
            raise SystemExit(f"{path} has no column {', '.join(sorted(lacking))}")
        rows = [(float(line["time"]), line["user"], line["item"]) for line in lines]
    rows.sort(key=lambda row: row[0])
    last = {user: item for _, user, item in rows}
    kept = [(user, item) for _, user, item in rows if last[user] != item]
    users, items = ([*column] for column in zip(*kept, strict=True))
    known = {*users}, {*items}
    held_out = {u: item for u, item in last.items() if u in known[0] and item in known[1]}
    return Split(users, items, held_out)


KINDS = ("Cooking", "Crime", "Gardens", "History", "Islands", "Machines", "Poems", "Stars")
FIRST = ("Blue", "Cold", "Early", "Hidden", "Last", "Open", "Quiet", "Second", "Small", "White")
SECOND = ("Door", "House", "Letter", "Road", "Winter")


def write_sample(path: Path, readers: int, seed: int) -> None:
    """Make a file: readers with one or two favourite kinds of books, and books of uneven fame."""
    random = np.random.default_rng(seed)
    books = [[f"{kind}: The {a} {b}" for a in FIRST for b in SECOND] for kind in KINDS]
    fame = 1.0 / np.arange(3, 3 + len(books[0]))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "item", "time"])
        for number in range(readers):
            favourites = random.choice(len(KINDS), 2, replace=False)
            share = np.full(len(KINDS), 0.12 / len(KINDS))
            share[favourites] += [0.58, 0.3]
            read: set[str] = set()
            for day in range(int(random.integers(8, 30))):
                kind = random.choice(len(KINDS), p=share)
                book = books[kind][random.choice(len(fame), p=fame / fame.sum())]
                if book not in read:
                    read.add(book)
                    writer.writerow([f"reader-{number:05d}", book, day])


# --- the model -----------------------------------------------------------------------------------


class Factorisation(nn.Module):
    """How well a book fits a reader: the product of their rows, plus what the book is liked for."""

    def __init__(self, users: ps.Table, items: ps.Table) -> None:
        super().__init__()
        self.users, self.items = ps.pytorch.Embedding(users), ps.pytorch.Embedding(items)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Scores of keys, [n] and [n, m] -> [n, m], with the rows that they are made of."""
        reader, book = self.users(user), self.items(item)
        return (reader[:, None, :-1] * book[..., :-1]).sum(-1) + book[..., -1], reader, book


def tables(client: ps.Client, seed: int = 0) -> tuple[ps.Table, ps.Table]:
    """The tables of readers and books. The first client that asks makes them."""
    how: dict[str, Any] = {"rule": ps.Adagrad(lr=RATE), "init": ps.Normal(std=STD), "seed": seed}
    users = client.table("users", dim=DIM + 1, **how)
    return users, client.table("items", dim=DIM + 1, labels=True, **how)


def train(worker: ps.Worker, split: Split, options: argparse.Namespace) -> None:
    """What each worker does."""
    users, items = tables(worker.client, worker.seed)
    model = Factorisation(users, items)
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=RATE))
    read = (
        torch.from_numpy(users.keys_of(split.users)),
        torch.from_numpy(items.keys_of(split.items)),
    )
    books = read[1].unique()
    batches = worker.loader(TensorDataset(*read), batch_size=128, epochs=options.epochs)
    for user, book in batches:
        other = books[torch.randint(len(books), (len(book),))]  # most readers have not read it
        optimizer.zero_grad()
        scores, *rows = model(user, torch.stack([book, other], 1))
        penalty = sum(each.square().sum(-1).mean() for each in rows)
        loss = -F.logsigmoid(scores[:, 0] - scores[:, 1]).mean() + PENALTY * penalty
        loss.backward()
        optimizer.step()
        worker.log(loss=loss)


# --- result --------------------------------------------------------------------------------------


class Figures(NamedTuple):
    """Figures of a ranking: the share of readers whose held-out book is among the first 10, and the
    mean of 1 / log2(1 + its rank) over all readers, 0 behind the first 10."""

    hit_rate: float
    ndcg: float


def figures(split: Split, books: list[str], scores: np.ndarray) -> Figures:
    """Rank for each reader the books that she has not read.

    Args:
        scores: [readers of `split.held_out`, books], higher is better.
    """
    column = {book: number for number, book in enumerate(books)}
    hits = gain = 0.0
    seen = split.seen
    for row, (user, item) in zip(scores, split.held_out.items(), strict=True):
        row = row.copy()
        row[[column[book] for book in seen[user]]] = -np.inf
        rank = 1 + int((row > row[column[item]]).sum())
        if rank <= TOP:
            hits += 1
            gain += 1 / math.log2(1 + rank)
    return Figures(hits / len(scores), gain / len(scores))


def by_model(split: Split, users: ps.Table, items: ps.Table) -> Figures:
    """Figures of the rows of a table; books and readers are asked for by their strings."""
    books = sorted(set(split.items))
    readers = users.pull([*split.held_out])
    rows = items.pull(books)
    return figures(split, books, readers[:, :-1] @ rows[:, :-1].T + rows[:, -1])


def by_popularity(split: Split) -> Figures:
    """Figures of a ranking by the number of readers, the same for all."""
    fame = Counter(split.items)
    books = sorted(fame)
    row = np.array([fame[book] for book in books], np.float32)
    return figures(split, books, np.tile(row, (len(split.held_out), 1)))


def neighbours(items: ps.Table, title: str, most: int = 5) -> list[str]:
    """The books whose rows point the same way, nearest first."""
    keys = items.keys()
    rows = items.pull(keys)[:, :-1]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    own = int(np.flatnonzero(keys == ps.keys_of(title))[0])
    nearest = np.argsort(-(rows @ rows[own]))[1 : 1 + most]
    return items.labels(keys[nearest])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--csv", type=Path, help="file with the columns user, item and time; default: make one")
    add("--readers", type=count, default=800, help="of the file that is made (default 800)")
    add("--workers", type=count, default=2)
    add("--servers", type=count, default=1)
    add("--engine", choices=ENGINES, default="local")
    add("--epochs", type=count, default=12)
    add("--out", type=Path, help="folder for the tables as Parquet files; default: a temporary one")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


@exit_code
def main(argv: list[str] | None = None) -> None:
    """Train, save, load into another cluster, and print figures and neighbours from there."""
    options = parse(argv)
    torch.set_num_threads(1)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        path = options.csv if options.csv is not None else Path(folder, "readings.csv")
        if options.csv is None:
            write_sample(path, options.readers, options.seed)
        split = read(path)
        console.print(f"{len(split.items):,} readings of {len(set(split.items)):,} books")
        result = ps.run(
            train,
            args=(split, options),
            workers=options.workers,
            servers=options.servers,
            engine=engine_of(options.engine),
            consistency=ps.Async(),
            seed=options.seed,
            checkpoint=ps.Checkpoint(
                save_tables=options.out if options.out is not None else folder
            ),
        )
        with ps.Cluster(servers=1) as cluster:  # another run, with another number of servers
            users, items = tables(cluster.client())
            users.from_parquet(result.table_files["users"])
            items.from_parquet(result.table_files["items"])
            for name, found in (
                ("popularity", by_popularity(split)),
                (f"{options.workers} workers, tables", by_model(split, users, items)),
            ):
                console.print(
                    f"{name}: hit rate@{TOP} {found.hit_rate:.3f}, NDCG@{TOP} {found.ndcg:.3f}"
                )
            favourite = Counter(split.items).most_common(1)[0][0]
            console.print(f"nearest to {favourite!r}:")
            for title in neighbours(items, favourite):
                console.print(f"  {title}")


if __name__ == "__main__":
    raise SystemExit(main())
