"""What blocks of tensors and tables share: a rule, its hyper-parameters, and how failures read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paramserve.core.user_rules import guarded
from paramserve.errors import ParamServeError
from paramserve.messages import BlockSpec
from paramserve.rules.base import Hyper, Rule

Array = npt.NDArray[Any]


class Keep(Protocol):
    """Make a prepared update the values and state, once; with `out`, leave all values there."""

    def __call__(self, out: Array | None = None) -> None: ...


class Unsaved(Protocol):
    """What is still to be copied of a block for a cut."""

    def finish(self) -> None:
        """Copy it: the block is about to change."""


class ShardStorage(ABC):
    """Base of what a group holds on one shard."""

    may_fail: bool
    """Whether an update may fail, and is therefore prepared before the commit is decided."""

    def __init__(self, spec: BlockSpec, rule: Rule | None, attempt: int) -> None:
        self.spec = spec
        self.rule = rule
        self.attempt = attempt
        self.dtype = np.dtype(spec.dtype)
        self.hyper: Hyper = ()
        self.unsaved: list[Unsaved] = []
        """Copies to make for cuts before the block changes."""
        self.checked: tuple[Sequence[int] | None, Hyper | None] | None = None
        """Pieces and hyper-parameters of a push that `check` has found good last: most pushes have
        the same."""
        self._hyper_checked: Hyper | None = None

    def save(self) -> None:
        """Finish the copies for cuts, before the first change after them."""
        while self.unsaved:
            self.unsaved.pop().finish()

    def check(self, active: Sequence[int] | None, hyper: Hyper | None) -> None:
        """Refuse a push that cannot be applied, before anything is written.

        Raises:
            ParamServeError, ShapeMismatch, ValueError: see the text. Nothing was applied.
        """
        if self.rule is None:
            raise ParamServeError(
                f"{self.names} has no rule: it cannot be pushed to",
                fix="define it with a rule, or use assign",
            )
        if active is not None:
            self._check_active(active)
        if hyper is not None and hyper != self._hyper_checked:
            self._check_hyper(self.rule, hyper)
            self._hyper_checked = hyper
        self.checked = active, hyper

    def _check_hyper(self, rule: Rule, hyper: Hyper) -> None:
        about = self._about("failed to check its hyper-parameters")
        with guarded(about, rule, (ValueError, ParamServeError)):
            rule.check(hyper)
            needed = rule.states(hyper)
            states = rule.states(self.hyper)
        if len(needed) > len(states):
            named = zip(rule.hyper_names, hyper, strict=True)
            listed = ", ".join(f"{name}={value:g}" for name, value in named)
            raise ParamServeError(
                f"{type(rule).__name__} with {listed} "
                f"needs the state {', '.join(needed)}, but {self.names} was defined without it",
                fix="define the parameters with these hyper-parameters (momentum > 0) at the start",
            )

    @abstractmethod
    def _check_active(self, active: Sequence[int]) -> None: ...

    def _about(self, what: str) -> str:
        """How a failure of the rule is told."""
        assert self.rule is not None
        group = self.spec.group_name
        return f"rule {self.rule.name!r} {what} on {self.names} of group {group!r}"

    @cached_property
    def names(self) -> str:
        """Names for messages that are put together before it is known whether they are needed."""
        names = ", ".join(repr(piece.name) for piece in self.spec.pieces[:3])
        more = len(self.spec.pieces) - 3
        return names + (f" and {more} more" if more > 0 else "")
