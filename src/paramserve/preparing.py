"""What a server has to compile or import before it can take a definition; slow, so in a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from paramserve.config import RuleSpec
from paramserve.core.partition import DTYPES
from paramserve.errors import ParamServeError
from paramserve.loading import (
    load_kernels,
    load_table,
    loaded,
    prepare_rule,
    prepared,
    table_loaded,
)
from paramserve.messages import BlockSpec, TableSpec
from paramserve.rules.base import Rule
from paramserve.rules.registry import TORCH
from paramserve.rules.registry import build as build_rule
from paramserve.rules.rows import row_layout

Rules = Mapping[str, type[Any]]


def needed(spec: BlockSpec, rules: Rules) -> Callable[[], None] | None:
    """What has to run before a block can be defined; None: nothing.

    Args:
        rules: registered ones, by name. Where a rule cannot be built the shard refuses it properly.
    """
    described = spec.rule
    dtype: np.dtype[Any] = np.dtype(spec.dtype) if spec.dtype in DTYPES else np.dtype(np.float32)
    foreign = described is not None and (described.name == TORCH or described.name in rules)
    if described is not None and foreign and not prepared(dtype, described.name):
        return partial(_prepare, spec, dtype, described, rules)
    if spec.table is not None and described is not None:
        return _needed_for_table(spec.table, described, rules)
    if foreign or spec.dtype not in DTYPES:
        return None  # No kernel of ours is for it.
    rule: Rule | None = None
    with contextlib.suppress(ParamServeError, ValueError):
        rule = None if described is None else build_rule(described)
    return None if loaded(dtype, rule) else partial(load_kernels, dtype, rule)


def _prepare(spec: BlockSpec, dtype: np.dtype[Any], described: RuleSpec, rules: Rules) -> None:
    prepare_rule(dtype, described, rules)
    if spec.table is not None:
        more = _needed_for_table(spec.table, described, rules)
        if more is not None:
            more()


def _needed_for_table(
    table: TableSpec, described: RuleSpec, rules: Rules
) -> Callable[[], None] | None:
    with contextlib.suppress(Exception, SystemExit):  # a user's code; its block tells
        rule = build_rule(described, rules)
        layout = row_layout(rule, table.dim, table.dtype)
        if not table_loaded(rule, layout):
            return partial(load_table, rule, layout)
    return None
