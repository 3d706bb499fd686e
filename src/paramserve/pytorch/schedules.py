"""What a worker tells its next incarnation with its steps, and an added worker.

Each step says in its note, when that has changed, which hyper-parameters it goes by and how far the
learning rate schedulers of its optimizer are. A worker that is started again reads the last note of
its rank, an added one the others'. At its first step it steps its own schedulers until they are
where they would be at that clock; so does one without which the others have decided clocks, as
`ps.Sync(backup=)` allows. Calls that its function has made before that, as a loop over
epochs does whose batches were all left out, count; where a loop over `loader.epochs` left out
epochs since that note, a scheduler that is not stepped at each step of the optimizer is stepped
once for each of them. A scheduler that wants a metric is stepped by these calls only. What neither
gives (one without such calls, other schedulers than before) has the group's hyper-parameters, and
warns. Where the note is of another run, from whose checkpoint this one goes on, the function may be
another one: then its own schedulers count, stepped as often.
"""

from __future__ import annotations

import gc
import inspect
import math
import sys
import weakref
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paramserve.errors import warn_user
from paramserve.messages import NOTE_BYTES_MAX
from paramserve.rules.torch_kinds import ParamGroup

if TYPE_CHECKING:
    from paramserve.client import Client

T = TypeVar("T")

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

    name: str
    """Of its class."""
    position: float
    """What torch calls `last_epoch`."""
    rate: int
    """Calls of its `step` for each step of the optimizer; 0: fewer than one for two."""
    options: int = 0
    """A number that others than its options hardly give; 0: it is not torch's."""


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


class Schedules:
    """The hyper-parameters and the schedulers of one adopted optimizer.

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
        self._known: list[weakref.ref[LRScheduler]] = []
        self._first: list[tuple[float, int]] = []
        """Of each known scheduler: position and `_steps` when it was found."""
        self._rates: list[int | None] = []
        """Of each, as an older incarnation knew it; holds for `_SEVERAL` steps."""
        self._options: list[int] = []
        """Of each, as `Progress.options`."""
        self._steps = 0
        self._at = 0
        """Steps before the one that `before_step` was called for last."""
        self._missed = 0
        """Clocks decided without this worker that its schedulers were stepped over."""
        self._quick: list[Any] | None = None
        self._positions: list[float] = []
        self._unexplained = 0
        self._by_hand = 0
        """Steps in a row before which numbers had changed, and no scheduler was stepped."""
        self._told: Note | None = None
        """What the last step that was sent has told."""
        self._telling: Note | None = None
        self._warned = False
        """Whether a note was too long."""

    def start(self, groups: Sequence[ParamGroup]) -> None:
        """Where the others were first, take the group's hyper-parameters, if no scheduler makes
        them: schedulers begin with the optimizer's own."""
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
        elif self._steps == 0 and groups and "initial_lr" in groups[0]:
            self._search(groups)
        quick = [[group.get(name) for name in _QUICK] for group in groups]
        positions = [_position(each) for each in self._alive()] if self._known else []
        if self._quick is None or quick == self._quick or positions != self._positions:
            self._by_hand = 0
        else:
            self._by_hand += 1
            self._unexplained += 1
            if self._unexplained & (self._unexplained - 1) == 0:  # a search goes over all objects
                self._search(groups)
                positions = [_position(each) for each in self._alive()]
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
        """Of the step of the last `before_step`; empty if it says what was sent last."""
        self._telling = self._told
        if not (self._told or self._known or self._unexplained):
            return b""
        steps = self._client.steps
        progress, numbers = tuple(self._progress()), tuple(_numbers(self._groups))
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

    # --- schedulers -------------------------------------------------------------------------------

    def _alive(self) -> list[LRScheduler]:
        found = [each() for each in self._known]
        if None in found:
            keep = [index for index, each in enumerate(found) if each is not None]
            self._known = [self._known[index] for index in keep]
            self._first = [self._first[index] for index in keep]
            self._rates = [self._rates[index] for index in keep]
            self._options = [self._options[index] for index in keep]
        return [each for each in found if each is not None]

    def _search(self, groups: Sequence[ParamGroup]) -> list[LRScheduler]:
        """All schedulers of this optimizer that its function steps itself. Torch keeps no list of
        them, and a scheduler leaves no trace of itself on its optimizer."""
        optimizers = _with_attribute("param_groups", groups, Optimizer)
        found = [s for each in optimizers for s in _with_attribute("optimizer", each, LRScheduler)]
        inner = {id(part) for each in found for part in vars(each).get("_schedulers", ())}
        own = sorted((e for e in found if id(e) not in inner), key=lambda e: type(e).__name__)
        known = {id(each) for each in self._alive()}
        for each in own:
            if id(each) not in known:
                self._known.append(weakref.ref(each))
                self._first.append((_position(each), self._steps))
                self._rates.append(None)
                self._options.append(_options(each))
        return self._alive()

    def _progress(self) -> list[Progress]:
        progress = []
        for index, each in enumerate(self._alive()):
            position, (first, since) = self._positions[index], self._first[index]
            steps, known = self._at - since, self._rates[index]
            # The end of an epoch may lie between the first steps of this worker.
            enough = steps > 0 if known is None else steps >= _SEVERAL
            rate = round((position - first) / steps) if enough else known or 0
            name, options = type(each).__name__, self._options[index]
            progress.append(Progress(name, position, rate, options))
        return progress

    # --- catching up ------------------------------------------------------------------------------

    def _step_over(self, clocks: int) -> None:
        """Clocks were decided without this worker: step the schedulers that are stepped at each
        step to where they are on the ranks that had a part in them. The function may have made
        these calls itself, as one that goes by `worker.clock`.

        Before this worker has seen how often each is stepped, the others' notes tell it.
        """
        steps = clocks * self._steps_per_clock
        alive = self._alive()
        self._steps += steps
        if len(alive) != len(self._positions) or any(
            self._at - since < _SEVERAL and rate is None
            for (_, since), rate in zip(self._first, self._rates, strict=True)
        ):
            self._behind = True
            return
        pairs = zip(alive, self._progress(), strict=True)
        _advance([(s, p.position + (steps + 1) * p.rate) for s, p in pairs if not _asks(s)])

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
            self._search(groups)
            return
        ahead, note = found
        schedulers = self._search(groups)
        if not note.schedulers:
            if self._taken == _numbers(groups):
                _install(groups, note.numbers)
                if note.by_hand and ahead > 0:
                    self._warn_by_hand()
            return
        names = [type(each).__name__ for each in schedulers]
        if sorted(names) != sorted(each.name for each in note.schedulers):
            there = [each.name for each in note.schedulers]
            stepped = any(_position(each) > 0 for each in schedulers)
            if stepped and not self._same(note):
                self._tell_other(groups, note)
            else:
                self._take(groups, note, f"the group steps with {there}, this worker with {names}")
        elif unfit := [name for name, each in zip(names, schedulers, strict=True) if _asks(each)]:
            if not _stepped_by_function(groups, note, schedulers, same=self._same(note)):
                self._take(groups, note, f"{', '.join(unfit)} cannot be stepped without a metric")
        else:
            self._replay(groups, note, ahead, schedulers)
        self._first = [(_position(each), self._steps) for each in schedulers]

    def _replay(
        self,
        groups: Sequence[ParamGroup],
        note: Note,
        ahead: int,
        schedulers: Sequence[LRScheduler],
    ) -> None:
        """Step the schedulers until they are where they were at the note, and then on to the
        present step."""
        pairs = _paired(schedulers, note.schedulers)
        at_note = all(_position(each) <= progress.position for each, progress in pairs)
        other = not self._same(note) and any(
            0 != progress.options != _options(each) for each, progress in pairs
        )
        if ahead >= 0:
            _advance([(each, progress.position) for each, progress in pairs])
            close = at_note and _close(_numbers(groups), note.numbers)
            if close:
                _install(groups, note.numbers)
            elif at_note and self._same(note):
                self._take(groups, note, "the schedulers, stepped as often, give others")
            elif at_note:
                other = True
        if other:
            self._tell_other(groups, note)
        ended = max(self._client.steps.epochs - note.epochs, 0) if note.epochs else 0
        _advance([(each, p.position + (ahead * p.rate if p.rate else ended)) for each, p in pairs])
        by_id = {id(each): progress.rate for each, progress in pairs}
        self._rates = [by_id[id(each)] for each in schedulers]

    def _same(self, note: Note) -> bool:
        """Whether a note is of this run, so that its function is this one."""
        return note.run == self._client.steps.run

    def _tell_other(self, groups: Sequence[ParamGroup], note: Note) -> None:
        """The function of a run that goes on from a checkpoint has another schedule than before,
        which holds from now on: say so, once for all ranks."""
        if self._rank == 0:
            before, now = ([each["lr"] for each in n] for n in (note.numbers, _numbers(groups)))
            told = (
                f"paramserve: group {self._group!r} goes on with this run's schedulers, which are "
                f"others than the checkpoint's: learning rates {_shown(now)}, where its last step "
                f"had {_shown(before)}"
            )
            print(f"{told}\n", end="", file=sys.stderr, flush=True)

    def _warn_by_hand(self) -> None:
        warn_user(
            f"rank {self._rank} goes on with the hyper-parameters of the last step of group "
            f"{self._group!r}; its function has changed them behind each step, and what it made of "
            "them behind this one is not known. Set them before each step from worker.clock, as in "
            'optimizer.param_groups[0]["lr"] = rate(worker.clock)'
        )

    def _take(self, groups: Sequence[ParamGroup], note: Note, why: str) -> None:
        _install(groups, note.numbers)
        for each in self._alive():
            each._last_lr = [group["lr"] for group in each.optimizer.param_groups]
        warn_user(
            f"rank {self._rank} goes on with the hyper-parameters of group {self._group!r}, and "
            f"its schedulers are not where they were: {why}. From here on they go on from these "
            "hyper-parameters; where that is wrong, set them from worker.clock"
        )


def _unpacked(note: bytes) -> Note:
    return msgspec.msgpack.decode(note, type=Note)


def _shown(rates: Sequence[float]) -> str:
    more = ", ..." if len(rates) > RATES_SHOWN_MAX else ""
    return ", ".join(f"{each:.4g}" for each in rates[:RATES_SHOWN_MAX]) + more


def _with_attribute(name: str, value: object, kind: type[T]) -> list[T]:
    """The objects of a kind that have this very value as an attribute.

    Not from `gc.get_objects`: that holds on to all tuples for a moment, also those that another
    thread is just making, and CPython raises `SystemError` there.
    """
    found: dict[int, T] = {}
    for holder in gc.get_referrers(value):  # the object, or its dict
        for each in (holder, *(gc.get_referrers(holder) if type(holder) is dict else ())):
            if issubclass(type(each), kind) and vars(each).get(name) is value:
                found[id(each)] = each
    return list(found.values())


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


def _stepped_by_function(
    groups: Sequence[ParamGroup], note: Note, schedulers: Sequence[LRScheduler], *, same: bool
) -> bool:
    """Whether the function has made all calls of its schedulers itself, with the same metrics, as
    where `Worker.all_reduce` gives them again; or is ahead of the note, which tells nothing then.

    Args:
        same: whether the note is of this function: another one may give other rates.
    """
    positions = [
        (_position(each), told.position) for each, told in _paired(schedulers, note.schedulers)
    ]
    if any(ours < theirs for ours, theirs in positions):
        return False
    ahead = any(ours > theirs for ours, theirs in positions)
    return ahead or not same or _close(_numbers(groups), note.numbers)


def _paired(
    schedulers: Sequence[LRScheduler], progress: Sequence[Progress]
) -> list[tuple[LRScheduler, Progress]]:
    """Each scheduler with what the note says of it; both are of the same classes."""
    left = list(progress)
    pairs = []
    for each in schedulers:
        index = next(i for i, p in enumerate(left) if p.name == type(each).__name__)
        pairs.append((each, left.pop(index)))
    return pairs


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


def _close(ours: Sequence[Numbers], theirs: Sequence[Numbers]) -> bool:
    """Whether the rates are equal but for rounding."""
    pairs = [(one.get("lr"), other.get("lr")) for one, other in zip(ours, theirs, strict=False)]
    return all(
        a is None or b is None or math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-30) for a, b in pairs
    )
