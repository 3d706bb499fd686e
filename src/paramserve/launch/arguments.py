"""Checks what `run`, `start` and `Cluster` are given, before anything is started.

Deadlines and limits are checked in `config.py`, policies and rules in
`consistency/registry.py`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from typing import Any

from paramserve.client.arrow import pyarrow, saying
from paramserve.engine.base import Engine
from paramserve.engine.local import Local
from paramserve.launch.abbreviation import abbreviated
from paramserve.launch.roster import Restart

SEED_BITS = 63
"""Bits of the seed drawn for a run without one."""


def check_arguments(args: object, kwargs: object) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What a training function is called with behind the worker; of None for `kwargs` nothing.

    Raises:
        TypeError: `args` is no list and no tuple (a string would be one argument for each letter),
            or `kwargs` no dict by names.
    """
    if not isinstance(args, Sequence) or isinstance(args, str | bytes | bytearray):
        fix = "leave it out for none" if args is None else f"write args=({abbreviated(args)},)"
        raise TypeError(
            "args must be a tuple or list of the arguments behind the worker, not "
            f"{abbreviated(args)}: {fix}"
        )
    if kwargs is None:
        return args, {}
    if not isinstance(kwargs, Mapping):
        raise TypeError(
            "kwargs must be a dict of arguments by their names, as in kwargs={'lr': 0.1}, not "
            f"{abbreviated(kwargs)}"
        )
    for name in kwargs:
        if not isinstance(name, str):
            raise TypeError(f"kwargs goes by the names of parameters, and {name!r} is none")
    return args, kwargs


def check_engine(engine: Engine | None) -> Engine:
    """The engine, or `Local()` for None. Raises `TypeError` for what is none."""
    if engine is None:
        return Local()
    if isinstance(engine, type) and hasattr(engine, "open"):
        name = engine.__name__
        raise TypeError(f"engine must be an object, not the class {name}: call it: ps.{name}()")
    if isinstance(engine, type) or not hasattr(engine, "open"):
        raise TypeError(f"engine must be an engine (an object, as in ps.Local()), not {engine!r}")
    for name in ("reads_refs", "threads_per_worker", "deadlines", "limits"):
        if not hasattr(engine, name):
            raise TypeError(
                f"engine must be an engine, as paramserve.engine.base.Engine says: {engine!r} has "
                f"no {name}"
            )
    return engine


def check_folder(path: str | os.PathLike[str] | None) -> str:
    """The whole path of the folder that tables are written to, which is made; empty for None.

    Raises:
        TypeError: it is no path. OSError: it cannot be made or written to.
        ParamServeError: pyarrow is not installed.
    """
    if path is None:
        return ""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"save_tables must be the path of a folder, not {path!r}")
    pyarrow()
    folder = os.path.abspath(os.fspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
    except OSError as error:
        raise saying(
            error,
            f"save_tables cannot write to the folder {folder}: {error.strerror}. Applied: no. To "
            "fix: name a folder that this process may make and write to",
        ) from error
    return folder


def check_options(on_worker_death: object, timeout_s: float | None, seed: int | None) -> None:
    """Raise `ValueError` for an option that means nothing."""
    if on_worker_death not in ("stop", "continue") and not isinstance(on_worker_death, Restart):
        raise ValueError(
            f'on_worker_death must be "stop", "continue" or ps.Restart(...), not '
            f"{on_worker_death!r}"
        )
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s must be above 0, not {timeout_s!r}")
    if seed is not None and (not isinstance(seed, int) or seed < 0):
        raise ValueError(f"seed must be an int of at least 0, not {seed!r}")
