"""What the loops of one worker over its loaders know from one pass to the next.

A pass is one iteration over a loader. What outlives it is here, the same for every form of loop:
the steps of older incarnations whose batches are still to be left out, the clocks that the others
decided without this worker, which batches of a pass were in no step, and what the loaders that the
steps were made with looked like. What a later incarnation needs of it goes out with the steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from paramserve.client.saving import RANDOM
from paramserve.errors import warn_user
from paramserve.training.irregular import Extent, Irregular, IrregularPasses

if TYPE_CHECKING:
    from paramserve.client import Client
    from paramserve.training.optimizers import Optimizers

SHAPES = "shapes of loaders"
"""What a worker saves of its loaders."""
MADE = "steps with batches"
"""What it saves of its steps where it has several optimizers."""
OF_PASSES = PASSES, UNDER_WAY = "passes", "passes under way"
"""What it saves of passes with batches that were in no step."""
SHAPES_MAX = 64
"""Loaders' shapes that are saved. Behind steps with more of them no shape is refused."""


class Shape(NamedTuple):
    """What the steps of a loader stand for: how many samples are done after so many of them."""

    samples: int
    batch_size: int
    batches_per_step: int

    @property
    def in_words(self) -> str:
        """Of an error."""
        several = f", {self.batches_per_step} in each step" if self.batches_per_step > 1 else ""
        return f"{self.samples} samples in batches of {self.batch_size}{several}"


class Made(msgspec.Struct, frozen=True, array_like=True):
    """How many steps a worker has made, each with other batches, with those that were decided
    without it: with several optimizers this is the clock of none of them, as where they step in
    turn.

    Attributes:
        clock: of this group behind these steps: with it, later missed ones are counted.
        rests: those of them that were made with what was left of own steps, as another optimizer
            took over.
    """

    steps: int
    group: str
    clock: int
    rests: int = 0


class Epochs:
    """What loaders that go on from each other have in common.

    Attributes:
        next: number of the next epoch.
        ended: whether a pass with gradients on has come to its end.
        passes: that were begun and count for restarts, with those that were left out.
        stepped: whether steps were made in a pass.
        number: of these loaders among the worker's, in the order of their first passes; -1: none.
        summed: steps left out with the first of the passes that are known by their sums.
    """

    def __init__(self) -> None:
        self.next = 0
        self.ended = False
        self.passes = 0
        self.stepped = False
        self.number = -1
        self.summed = 0


class Course:
    """The passes of one worker over its loaders; see the module.

    Attributes:
        late: clocks that were decided without this worker, and whose batches no pass has left out.
        loops_ended: loops over `loader.epochs` that have ended.
    """

    def __init__(self, client: Client, optimizers: Optimizers) -> None:
        self._client = client
        self._optimizers = optimizers
        self._steps_left: int | None = None
        """None: no loader has asked yet."""
        self._before = 0
        """Steps of older incarnations."""
        self._made: bytes = b""
        """What was told of `Made`; empty: the steps are the clock of the worker's first group."""
        self._loaders = 0
        self._irregular: IrregularPasses | None = None
        """None: the servers were not asked."""
        self._ahead = 0
        """Steps that were left out with the first of the passes that are known by their sums."""
        self._active: list[Pass] = []
        self.late = 0
        self.loops_ended = 0
        self._missed: dict[str, int] | None = None
        """By group: clocks that `late` knows of; None: no pass has begun."""
        self._clocks: dict[str, int] = {}
        """By group, when it was looked at last."""
        self._moves = 0
        """How often groups were seen to step, and clocks that `late` has counted."""
        self._rests = 0
        """Of `Made`."""
        self._rests_left = 0
        """Those of older incarnations, before which the program is."""
        self._takes_over = False
        """Whether another optimizer is about to take over."""
        self._stepping = ""
        """The group that was seen to step last."""

    def epoch_behind(self, rounds: int) -> int:
        """`AllReduce.epoch` behind so many more rounds of a loop over `loader.epochs`."""
        return 2 * (self._client.steps.epochs + rounds) + self.loops_ended

    # --- steps of older incarnations --------------------------------------------------------------

    @property
    def steps_left(self) -> int:
        """Steps of older incarnations whose batches no loader has left out yet.

        A loader lowers it by those that it leaves out; the next one leaves out what is beyond.
        """
        self._client.steps.clock_read = True
        return self._look_left()

    @steps_left.setter
    def steps_left(self, steps: int) -> None:
        self._steps_left = steps

    @property
    def place_known(self) -> bool:
        """Whether `look_left` tells at which clock the program is."""
        return not (self._ahead or (self._look_left() and self._made))

    def look_left(self) -> int:
        """Clocks of the worker's first group that the program has not gone through, for a caller
        that leaves none out; where they are not known, at least these."""
        left = self._look_left()
        if left and self._made:
            return self._clock
        return left + self._ahead

    @property
    def _clock(self) -> int:
        return self._client.steps.clocks.get(self._optimizers.groups[0], 0)

    def _look_left(self) -> int:
        client = self._client
        again = client.connection.incarnation > 1
        if self._steps_left is None:
            self._made = client.saving.kept(MADE) if again else b""
            self._steps_left = self._clock if again else 0
            if self._made:
                made = msgspec.msgpack.decode(self._made, type=Made)
                missed = client.steps.resumed.get(made.group, 0) - made.clock
                self._steps_left = made.steps + max(missed, 0)
                self._rests = self._rests_left = made.rests
            self._before = self._steps_left
        return self._steps_left

    def _pack_made(self) -> bytes | None:
        """What has changed since the step before; None: nothing. Asked in each step."""
        groups, packed = self._optimizers.groups, b""
        self._look_left()  # what older incarnations have told
        self._rests += self._takes_over
        if len(groups) > 1 or self._rests:
            client = self._client
            stepping = client.saving.stepping
            steps = self._before + self._moves + 1
            if self._rests or steps != self._clock + (groups[0] in stepping):
                group = stepping[0]
                made = Made(steps, group, client.steps.clocks.get(group, 0) + 1, self._rests)
                packed = msgspec.msgpack.encode(made)
        if packed == self._made:
            return None
        self._made = packed
        return packed

    @contextmanager
    def take_over(self) -> Iterator[None]:
        """Another optimizer takes over: a step within is made with fewer batches than a step has,
        and no pass leaves out batches for it."""
        left = self._look_left()
        if self._rests_left and left:
            self._rests_left -= 1
            self._steps_left = left - 1
        self._takes_over = True
        try:
            yield
        finally:
            self._takes_over = False

    # --- what the loaders look like ---------------------------------------------------------------

    def check(self, shape: Shape) -> None:
        """Refuse to leave out batches for steps of a checkpoint that were made with others.

        Compared is what older incarnations have saved: `remember` comes after it.

        Raises:
            ValueError: a loader of another shape made them. Nothing was left out.
        """
        client = self._client
        if not (client.connection.before and self.steps_left):
            return
        known = self._shapes_before()
        if not known and client.saving.older(RANDOM) is None:
            return  # the rank had died before its first step: the others made these
        if shape not in known and len(known) < SHAPES_MAX:
            those = " and ".join(each.in_words for each in known)
            if not known:
                those = 'batches of another kind, as of shards="dynamic"'
            raise ValueError(
                f"the run goes on from a checkpoint whose {self.steps_left} steps were made with "
                f"{those}, and this loader has {shape.in_words}: which samples are done cannot be "
                "told. Applied: no. To fix: give the loader the dataset, batch_size and "
                "batches_per_step of before; or worker.loader(..., resume=False), which begins its "
                "epochs anew: for epoch in loader.epochs(10, start=5) makes 5 more"
            )

    def remember(self, shape: Shape) -> None:
        """Save the shape with the next step, where a run may go on from it with another one."""
        client = self._client
        if client.connection.restarts:
            known = _shapes(client.saving.kept(SHAPES))
            if shape not in known and len(known) < SHAPES_MAX:
                client.saving.keep(SHAPES, msgspec.msgpack.encode([*known, shape]))

    @property
    def has_static(self) -> bool:
        """Whether steps of a checkpoint are left that were made with loaders of equal shares."""
        before = self._client.connection.before
        return bool(before and self.steps_left and self._shapes_before())

    def _shapes_before(self) -> list[Shape]:
        """Of the loaders that the steps of older incarnations were made with."""
        return _shapes(self._client.saving.older(SHAPES))

    # --- passes -----------------------------------------------------------------------------------

    def begin(self, epochs: Epochs, extent: Extent, *, resume: bool, trains: bool) -> Pass:
        """A pass begins: behind what older incarnations have done, and what the others have decided
        without this worker.

        Args:
            epochs: of the loader.
            resume: whether it counts for restarts.
            trains: whether it may be stepped with, as gradients are on.
        """
        found = Pass(self, epochs, extent, trains=resume and trains)
        if resume:
            irregular = self._known(epochs)
            found.number = epochs.passes
            epochs.passes += 1
            # With gradients off it is an evaluation, unless steps were made in such a pass.
            counts = trains or epochs.number in irregular
            if counts and ((left := self.steps_left) or self._ahead):
                self._go_on(found, epochs, left)
            self._active.append(found)
            self._save(irregular)
        found.leave_out_late()
        return found

    def _go_on(self, found: Pass, epochs: Epochs, left: int) -> None:
        """Where a pass begins of whose steps older incarnations have made some."""
        record, extent = self._known(epochs).of(epochs.number), found.extent
        if found.number < record.passes:
            self.steps_left = left - self._leave_out_summed(epochs, found.number + 1)
            last = found.number + 1 == record.passes
            found.start, found.epochs = extent.length, record.epochs if last else 0
            return
        known, usual = record.find(found.number), record.usual(found.number)
        if usual.skipped >= extent.length:  # an evaluation
            known = usual
        steps = min(left, known.steps(extent))
        self.steps_left = left - steps
        found.epochs = known.epochs or extent.epochs
        if self.steps_left or self._ahead:
            found.start = extent.length
            return
        found.start = steps * extent.per_step + known.skipped
        if known.end == 0:
            found.skipped = known.skipped
        # The program's count of the batches begins anew, and would not end it there.
        if usual.end and found.start <= usual.end:
            found.end, found.epochs = usual.end, usual.epochs

    def whole_passes(self, epochs: Epochs, extent: Extent, most: int) -> tuple[int, int, int]:
        """The next passes over a loader whose steps older incarnations have made: how many, their
        steps, and the epochs that they have begun.

        Args:
            most: passes that are to come.
        """
        left, record = self.steps_left, self._known(epochs).of(epochs.number)
        passes = steps = begun = 0
        if (left or self._ahead) and epochs.passes < record.passes:
            passes = min(record.passes - epochs.passes, most)
            steps = min(record.steps - epochs.summed, left)
            begun = record.epochs if epochs.passes + passes == record.passes else 0
        while left > steps and passes < most:
            number = epochs.passes + passes
            known, usual = record.find(number), record.usual(number)
            # The last one may have been left behind its last step, as those before, untold.
            if not known.skipped and usual.end and left - steps == usual.steps(extent):
                known = usual
            made = known.steps(extent)
            if left - steps < made or not (made or known.skipped):
                break
            passes, steps = passes + 1, steps + made
            begun += known.epochs or extent.epochs
        return passes, steps, begun

    def leave_out(self, epochs: Epochs, passes: int, steps: int) -> None:
        """Begin behind the next whole passes over a loader, with their steps."""
        left = self.steps_left
        if epochs.passes < self._known(epochs).of(epochs.number).passes:
            self._leave_out_summed(epochs, epochs.passes + passes)
        self.steps_left = left - steps
        epochs.passes += passes

    def _leave_out_summed(self, epochs: Epochs, behind: int) -> int:
        """Leave out passes that are known by their sums; how many steps: all with the first pass.

        Args:
            behind: the pass where the program goes on.
        """
        record = self._known(epochs).of(epochs.number)
        steps = min(record.steps - epochs.summed, self.steps_left)
        epochs.summed += steps
        self._ahead += steps
        if behind >= record.passes:
            self._ahead -= epochs.summed
        return steps

    def _known(self, epochs: Epochs) -> IrregularPasses:
        """The passes that are known, once the loader has its number."""
        if epochs.number < 0:
            epochs.number = self._loaders
            self._loaders += 1
        if self._irregular is None:
            client = self._client
            again = client.connection.incarnation > 1
            saved = [client.saving.kept(each) if again else b"" for each in OF_PASSES]
            self._irregular = IrregularPasses(*saved)
            if self._irregular.forgotten:
                warn_user(
                    f"rank {client.rank} goes on behind loops over more loaders than are known one "
                    f"by one: of {self._irregular.forgotten} with batches that were in no step all "
                    "batches count as done, so that it may make other steps than before, or with "
                    "other samples. To fix: take steps=n of worker.loader in place of break, and "
                    "one loader for all rounds"
                )
        return self._irregular

    def stepped(self, which: Pass, epochs: Epochs) -> None:
        """A step was made in a pass."""
        epochs.stepped = True
        if which.number >= 0 and not which.trains:
            self._known(epochs).step_without_gradients(epochs.number)

    def ended(self, which: Pass, epochs: Epochs, known: Irregular) -> None:
        """A pass has ended, or its loop was left."""
        if which in self._active:
            self._active.remove(which)
            if known.skipped:
                trains = which.trains or epochs.stepped
                self._known(epochs).add(epochs.number, known, which.extent, trains=trains)

    def _save(self, irregular: IrregularPasses) -> None:
        """Tell of irregular passes with the steps, where a later incarnation may follow."""

        def under_way() -> bytes | None:
            active = ((each.epochs_of.number, each.so_far) for each in self._active if each.skipped)
            return irregular.pack_under_way(active)

        client = self._client
        if client.connection.restarts and not client.saving.asks(PASSES):
            client.saving.ask(PASSES, irregular.pack)
            client.saving.ask(UNDER_WAY, under_way)
            client.saving.ask(MADE, self._pack_made)

    @property
    def in_pass(self) -> bool:
        """Whether the training function has batches of a pass that counts for restarts."""
        return any(each.under_way for each in self._active)

    # --- clocks that went on without this worker --------------------------------------------------

    def _count_missed(self) -> None:
        """Count the clocks missed since the last look, on the group that steps: others that step
        with it miss the same ones."""
        missed = self._client.steps.missed_by
        if self._missed is None:
            self._missed = dict(missed)
        elif missed:
            group, steps = self._stepping, self._optimizers.steps
            if group not in self._clocks or not steps(group):
                group = next(filter(steps, self._clocks), group)
            late = missed.get(group, 0) - self._missed.get(group, 0)
            self.late += late
            self._moves += late
            self._missed = dict(missed)

    def forget_missed(self) -> None:
        """What was missed until now is no batches of a loader: of leased ones each comes once."""
        self._missed = dict(self._client.steps.missed_by)

    def look(self) -> int:
        """A number that grows where a group was seen to step, or clocks were missed.

        Several optimizers may step in turn, as in the phases of a training, or with each batch.
        """
        before, clocks = self._clocks, self._client.steps.clocks
        self._clocks = {group: clocks.get(group, 0) for group in self._optimizers.groups}
        moved = [each for each, clock in self._clocks.items() if clock != before.get(each, clock)]
        if moved:
            self._moves += 1
            most = max(moved, key=self._clocks.__getitem__)
            if self._stepping not in moved or self._clocks[most] > self._clocks[self._stepping]:
                self._stepping = most
        self._count_missed()
        return self._moves


class Pass:
    """One pass over a loader: which batches come, and which of them were in a step.

    Attributes:
        start: batches at its beginning that are left out.
        end: batch before which it ends.
        epochs: that a pass which is left out has begun.
        number: of those over this loader that count for restarts; -1: it does not.
        skipped: batches so far that were in no step.
    """

    def __init__(self, course: Course, epochs: Epochs, extent: Extent, *, trains: bool) -> None:
        self.extent = extent
        self.start, self.end, self.epochs = 0, extent.length, extent.epochs
        self.number = -1
        self.skipped = 0
        self.epochs_of = epochs
        self._course = course
        self.trains = trains
        self._at = course.look()
        self._pending = 0
        """Batches that the training function has got since the last step."""
        self._taken = -1
        """Batches that are behind it; -1: `start`."""
        self._leaving = 0
        """Batches that are still to be left out of a clock that was missed."""

    @property
    def so_far(self) -> Irregular:
        """Of this pass, while it is under way."""
        return Irregular(self.number, 1, self.skipped, 0, 0)

    @property
    def under_way(self) -> bool:
        """Whether the training function has got a batch of it."""
        return self._taken >= 0

    def leave_out_late(self) -> None:
        """Begin behind the clocks that were missed since the last pass, as far as this one has
        batches for them."""
        if not self._may_be_late:
            return
        clocks = max(min(self._course.late, (self.end - self.start) // self.extent.per_step), 0)
        self._course.late -= clocks
        self.start += clocks * self.extent.per_step

    @property
    def _may_be_late(self) -> bool:
        """Whether clocks that were missed have batches of this pass; an evaluation goes on."""
        return self.trains or self.epochs_of.stepped

    def takes(self, number: int) -> bool:
        """Whether the training function gets this batch; else a clock that was missed has it.

        Args:
            number: of the batch in this pass.
        """
        self._look()
        left = self.extent.length - number
        late = self._course.late and self._may_be_late
        if late and not self._leaving and left >= self.extent.per_step:
            self._course.late -= 1
            self._leaving = self.extent.per_step
        self._taken = number + 1
        if self._leaving:
            self._leaving -= 1
            return False
        self._pending += 1
        return True

    def _look(self) -> bool:
        """Whether a batch is in no step, as more have come without one than a step has."""
        at = self._course.look()
        if at != self._at:
            self._at, self._pending = at, 0
            self._course.stepped(self, self.epochs_of)
        elif self._pending >= self.extent.per_step:
            self._pending -= 1
            self.skipped += 1
            return True
        return False

    def close(self, epochs: int) -> None:
        """It has ended, or its loop was left.

        Args:
            epochs: that it has begun.
        """
        if self.number < 0:
            return
        unused = self._look()
        taken = self._taken if self._taken >= 0 else self.start
        known = replace(self.so_far, skipped=self.skipped + self.extent.length - taken)
        if taken < self.extent.length:
            known = replace(known, end=taken - unused, epochs=epochs)
        self._course.ended(self, self.epochs_of, known)


def _shapes(packed: bytes | None) -> list[Shape]:
    return msgspec.msgpack.decode(packed, type=list[Shape]) if packed else []
