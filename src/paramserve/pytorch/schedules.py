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

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from paramserve.errors import warn_user
from paramserve.logs import write_line
from paramserve.messages import NOTE_BYTES_MAX
from paramserve.pytorch.schedulers import (
    NamedScheduler,
    Pairs,
    Progress,
    advance,
    paired,
    position_of,
    replay,
)
from paramserve.rules.torch_kinds import ParamGroup

if TYPE_CHECKING:
    from paramserve.client import Client

Numbers = dict[str, Any]
_NOT_OURS = ("params", "foreach", "fused", "capturable", "differentiable")
_QUICK = ("lr", "momentum", "betas", "weight_decay")
"""What is compared at each step; the other hyper-parameters go along when one of these changes."""
BY_HAND_STEPS = 2
"""Steps in a row before which the function has set numbers itself: it does so at each step."""
RATES_SHOWN_MAX = 3
"""Most parameter groups of an optimizer whose rates are shown."""


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
    """Number of the run (`WorkerConfig.run`): another run's function may be another one."""
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
        self._as_started: list[Numbers] | None = None
        """Numbers that `start` has left: the function has not changed them since, if they stand."""
        self._named: list[NamedScheduler] = []
        self._as_named: list[Numbers] = []
        """Numbers when the last of them was named."""
        self._caught_up_at = 0
        self._unmatched: list[Progress] = []
        """Progress in the note, caught up by, for which no scheduler was named yet."""
        self._saved = False
        """Whether notes are this rank's own, saved with its steps: no group carries them."""
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
        self._last_note: Note | None = None
        """What the last step that was sent has told."""
        self._next_note: Note | None = None
        self._warned = False
        """Whether a note was too long."""

    def name(self, key: str, scheduler: LRScheduler) -> None:
        """Send a scheduler's state with the steps, and have it where the group is; it takes the
        place of one that was called so, and of its own older name.

        Raises:
            TypeError: its state cannot be stored without pickling.
        """
        added = NamedScheduler(key, scheduler, position_of(scheduler), self._steps)
        added.progress(self._steps)
        parts = [id(each) for each in vars(scheduler).get("_schedulers", ())]
        self._named = [
            each
            for each in self._named
            if each.key != key and id(each.scheduler) not in (id(scheduler), *parts)
        ]
        whole = [vars(each.scheduler).get("_schedulers", ()) for each in self._named]
        if any(scheduler is part for parts_of in whole for part in parts_of):
            return  # it comes back with the one that steps it
        self._named.append(added)
        self._as_named = _numbers(
            scheduler.optimizer.param_groups if hasattr(scheduler, "optimizer") else ()
        )
        self._find_late(added)

    def save(self) -> None:
        """Save notes with this rank's steps, where no group carries them."""
        if not self._saved:
            self._saved = True
            self._client.saving.ask(self._key, lambda: self.note() or None)

    @property
    def is_saved(self) -> bool:
        """Whether notes are saved with this rank's steps."""
        return self._saved

    @property
    def _key(self) -> str:
        return f"schedules of {self._group}"

    def start(self, groups: Sequence[ParamGroup]) -> None:
        """Take the group's hyper-parameters where other ranks were first, if no named scheduler
        makes them: schedulers begin with the optimizer's own."""
        if self._behind:
            best = self._choose_note()
            if best is not None and not best[1].schedulers:
                _install(groups, best[1].numbers)
            self._as_started = _numbers(groups)

    def mark_behind(self) -> None:
        """Have the next step catch up with the others: this worker took no part for a while."""
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
            self._caught_up_at = self._steps
            self._catch_up(groups)
            self._quick = None
        quick = [[group.get(name) for name in _QUICK] for group in groups]
        positions = [each.position for each in self._named]
        if self._quick is None or quick == self._quick or positions != self._positions:
            self._by_hand = 0
        else:
            self._by_hand += 1
            self._changed = True
        self._quick, self._positions = quick, positions

    def count_step(self, *, noted: bool = False) -> None:
        """Count the step of the last `before_step`, which was made.

        Args:
            noted: it has carried the last `note`; see `confirm_note`.
        """
        self._steps += 1
        if noted:
            self._last_note = self._next_note

    def note(self) -> bytes:
        """Note of the step of the last `before_step`; empty if it says what was sent last.

        Raises:
            TypeError: the state of a named scheduler cannot be stored without pickling.
        """
        self._next_note = self._last_note
        if not (self._last_note or self._named or self._changed):
            return b""
        steps = self._client.steps
        progress, numbers = self._progress(), tuple(_numbers(self._groups))
        by_hand = self._by_hand >= BY_HAND_STEPS
        note = Note(progress, numbers, epochs=steps.epochs, run=steps.run, by_hand=by_hand)
        if note == self._last_note:
            return b""
        self._next_note = note
        packed = note.packed()
        if len(packed) > NOTE_BYTES_MAX and progress:
            packed = self._without_states(note).packed()
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

    def _without_states(self, note: Note) -> Note:
        """A note that is too long, with the positions of schedulers only."""
        if not self._warned:
            self._warned = True
            sizes = ", ".join(f"{len(each.state)} of {each.kind}" for each in note.schedulers)
            warn_user(
                f"the states of the schedulers of group {self._group!r} are too large to go with "
                f"its steps: {sizes} bytes, the most are {NOTE_BYTES_MAX} together. A worker that "
                "is started again steps its own schedulers as often as these were"
            )
        bare = tuple(each._replace(state=b"") for each in note.schedulers)
        return msgspec.structs.replace(note, schedulers=bare)

    def confirm_note(self) -> None:
        """Note that the last `note` was sent; after a refused step the next one sends it again."""
        self._last_note = self._next_note

    def _progress(self) -> tuple[Progress, ...]:
        return tuple(each.progress(self._at) for each in self._named)

    # --- catching up ------------------------------------------------------------------------------

    def _step_over(self, clocks: int) -> None:
        """Clocks were decided without this worker: step the schedulers that are stepped at each
        step to where they are on the ranks that had a part in them. The function may have made
        these calls itself, as one that goes by `worker.clock`.

        Before this worker has seen how often each is stepped, the others' notes tell it.
        """
        steps, named = clocks * self._steps_per_clock, self._named
        self._steps += steps
        if len(named) != len(self._positions) or not all(
            each.tells_rate(self._at) for each in named
        ):
            self._behind = True
            return
        goals = [
            (each.scheduler, position + (steps + 1) * each.rate_at(position, self._at))
            for each, position in zip(named, self._positions, strict=True)
            if not each.asks
        ]
        advance(goals)

    def _choose_note(self) -> tuple[int, Note] | None:
        """Choose the note to go by; also how many own steps after it the next one is."""
        if self._saved:
            older = self._client.saving.older(self._key)
            return (1, _unpacked(older)) if older else None
        by_rank = self._client.dense.notes(self._group)
        if not by_rank:
            return None
        notes = {rank: max(by_clock.items()) for rank, by_clock in by_rank.items()}
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
        """Take over the hyper-parameters and the schedulers' state from the note that is best to go
        by. What the function has set itself stays, and so do its own schedulers where the note is
        of another run."""
        best = self._choose_note()
        if best is None:
            return
        ahead, note = best
        if not note.schedulers:
            if self._as_started == _numbers(groups):
                _install(groups, note.numbers)
                if note.by_hand and ahead > 0:
                    self._warn_by_hand()
            return
        pairs, ours, theirs = paired(self._named, note.schedulers)
        self._unmatched = theirs
        by_hand = self._set_by_hand(groups)
        if pairs:
            self._replay(groups, note, ahead, pairs)
        if ours or theirs:
            if self._same(note) or not any(each.position for each in ours):
                self._take(groups, note, ours, theirs)
            else:
                self._tell_other(groups, note)
        for group, numbers in zip(groups, by_hand, strict=True):
            _install([group], [numbers])
        for each in self._named:
            each.first, each.since = each.position, self._steps

    def _set_by_hand(self, groups: Sequence[ParamGroup]) -> list[Numbers]:
        """What of each group the function has set itself since it has named the schedulers: where
        it has not stepped them."""
        if len(self._as_named) != len(groups) or any(n.position != n.first for n in self._named):
            return [{} for _ in groups]
        pairs = zip(_numbers(groups), self._as_named, strict=True)
        return [{k: v for k, v in now.items() if before.get(k) != v} for now, before in pairs]

    def _replay(self, groups: Sequence[ParamGroup], note: Note, ahead: int, pairs: Pairs) -> None:
        """Have the named schedulers where they were at the note, and then step them on to the
        present step."""
        reached = [named.position for named, _ in pairs]
        ended = self._client.steps.epochs - note.epochs if note.epochs else 0  # others may be ahead
        only_asks = all(named.asks for named, _ in pairs)
        if not self._same(note) and any(named.differs(progress) for named, progress in pairs):
            for named, progress in pairs:
                if named.asks:
                    named.load(progress, own_options=True)
            advance([(n.scheduler, p.position) for n, p in pairs if not n.asks])
            if only_asks:
                _install(groups, note.numbers)
            self._tell_other(groups, note)
        elif (ahead >= 0 or any(named.asks for named, _ in pairs)) and replay(pairs):
            _install(groups, note.numbers)
            self._warn_of_calls(pairs, reached, ahead, ended)
        goals = [
            (named.scheduler, max(progress.position + (ahead * progress.rate or ended), at))
            for (named, progress), at in zip(pairs, reached, strict=True)
            if not named.asks
        ]
        advance(goals)
        for named, progress in pairs:
            named.rate = progress.rate

    def _warn_of_calls(
        self, pairs: Pairs, reached: Sequence[float], ahead: int, ended: int
    ) -> None:
        """Warn where calls of schedulers are not made up for.

        Args:
            reached: their positions before they were where the note has them.
        """
        missing = [
            named.kind
            for (named, progress), at in zip(pairs, reached, strict=True)
            if ahead > 0
            and (
                (named.asks and (progress.rate or ended > 0 or 0 < at < progress.position))
                or not named.tells_position
            )
        ]
        if missing:
            warn_user(
                f"rank {self._rank} goes on with {', '.join(missing)} as of the last step that "
                "told its state. Calls of it behind that step, or before this one, are not in it: "
                "only the function has what they are given. To fix: where it takes a metric, call "
                "it behind each epoch of a loop over range(epochs), with worker.all_reduce(metric)"
            )

    def _find_late(self, added: NamedScheduler) -> None:
        """A scheduler is named when this worker has caught up: have it where the group is."""
        pairs, _, _ = paired([added], self._unmatched)
        for named, progress in pairs:
            self._unmatched.remove(progress)
            named.load(progress)
            named.rate = progress.rate
            if not named.asks:
                optimizer: Any = named.scheduler.optimizer
                optimizer._opt_called = True  # torch's mark: it has stepped
                goal = progress.position + (self._steps - self._caught_up_at) * progress.rate
                advance([(named.scheduler, goal)])

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
                f"others than the checkpoint's: learning rates {_rates_text(now)}, where its last "
                f"step had {_rates_text(before)}"
            )

    def _warn_by_hand(self) -> None:
        warn_user(
            f"rank {self._rank} goes on with the hyper-parameters of the last step of group "
            f"{self._group!r}; its function has changed them behind each step, and what it made of "
            "them behind this one is not known. To fix: name the scheduler that does so, as in "
            "worker.optimizer(..., schedulers=[scheduler]); or set them before each step from "
            'worker.clock, as in optimizer.param_groups[0]["lr"] = rate(worker.clock)'
        )

    def _take(
        self,
        groups: Sequence[ParamGroup],
        note: Note,
        ours: Sequence[NamedScheduler],
        theirs: Sequence[Progress],
    ) -> None:
        """Go on with the group's hyper-parameters: other schedulers are named than before.

        Args:
            ours, theirs: what was named on one side only.
        """
        if ours or len(theirs) == len(note.schedulers):
            _install(groups, note.numbers)
        for each in ours:
            each.scheduler._last_lr = [group["lr"] for group in groups]
        warn_user(
            f"rank {self._rank} goes on with the hyper-parameters of group {self._group!r}, and "
            f"not all its schedulers are where they were: named are {_called(ours)} here, and "
            f"{_called(theirs)} there. To fix: name the same schedulers in each incarnation, "
            "before the first step, as in worker.optimizer(..., schedulers=[scheduler])"
        )


def _called(named: Sequence[NamedScheduler] | Sequence[Progress]) -> str:
    return ", ".join(f"{each.kind} ({each.key!r})" for each in named) or "no others"


def _unpacked(note: bytes) -> Note:
    return msgspec.msgpack.decode(note, type=Note)


def _rates_text(rates: Sequence[float]) -> str:
    more = ", ..." if len(rates) > RATES_SHOWN_MAX else ""
    return ", ".join(f"{each:.4g}" for each in rates[:RATES_SHOWN_MAX]) + more


def _numbers(groups: Sequence[ParamGroup]) -> list[Numbers]:
    """The hyper-parameters that are numbers, or tuples of numbers."""
    by_group = []
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
        by_group.append(numbers)
    return by_group


def _install(groups: Sequence[ParamGroup], numbers: Sequence[Numbers]) -> None:
    for group, values in zip(groups, numbers, strict=False):
        for name, value in values.items():
            present = group.get(name)
            if isinstance(present, Tensor):
                present.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(present, tuple) else value
