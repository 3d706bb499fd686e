"""Learning rate schedulers that a training function has named: their state, and how far they are.

Torch's schedulers tell their position (`last_epoch`), and all but those that want a metric can be
stepped to one. What one tells with a step of the optimizer (`Progress`), `replay` restores.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paramserve.checkpoint import plain

_OF_STEPS = (*("last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i"),)
"""Public attributes of torch's schedulers that their steps change."""
_SEVERAL = 2
"""Steps from which on what a worker has seen itself tells how often a scheduler is stepped."""


class Progress(NamedTuple):
    """How far one scheduler is."""

    key: str
    """What the function calls it."""
    kind: str
    """Name of its class."""
    position: float
    """What torch calls `last_epoch`."""
    rate: int
    """Calls of its `step` for each step of the optimizer; 0: fewer than one for two."""
    options: int
    """A number that others than its options hardly give; 0: it is not torch's."""
    state: bytes
    """State as `plain.dump` has it; empty: it was too large."""


@dataclass
class NamedScheduler:
    """A scheduler that the function has named.

    Attributes:
        key: what it is called.
        first: its position when it was named, or when it last caught up with the group.
        since: own steps that were made by then.
        rate: as an older incarnation knew it; holds for `_SEVERAL` steps.
    """

    key: str
    scheduler: LRScheduler
    first: float
    since: int
    rate: int | None = None

    @property
    def kind(self) -> str:
        """Name of its class."""
        return type(self.scheduler).__name__

    @property
    def position(self) -> float:
        """What torch calls `last_epoch`."""
        return position_of(self.scheduler)

    @property
    def tells_position(self) -> bool:
        """Whether it counts its steps as torch's do."""
        parts = vars(self.scheduler).get("_schedulers")
        return bool(parts) or "last_epoch" in vars(self.scheduler)

    @property
    def asks(self) -> bool:
        """Whether its `step` wants an argument: it is stepped by the function only."""
        needed = inspect.signature(self.scheduler.step).parameters.values()
        return any(
            each.default is each.empty
            and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
            for each in needed
        )

    def progress(self, steps: int) -> Progress:
        """How far it is, before the own step behind so many.

        Raises:
            TypeError: its state cannot be stored without pickling.
        """
        state = plain.dump(self.scheduler.state_dict(), f"the state of {self.kind}")
        rate = self.rate_at(self.position, steps)
        return Progress(self.key, self.kind, self.position, rate, options_of(self.scheduler), state)

    def rate_at(self, position: float, steps: int) -> int:
        """Rate (`Progress.rate`) at this position, before the own step behind so many."""
        steps_since = steps - self.since
        # The end of an epoch may lie between the first steps of this worker.
        enough = steps_since > 0 if self.rate is None else steps_since >= _SEVERAL
        return round((position - self.first) / steps_since) if enough else self.rate or 0

    def tells_rate(self, steps: int) -> bool:
        """Whether `rate_at` tells how often it is stepped, before the own step behind so many."""
        return self.rate is not None or steps - self.since >= _SEVERAL

    def differs(self, progress: Progress) -> bool:
        """Whether its options are others than those of what a step told."""
        return 0 != progress.options != options_of(self.scheduler)

    def load(self, progress: Progress, *, own_options: bool = False) -> None:
        """Be where a step told.

        Args:
            own_options: take what steps change only.
        """
        if not progress.state:
            advance([(self.scheduler, progress.position)] if not self.asks else [])
            return
        state = plain.load(progress.state)
        if own_options:
            present = self.scheduler.state_dict()
            state = {**present, **{name: state[name] for name in _OF_STEPS if name in state}}
        self.scheduler.load_state_dict(state)


Pairs = Sequence[tuple[NamedScheduler, Progress]]


def paired(
    named: Iterable[NamedScheduler], progress: Iterable[Progress]
) -> tuple[list[tuple[NamedScheduler, Progress]], list[NamedScheduler], list[Progress]]:
    """Each named scheduler with what a step told of it: by what they are called, and the others by
    their classes, in order. And those of either that have none."""
    ours, theirs = list(named), list(progress)
    pairs = []
    for by_key in (True, False):
        for each in list(ours):
            fits = (p for p in theirs if p.kind == each.kind and (p.key == each.key or not by_key))
            match = next(fits, None)
            if match is not None:
                pairs.append((each, match))
                ours.remove(each)
                theirs.remove(match)
    return pairs, ours, theirs


def replay(pairs: Pairs) -> bool:
    """Have schedulers where a step told; whether the hyper-parameters are to be that step's, and
    have to be taken before they are stepped on.

    Where the function has stepped all of them as far by itself, and some further, it has made all
    the calls, and they stay.
    """
    if all(n.position >= p.position for n, p in pairs) and any(
        n.position > p.position for n, p in pairs
    ):
        return False
    for named, progress in pairs:
        # One that wants a metric and is further stays: only the function has its last metrics.
        if not (named.asks and named.position > progress.position):
            named.load(progress)
    return True


def position_of(scheduler: LRScheduler) -> float:
    parts = vars(scheduler).get("_schedulers")
    while "last_epoch" not in vars(scheduler) and parts:
        scheduler = parts[0]
        parts = vars(scheduler).get("_schedulers")
    position: float = vars(scheduler).get("last_epoch", 0)
    return position


def options_of(scheduler: LRScheduler) -> int:
    """Hash (`Progress.options`) of the numbers and words that `step` does not change."""
    parts = vars(scheduler).get("_schedulers", ())
    if parts:  # of a chain, or one after the other
        return zlib.crc32(repr([options_of(each) for each in parts]).encode())
    if type(scheduler).__module__ != LRScheduler.__module__:
        return 0
    options = {
        name: sorted(value.items()) if isinstance(value, dict) else value
        for name, value in vars(scheduler).items()
        if name not in _OF_STEPS and not name.startswith("_") and _is_plain(value)
    }
    return zlib.crc32(repr(sorted(options.items())).encode())


def _is_plain(value: object) -> bool:
    """Whether its text is the same in another process."""
    parts = value if isinstance(value, list | tuple | dict) else (value,)
    return all(isinstance(each, int | float | str) for each in parts)


def advance(goals: Sequence[tuple[LRScheduler, float]]) -> None:
    """Step schedulers, in turns, until each is at its position."""
    behind = list(goals)
    while behind := [(each, goal) for each, goal in behind if position_of(each) < goal]:
        for each, _ in behind:
            before = position_of(each)
            each.step()
            if position_of(each) <= before:
                return  # it counts in another way: the group's hyper-parameters have to do


def check_schedulers(optimizer: Optimizer, schedulers: Sequence[Any]) -> None:
    """Refuse what cannot be named as a scheduler of an optimizer.

    Raises:
        TypeError: it is no sequence of schedulers of torch, or the state of one cannot be stored
            without pickling.
        ValueError: one is of another optimizer.
    """
    if not isinstance(schedulers, Sequence) or isinstance(schedulers, str):
        raise TypeError(f"schedulers is a list, as in schedulers=[scheduler], not {schedulers!r}")
    for each in schedulers:
        if not isinstance(each, LRScheduler):
            raise TypeError(
                f"schedulers are of torch.optim.lr_scheduler, and this is a {type(each).__name__}. "
                'To fix: worker.track("name", ...) restores what has a state_dict'
            )
        if getattr(each, "optimizer", optimizer) is not optimizer:
            raise ValueError(
                f"a {type(each).__name__} was given that is one of another optimizer. To fix: make "
                "it from the optimizer that worker.optimizer(...) is given"
            )
        NamedScheduler("", each, 0.0, 0).progress(0)
