"""Train a language model on Shakespeare's plays: embedding, LSTM and linear, Adam on the servers.

Two workers train asynchronously. Meanwhile this process evaluates the servers' values: perplexity
on the last part of the text, which no worker sees, beside that of a model which only knows how
frequent each word is (the unigram model).

    python examples/language_model.py --workers 2 --servers 1
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import datasets
import paramserve as ps
from arguments import count
from ending import exit_code
from engines import ENGINES, engine_of

WORD = re.compile(r"[a-z]+(?:'[a-z]+)*|[.,;:!?]")
"""A word in small letters, also one like o'er, or a punctuation mark."""
UNKNOWN = 0
"""The number of <unk>, which stands for every word that is not in the vocabulary."""
HELD_OUT = 0.03
"""Share of the text, at its end; of the whole text that is about The Winter's Tale."""
EVALUATED = 100
"""Pieces of it on which a snapshot is evaluated; the end of the run uses all of them."""
PIECES = 32
"""Evaluated at a time."""

Words = npt.NDArray[np.int32]


class Text(NamedTuple):
    """The plays as numbers of words, below `vocabulary`."""

    train: Words
    held_out: Words
    vocabulary: int


class Sizes(NamedTuple):
    """Sizes of the model."""

    vocabulary: int
    embedding: int
    hidden: int


class LanguageModel(nn.Module):
    """Scores for the word that follows each word: [batch, length] to [batch, length, words]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.embedding)
        self.lstm = nn.LSTM(sizes.embedding, sizes.hidden, batch_first=True)
        self.linear = nn.Linear(sizes.hidden, sizes.vocabulary)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.linear(self.lstm(self.embedding(words))[0])


def train(worker: ps.Worker, words: Words, sizes: Sizes, options: argparse.Namespace) -> None:
    """What each worker does. The text comes with it, so that it may run on another machine."""
    model = LanguageModel(sizes)
    optimizer = worker.optimizer(model, torch.optim.Adam(model.parameters(), lr=options.lr))
    dataset = TensorDataset(*pieces(words, options.length))
    for inputs, targets in worker.loader(
        dataset, batch_size=options.batch_size, steps=options.steps
    ):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()  # push gradients, pull values
        worker.log(loss=loss)


def numbered(text: str, vocabulary: int, words: int | None) -> Text:
    """The text as numbers: those of the most frequent words of its first part, the rest <unk>.

    Args:
        vocabulary: how many numbers there are at most, with that of <unk>.
        words: how many of the text's words to use; None: all.
    """
    found = WORD.findall(text.lower())[:words]
    cut = round(len(found) * (1 - HELD_OUT))
    frequent = Counter(found[:cut]).most_common(vocabulary - 1)
    numbers = {word: number for number, (word, _) in enumerate(frequent, UNKNOWN + 1)}
    ids = np.array([numbers.get(word, UNKNOWN) for word in found], np.int32)
    return Text(ids[:cut], ids[cut:], len(numbers) + 1)


def pieces(words: Words, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of a text [n, length], and for each word of them the one that follows it."""
    whole = torch.from_numpy(words.astype(np.int64))
    n = (len(words) - 1) // length * length
    return whole[:n].view(-1, length), whole[1 : n + 1].view(-1, length)


def perplexity(
    state: Mapping[str, Any], sizes: Sizes, inputs: torch.Tensor, targets: torch.Tensor
) -> float:
    """Perplexity of a model with these values: how many words it is in doubt between, at each
    word."""
    model = LanguageModel(sizes)
    model.load_state_dict({name: torch.as_tensor(value) for name, value in state.items()})
    loss = 0.0
    with torch.inference_mode():
        for some, following in zip(inputs.split(PIECES), targets.split(PIECES), strict=True):
            scores = model(some).flatten(0, 1)
            loss += F.cross_entropy(scores, following.flatten(), reduction="sum").item()
    return math.exp(loss / targets.numel())


def unigram(text: Text, targets: torch.Tensor) -> float:
    """Perplexity of a model that knows how frequent each word of the first part is, plus one."""
    frequency = torch.from_numpy(np.bincount(text.train, minlength=text.vocabulary) + 1.0)
    surprise = -(frequency / frequency.sum()).log()
    return surprise[targets].mean().exp().item()


def learn(options: argparse.Namespace, console: Console) -> tuple[float, float]:
    """Train and evaluate; returns the perplexities of the trained and of the unigram model."""
    plays = datasets.read_plays(datasets.fetch_plays(options.data))
    text = numbered(plays, options.vocabulary, options.words)
    sizes = Sizes(text.vocabulary, options.embedding, options.hidden)
    inputs, targets = pieces(text.held_out, options.length)
    spread = slice(None, None, max(len(inputs) // EVALUATED, 1))
    console.print(
        f"{len(text.train):,} words to train on, {targets.numel():,} held out, "
        f"vocabulary {text.vocabulary:,}"
    )
    job = ps.start(
        train,
        args=(text.train, sizes, options),
        workers=options.workers,
        servers=options.servers,
        engine=engine_of(options.engine),
        consistency=ps.Async(),
        seed=options.seed,
    )
    base = unigram(text, targets[spread])
    for snapshot in job.snapshots(every=options.every, keep=1):
        reached = perplexity(snapshot.state, sizes, inputs[spread], targets[spread])
        console.print(
            f"{snapshot.seconds:6.1f} s  update {snapshot.version:5,}  "
            f"perplexity {reached:7,.1f}  (unigram model {base:,.1f})"
        )
    state = job.wait().state_dict()
    torch.set_num_threads(os.cpu_count() or 1)  # no worker computes any more
    return perplexity(state, sizes, inputs, targets), unigram(text, targets)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workers", type=count, default=2)
    add("--servers", type=count, default=1)
    add("--engine", choices=ENGINES, default="local")
    add("--steps", type=count, default=400, help="of each worker (default 400)")
    add("--every", type=count, default=50, help="updates between two evaluations (default 50)")
    add("--vocabulary", type=count, default=10_000, help="words, with <unk> (default 10,000)")
    add("--embedding", type=count, default=256)
    add("--hidden", type=count, default=512)
    add("--words", type=count, help="of the text; default: all of them")
    add("--batch-size", type=count, default=20, help="pieces of the text (default 20)")
    add("--length", type=count, default=20, help="words of a piece (default 20)")
    add("--lr", type=float, default=1e-3)
    add("--data", help="folder with the texts; default: find or fetch them")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


@exit_code
def main(argv: list[str] | None = None) -> None:
    """Train, showing how it gets on, and print the final perplexities."""
    options = parse(argv)
    torch.set_num_threads(1)
    console = Console()
    reached, base = learn(options, console)
    console.print(f"Held-out perplexity: {reached:,.1f}; of the unigram model: {base:,.1f}")


if __name__ == "__main__":
    raise SystemExit(main())
