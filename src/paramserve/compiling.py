"""What has to be compiled, loaded or imported before a definition or a push, and doing it once."""

from __future__ import annotations

import contextlib
import fcntl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from paramserve.codecs import compiled as compiled_codecs
from paramserve.codecs.registry import BUILT_IN as ALL
from paramserve.codecs.registry import names_in
from paramserve.config import RuleSpec
from paramserve.core.partition import DTYPES, HALVES
from paramserve.core.table.compiled import index_kernels, text_kernels
from paramserve.core.table.compiled import kernels as store_kernels
from paramserve.core.table.routing import routing_kernels
from paramserve.errors import ParamServeError
from paramserve.messages import BlockSpec, TableSpec
from paramserve.rules.base import Rule
from paramserve.rules.built_in import BuiltIn
from paramserve.rules.compiled import compiled
from paramserve.rules.layout import RowLayout
from paramserve.rules.registry import TORCH, build, is_built_in
from paramserve.rules.rows import kernels_of, row_layout

if TYPE_CHECKING:
    from paramserve.kernel_cache import Kernels

COMPILE_WAIT_S = 120.0
"""How long a process waits for the one that compiles, before it compiles as well."""
_LOOK_S = 0.05
FLOAT = np.dtype(np.float32)

Rules = Mapping[str, type[Any]]

_local = threading.Lock()
_loaded: set[tuple[str, ...]] = set()
_ROUTING, _INDEX, _TEXT = ("routing",), ("index",), ("text",)
_prepared: set[tuple[str, str]] = set()
"""Names of rules that are not built in, by dtype, that a server has prepared, or tried to."""


# --- what a server has to have before it can take a definition; slow, so in a thread --------------


def needed(spec: BlockSpec, rules: Rules) -> Callable[[], None] | None:
    """What has to run before a block can be defined; None: nothing.

    Args:
        rules: registered ones, by name. Where a rule cannot be built the shard refuses it properly.
    """
    found = [_needed(spec, rules)]
    if not codecs_loaded(spec):
        found.append(partial(load_codecs, spec))
    if spec.half is not None and spec.half in HALVES:
        found.append(_needed_for_half(spec.half, spec.rule, rules))
    steps = [each for each in found if each is not None]

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
    return None if _half_key(half, rule) in _loaded else partial(_load_half, half, rule)


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

    Where no folder has them yet this compiles for some seconds, and says so on stderr. A rule
    that is not built in has no kernels of ours.

    Args:
        half: in which gradients come, as `BlockSpec.half`.
    """
    if not loaded(dtype, rule):
        _load(_key(dtype, rule), lambda: _dense(dtype, rule))
    if half is not None:
        _load_half(half, rule)


def _load_half(half: str, rule: Rule | None) -> None:
    """Have ready what takes gradients of 16 bits."""
    key, dtype = _half_key(half, rule), HALVES[half]
    if key not in _loaded:
        own: Kernels = rule.block_kernels(FLOAT, dtype) if isinstance(rule, BuiltIn) else {}
        _load(key, lambda: {**compiled().shared(dtype), **own})


def _half_key(half: str, rule: Rule | None) -> tuple[str, ...]:
    return (half, *_key(FLOAT, rule)[1:])


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
    if _ROUTING not in _loaded:
        _load(_ROUTING, lambda: routing_kernels().KERNELS)


def load_index() -> None:
    """Have ready what finds keys in an index, as `load_kernels`."""
    if _INDEX not in _loaded:
        _load(_INDEX, lambda: index_kernels().KERNELS)


def load_text() -> None:
    """Have ready what makes keys of strings, as `load_kernels`."""
    if _TEXT not in _loaded:
        _load(_TEXT, lambda: text_kernels().KERNELS)


def load_codecs(spec: BlockSpec | None = None) -> None:
    """Have ready what encodes and decodes gradients and values, as `load_kernels`.

    Args:
        spec: those of this block; None: those of all codecs.
    """
    names = _codecs_of(spec) if spec is not None else compiled_codecs.names_of(ALL, rows=True)
    if names and ("codecs", *names) not in _loaded:
        _load(("codecs", *names), lambda: compiled_codecs.kernels_of(names))


def codecs_loaded(spec: BlockSpec) -> bool:
    """Whether `load_codecs` would return at once."""
    names = _codecs_of(spec)
    return not names or ("codecs", *names) in _loaded


def _codecs_of(spec: BlockSpec) -> tuple[str, ...]:
    """The names of the kernels that the codecs of a block need."""
    given = [each for each in (spec.push, spec.pull) if each is not None]
    if not given:
        return ()
    names = {name for each in given for name in names_in(each)}
    return compiled_codecs.names_of(names, rows=spec.table is not None)


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
    _load(
        _table_key(rule, layout),
        lambda: {
            **_dense(FLOAT, rule),
            **routing_kernels().KERNELS,
            **store_kernels(),
            **kernels_of(rule),
        },
    )


def table_loaded(rule: Rule, layout: RowLayout) -> bool:
    """Whether `load_table` would return at once."""
    return _table_key(rule, layout) in _loaded


def _table_key(rule: Rule, layout: RowLayout) -> tuple[str, ...]:
    return ("table", layout.dtype, rule.name, *rule.states(rule.hyper()))


def _key(dtype: np.dtype[Any], rule: Rule | None) -> tuple[str, ...]:
    if rule is None or not is_built_in(rule):
        return (dtype.name,)
    # A rule has other kernels when it keeps other state, as SGD with and without momentum.
    return (dtype.name, rule.name, *rule.states(rule.hyper()))


def loaded(dtype: np.dtype[Any], rule: Rule | None) -> bool:
    """Whether `load_kernels` would return at once."""
    return _key(dtype, rule) in _loaded or dtype.name not in ("float32", "float64")


def _dense(dtype: np.dtype[Any], rule: Rule | None) -> Kernels:
    shared: Kernels = compiled().shared(dtype)
    own: Kernels = rule.block_kernels(dtype) if isinstance(rule, BuiltIn) else {}
    return {**shared, **own}


def _load(key: tuple[str, ...], kernels: Callable[[], Kernels]) -> None:
    """Load kernels: one process compiles them, the others wait for its cache."""
    from paramserve import kernel_cache, kernel_folder

    with _local:
        wanted = kernels()
        if kernel_cache.compiled(wanted):
            kernel_cache.load(wanted)
        else:
            with _one_process():
                if not kernel_cache.compiled(wanted):
                    folder = kernel_folder.choose().folder
                    text = (
                        f"paramserve: compiling kernels for {' '.join(key)}, for some seconds; "
                        f"kept {f'in {folder}' if folder else 'nowhere: see `paramserve doctor`'}"
                    )
                    print(text, file=sys.stderr, flush=True)
                kernel_cache.load(wanted)
        _loaded.add(key)


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
