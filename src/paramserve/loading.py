"""Loading kernels: one process compiles, the others wait for its cache."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from paramserve.config import RuleSpec
from paramserve.rules.base import Rule
from paramserve.rules.compiled import compiled
from paramserve.rules.layout import RowLayout
from paramserve.rules.registry import build, is_built_in

COMPILE_WAIT_S = 120.0
"""How long a process waits for the one that compiles, before it compiles as well."""
_LOOK_S = 0.05

_local = threading.Lock()
_loaded: set[tuple[str, ...]] = set()
_ROUTING = ("routing",)
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

    _load(_key(dtype, rule), [kernels], lambda: _prepare(kernels, dtype, rule))


def load_if_compiled() -> None:
    """Import what kernels need, and load the shared ones for each dtype that they are compiled for:
    in a process that will be forked."""
    from paramserve.rules import kernels

    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
        mark = _mark((dtype.name, "*"), [kernels])
        if any(mark.parent.glob(mark.name)):  # with any rule
            kernels.prepare(dtype)


def load_routing() -> None:
    """Have ready what spreads a table's keys and gradients over the shards, as `load_kernels`."""
    if _ROUTING in _loaded:
        return
    from paramserve.core.table import kernels, routing_kernels

    _load(_ROUTING, [kernels, routing_kernels], routing_kernels.prepare)


def load_table(rule: Rule, layout: RowLayout) -> None:
    """Have ready what a table of such rows needs on a shard, as `load_kernels`.

    What a rule that is not built in fails with here is no error yet: it fails again, and is told,
    where the table is defined.
    """
    if table_loaded(rule, layout):
        return
    load_kernels(np.dtype(np.float32), rule)
    load_routing()
    from paramserve.core.table.compiled import kernel_modules, prepare
    from paramserve.rules import halves, kernels, row_kernels
    from paramserve.rules.rows import prepare_rows

    built_in, key = is_built_in(rule), _table_key(rule, layout)

    def compile_all() -> None:
        prepare()
        if built_in:
            prepare_rows(rule, layout)

    modules = [*kernel_modules(), kernels, halves, row_kernels]
    _load(key if built_in else key[:2], modules, compile_all)
    if not built_in:
        with contextlib.suppress(Exception, SystemExit):  # a user's code may raise anything
            prepare_rows(rule, layout)
        _loaded.add(key)


def table_loaded(rule: Rule, layout: RowLayout) -> bool:
    """Whether `load_table` would return at once."""
    return _table_key(rule, layout) in _loaded


def _table_key(rule: Rule, layout: RowLayout) -> tuple[str, ...]:
    return ("table", layout.dtype, rule.name, *rule.states(rule.hyper()))


def _load(key: tuple[str, ...], modules: list[ModuleType], prepare: Callable[[], None]) -> None:
    with _local:
        mark = _mark(key, modules)
        if mark.exists():
            prepare()
        else:
            with _one_process():
                if not mark.exists():
                    text = "paramserve: compiling kernels, once per installation; some seconds"
                    print(text, file=sys.stderr, flush=True)
                prepare()
                mark.touch()
        _loaded.add(key)


def _prepare(kernels: ModuleType, dtype: np.dtype[Any], rule: Rule | None) -> None:
    kernels.prepare(dtype)
    if rule is not None and is_built_in(rule):
        rule.prepare(dtype)


def _key(dtype: np.dtype[Any], rule: Rule | None) -> tuple[str, ...]:
    if rule is None or not is_built_in(rule):
        return (dtype.name,)
    # A rule has other kernels when it keeps other state, as SGD with and without momentum.
    return (dtype.name, rule.name, *rule.states(rule.hyper()))


def _mark(key: tuple[str, ...], modules: list[ModuleType]) -> Path:
    """A file beside Numba's cache that says: this is compiled. Without it, one process compiles
    and the others wait; what it says of a cache that was deleted since costs time, nothing else."""
    kernels: Any = compiled()
    age = max(os.stat(str(each.__file__)).st_mtime_ns for each in modules)
    name = "-".join((*key, kernels.numba.__version__, str(age)))
    return Path(kernels.finite.stats.cache_path) / f"paramserve-{name}.compiled"


def loaded(dtype: np.dtype[Any], rule: Rule | None) -> bool:
    """Whether `load_kernels` would return at once."""
    return _key(dtype, rule) in _loaded or dtype.name not in ("float32", "float64")


def prepare_rule(
    dtype: np.dtype[Any], described: RuleSpec, registered: Mapping[str, type[Any]]
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
def _one_process() -> Iterator[None]:
    # A lock on a source file that every process has: nothing is created and nothing is left. Any
    # user who may read the file can hold it, so the wait has an end. Two that compile at a time
    # write the same files, each in one step.
    deadline = time.monotonic() + COMPILE_WAIT_S
    with open(__file__, "rb") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOOK_S)
        yield
