"""Learn from a stream of clicks that never ends, in memory that does not grow.

The stream is SYNTHETIC: made by this program, in the shape of Criteo's logs of advertisements (13
numbers, 26 keys, clicked or not). Keys follow Zipf's law, and new ones come all the time: in every
second field what is new is what is popular, as with news. A table that keeps a row for every key
grows for ever. With `admit=ps.MinCount(3)` a key gets its row at its third push, and with
`evict=ps.TTL(clocks=...)` it loses it when it has not come for a while.

    python examples/click_stream.py --workers 2

trains once for each of four ways to choose, which takes some minutes. Each batch is predicted
before it is learned from, so that the area under the ROC curve (AUC) is an honest one. A picture of
memory and AUC goes into a new folder of `--out`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import paramserve as ps
from arguments import count
from ending import exit_code
from engines import ENGINES, engine_of

NUMBERS, FIELDS = 13, 26
"""Columns of a line of Criteo's logs."""
ZIPF, VOCABULARY = 1.05, 10_000_000
"""A field's keys come with frequency rank ** -ZIPF, up to this rank."""
NEW = 1
"""Keys that become the newest, and so the most frequent, of each second field in each step."""
EFFECT = 0.4
"""How strongly a key moves the odds of a click, at most."""
DIM, UNITS = 32, 64
"""Width of a row, and of the layer above the rows."""

COLORS = ("#9a9a9a", "#3a8f3a", "#2a6fbb", "#d1661a")


def policies(clocks: int) -> dict[str, dict[str, Any]]:
    """Who gets a row and how long it stays: options of the tables, by what they are called."""
    admit, evict = ps.MinCount(3), ps.TTL(clocks=clocks)
    return {
        "every key kept": {},
        f"TTL({clocks})": {"evict": evict},
        "MinCount(3)": {"admit": admit},
        f"MinCount(3), TTL({clocks})": {"admit": admit, "evict": evict},
    }


class Batch(NamedTuple):
    """Some lines of the stream."""

    numbers: torch.Tensor
    """float32 [n, 13]."""
    keys: torch.Tensor
    """int64 [n, 26]; each field has keys of its own."""
    clicked: torch.Tensor
    """float32 [n], 0 or 1."""


def stream(seed: int, rank: int, size: int) -> Iterator[Batch]:
    """A worker's part of the synthetic stream, without an end.

    Whether a line is clicked is drawn from its numbers and from a hidden effect of each key, which
    is the same on all ranks.
    """
    weights = np.random.default_rng(seed).normal(size=NUMBERS) / 4
    field = np.arange(FIELDS)
    for step in itertools.count():
        rng = np.random.default_rng([seed, rank, step])
        ranks = zipf(rng.random((size, FIELDS)))
        things = np.where(
            field % 2, ranks, VOCABULARY + NEW * step - ranks
        )  # the newest ranks first
        keys = hashed(things * FIELDS + field, seed)
        effects = (hashed(keys, seed + 1) / 2.0**62 - 1.0) * EFFECT
        numbers = rng.normal(size=(size, NUMBERS)).astype(np.float32)
        odds = effects.sum(1) + numbers @ weights - 1.0
        clicked = rng.random(size) < 1.0 / (1.0 + np.exp(-odds))
        yield Batch(*map(torch.from_numpy, (numbers, keys, clicked.astype(np.float32))))


def zipf(uniform: np.ndarray) -> np.ndarray:
    """Ranks from 1 to `VOCABULARY`, drawn by inverting the law's integral at uniform numbers."""
    exponent = 1.0 - ZIPF
    spread = VOCABULARY**exponent - 1.0
    return np.floor((spread * uniform + 1.0) ** (1.0 / exponent)).astype(np.int64)


def hashed(values: np.ndarray, seed: int) -> np.ndarray:
    """Numbers of 63 bits (splitmix64: Steele, Lea, Flood, OOPSLA 2014)."""
    x = values.astype(np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


class WideAndDeep(nn.Module):
    """Odds of a click: a weight for each key, and layers over the keys' rows and the numbers.

    Source: Cheng et al., Wide & Deep Learning for Recommender Systems, 2016; the weights are
    learned as in McMahan et al., Ad Click Prediction: a View from the Trenches, KDD 2013.
    """

    def __init__(self, wide: nn.Module, deep: nn.Module) -> None:
        super().__init__()
        self.wide, self.deep = wide, deep
        self.layers = nn.Sequential(
            nn.Linear(FIELDS * DIM + NUMBERS, UNITS), nn.ReLU(), nn.Linear(UNITS, 1)
        )

    def forward(self, numbers: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([self.deep(keys).flatten(1), numbers], 1)
        return (self.wide(keys) + self.layers(rows))[:, 0]


def train(worker: ps.Worker, policy: Mapping[str, Any], options: argparse.Namespace) -> None:
    """What each worker does. It logs AUC, rows and the memory of both tables now and then."""
    from sklearn.metrics import roc_auc_score

    table = partial(worker.client.table, seed=worker.seed, **policy)
    wide = table("wide", dim=1, rule=ps.FTRL(alpha=0.1, l2=1.0), init=ps.Zeros())
    deep = table("deep", dim=DIM, rule=ps.RowAdagrad(lr=0.02))
    model = WideAndDeep(ps.pytorch.EmbeddingBag(wide, mode="sum"), ps.pytorch.Embedding(deep))
    optimizer = worker.optimizer(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step, batch in enumerate(stream(options.seed, worker.rank, options.batch_size), 1):
        optimizer.zero_grad()
        odds = model(batch.numbers, batch.keys)
        loss = F.binary_cross_entropy_with_logits(odds, batch.clicked)
        loss.backward()
        optimizer.step()  # both tables and the layers, in one message to each server
        seen.append((odds.detach(), batch.clicked))
        if step % options.every == 0:
            scores, clicked = map(torch.cat, zip(*seen, strict=True))
            seen.clear()
            worker.log(
                lines=step * options.batch_size * worker.workers,
                auc=float(roc_auc_score(clicked, scores)),
                rows=len(deep),
                megabytes=(wide.memory_bytes() + deep.memory_bytes()) / 1e6,
            )
        if step == options.steps:
            return


class Point(NamedTuple):
    """Size of the tables, and how well was predicted since the last point."""

    lines: int
    auc: float
    rows: int
    megabytes: float


def run(policy: Mapping[str, Any], options: argparse.Namespace) -> list[Point]:
    """Train under one policy; what rank 0 has logged."""
    result = ps.run(
        train,
        args=(policy, options),
        workers=options.workers,
        servers=options.servers,
        engine=engine_of(options.engine),
        consistency=ps.Async(),
        seed=options.seed,
    )
    logged = [record.values for record in result.metrics if record.rank == 0]
    return [
        Point(int(each["lines"]), each["auc"], int(each["rows"]), each["megabytes"])
        for each in logged
    ]


def picture(curves: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Memory and AUC against the lines of the stream, one line for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, quality) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for color, (policy, points) in zip(COLORS, curves.items(), strict=False):
        lines = [point.lines / 1e6 for point in points]
        look = {"color": color, "label": policy}
        memory.plot(lines, [point.megabytes for point in points], **look)
        quality.plot(lines, [point.auc for point in points], **look)
    memory.set(ylabel="memory of both tables (MB)", ylim=(0, None))
    quality.set(ylabel="AUC, before learning from the line")
    for one in (memory, quality):
        one.set(xlabel="lines of the stream (millions)", xlim=(0, None))
        one.grid(color="#dddddd", linewidth=0.6)
        one.spines[["top", "right"]].set_visible(False)
    memory.legend(loc="upper left", frameon=False)
    figure.suptitle("A synthetic click stream with new keys all the time")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def show(curves: Mapping[str, Sequence[Point]]) -> Table:
    """The end of each run, and its memory when half the stream had come."""
    table = Table(title="Synthetic click stream", title_justify="left")
    table.add_column("policy")
    for column in ("rows", "MB at half", "MB at the end", "AUC, second half"):
        table.add_column(column, justify="right")
    for policy, points in curves.items():
        half = points[len(points) // 2 :]
        mean = sum(point.auc for point in half) / len(half)
        last = points[-1]
        memory = f"{half[0].megabytes:.1f}", f"{last.megabytes:.1f}"
        table.add_row(policy, f"{last.rows:,}", *memory, f"{mean:.4f}")
    return table


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workers", type=count, default=2)
    add("--servers", type=count, default=1)
    add("--engine", choices=ENGINES, default="local")
    add("--steps", type=count, default=1500, help="of each worker (default 1,500)")
    add("--batch-size", type=count, default=256, help="lines (default 256)")
    add("--clocks", type=count, default=150, help="a row unused for so long goes (default 150)")
    add("--every", type=count, default=50, help="steps from one log to the next (default 50)")
    add("--out", type=Path, default=Path("runs"), help="where the results go (default runs/)")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


@exit_code
def main(argv: list[str] | None = None) -> None:
    """Train under each policy, print the table, write curves and picture."""
    options = parse(argv)
    torch.set_num_threads(1)
    console = Console()
    chosen = policies(options.clocks)
    curves = {name: run(policy, options) for name, policy in chosen.items()}
    console.print(show(curves))
    folder = options.out / time.strftime("clicks-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    body = {policy: [point._asdict() for point in points] for policy, points in curves.items()}
    (folder / "curves.json").write_text(json.dumps(body, indent=1) + "\n")
    picture(curves, folder / "click_stream.png")
    console.print(f"Curves and picture: {folder}")


if __name__ == "__main__":
    raise SystemExit(main())
