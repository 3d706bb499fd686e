"""Adding what was pushed: the rule of a plain key-value store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from paramserve.rules.base import Array, Hyper, PushInfo, Run
from paramserve.rules.built_in import BuiltIn
from paramserve.rules.compiled import compiled, compiled_rows
from paramserve.rules.layout import RowView


@dataclass(frozen=True)
class Add(BuiltIn):
    """value += gradient

    Example:
        >>> client.define("w", np.zeros(3), rule=Add())
        >>> client.push("w", np.ones(3))
    """

    name: ClassVar[str] = "Add"
    kernel: ClassVar[str] = "add"

    def apply(
        self,
        value: Array,
        gradient: Array,
        state: tuple[Array, ...],
        hyper: Hyper,
        runs: Sequence[Run],
        push: PushInfo,
        out: Array | None = None,
    ) -> None:
        add = compiled().add
        target = out if out is not None else value[:0]
        for start, stop, *_ in runs:
            add(value, gradient, target, start, stop, push.scale)

    def apply_rows(self, view: RowView, gradients: Array, hyper: Hyper, push: PushInfo) -> None:
        rows = compiled_rows()
        rows.add(rows.rows_of(view, gradients), push.scale)
