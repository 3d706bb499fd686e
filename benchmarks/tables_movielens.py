"""`examples/movielens.py` as it stands: on tables with asynchronous workers, and in one process."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import paramserve as ps

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
HELD_OUT = 10
"""Made-up ratings that the error is of; the speed is not."""


@dataclass(frozen=True)
class Films:
    """One model of the example.

    Attributes:
        model: "dlrm" or "mf".
        made_up: ratings drawn at random; 0: MovieLens 100K, which is fetched.
    """

    model: str = "dlrm"
    batch: int = 4096
    workers: int = 2
    servers: int = 1
    units: int = 512
    epochs: int = 4
    made_up: int = 0


def tables(load: Films, scratch: Path) -> dict[str, float]:
    """Samples a second over all workers."""
    movielens = _example()
    options = _options(movielens, load)
    data = _data(movielens, load, options)
    result = ps.run(
        movielens.train,
        args=(data, options),
        workers=load.workers,
        servers=load.servers,
        consistency=ps.Async(),
        seed=options.seed,
        engine=ps.Local(threads_per_worker=1),
    )
    outcomes = [movielens.Outcome(*each) for each in result.returns.values()]
    return {"per_s": movielens.speed(outcomes)}


def serial(load: Films, scratch: Path) -> dict[str, float]:
    """Samples a second in one process with one thread, rows in `nn.Embedding`."""
    movielens = _example()
    options = _options(movielens, load)
    data = _data(movielens, load, options)
    return {"per_s": movielens.speed([movielens.serial(data, options)])}


def _example() -> ModuleType:
    """The example, which its workers have to find as well."""
    paths = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path.insert(0, str(EXAMPLES))
    import movielens

    module: ModuleType = movielens
    return module


def _options(movielens: ModuleType, load: Films) -> argparse.Namespace:
    given = {
        "model": load.model,
        "batch-size": load.batch,
        "workers": load.workers,
        "units": load.units,
        "epochs": load.epochs,
    }
    found: argparse.Namespace = movielens.parse(
        [f"--{key}={value}" for key, value in given.items()]
    )
    return found


def _data(movielens: ModuleType, load: Films, options: argparse.Namespace) -> Any:
    if not load.made_up:
        return movielens.load(options)
    chance, count = np.random.default_rng(0), load.made_up + HELD_OUT
    parts = (
        chance.integers(1000, size=(count, 5)),
        chance.random((count, 23), np.float32),
        chance.integers(1, 6, count).astype(np.float32),
    )
    return movielens.Split(*zip(*(np.split(each, [load.made_up]) for each in parts), strict=True))
