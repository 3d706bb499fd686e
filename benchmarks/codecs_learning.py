"""What codecs do to training: the last loss of each, against that of none, with the same seeds.

Two workers train a small transformer on text with AdamW, and a ConvNet on handwritten digits with
SGD, whose learning rates fall to 0, in one machine: codecs encode here too (`even_local=True`).
Loss is on what no worker sees, of the servers' values.

    python -m benchmarks.codecs_learning --steps 300 --seeds 3
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

import paramserve as ps

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import slow_links

WORKERS, EVERY = 2, 10
WIDTH, LAYERS, BATCH, LR = 64, 2, 16, 2e-3
DIGITS_STEPS = 2
"""Steps on digits for each one on text: they are so much shorter."""


def ways() -> dict[str, dict[str, Any]]:
    """Arguments of `worker.optimizer`, by name."""
    local, four, two = ps.LocalSteps(EVERY), ps.Int4(256), ps.Int2(256)
    own = f"LocalSteps({EVERY})"
    return {
        "none": {},
        "BFloat16, both ways": {"push": ps.BFloat16(), "pull": ps.BFloat16()},
        "Int8": {"push": ps.Int8()},
        "Int8, both ways": {"push": ps.Int8(), "pull": ps.Int8(block=64)},
        "Int4": {"push": ps.Int4()},
        "Int2": {"push": ps.Int2()},
        "Sign": {"push": ps.Sign()},
        "TopK(0.01)": {"push": ps.TopK(0.01)},
        own: {"consistency": local},
        f"{own}, Int4": {"consistency": local, "push": ps.Int4()},
        f"{own}, Int2": {"consistency": local, "push": ps.Int2()},
        f"{own}, Int4, Delta(Int4)": {"consistency": local, "push": four, "pull": ps.Delta(four)},
        f"{own}, Int4, Delta(Int2)": {"consistency": local, "push": four, "pull": ps.Delta(two)},
        f"{own}, TopK(0.01)": {"consistency": local, "push": ps.TopK(0.01)},
    }


def text_loss(worker: ps.Worker, name: str, steps: int) -> float:
    """Train on text; the loss on its last part."""
    text = torch.from_numpy(slow_links.read_text(""))
    cut = round(0.95 * len(text))
    model = slow_links.Transformer(int(text.max()) + 1, WIDTH, LAYERS)
    optimizer = adopted(worker, name, model, torch.optim.AdamW(model.parameters(), lr=LR))
    draw = torch.Generator().manual_seed(1_000 * worker.seed + worker.rank)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        starts = torch.randint(cut - slow_links.LENGTH - 1, (BATCH,), generator=draw)
        inputs, targets = slow_links.pieces(text[:cut], starts)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        schedule.step()
    spread = torch.linspace(0, len(text) - cut - slow_links.LENGTH - 2, 128).long()
    with torch.inference_mode():
        inputs, targets = slow_links.pieces(text[cut:], spread)
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()


def digits_loss(worker: ps.Worker, name: str, steps: int) -> float:
    """Train on handwritten digits of 8 x 8; the loss on the last fifth."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.from_numpy(found.images).float().unsqueeze(1) / 16.0
    labels = torch.from_numpy(found.target)
    cut = len(labels) * 4 // 5
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(1024, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )
    optimizer = adopted(worker, name, model, torch.optim.SGD(model.parameters(), 0.01, 0.9))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, DIGITS_STEPS * steps)
    draw = torch.Generator().manual_seed(1_000 * worker.seed + worker.rank)
    for _ in range(DIGITS_STEPS * steps):
        chosen = torch.randint(cut, (BATCH,), generator=draw)
        optimizer.zero_grad()
        loss_of(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        schedule.step()
    with torch.inference_mode():
        return loss_of(model(images[cut:]), labels[cut:]).item()


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Smoothed: without, this loss of a ConvNet that knows its digits by heart is noise."""
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def adopted(worker: ps.Worker, name: str, model: Any, own: Any) -> torch.optim.Optimizer:
    options = dict(ways()[name])
    for what in ("push", "pull"):
        if what in options:
            options[what] = replace(options[what], even_local=True)
    return worker.optimizer(model, own, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="on text; on digits twice as many")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    losses: dict[str, dict[str, list[float]]] = {}
    for name in ways():
        for what, function in (("text", text_loss), ("digits", digits_loss)):
            of = losses.setdefault(what, {}).setdefault(name, [])
            for seed in range(options.seeds):
                arguments = (name, options.steps)
                result = ps.run(function, args=arguments, workers=WORKERS, seed=seed, show="none")
                of.append(result.returns[0])
    table = Table(title=f"last loss, mean of {options.seeds} seeds", title_justify="left")
    table.add_column("codec")
    for column in ("text", "of none", "digits", "of none"):
        table.add_column(column, justify="right")
    for name in ways():
        cells = []
        for what in ("text", "digits"):
            found, plain = mean(losses[what][name]), mean(losses[what]["none"])
            cells += [f"{found:.4f}", f"{found / plain - 1:+.2%}"]
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
