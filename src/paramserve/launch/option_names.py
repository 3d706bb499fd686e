"""Options by their names: one that is misspelt, or has moved elsewhere, is told what to write."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from paramserve.errors import did_you_mean
from paramserve.launch.abbreviation import abbreviated

MOVED: Mapping[str, str] = MappingProxyType(
    {
        "policies": "rules=[MyPolicy]",
        "codecs": "rules=[MyCodec]",
        "deadlines": "engine=ps.Local(deadlines=...), or ps.OnRay(...)",
        "limits": "engine=ps.Local(limits=...), or ps.OnRay(...)",
    }
)
"""New way to write an option, by its name of before."""
MOVED_OF_RUNS: Mapping[str, str] = MappingProxyType(
    {
        **MOVED,
        "threads_per_worker": "engine=ps.Local(threads_per_worker=...), or ps.OnRay(...)",
        "load_state": "checkpoint=ps.Checkpoint(load_state=...)",
        "load_tables": "checkpoint=ps.Checkpoint(load_tables=...)",
        "save_tables": "checkpoint=ps.Checkpoint(save_tables=...)",
        "on_server_death": "checkpoint=ps.Checkpoint(path, on_server_death=...)",
        "worker_weight": "worker.factor = ... in the training function",
        "show_rank": "engine=ps.Local(show_rank=...)",
    }
)
"""New way to write an option of `run` and `start`, by its name of before."""

P = ParamSpec("P")
R = TypeVar("R")


def by_name(begin: Callable[P, R]) -> Callable[P, R]:
    """Have an unknown option of `run`, `start`, `Cluster` and `serve` say what to write, and
    `ps.run(train, 3)` and `ps.run(train, epochs=3)` how `train` is given its arguments."""
    valid = [*inspect.signature(begin).parameters]
    called = f"ps.{begin.__qualname__.removesuffix('.__init__')}"

    @functools.wraps(begin)
    def named(*args: P.args, **options: P.kwargs) -> R:
        if valid[0] == "train" and len(args) > 1:
            others = "".join(f"{abbreviated(each)}, " for each in args[1:])
            raise TypeError(
                f"{called} takes the training function and options by their names, and "
                f"got {len(args)} arguments without one: for arguments of the training function "
                f"write args=({others.rstrip() if len(args) == 2 else others.rstrip(', ')})"
            )
        for name in options:
            if name not in valid:
                raise TypeError(
                    f"{called} got an unexpected keyword argument {name!r}{_instead(name, valid)}"
                )
        return begin(*args, **options)

    return named


def _instead(name: str, valid: Sequence[str]) -> str:
    """What to write in place of an option that there is not."""
    trains = valid[0] == "train"
    if name == "show" and trains:  # of `run`
        return ": paramserve.observe.watch(job) shows how far a job is"
    if moved := (MOVED_OF_RUNS if trains else MOVED).get(name):
        return f": write {moved}"
    if (nearest := did_you_mean(name, valid)) or not trains:
        return nearest
    return f": for an argument of the training function write kwargs={{{name!r}: ...}}"
