"""Kernels are compiled before the first request, and never in one."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.core.table.rig import keys_of

from paramserve import compiling
from paramserve.compiling import load_table, table_loaded
from paramserve.core.table import compiled
from paramserve.rules import SGD, Adam
from paramserve.rules.rows import row_layout

load_table(SGD(0.1), row_layout(SGD(0.1), 3, "float32"))  # here: the first time takes long


def test_other_types_are_refused_and_not_compiled() -> None:
    kernels = compiled.index_kernels()
    entries, rows = np.zeros((8, 2), np.int64), keys_of([0])
    assert kernels.find(entries, keys_of([3]), rows, -1) == 1
    with pytest.raises(TypeError):
        kernels.find(entries, np.array([3.0]), rows, -1)


def test_every_kernel_of_the_store_is_prepared() -> None:
    modules = (compiled.index_kernels(), compiled.row_kernels(), compiled.use_kernels())
    for module in modules:
        for name, each in vars(module).items():
            if hasattr(each, "overloads") and each.py_func.__module__ == module.__name__:
                inlined = each.targetoptions.get("forceinline", False)
                part = name in ("link", "unlink")  # called by kernels only
                assert inlined or part or each.nopython_signatures, name


def test_table_is_loaded_once_for_its_rule_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_loaded", set[tuple[str, ...]]())
    load_table(SGD(0.1), row_layout(SGD(0.1), 3, "float32"))
    for dim in (3, 8):
        assert table_loaded(SGD(0.5), row_layout(SGD(0.5), dim, "float32"))
    assert not table_loaded(SGD(0.5), row_layout(SGD(0.5), 3, "bfloat16"))
    assert not table_loaded(Adam(), row_layout(Adam(), 3, "float32"))
