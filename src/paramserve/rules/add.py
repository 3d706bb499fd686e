"""Adding what was pushed: the rule of a plain key-value store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from paramserve.rules.allowed import check_hyper
from paramserve.rules.base import Array, Hyper, PushInfo, Run
from paramserve.rules.compiled import compiled, compiled_rows
from paramserve.rules.layout import RowLayout, RowView


@dataclass(frozen=True)
class Add:
    """value += gradient

    Example:
        >>> client.define("w", np.zeros(3), rule=Add())
        >>> client.push("w", np.ones(3))
    """

    name: ClassVar[str] = "Add"
    hyper_names: ClassVar[tuple[str, ...]] = ()
    state_names: ClassVar[tuple[str, ...]] = ()

    def hyper(self) -> Hyper:
        return ()

    def check(self, hyper: Hyper) -> None:
        check_hyper(self.name, {}, hyper)

    def states(self, hyper: Hyper) -> tuple[str, ...]:
        return ()

    def init_state(self, size: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
        return ()

    def prepare(self, dtype: np.dtype[Any]) -> None:
        compiled().load(dtype, compiled().add)

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

    def counted(self, hyper: Hyper) -> bool:
        return False

    def prepare_rows(self, layout: RowLayout) -> None:
        compiled_rows().load(compiled_rows().add)

    def apply_rows(self, view: RowView, gradients: Array, hyper: Hyper, push: PushInfo) -> None:
        rows = compiled_rows()
        rows.add(rows.rows_of(view, gradients), push.scale)
