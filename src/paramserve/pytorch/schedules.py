"""Learning rate schedules of an adopted optimizer, and the hyper-parameters that its steps go by.

Each step says in its note, when that has changed, which hyper-parameters it goes by and the state
of the schedulers that the function has named (`worker.optimizer(..., schedulers=)`, or
`worker.track`). A worker that is started again reads the last note of its rank, an added one the
others': they take over the hyper-parameters and the schedulers' state. So does one without which
the others have decided clocks, as `ps.Sync(backup=)` allows. What was called between that step and
this one is made up for: once for each step of the optimizer, or for each epoch of a loop over
`loader.epochs`, as often as the scheduler was stepped before; one that wants a metric is stepped by
the function only. A scheduler that the function has stepped further by itself stays as it is. Where
the note is of another run, from whose checkpoint this one goes on, the function may be another one:
then its own schedulers count, stepped as often.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paramserve.checkpoint import plain
from paramserve.errors import warn_user
from paramserve.logs import write_line
from paramserve.messages import NOTE_BYTES_MAX
from paramserve.rules.torch_kinds import ParamGroup

if TYPE_CHECKING:
    from paramserve.client import Client

Numbers = dict[str, Any]
_NOT_OURS = ("params", "foreach", "fused", "capturable", "differentiable")
_QUICK = ("lr", "momentum", "betas", "weight_decay")
"""What is compared at each step; the other hyper-parameters go along when one of these changes."""
_OF_STEPS = (*("last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i"),)
"""Public attributes of torch's schedulers that their steps change."""
RATES_SHOWN_MAX = 3
"""Of the parameter groups of an optimizer."""
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
    """Its `state_dict`, as `plain.dump` has it."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """What a step tells of its optimizer."""

    schedulers: tuple[Progress, ...]
    groups: tuple[Numbers, ...]
    """The numbers in each parameter group; without those that all have, if `common` has them."""
    common: Numbers = {}
    """The numbers that are the same in all groups."""
    epochs: int = 0
    """Epochs that had begun; 0: its function does not loop over `loader.epochs`."""
    run: int = 0
    """As `WorkerConfig.run`: the function of another run may be another one."""
    by_hand: bool = False
    """Whether the function has set numbers itself behind each of the last steps."""

    @property
    def numbers(self) -> tuple[Numbers, ...]:
        """All numbers of each parameter group."""
        return tuple({**self.common, **each} for each in self.groups)

    def packed(self) -> bytes:
        """What is sent: numbers that all groups have only once."""
        first, *others = self.groups or ({},)
        common = {
            name: value
            for name, value in first.items()
            if all(name in each and each[name] == value for each in others)
        }
        groups = tuple(
            {name: value for name, value in each.items() if name not in common}
            for each in self.groups
        )
        return msgspec.msgpack.encode(msgspec.structs.replace(self, groups=groups, common=common))


@dataclass
class _Named:
    """A scheduler that the function has named.

    Attributes:
        first: its position when it was named, or when it was last brought to where the group is.
        since: own steps that were made by then.
        rate: as an older incarnation knew it; holds for `_SEVERAL` steps.
        packed: its state at `position`.
    """

    scheduler: LRScheduler
    options: int
    first: float
    since: int
    rate: int | None = None
    position: float = -1.0
    packed: bytes = b""

    def progress(self, key: str, steps: int) -> Progress:
        """How far it is, before the own step behind so many."""
        position = _position(self.scheduler)
        kind = type(self.scheduler).__name__
        if position != self.position or not self.packed:
            self.packed = plain.dump(self.scheduler.state_dict(), f"the state of {kind}")
            self.position = position
        rate = self.rate_at(position, steps)
        return Progress(key, kind, position, rate, self.options, self.packed)

    def rate_at(self, position: float, steps: int) -> int:
        """As `Progress.rate`, where it is at this position before the own step behind so many."""
        made = steps - self.since
        # The end of an epoch may lie between the first steps of this worker.
        enough = made > 0 if self.rate is None else made >= _SEVERAL
        return round((position - self.first) / made) if enough else self.rate or 0

    def load(self, state: bytes) -> None:
        """Be in this state."""
        self.scheduler.load_state_dict(plain.load(state))


class Schedules:
    """The hyper-parameters and the named schedulers of one adopted optimizer.

    Args:
        group: its group on the servers.
        late: whether the others may have made steps before this worker.
        steps_per_clock: own steps between two that carry notes.
    """

    def __init__(
        self,
        client: Client,
        group: str,
        rank: int,
        *,
        late: bool,
        steps_per_clock: int = 1,
    ) -> None:
        self._client = client
        self._group = group
        self._rank = rank
        self._behind = late
        self._steps_per_clock = steps_per_clock
        self._groups: Sequence[ParamGroup] = ()
        self._taken: list[Numbers] | None = None
        """Numbers that `start` has left: the function has not changed them since, if they stand."""
        self._named: dict[str, _Named] = {}
        """By what the function calls them."""
        self._steps = 0
        self._at = 0
        """Steps before the one that `before_step` was called for last."""
        self._missed = 0
        """Clocks decided without this worker that its schedulers were stepped over."""
        self._quick: list[Any] | None = None
        self._positions: list[float] = []
        self._changed = False
        """Whether numbers had changed before a step, and no named scheduler was stepped."""
        self._by_hand = 0
        """Steps in a row before which that was so."""
        self._told: Note | None = None
        """What the last step that was sent has told."""
        self._telling: Note | None = None
        self._warned = False
        """Whether a note was too long."""

    def name(self, key: str, scheduler: LRScheduler) -> None:
        """Send a scheduler's state with the steps, and have it where the group is."""
        options = _options(scheduler)
        self._named[key] = _Named(scheduler, options, _position(scheduler), self._steps)

    def start(self, groups: Sequence[ParamGroup]) -> None:
        """Where the others were first, take the group's hyper-parameters, if no named scheduler
        makes them: schedulers begin with the optimizer's own."""
        if self._behind:
            found = self._best()
            if found is not None and not found[1].schedulers:
                _install(groups, found[1].numbers)
            self._taken = _numbers(groups)

    def behind(self) -> None:
        """This worker took no part for a while: it goes on where the others are."""
        self._behind = True

    def before_step(self, groups: Sequence[ParamGroup]) -> None:
        """Catch up if this is the first step of a worker that was not there before."""
        self._groups = groups
        missed_by = self._client.steps.missed_by
        if missed_by and missed_by.get(self._group, 0) != self._missed:
            before, self._missed = self._missed, missed_by[self._group]
            self._step_over(self._missed - before)
        self._at = self._steps
        if self._behind:
            self._behind = False
            self._catch_up(groups)
            self._quick = None
        quick = [[group.get(name) for name in _QUICK] for group in groups]
        positions = [_position(each.scheduler) for each in self._named.values()]
        if self._quick is None or quick == self._quick or positions != self._positions:
            self._by_hand = 0
        else:
            self._by_hand += 1
            self._changed = True
        self._quick, self._positions = quick, positions

    def made(self, *, sent: bool = False) -> None:
        """The step of the last `before_step` was made, and counts.

        Args:
            sent: with the last `note`; as `sent`.
        """
        self._steps += 1
        if sent:
            self._told = self._telling

    def note(self) -> bytes:
        """Of the step of the last `before_step`; empty if it says what was sent last.

        Raises:
            TypeError: the state of a named scheduler cannot be stored without pickling.
        """
        self._telling = self._told
        if not (self._told or self._named or self._changed):
            return b""
        steps = self._client.steps
        progress, numbers = self._progress(), tuple(_numbers(self._groups))
        by_hand = self._by_hand >= _SEVERAL
        note = Note(progress, numbers, epochs=steps.epochs, run=steps.run, by_hand=by_hand)
        if note == self._told:
            return b""
        self._telling = note
        packed = note.packed()
        if len(packed) <= NOTE_BYTES_MAX:
            return packed
        if not self._warned:
            self._warned = True
            warn_user(
                f"group {self._group!r} has {len(note.groups)} parameter groups, too many to tell "
                f"of with a step: {len(packed)} bytes, the most are {NOTE_BYTES_MAX}. A worker "
                "that is started again goes on with the hyper-parameters and schedules of its own "
                "function, as does an added one; set them from worker.clock"
            )
        return b""

    def sent(self) -> None:
        """The last `note` has gone out: of a step that is refused the next one tells again."""
        self._told = self._telling

    def _progress(self) -> tuple[Progress, ...]:
        return tuple(each.progress(key, self._at) for key, each in self._named.items())

    # --- catching up ------------------------------------------------------------------------------

    def _step_over(self, clocks: int) -> None:
        """Clocks were decided without this worker: step the schedulers that are stepped at each
        step to where they are on the ranks that had a part in them. The function may have made
        these calls itself, as one that goes by `worker.clock`.

        Before this worker has seen how often each is stepped, the others' notes tell it.
        """
        steps = clocks * self._steps_per_clock
        named = [*self._named.values()]
        self._steps += steps
        seen = len(named) == len(self._positions) and all(
            self._at - each.since >= _SEVERAL or each.rate is not None for each in named
        )
        if not seen:
            self._behind = True
            return
        goals = [
            (each.scheduler, position + (steps + 1) * each.rate_at(position, self._at))
            for each, position in zip(named, self._positions, strict=True)
        ]
        _advance([(each, goal) for each, goal in goals if not _asks(each)])

    def _best(self) -> tuple[int, Note] | None:
        """The note to go by, and how many own steps after it the next one is."""
        told = self._client.dense.notes(self._group)
        if not told:
            return None
        notes = {rank: max(by_clock.items()) for rank, by_clock in told.items()}
        if self._rank in notes and not self._same(own := _unpacked(notes[self._rank][1])):
            # The run goes on from a checkpoint: by its notes, also where another rank is quicker
            # and has told of a step of this run.
            notes = {r: n for r, n in notes.items() if _unpacked(n[1]).run == own.run}
        clock = self._client.steps.clocks.get(self._group, 0)
        if self._client.steps.terms(self._group).collects:
            # All ranks are at one clock, and go by the same schedule: the newest is the best.
            rank = max(notes, key=lambda rank: (notes[rank][0], rank == self._rank))
            if not self._missed:  # else the others may be at the next clock already
                clock = max(clock, notes[rank][0])
        elif self._rank in notes:
            rank = self._rank
        else:
            rank = min(notes, key=lambda rank: abs(notes[rank][0] - clock))
        at, packed = notes[rank]
        return (clock - at - 1) * self._steps_per_clock + 1, _unpacked(packed)

    def _catch_up(self, groups: Sequence[ParamGroup]) -> None:
        found = self._best()
        if found is None:
            return
        ahead, note = found
        if not note.schedulers:
            if self._taken == _numbers(groups):
                _install(groups, note.numbers)
                if note.by_hand and ahead > 0:
                    self._warn_by_hand()
            return
        ours = {key: type(each.scheduler).__name__ for key, each in self._named.items()}
        theirs = {each.key: each.kind for each in note.schedulers}
        if ours == theirs:
            self._replay(groups, note, ahead)
        elif self._same(note) or not any(_position(n.scheduler) for n in self._named.values()):
            self._take(groups, note, f"{_called(theirs)} there, {_called(ours)} here")
        else:
            self._tell_other(groups, note)
        for each in self._named.values():
            each.position = each.first = _position(each.scheduler)
            each.since, each.packed = self._steps, b""

    def _replay(self, groups: Sequence[ParamGroup], note: Note, ahead: int) -> None:
        """Have the named schedulers where they were at the note, and then step them on to the
        present step."""
        pairs = [(self._named[each.key], each) for each in note.schedulers]
        at_note = ahead >= 0 and all(_position(n.scheduler) <= p.position for n, p in pairs)
        other = not self._same(note) and any(0 != p.options != n.options for n, p in pairs)
        if at_note and not other:
            for named, progress in pairs:
                named.load(progress.state)
            _install(groups, note.numbers)
        elif ahead >= 0:  # the function has other ones, or has stepped them further by itself
            _advance([(n.scheduler, p.position) for n, p in pairs if not _asks(n.scheduler)])
        if other:
            self._tell_other(groups, note)
        ended = self._client.steps.epochs - note.epochs if note.epochs else 0  # others may be ahead
        goals = [(n, p.position + (ahead * p.rate if p.rate else ended)) for n, p in pairs]
        _advance([(n.scheduler, goal) for n, goal in goals if not _asks(n.scheduler)])
        for named, progress in pairs:
            named.rate = progress.rate

    def _same(self, note: Note) -> bool:
        """Whether a note is of this run, so that its function is this one."""
        return note.run == self._client.steps.run

    def _tell_other(self, groups: Sequence[ParamGroup], note: Note) -> None:
        """The function of a run that goes on from a checkpoint has another schedule than before,
        which holds from now on: say so, once for all ranks."""
        if self._rank == 0:
            before, now = ([each["lr"] for each in n] for n in (note.numbers, _numbers(groups)))
            write_line(
                f"group {self._group!r} goes on with this run's schedulers, which are "
                f"others than the checkpoint's: learning rates {_shown(now)}, where its last step "
                f"had {_shown(before)}"
            )

    def _warn_by_hand(self) -> None:
        warn_user(
            f"rank {self._rank} goes on with the hyper-parameters of the last step of group "
            f"{self._group!r}; its function has changed them behind each step, and what it made of "
            "them behind this one is not known. To fix: name the scheduler that does so, as in "
            "worker.optimizer(..., schedulers=[scheduler]); or set them before each step from "
            'worker.clock, as in optimizer.param_groups[0]["lr"] = rate(worker.clock)'
        )

    def _take(self, groups: Sequence[ParamGroup], note: Note, why: str) -> None:
        _install(groups, note.numbers)
        for each in self._named.values():
            each.scheduler._last_lr = [
                group["lr"] for group in each.scheduler.optimizer.param_groups
            ]
        warn_user(
            f"rank {self._rank} goes on with the hyper-parameters of group {self._group!r}, and "
            f"its schedulers are not where they were, for others are named: {why}. From here on "
            "they go on from these hyper-parameters. To fix: name the same schedulers in each "
            "incarnation, worker.optimizer(..., schedulers=[scheduler])"
        )


def check_schedulers(optimizer: Optimizer, schedulers: Sequence[Any]) -> None:
    """Refuse what cannot be named as a scheduler of an optimizer.

    Raises:
        TypeError: it is no sequence of schedulers of torch.
        ValueError: one is of another optimizer.
    """
    if not isinstance(schedulers, Sequence) or isinstance(schedulers, str):
        raise TypeError(f"schedulers is a list, as in schedulers=[scheduler], not {schedulers!r}")
    for each in schedulers:
        if not isinstance(each, LRScheduler):
            raise TypeError(
                f"schedulers are of torch.optim.lr_scheduler, and this is a {type(each).__name__}. "
                'To fix: worker.track("name", ...) brings back what has a state_dict'
            )
        if getattr(each, "optimizer", optimizer) is not optimizer:
            raise ValueError(
                f"a {type(each).__name__} was given that is one of another optimizer. To fix: make "
                "it from the optimizer that worker.optimizer(...) is given"
            )


def _unpacked(note: bytes) -> Note:
    return msgspec.msgpack.decode(note, type=Note)


def _called(schedulers: Mapping[str, str]) -> str:
    return ", ".join(schedulers.values()) or "none"


def _shown(rates: Sequence[float]) -> str:
    more = ", ..." if len(rates) > RATES_SHOWN_MAX else ""
    return ", ".join(f"{each:.4g}" for each in rates[:RATES_SHOWN_MAX]) + more


def _position(scheduler: LRScheduler) -> float:
    parts = vars(scheduler).get("_schedulers")
    while "last_epoch" not in vars(scheduler) and parts:
        scheduler = parts[0]
        parts = vars(scheduler).get("_schedulers")
    found: float = vars(scheduler).get("last_epoch", 0)
    return found


def _options(scheduler: LRScheduler) -> int:
    """As `Progress.options`: of the numbers and words that its `step` does not change."""
    parts = vars(scheduler).get("_schedulers", ())
    if parts:  # of a chain, or one after the other
        return zlib.crc32(repr([_options(each) for each in parts]).encode())
    if type(scheduler).__module__ != LRScheduler.__module__:
        return 0
    told = {
        name: sorted(value.items()) if isinstance(value, dict) else value
        for name, value in vars(scheduler).items()
        if name not in _OF_STEPS and not name.startswith("_") and _is_plain(value)
    }
    return zlib.crc32(repr(sorted(told.items())).encode())


def _is_plain(value: object) -> bool:
    """Whether its text is the same in another process."""
    parts = value if isinstance(value, list | tuple | dict) else (value,)
    return all(isinstance(each, int | float | str) for each in parts)


def _asks(scheduler: LRScheduler) -> bool:
    """Whether its `step` wants an argument."""
    needed = inspect.signature(scheduler.step).parameters.values()
    return any(
        each.default is each.empty
        and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        for each in needed
    )


def _advance(goals: Sequence[tuple[LRScheduler, float]]) -> None:
    """Step schedulers, in turns, until each is at its position."""
    left = list(goals)
    while left := [(each, goal) for each, goal in left if _position(each) < goal]:
        for each, _ in left:
            before = _position(each)
            each.step()
            if _position(each) <= before:
                return  # it counts in another way: the group's hyper-parameters have to do


def _numbers(groups: Sequence[ParamGroup]) -> list[Numbers]:
    """The hyper-parameters that are numbers, or tuples of numbers."""
    found = []
    for group in groups:
        numbers = {}
        for name, value in group.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, list | tuple):
                plain = all(isinstance(each, int | float) for each in value)
                value = list(value) if plain else None
            if name not in _NOT_OURS and isinstance(value, int | float | list):
                numbers[name] = value
        found.append(numbers)
    return found


def _install(groups: Sequence[ParamGroup], numbers: Sequence[Numbers]) -> None:
    for group, found in zip(groups, numbers, strict=False):
        for name, value in found.items():
            present = group.get(name)
            if isinstance(present, Tensor):
                present.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(present, tuple) else value
