"""Running rules that are not ours: on copies, and whatever they raise is a refusal."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.errors import RuleFailed
from paramserve.rules.base import Hyper, PushInfo, Rule, Run
from paramserve.rules.compiled import compiled
from paramserve.rules.custom import CustomRule, check_unchanged
from paramserve.rules.registry import TORCH, is_built_in

Array = npt.NDArray[Any]

OURS = __file__.rpartition("/core/")[0]
"""The package's folder: frames in it say nothing about a user's rule."""


@contextlib.contextmanager
def guarded(failed: str, rule: Rule, passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn what a user's rule raises into `RuleFailed`; one of ours raises as it is.

    Args:
        failed: which rule failed at what.
        passes: what it raises to refuse an argument, which is no failure.
    """
    if is_built_in(rule):
        yield
        return
    try:
        yield
    except passes:
        raise
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"
        raise RuleFailed(
            f"{failed}: {text}{where(error)}",
            fix="correct the rule, and start the servers with the corrected one",
        ) from None


def where(error: BaseException) -> str:
    """The last line of the user's that an exception went through."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(OURS)]
    if not theirs:
        return ""
    # Below the user's line there may be numpy's: what they wrote is in the file that we called.
    last = [frame for frame in theirs if frame.filename == theirs[0].filename][-1]
    return f" ({last.filename}:{last.lineno} in {last.name}: {last.line})"


class Copies:
    """Copies of a block's value and state, where a rule computes an update.

    The rule is given views, which cannot be resized. What it keeps of them is never the block. It
    cannot change the gradient that was pushed: it has a read-only view of it, or a copy.
    """

    def __init__(self, value: Array, state: tuple[Array, ...]) -> None:
        self._value, self._state = value, state
        self._new = tuple(np.empty_like(array) for array in (value, *state))
        self._gradient: Array | None = None

    def compute(
        self, rule: Rule, gradient: Array, hyper: Hyper, runs: Sequence[Run], push: PushInfo
    ) -> bool:
        """Compute the update of these runs.

        Returns:
            Whether the gradient is finite. If not, there is no update: it was written to after its
            client had looked at it, maybe while the rule read it.
        Raises:
            ValueError, TypeError: the rule returned something, resized an array, or made NaN or
                Inf of finite numbers. What the rule itself raises passes through.
        """
        if not _finite(gradient, runs):
            return False
        for old, new in zip((self._value, *self._state), self._new, strict=True):
            for run in runs:
                new[run.start : run.stop] = old[run.start : run.stop]
        views = [new[:] for new in self._new]
        pushed = self._pushed(rule, gradient, runs)
        apply: Any = rule.apply  # what users write need not be typed
        returned = apply(views[0], pushed, tuple(views[1:]), hyper, runs, push, None)
        if returned is not None:
            raise TypeError(f"apply returned {type(returned).__name__}, not None")
        names = ("value", *rule.states(rule.hyper()))
        for name, view, new in zip(names, views, self._new, strict=True):
            check_unchanged(rule.name, name, view, new.shape, new.dtype)
            if _finite(new, runs):
                continue
            if not _finite(gradient, runs):
                return False
            if all(_finite(old, runs) for old in (self._value, *self._state)):
                raise ValueError(f"{name} holds NaN or Inf after the update, and held none before")
        return True

    def _pushed(self, rule: Rule, gradient: Array, runs: Sequence[Run]) -> Array:
        """The gradient for a rule that might write to it; it may be the client's own memory."""
        if rule.name == TORCH or getattr(type(rule), "apply", None) is CustomRule.apply:
            view = gradient[:]
            view.flags.writeable = False
            return view
        # A rule by the protocol may call one of ours, whose kernels take no read-only array.
        if self._gradient is None:
            self._gradient = np.empty_like(self._value)
        for run in runs:
            self._gradient[run.start : run.stop] = gradient[run.start : run.stop]
        return self._gradient[:]

    def leave_out(self, number: int, start: int, stop: int) -> None:
        """Elements of the value (0) or a state stay as they are in the block."""
        source = (self._value, *self._state)[number]
        self._new[number][start:stop] = source[start:stop]

    def keep(self, runs: Sequence[Run]) -> None:
        """Copy the update of these runs to the block."""
        for old, new in zip((self._value, *self._state), self._new, strict=True):
            for run in runs:
                old[run.start : run.stop] = new[run.start : run.stop]


def _finite(array: Array, runs: Sequence[Run]) -> bool:
    largest = compiled().largest
    return all(largest(array[run.start : run.stop]) < math.inf for run in runs)
