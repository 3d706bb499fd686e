"""What has to be compiled, loaded or imported before a definition or a push, and doing it once."""

from __future__ import annotations

import contextlib
import fcntl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from paramserve import kernel_sets
from paramserve.config import RuleSpec
from paramserve.core.partition import DTYPES, HALVES
from paramserve.errors import ParamServeError
from paramserve.kernel_sets import KernelSet
from paramserve.logs import write_line
from paramserve.messages import BlockSpec, TableSpec
from paramserve.rules.base import Rule
from paramserve.rules.compiled import compiled
from paramserve.rules.layout import RowLayout
from paramserve.rules.registry import TORCH, build, is_built_in
from paramserve.rules.rows import row_layout

COMPILE_WAIT_S = 120.0
"""How long a process waits for the one that compiles, before it compiles as well."""
SAY_S = 2.0
"""Seconds of waiting for compilation before a line says so."""
_LOOK_S = 0.05
FLOAT = np.dtype(np.float32)

Rules = Mapping[str, type[Any]]

_local = threading.Lock()
_loaded: set[tuple[str, ...]] = set()
_prepared: set[tuple[str, str]] = set()
"""Names of rules that are not built in, by dtype, that a server has prepared, or tried to."""


# --- what a server has to have before it can take a definition; slow, so in a thread --------------


def needed(spec: BlockSpec, rules: Rules) -> Callable[[], None] | None:
    """What has to run before a block can be defined; None: nothing.

    Args:
        rules: registered ones, by name. Where a rule cannot be built the shard refuses it properly.
    """
    needs = [_needed(spec, rules)]
    if not codecs_loaded(spec):
        needs.append(partial(load_codecs, spec))
    if spec.half is not None and spec.half in HALVES:
        needs.append(_needed_for_half(spec.half, spec.rule, rules))
    steps = [each for each in needs if each is not None]

    def all_of_them() -> None:
        for step in steps:
            step()

    return all_of_them if steps else None


def _needed_for_half(
    half: str, described: RuleSpec | None, rules: Rules
) -> Callable[[], None] | None:
    rule: Rule | None = None
    if described is not None and described.name != TORCH and described.name not in rules:
        with contextlib.suppress(ParamServeError, ValueError):
            rule = build(described)
    kernels = kernel_sets.half(half, rule)
    return None if kernels.key in _loaded else partial(_load, kernels)


def _needed(spec: BlockSpec, rules: Rules) -> Callable[[], None] | None:
    described = spec.rule
    dtype: np.dtype[Any] = np.dtype(spec.dtype) if spec.dtype in DTYPES else np.dtype(np.float32)
    foreign = described is not None and (described.name == TORCH or described.name in rules)
    if described is not None and foreign and (dtype.name, described.name) not in _prepared:
        return partial(_prepare, spec, dtype, described, rules)
    if spec.table is not None and described is not None:
        return _needed_for_table(spec.table, described, rules)
    if foreign or spec.dtype not in DTYPES:
        return None  # No kernel of ours is for it.
    rule: Rule | None = None
    with contextlib.suppress(ParamServeError, ValueError):
        rule = None if described is None else build(described)
    return None if loaded(dtype, rule) else partial(load_kernels, dtype, rule)


def _prepare(spec: BlockSpec, dtype: np.dtype[Any], described: RuleSpec, rules: Rules) -> None:
    """Import what a rule that is not built in needs (torch takes seconds), and let it prepare.

    What fails here is no error yet: it fails again, and is told, where a block is defined.
    """
    load_kernels(dtype)
    with contextlib.suppress(Exception, SystemExit):  # a user's code may raise anything
        build(described, rules).prepare(dtype)
    _prepared.add((dtype.name, described.name))
    if spec.table is not None:
        more = _needed_for_table(spec.table, described, rules)
        if more is not None:
            more()


def _needed_for_table(
    table: TableSpec, described: RuleSpec, rules: Rules
) -> Callable[[], None] | None:
    with contextlib.suppress(Exception, SystemExit):  # a user's code; its block tells
        rule = build(described, rules)
        layout = row_layout(rule, table.dim, table.dtype)
        if not table_loaded(rule, layout):
            return partial(load_table, rule, layout)
    return None


# --- having it -----------------------------------------------------------------------------------


def load_kernels(dtype: np.dtype[Any], rule: Rule | None = None, half: str | None = None) -> None:
    """Have the shared kernels, and those of a rule, ready for a dtype. Repeating costs nothing.

    Where no folder has them yet this compiles them, for seconds, and says so on stderr. A rule that
    is not built in has no kernels of ours.

    Args:
        half: in which gradients come, as `BlockSpec.half`.
    """
    if not loaded(dtype, rule):
        _load(kernel_sets.dense(dtype, rule))
    if half is not None:
        _load(kernel_sets.half(half, rule))


def loaded(dtype: np.dtype[Any], rule: Rule | None) -> bool:
    """Whether `load_kernels` would return at once."""
    compiled = dtype.name in ("float32", "float64")
    return not compiled or kernel_sets.dense(dtype, rule).key in _loaded


def load_if_compiled() -> None:
    """Import what kernels need, and load the shared ones for each dtype that they are compiled for:
    in a process that will be forked."""
    from paramserve import kernel_cache

    for dtype in compiled().DTYPES:
        kernels = compiled().shared(dtype)
        if kernel_cache.compiled(kernels):
            kernel_cache.load(kernels)


def load_routing() -> None:
    """Have ready what spreads a table's keys and gradients over the shards, as `load_kernels`."""
    _load(kernel_sets.ROUTING)


def load_index() -> None:
    """Have ready what finds keys in an index, as `load_kernels`."""
    _load(kernel_sets.INDEX)


def load_text() -> None:
    """Have ready what makes keys of strings, as `load_kernels`."""
    _load(kernel_sets.TEXT)


def load_codecs(spec: BlockSpec | None = None) -> None:
    """Have ready what encodes and decodes gradients and values, as `load_kernels`.

    Args:
        spec: those of this block; None: those of all codecs.
    """
    if spec is None:
        _load(kernel_sets.EVERY_CODEC)
    elif not codecs_loaded(spec):  # else Numba is not even imported
        _load(kernel_sets.codecs_of(spec))


def codecs_loaded(spec: BlockSpec) -> bool:
    """Whether `load_codecs` would return at once."""
    kernels = kernel_sets.codecs_of(spec)
    return not kernels.about or kernels.key in _loaded


def load_table(rule: Rule, layout: RowLayout) -> None:
    """Have ready what a table of such rows needs on a shard, as `load_kernels`.

    What a rule that is not built in fails with here is no error yet: it fails again, and is told,
    where the table is defined.
    """
    if table_loaded(rule, layout):
        return
    if not is_built_in(rule):
        with contextlib.suppress(Exception, SystemExit):  # a user's code may raise anything
            rule.prepare(FLOAT)
    _load(kernel_sets.table(rule, layout.dtype))


def table_loaded(rule: Rule, layout: RowLayout) -> bool:
    """Whether `load_table` would return at once."""
    return kernel_sets.table(rule, layout.dtype).key in _loaded


def compile_all() -> int:
    """Compile every kernel that no folder has yet; how many these were."""
    from paramserve import compilers

    sets = kernel_sets.every()
    with _local, _one_process(lambda: compilers.missing(sets) == 0):
        return compilers.compile_missing(sets)


def _load(kernel_set: KernelSet) -> None:
    """Load kernels: one process compiles them, or has them compiled, the others wait for that."""
    from paramserve import compilers, kernel_cache

    if kernel_set.key in _loaded:
        return
    with _local:
        kernels = kernel_set.kernels()
        if not kernel_cache.compiled(kernels):
            with _one_process(lambda: kernel_cache.compiled(kernels)):
                compilers.compile_missing([kernel_set])
        kernel_cache.load(kernels)
        _loaded.add(kernel_set.key)


@contextlib.contextmanager
def _one_process(compiled: Callable[[], bool]) -> Iterator[None]:
    """Wait until no other process compiles, or what is needed is there.

    Args:
        compiled: whether it is.
    """
    # A lock on a source file that every process has: nothing is created and nothing is left. Any
    # user who may read the file can hold it, so the wait has an end. Two that compile at a time
    # write the same files, each in one step.
    began, silent = time.monotonic(), True
    with open(__file__, "rb") as file:
        while time.monotonic() < began + COMPILE_WAIT_S:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if compiled():
                    break
            if silent and time.monotonic() > began + SAY_S:
                silent = False
                limit = f"{COMPILE_WAIT_S:.0f} s at most"
                write_line(f"waiting for another process that compiles, {limit}")
            time.sleep(_LOOK_S)
        yield
