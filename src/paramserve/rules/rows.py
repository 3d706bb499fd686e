"""Rules on rows of a keyed table: what a row has to hold for a rule, and one update of some rows.

A built-in rule updates rows where they lie. Any other is given copies, of which the rows take over
what it made only after it has succeeded and passed the checks that dense blocks have, so that a
failure in its middle changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from paramserve.rules.add import Add
from paramserve.rules.base import Array, Hyper, PushInfo, RowRule, Rule, Run
from paramserve.rules.compiled import compiled, compiled_rows
from paramserve.rules.custom import CustomRule, check_unchanged
from paramserve.rules.layout import WIDE, RowLayout, RowView
from paramserve.rules.registry import TORCH, is_built_in

if TYPE_CHECKING:
    from paramserve.kernel_cache import Kernels

__all__ = [
    "RowLayout",
    "RowView",
    "row_layout",
    "initial_state",
    "check_rows",
    "kernels_of",
    "prepare_rows",
    "apply_rows",
    "for_kernels",
]
FLOAT = np.dtype(np.float32)


def row_layout(rule: Rule, dim: int, dtype: str) -> RowLayout:
    """What a row of a table with this rule holds.

    Args:
        dim, dtype: as in `RowLayout`.
    Raises:
        ValueError: the rule cannot run on rows, or dim or dtype are wrong.
    """
    if getattr(rule, "whole_tensors", False):
        raise ValueError(
            f"{_called(rule)} looks at whole tensors, and a table has none: its rows come and go "
            "one by one. Use a rule that updates each element, or each row, by itself"
        )
    rows_only = bool(getattr(rule, "whole_rows", False))
    if rows_only and not (is_built_in(rule) or isinstance(rule, CustomRule)):
        raise ValueError(f"{_called(rule)} has whole_rows: derive it from ps.CustomRule")
    names = rule.states(rule.hyper())
    widths = rule.row_states(dim) if hasattr(rule, "row_states") else (dim,) * len(names)
    if (
        not isinstance(widths, tuple)
        or len(widths) != len(names)
        or not all(type(width) is int and width >= 1 for width in widths)
    ):
        raise ValueError(
            f"row_states({dim}) of {_called(rule)} gave {widths!r}: it has to be a tuple of one "
            f"width for each state ({', '.join(names) if names else 'there is none'})"
        )
    if not rows_only and any(width != dim for width in widths):
        raise ValueError(
            f"{_called(rule)} updates elements, so each state is as wide as a row, {dim}, and not "
            f"{widths}. For states of another width set whole_rows = True: update() then sees rows"
        )
    if dtype in WIDE and type(rule) is not Add:
        raise ValueError(
            f"rows of {dtype} are for counting, with rule=ps.Add(), not {_called(rule)}: give the "
            'table dtype="float32"'
        )
    counted = dtype in ("bfloat16", "float16") or _counted(rule, rule.hyper())
    return RowLayout(dim, dtype, widths, counted)


def initial_state(rule: Rule, layout: RowLayout) -> Array:
    """The states of a fresh row, one after the other: float32 [state words].

    Raises:
        ValueError: the rule gave something else.
    """
    if hasattr(rule, "initial_row"):
        state = np.asarray(rule.initial_row(layout.dim), FLOAT)
    else:
        arrays = rule.init_state(layout.dim, FLOAT)
        state = np.concatenate([np.zeros(0, FLOAT), *arrays])
    if state.shape != (layout.state_words,):
        raise ValueError(
            f"the fresh states of {_called(rule)} have shape {list(state.shape)}, a row has room "
            f"for [{layout.state_words}]"
        )
    return np.ascontiguousarray(state, FLOAT)


def check_rows(rule: Rule, layout: RowLayout, hyper: Hyper) -> None:
    """Refuse hyper-parameters that need more than a table's rows hold, before anything is written.

    Raises:
        ValueError: they do. Nothing was applied.
    """
    needed = rule.states(hyper)
    if len(needed) > len(layout.widths):
        missing = f"the state {', '.join(needed)}"
    elif _counted(rule, hyper) and not layout.counted:
        missing = "a count of updates for each row"
    else:
        return
    numbers = dict(zip(rule.hyper_names, hyper, strict=True))
    raise ValueError(
        f"{_called(rule)} with {numbers} needs {missing}, and this table was defined without. "
        "Applied: no. To fix: define it with these hyper-parameters"
    )


def kernels_of(rule: Rule | None) -> Kernels:
    """Every kernel that `apply_rows` can need, besides what the rule loads in `prepare`.

    Args:
        rule: None: any that is not built in.
    """
    if rule is not None and is_built_in(rule):
        return cast(RowRule, rule).row_kernels()
    dense, rows = compiled(), compiled_rows()
    return {
        **dense.typed(FLOAT, dense.largest),
        **rows.copies(),
    }


def prepare_rows(rule: Rule) -> None:
    """Compile or load every kernel that `apply_rows` can need. Repeating costs nothing."""
    from paramserve.kernel_cache import load

    rule.prepare(FLOAT)
    load(kernels_of(rule))


def apply_rows(rule: Rule, view: RowView, gradients: Array, hyper: Hyper, push: PushInfo) -> None:
    """Update rows by one push.

    Args:
        gradients: float32 [n, dim] for the rows of `view`; not changed.
    Raises:
        ValueError: the hyper-parameters need what the rows do not hold, or a rule that is not built
            in resized an array or made NaN or Inf of finite numbers. Nothing was applied.
        TypeError: such a rule returned something. What it raises passes through, and nothing was
            applied then either.
    """
    assert gradients.shape == (view.slots.size, view.layout.dim), gradients.shape
    check_rows(rule, view.layout, hyper)
    if not view.slots.size:
        return
    if view.layout.dtype in WIDE:
        _add_wide(view, gradients, push.scale)
    elif is_built_in(rule):
        cast(RowRule, rule).apply_rows(view, for_kernels(gradients), hyper, push)
    else:
        draft_rows(rule, view, gradients, hyper, push).write(view)


def _add_wide(view: RowView, gradients: Array, scale: float) -> None:
    """Add numbers of 64 bits, as `Add`. A scaled sum of int64 ones is rounded, and one past the
    largest number goes on at the smallest, as numpy has it."""
    kind, dim = WIDE[view.layout.dtype], view.layout.dim
    present = view.floats[view.slots, :dim].view(kind)
    present += scaled(np.ascontiguousarray(gradients).view(kind), scale)
    view.floats[view.slots, :dim] = present.view(FLOAT)


def scaled(numbers: Array, factor: float) -> Array:
    """Numbers of `WIDE` times a factor, int64 ones rounded to whole ones."""
    if factor == 1.0:
        return numbers
    product: Array = numbers * np.float64(factor)
    return np.rint(product).astype(np.int64) if numbers.dtype.kind == "i" else product


def for_kernels(gradients: Array) -> Array:
    """Gradients as the kernels were compiled for: these, where nothing is wrong with them."""
    if gradients.flags.carray and gradients.dtype == FLOAT:
        return gradients
    return np.require(gradients, FLOAT, ("C", "A", "W"))


def draft_rows(
    rule: Rule, view: RowView, gradients: Array, hyper: Hyper, push: PushInfo
) -> RowDraft:
    """Compute an update of some rows with a rule that is not built in, and write nothing.

    Args:
        gradients: float32 [n, dim] for the rows of `view`; not changed.
    Raises:
        As `apply_rows`.
    """
    check_rows(rule, view.layout, hyper)
    draft = RowDraft(view, for_kernels(gradients), hyper, push)
    draft.compute(rule, view)
    return draft


def _called(rule: Rule) -> str:
    kind = getattr(rule, "kind", None)
    return f"torch.optim.{kind}" if rule.name == TORCH else rule.name


def _counted(rule: Rule, hyper: Hyper) -> bool:
    """Whether a rule looks at counts: one by the protocol may, and `CustomRule` never does."""
    if is_built_in(rule):
        return cast(RowRule, rule).counted(hyper)
    return not isinstance(rule, CustomRule)


class RowDraft:
    """Copies of some rows, those with the same count side by side, for a rule without kernels."""

    def __init__(self, view: RowView, gradients: Array, hyper: Hyper, push: PushInfo) -> None:
        layout = view.layout
        self._hyper, self._push = hyper, push
        if layout.counted:
            counts = view.words[view.slots, layout.count_at]
            order = np.argsort(counts, kind="stable")
            gradients, counts = gradients[order], counts[order]
        else:
            order = np.arange(view.slots.size)
            counts = np.zeros(view.slots.size, np.uint32)
        self._order, self._layout = order, view.layout
        self._gradients, self._counts = gradients, counts
        self._values, self._states = self._gathered(view)

    def _ordered(self, view: RowView) -> RowView:
        return view._replace(slots=view.slots[self._order], keys=view.keys[self._order])

    def _gathered(self, view: RowView) -> tuple[Array, tuple[Array, ...]]:
        view, layout = self._ordered(view), self._layout
        values = np.empty((view.slots.size, layout.dim), FLOAT)
        kernels = compiled_rows()
        kernels.gather(kernels.rows_of(view, self._gradients), values)
        states = tuple(
            np.ascontiguousarray(view.floats[view.slots, at : at + width])
            for at, width in zip(layout.state_at, layout.widths, strict=True)
        )
        return values, states

    def compute(self, rule: Rule, view: RowView) -> None:
        """Compute the update, and check it.

        Args:
            view: the rows that it was made from, as they were then.
        """
        if getattr(rule, "whole_rows", False):
            assert isinstance(rule, CustomRule), "row_layout takes no other"
            rule.apply_whole_rows(
                self._values, self._gradients, self._states, self._hyper, self._push
            )
        else:
            self._apply(rule)
        self._check(rule, view)

    def choose(self, there: Array) -> None:
        """Go on with some of the rows only.

        Args:
            there: bool [n], in the order of the rows that it was made from.
        """
        selection = there[self._order]
        self._order = (np.cumsum(there) - 1)[self._order[selection]]
        self._gradients, self._counts = self._gradients[selection], self._counts[selection]
        self._values = self._values[selection]
        self._states = tuple(each[selection] for each in self._states)

    def write(self, view: RowView) -> None:
        """Make the update the rows' values and state, and count it.

        Args:
            view: rows of the same keys in the same order, wherever they lie by now.
        """
        view = self._ordered(view)
        kernels = compiled_rows()
        kernels.scatter(kernels.rows_of(view, self._gradients), self._values)
        for at, new in zip(view.layout.state_at, self._states, strict=True):
            view.floats[view.slots, at : at + new.shape[1]] = new

    def _apply(self, rule: Rule) -> None:
        flat = [array.reshape(-1) for array in (self._values, *self._states)]
        gradient = self._gradients.reshape(-1)
        ours = rule.name == TORCH or getattr(type(rule), "apply", None) is CustomRule.apply
        if not ours:  # it might write to the gradients, which are the caller's
            gradient = gradient.copy()
        runs = self._runs(bool(getattr(rule, "separate_tensors", False)))
        apply: Any = rule.apply  # what users write need not be typed
        returned = apply(flat[0], gradient, tuple(flat[1:]), self._hyper, runs, self._push, None)
        if returned is not None:
            raise TypeError(f"apply returned {type(returned).__name__}, not None")
        names = ("value", *rule.states(rule.hyper()))
        size = gradient.size
        for name, array in zip(names, flat, strict=True):
            check_unchanged(rule.name, name, array, (size,), FLOAT)

    def _runs(self, separate: bool) -> Sequence[Run]:
        """Rows with one count as one run; with `separate`, each row is one."""
        dim, counts = self._layout.dim, self._counts
        new = np.ones(counts.size, bool)
        if not separate:
            new[1:] = counts[1:] != counts[:-1]
        starts = np.flatnonzero(new)
        stops = np.append(starts[1:], counts.size)
        return [
            Run(start * dim, stop * dim, int(counts[start]))
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]

    def _check(self, rule: Rule, view: RowView) -> None:
        largest = compiled().largest

        def finite(rows: Array) -> bool:
            return bool(largest(rows.reshape(-1)) < math.inf)

        names = ("value", *rule.states(rule.hyper()))
        for name, new in zip(names, (self._values, *self._states), strict=True):
            if finite(new):
                continue
            values, states = self._gathered(view)  # nothing is written yet
            if all(map(finite, (values, *states, self._gradients))):
                raise ValueError(f"{name} holds NaN or Inf after the update, and held none before")
