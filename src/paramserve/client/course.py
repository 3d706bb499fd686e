"""What the loops of one worker over its loaders know from one pass to the next.

A pass is one iteration over a loader. What outlives it is here, the same for every form of loop:
the steps of older incarnations whose batches are still to be left out, the clocks that the others
decided without this worker, which batches of a pass were in no step, and what the loaders that the
steps were made with looked like. What a later incarnation needs of it goes out with the steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from paramserve.client.saving import RANDOM

if TYPE_CHECKING:
    from paramserve.worker import Worker

SHAPES, PASSES = "shapes of loaders", "passes"
"""What a worker saves of its loaders, and of passes with batches that were in no step."""


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


class Epochs:
    """What loaders that go on from each other have in common.

    Attributes:
        next: number of the next epoch.
        ended: whether a pass with gradients on has come to its end.
        passes: that were begun and count for restarts, with those that were left out.
        stepped: whether steps were made in a pass.
        number: of these loaders among the worker's, in the order of their first passes; -1: none.
    """

    def __init__(self) -> None:
        self.next = 0
        self.ended = False
        self.passes = 0
        self.stepped = False
        self.number = -1


class Irregular(msgspec.Struct, frozen=True, array_like=True):
    """Passes over one loader, one after the other, with batches that were in no step."""

    first: int
    """Number of the first of them."""
    passes: int
    skipped: int
    """Batches of each pass that were in no step, those behind its end included."""
    end: int
    """Batches after which the loop was left; 0: it was not."""
    epochs: int
    """Epochs that each pass has begun, where it was left."""


REGULAR = Irregular(0, 1, 0, 0, 0)


class Course:
    """The passes of one worker over its loaders; see the module.

    Attributes:
        late: clocks that were decided without this worker, and whose batches no pass has left out.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._steps_left: int | None = None
        """None: no loader has asked yet."""
        self._counted: set[str] = set()
        """Groups that the worker stepped on when a loader asked."""
        self._loaders = 0
        self._irregular: dict[int, list[Irregular]] | None = None
        """By the number of the loaders; None: the servers were not asked."""
        self._stepped: set[int] = set()
        """Numbers of loaders in whose passes steps were made."""
        self._active: list[Pass] = []
        self._saved = b""
        self.late = 0
        self._missed: dict[str, int] | None = None
        """By group: clocks that `late` knows of; None: no pass has begun."""
        self._clocks: dict[str, int] = {}
        """By group, when it was looked at last."""
        self._moves = 0
        self._stepping = ""
        """The group that was seen to step last."""

    # --- steps of older incarnations --------------------------------------------------------------

    @property
    def steps_left(self) -> int:
        """Steps of older incarnations whose batches no loader has left out yet.

        A loader lowers it by those that it leaves out; the next one leaves out what is beyond. With
        an optimizer that is adopted when all of these are left out, or that has taken over from the
        ones before, as for a second phase of the training, its own steps begin to count.
        """
        self._worker.client.steps.clock_read = True
        return self.look_left()

    @steps_left.setter
    def steps_left(self, steps: int) -> None:
        self._steps_left = steps

    def look_left(self) -> int:
        """`steps_left`, for a caller that leaves none out."""
        worker = self._worker
        if self._steps_left is None:
            clock = worker.client.steps.clocks.get(worker.groups[0], 0)
            self._steps_left = clock if worker.incarnation > 1 else 0
        elif worker.incarnation > 1 and (not self._steps_left or self._counted <= worker.ended):
            new = [group for group in worker.groups if group not in self._counted]
            if new or not self._steps_left:
                self._steps_left = worker.client.steps.resumed.get(new[0], 0) if new else 0
        self._counted.update(worker.groups)
        return self._steps_left

    # --- what the loaders look like ---------------------------------------------------------------

    def check(self, shape: Shape) -> None:
        """Refuse to leave out batches for steps of a checkpoint that were made with others.

        Compared is what older incarnations have saved: `remember` comes after it.

        Raises:
            ValueError: a loader of another shape made them. Nothing was left out.
        """
        client = self._worker.client
        if not (client.connection.before and self.steps_left):
            return
        known = self._shapes_before()
        if not known and client.saving.older(RANDOM) is None:
            return  # the rank had died before its first step: the others made these
        if shape not in known:
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
        client = self._worker.client
        if client.connection.restarts:
            known = _shapes(client.saving.kept(SHAPES))
            if shape not in known:
                client.saving.keep(SHAPES, msgspec.msgpack.encode([*known, shape]))

    @property
    def has_static(self) -> bool:
        """Whether steps of a checkpoint are left that were made with loaders of equal shares."""
        before = self._worker.client.connection.before
        return bool(before and self.steps_left and self._shapes_before())

    def _shapes_before(self) -> list[Shape]:
        """Of the loaders that the steps of older incarnations were made with."""
        return _shapes(self._worker.client.saving.older(SHAPES))

    # --- passes -----------------------------------------------------------------------------------

    def begin(
        self, epochs: Epochs, length: int, per_step: int, *, resume: bool, trains: bool
    ) -> Pass:
        """A pass begins: behind what older incarnations have done, and what the others have decided
        without this worker.

        Args:
            epochs: of the loader.
            length: batches of the whole pass.
            per_step: batches of one step.
            resume: whether it counts for restarts.
            trains: whether it may be stepped with, as gradients are on.
        """
        found = Pass(self, epochs, length, per_step, trains=resume and trains)
        if resume:
            runs = self._runs(epochs)
            found.number = epochs.passes
            epochs.passes += 1
            # With gradients off it is an evaluation, unless steps were made in such a pass.
            counts = trains or runs or epochs.number in self._stepped
            if counts and (left := self.steps_left):
                self._go_on(found, epochs, left)
            self._active.append(found)
            self._save()
        found.leave_out_late()
        return found

    def _go_on(self, found: Pass, epochs: Epochs, left: int) -> None:
        """Where a pass begins of whose steps older incarnations have made some."""
        known = self.irregular(epochs, found.number)
        usual = self._usual(epochs, found.number)
        if usual.skipped >= found.length:  # an evaluation
            known = usual
        steps = min(left, (found.length - known.skipped) // found.per_step)
        self.steps_left = left - steps
        if self.steps_left:
            found.start, found.epochs = found.length, known.epochs
            return
        found.start = steps * found.per_step + known.skipped
        if known.end == 0:
            found.skipped = known.skipped
        if usual.end:  # the program's count of the batches begins anew, and would not end it there
            found.end, found.epochs = max(usual.end, found.start), usual.epochs

    def whole_passes(
        self, epochs: Epochs, length: int, per_step: int, most: int
    ) -> tuple[int, int, list[int]]:
        """The next passes over a loader whose steps older incarnations have made: how many, their
        steps, and the epochs that each of them has begun (0: all of a whole pass).

        Args:
            most: passes that are to come.
        """
        steps, begun, left = 0, list[int](), self.steps_left
        while left and len(begun) < most:
            number = epochs.passes + len(begun)
            known = self.irregular(epochs, number)
            if not known.skipped and (usual := self._usual(epochs, number)).end:
                known = usual
            made = _steps(known, length, per_step)
            if left < made or not (made or known.skipped):
                break
            left, steps = left - made, steps + made
            begun.append(known.epochs)
        return len(begun), steps, begun

    def irregular(self, epochs: Epochs, number: int) -> Irregular:
        """What is known of a pass over a loader."""
        for each in self._runs(epochs):
            if 0 <= number - each.first < each.passes:
                return each
        return REGULAR

    def _usual(self, epochs: Epochs, number: int) -> Irregular:
        """What all passes before this one were alike in."""
        runs = self._runs(epochs)
        alike = runs and runs[0].first == 0 and runs[0].passes >= number > 0
        return runs[0] if alike else REGULAR

    def _runs(self, epochs: Epochs) -> list[Irregular]:
        if epochs.number < 0:
            epochs.number = self._loaders
            self._loaders += 1
        if self._irregular is None:
            again = self._worker.incarnation > 1
            packed = self._worker.client.saving.kept(PASSES) if again else b""
            kind = dict[int, list[Irregular]]
            self._irregular = msgspec.msgpack.decode(packed, type=kind) if packed else {}
            self._stepped.update(self._irregular)
        return self._irregular.setdefault(epochs.number, [])

    def stepped(self, epochs: Epochs) -> None:
        """A step was made in a pass."""
        epochs.stepped = True
        self._stepped.add(epochs.number)

    def ended(self, which: Pass, epochs: Epochs, known: Irregular) -> None:
        """A pass has ended, or its loop was left."""
        if which in self._active:
            self._active.remove(which)
            if known.skipped:
                _add(self._runs(epochs), known)

    def _save(self) -> None:
        """Tell of irregular passes with the steps, where a later incarnation may follow."""
        client = self._worker.client
        if client.connection.restarts and not client.saving.asks(PASSES):
            client.saving.ask(PASSES, self._packed)

    def _packed(self) -> bytes | None:
        """What has changed since the step before; None: nothing. Asked in each step."""
        if self._irregular is None:
            return None
        told = {
            number: [*runs]
            for number, runs in self._irregular.items()
            if runs or number in self._stepped
        }
        for each in [*self._active]:
            if each.skipped:
                _add(told.setdefault(each.epochs_of.number, []), each.so_far)
        if not told and not self._saved:
            return None
        packed = msgspec.msgpack.encode(told)
        if packed == self._saved:
            return None
        self._saved = packed
        return packed

    # --- clocks that went on without this worker --------------------------------------------------

    def _count_missed(self) -> None:
        """Count the clocks missed since the last look, on the group that steps: others that step
        with it miss the same ones."""
        missed = self._worker.client.steps.missed_by
        if self._missed is None:
            self._missed = dict(missed)
        elif missed:
            group = self._stepping
            if group not in self._clocks or group in self._worker.ended:
                group = next((g for g in self._clocks if g not in self._worker.ended), group)
            self.late += missed.get(group, 0) - self._missed.get(group, 0)
            self._missed = dict(missed)

    def forget_missed(self) -> None:
        """What was missed until now is no batches of a loader: of leased ones each comes once."""
        self._missed = dict(self._worker.client.steps.missed_by)

    def look(self) -> int:
        """How often a group was seen to step so far; clocks that were missed are counted.

        Several optimizers may step in turn, as in the phases of a training, or with each batch.
        """
        before, clocks = self._clocks, self._worker.client.steps.clocks
        self._clocks = {group: clocks.get(group, 0) for group in self._worker.groups}
        moved = [each for each, clock in self._clocks.items() if clock != before.get(each, clock)]
        if moved:
            self._moves += 1
            if self._stepping not in moved:
                self._stepping = moved[0]
        self._count_missed()
        return self._moves


class Pass:
    """One pass over a loader: which batches come, and which of them were in a step.

    Attributes:
        start: batches at its beginning that are left out.
        end: batch before which it ends.
        epochs: that a pass which is left out has begun; 0: all.
        number: of those over this loader that count for restarts; -1: it does not.
        skipped: batches so far that were in no step.
    """

    def __init__(
        self, course: Course, epochs: Epochs, length: int, per_step: int, *, trains: bool
    ) -> None:
        self.length, self.per_step = length, per_step
        self.start, self.end, self.epochs = 0, length, 0
        self.number = -1
        self.skipped = 0
        self.epochs_of = epochs
        self._course = course
        self._trains = trains
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

    def leave_out_late(self) -> None:
        """Begin behind the clocks that were missed since the last pass, as far as this one has
        batches for them."""
        if not self._may_be_late:
            return
        clocks = max(min(self._course.late, (self.end - self.start) // self.per_step), 0)
        self._course.late -= clocks
        self.start += clocks * self.per_step

    @property
    def _may_be_late(self) -> bool:
        """Whether clocks that were missed have batches of this pass; an evaluation goes on."""
        return self._trains or self.epochs_of.stepped

    def takes(self, number: int) -> bool:
        """Whether the training function gets this batch; else a clock that was missed has it.

        Args:
            number: of the batch in this pass.
        """
        self._look()
        left = self.length - number
        late = self._course.late and self._may_be_late
        if late and not self._leaving and left >= self.per_step:
            self._course.late -= 1
            self._leaving = self.per_step
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
            self._course.stepped(self.epochs_of)
        elif self._pending >= self.per_step:
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
        known = replace(self.so_far, skipped=self.skipped + self.length - taken)
        if taken < self.length:
            known = replace(known, end=taken - unused, epochs=epochs)
        self._course.ended(self, self.epochs_of, known)


def _steps(known: Irregular, length: int, per_step: int) -> int:
    return (length - known.skipped) // per_step


def _add(runs: list[Irregular], known: Irregular) -> None:
    """Put a pass behind those before it; what was known of this one, or of later ones, goes."""
    while runs and runs[-1].first >= known.first:
        runs.pop()
    if runs:
        last = runs[-1]
        before = min(last.passes, known.first - last.first)
        runs[-1] = replace(last, passes=before)
        if replace(known, first=last.first, passes=before) == runs[-1] and (
            last.first + before == known.first
        ):
            runs[-1] = replace(last, passes=before + 1)
            return
    runs.append(known)


def _shapes(packed: bytes | None) -> list[Shape]:
    return msgspec.msgpack.decode(packed, type=list[Shape]) if packed else []
