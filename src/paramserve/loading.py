"""Loading kernels: one process compiles, the others wait for its cache."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from paramserve.config import PolicySpec
from paramserve.rules.base import Rule
from paramserve.rules.registry import build, is_built_in

_local = threading.Lock()
_loaded: set[tuple[str, ...]] = set()
_prepared: set[tuple[str, str]] = set()
"""Names of rules that are not built in, by dtype, that a server has prepared, or tried to."""


def load_kernels(dtype: np.dtype[Any], rule: Rule | None = None) -> None:
    """Have the shared kernels, and those of a rule, ready for a dtype. Repeating costs nothing.

    The first time in an installation this compiles for some seconds, and says so on stderr. A rule
    that is not built in has no kernels of ours.
    """
    if loaded(dtype, rule):
        return
    from paramserve.rules import kernels

    with _local:
        mark = _mark(kernels, dtype, rule)
        if mark.exists():
            _prepare(kernels, dtype, rule)
        else:
            with _one_process(kernels):
                if not mark.exists():
                    text = "paramserve: compiling kernels, once per installation; some seconds"
                    print(text, file=sys.stderr, flush=True)
                _prepare(kernels, dtype, rule)
                mark.touch()
        _loaded.add(_key(dtype, rule))


def _prepare(kernels: ModuleType, dtype: np.dtype[Any], rule: Rule | None) -> None:
    kernels.prepare(dtype)
    if rule is not None and is_built_in(rule):
        rule.prepare(dtype)


def _key(dtype: np.dtype[Any], rule: Rule | None) -> tuple[str, ...]:
    if rule is None or not is_built_in(rule):
        return (dtype.name,)
    # A rule has other kernels when it keeps other state, as SGD with and without momentum.
    return (dtype.name, rule.name, *rule.states(rule.hyper()))


def _mark(kernels: ModuleType, dtype: np.dtype[Any], rule: Rule | None) -> Path:
    """A file beside Numba's cache that says: this is compiled. Without it, one process compiles
    and the others wait; what it says of a cache that was deleted since costs time, nothing else."""
    assert kernels.__file__ is not None
    age = os.stat(kernels.__file__).st_mtime_ns
    name = "-".join((*_key(dtype, rule), kernels.numba.__version__, str(age)))
    return Path(kernels.finite.stats.cache_path) / f"paramserve-{name}.compiled"


def loaded(dtype: np.dtype[Any], rule: Rule | None) -> bool:
    """Whether `load_kernels` would return at once."""
    return _key(dtype, rule) in _loaded or dtype.name not in ("float32", "float64")


def prepare_rule(
    dtype: np.dtype[Any], described: PolicySpec, registered: Mapping[str, type[Any]]
) -> None:
    """Import what a rule that is not built in needs (torch takes seconds), and let it prepare.

    What fails here is no error yet: it fails again, and is told, where a block is defined.
    """
    load_kernels(dtype)
    with contextlib.suppress(Exception, SystemExit):  # a user's code may raise anything
        build(described, registered).prepare(dtype)
    _prepared.add((dtype.name, described.name))


def prepared(dtype: np.dtype[Any], name: str) -> bool:
    """Whether `prepare_rule` has run for a rule of this name."""
    return (dtype.name, name) in _prepared


@contextlib.contextmanager
def _one_process(kernels: ModuleType) -> Iterator[None]:
    # A lock on a source file that every process has: nothing is created and nothing is left.
    assert kernels.__file__ is not None
    with open(kernels.__file__, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
