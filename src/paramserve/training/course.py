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
STEPS = "steps with batches"
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
        """Shape in the words of an error."""
        several = f", {self.batches_per_step} in each step" if self.batches_per_step > 1 else ""
        return f"{self.samples} samples in batches of {self.batch_size}{several}"


class StepsRecord(msgspec.Struct, frozen=True, array_like=True):
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
        ended: whether a pass with gradients on has ended.
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
        self._steps_record: bytes = b""
        """The `StepsRecord` as it is saved; empty: the steps are the clock of the first group."""
        self._loaders = 0
        self._irregular: IrregularPasses | None = None
        """None: the servers were not asked."""
        self._ahead = 0
        """Steps that were left out with the first of the passes that are known by their sums."""
        self._active: list[Pass] = []
        self.late = 0
        self.loops_ended = 0
        self._missed: dict[str, int] | None = None
        """Clocks by group that `late` knows of; None: no pass has begun."""
        self._clocks: dict[str, int] = {}
        """Clock by group when it was looked at last."""
        self._moves = 0
        """How often groups were seen to step, and clocks that `late` has counted."""
        self._rests = 0
        """Rests of the program so far; see `StepsRecord`."""
        self._rests_left = 0
        """Rests of older incarnations that the program has not reached yet."""
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
        return not (self._ahead or (self._look_left() and self._steps_record))

    def look_left(self) -> int:
        """Clocks of the worker's first group that the program has not gone through, for a caller
        that leaves none out; where they are not known, at least these."""
        remaining = self._look_left()
        if remaining and self._steps_record:
            return self._clock
        return remaining + self._ahead

    @property
    def _clock(self) -> int:
        return self._client.steps.clocks.get(self._optimizers.groups[0], 0)

    def _look_left(self) -> int:
        client = self._client
        again = client.connection.incarnation > 1
        if self._steps_left is None:
            self._steps_record = client.saving.latest(STEPS) if again else b""
            self._steps_left = self._clock if again else 0
            if self._steps_record:
                record = msgspec.msgpack.decode(self._steps_record, type=StepsRecord)
                missed = client.steps.resumed.get(record.group, 0) - record.clock
                self._steps_left = record.steps + max(missed, 0)
                self._rests = self._rests_left = record.rests
            self._before = self._steps_left
        return self._steps_left

    def _pack_steps(self) -> bytes | None:
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
                record = StepsRecord(
                    steps, group, client.steps.clocks.get(group, 0) + 1, self._rests
                )
                packed = msgspec.msgpack.encode(record)
        if packed == self._steps_record:
            return None
        self._steps_record = packed
        return packed

    @contextmanager
    def take_over(self) -> Iterator[None]:
        """Another optimizer takes over: a step within is made with fewer batches than a step has,
        and no pass leaves out batches for it."""
        remaining = self._look_left()
        if self._rests_left and remaining:
            self._rests_left -= 1
            self._steps_left = remaining - 1
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
        shapes = self._shapes_before()
        if not shapes and client.saving.older(RANDOM) is None:
            return  # the rank had died before its first step: the others made these
        if shape not in shapes and len(shapes) < SHAPES_MAX:
            those = " and ".join(each.in_words for each in shapes)
            if not shapes:
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
            shapes = _shapes(client.saving.latest(SHAPES))
            if shape not in shapes and len(shapes) < SHAPES_MAX:
                client.saving.keep(SHAPES, msgspec.msgpack.encode([*shapes, shape]))

    @property
    def has_static(self) -> bool:
        """Whether steps of a checkpoint are left that were made with loaders of equal shares."""
        before = self._client.connection.before
        return bool(before and self.steps_left and self._shapes_before())

    def _shapes_before(self) -> list[Shape]:
        """Shapes of the loaders that the steps of older incarnations were made with."""
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
        new_pass = Pass(self, epochs, extent, trains=resume and trains)
        if resume:
            irregular = self._irregular_passes(epochs)
            new_pass.number = epochs.passes
            epochs.passes += 1
            # With gradients off it is an evaluation, unless steps were made in such a pass.
            counts = trains or epochs.number in irregular
            if counts and ((remaining := self.steps_left) or self._ahead):
                self._go_on(new_pass, epochs, remaining)
            self._active.append(new_pass)
            self._save(irregular)
        new_pass.leave_out_late()
        return new_pass

    def _go_on(self, new_pass: Pass, epochs: Epochs, remaining: int) -> None:
        """Resume a pass of whose steps older incarnations have made some."""
        record, extent = self._irregular_passes(epochs).of(epochs.number), new_pass.extent
        if new_pass.number < record.passes:
            self.steps_left = remaining - self._leave_out_summed(epochs, new_pass.number + 1)
            last = new_pass.number + 1 == record.passes
            new_pass.start, new_pass.epochs = extent.length, record.epochs if last else 0
            return
        run, usual = record.find(new_pass.number), record.usual(new_pass.number)
        if usual.skipped >= extent.length:  # an evaluation
            run = usual
        steps = min(remaining, run.steps(extent))
        self.steps_left = remaining - steps
        new_pass.epochs = run.epochs or extent.epochs
        if self.steps_left or self._ahead:
            new_pass.start = extent.length
            return
        new_pass.start = steps * extent.per_step + run.skipped
        if run.end == 0:
            new_pass.skipped = run.skipped
        # The program's count of the batches begins anew, and would not end it there.
        if usual.end and new_pass.start <= usual.end:
            new_pass.end, new_pass.epochs = usual.end, usual.epochs

    def whole_passes(self, epochs: Epochs, extent: Extent, most: int) -> tuple[int, int, int]:
        """The next passes over a loader whose steps older incarnations have made: how many, their
        steps, and the epochs that they have begun.

        Args:
            most: passes that are to come.
        """
        remaining, record = self.steps_left, self._irregular_passes(epochs).of(epochs.number)
        passes = steps = begun_epochs = 0
        if (remaining or self._ahead) and epochs.passes < record.passes:
            passes = min(record.passes - epochs.passes, most)
            steps = min(record.steps - epochs.summed, remaining)
            begun_epochs = record.epochs if epochs.passes + passes == record.passes else 0
        while remaining > steps and passes < most:
            number = epochs.passes + passes
            run, usual = record.find(number), record.usual(number)
            # The last one may have been left behind its last step, as those before, untold.
            if not run.skipped and usual.end and remaining - steps == usual.steps(extent):
                run = usual
            run_steps = run.steps(extent)
            if remaining - steps < run_steps or not (run_steps or run.skipped):
                break
            passes, steps = passes + 1, steps + run_steps
            begun_epochs += run.epochs or extent.epochs
        return passes, steps, begun_epochs

    def leave_out(self, epochs: Epochs, passes: int, steps: int) -> None:
        """Begin behind the next whole passes over a loader, with their steps."""
        remaining = self.steps_left
        if epochs.passes < self._irregular_passes(epochs).of(epochs.number).passes:
            self._leave_out_summed(epochs, epochs.passes + passes)
        self.steps_left = remaining - steps
        epochs.passes += passes

    def _leave_out_summed(self, epochs: Epochs, behind: int) -> int:
        """Leave out passes that are known by their sums; how many steps: all with the first pass.

        Args:
            behind: the pass where the program goes on.
        """
        record = self._irregular_passes(epochs).of(epochs.number)
        steps = min(record.steps - epochs.summed, self.steps_left)
        epochs.summed += steps
        self._ahead += steps
        if behind >= record.passes:
            self._ahead -= epochs.summed
        return steps

    def _irregular_passes(self, epochs: Epochs) -> IrregularPasses:
        """The passes that are known, once the loader has its number."""
        if epochs.number < 0:
            epochs.number = self._loaders
            self._loaders += 1
        if self._irregular is None:
            client = self._client
            again = client.connection.incarnation > 1
            saved = [client.saving.latest(each) if again else b"" for each in OF_PASSES]
            self._irregular = IrregularPasses(*saved)
            if self._irregular.dropped_loaders:
                warn_user(
                    f"rank {client.rank} goes on behind loops over more loaders than are known one "
                    f"by one: of {self._irregular.dropped_loaders} with batches that were in no "
                    "step all batches count as done, so that it may make other steps than before, "
                    "or with other samples. To fix: take steps=n of worker.loader in place of "
                    "break, and one loader for all rounds"
                )
        return self._irregular

    def stepped(self, which: Pass, epochs: Epochs) -> None:
        """A step was made in a pass."""
        epochs.stepped = True
        if which.number >= 0 and not which.trains:
            self._irregular_passes(epochs).step_without_gradients(epochs.number)

    def ended(self, which: Pass, epochs: Epochs, run: Irregular) -> None:
        """A pass has ended, or its loop was left."""
        if which in self._active:
            self._active.remove(which)
            if run.skipped:
                trains = which.trains or epochs.stepped
                self._irregular_passes(epochs).add(epochs.number, run, which.extent, trains=trains)

    def _save(self, irregular: IrregularPasses) -> None:
        """Tell of irregular passes with the steps, where a later incarnation may follow."""

        def under_way() -> bytes | None:
            active = ((each.epochs_of.number, each.so_far) for each in self._active if each.skipped)
            return irregular.pack_under_way(active)

        client = self._client
        if client.connection.restarts and not client.saving.asks(PASSES):
            client.saving.ask(PASSES, irregular.pack)
            client.saving.ask(UNDER_WAY, under_way)
            client.saving.ask(STEPS, self._pack_steps)

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
        self._next_batch = -1
        """Batches that are behind it; -1: `start`."""
        self._leaving = 0
        """Batches that are still to be left out of a clock that was missed."""

    @property
    def so_far(self) -> Irregular:
        """Irregular passes of this pass, while it is under way."""
        return Irregular(self.number, 1, self.skipped, 0, 0)

    @property
    def under_way(self) -> bool:
        """Whether the training function has got a batch of it."""
        return self._next_batch >= 0

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
        remaining = self.extent.length - number
        late = self._course.late and self._may_be_late
        if late and not self._leaving and remaining >= self.extent.per_step:
            self._course.late -= 1
            self._leaving = self.extent.per_step
        self._next_batch = number + 1
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
        """Record that the pass has ended, or its loop was left.

        Args:
            epochs: that it has begun.
        """
        if self.number < 0:
            return
        unused = self._look()
        next_batch = self._next_batch if self._next_batch >= 0 else self.start
        run = replace(self.so_far, skipped=self.skipped + self.extent.length - next_batch)
        if next_batch < self.extent.length:
            run = replace(run, end=next_batch - unused, epochs=epochs)
        self._course.ended(self, self.epochs_of, run)


def _shapes(packed: bytes | None) -> list[Shape]:
    return msgspec.msgpack.decode(packed, type=list[Shape]) if packed else []
