"""Every form of loop: where it goes on after a restart or a resume, and where it ends if the others
decide clocks without this rank. Counted are samples and clocks, on servers in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from paramserve.client.course import Course
from paramserve.client.loop_progress import LoopProgress
from paramserve.client.saving import RANDOM
from paramserve.pytorch.loader import load

SIZE, BATCH, EPOCHS = 40, 4, 4
OF_EPOCH = SIZE // (2 * BATCH)
"""Batches of one rank."""
Made = list[tuple[int, int]]
"""Of each step: its clock, and the first sample of its batch."""


class Killed(BaseException):
    """Ends a rank in its loop."""


class Servers:
    """What the servers know of one rank.

    Args:
        missed: by the number of a step that was made, the clocks that are decided without the rank
            while it is on its way.
        dies_at: clock before whose step the rank ends, once.
    """

    def __init__(self, missed: dict[int, int] | None = None, dies_at: int = -1) -> None:
        self.clock = 0
        self.saved: dict[str, bytes] = {}
        self.made: Made = []
        self.missed = missed if missed is not None else {}
        self.dies_at = dies_at
        self.incarnation = 0
        self.collectives = 0

    def worker(self, *, before: int = 0) -> Any:
        self.incarnation += 1
        again = self.incarnation > 1
        steps = SimpleNamespace(
            clocks={"model": self.clock} if again else {},
            resumed={"model": self.clock} if again else {},
            missed_by={},
            loop=LoopProgress(),
            clock_read=False,
            epochs=0,
        )
        made: Any = SimpleNamespace(
            client=SimpleNamespace(
                connection=SimpleNamespace(before=before, restarts=True, workers=2, members=list),
                steps=steps,
                saving=Saving(dict(self.saved)),
            ),
            rank=1,
            workers=2,
            incarnation=self.incarnation,
            seed=3,
            groups=("model",),
            ended=set(),
            go_on_drawing=lambda: None,
            passes={},
            leased=None,
            batches_per_step=1,
            retiring=False,
            returned_before=False,
            trains_alone=False,
            compare_size=lambda arguments, size: None,
            agree_on_batches=lambda batches: batches,
            notices=SimpleNamespace(behind_epoch=lambda epoch: None),
        )
        made.course = Course(made)
        made.step = lambda sample: self.step(made, sample)
        return made

    def step(self, worker: Any, sample: int) -> None:
        clocks, saving = worker.client.steps.clocks, worker.client.saving
        if self.clock == self.dies_at:
            self.dies_at = -1
            raise Killed
        self.made.append((self.clock, sample))
        self.saved = saving.due()
        missed = self.missed.get(len(self.made), 0)
        self.clock += 1 + missed
        clocks["model"] = self.clock
        if missed:
            worker.client.steps.missed_by["model"] = (
                worker.client.steps.missed_by.get("model", 0) + missed
            )


class Saving:
    """As `client.saving` where what it keeps goes out with each step."""

    def __init__(self, older: dict[str, bytes]) -> None:
        self._older = older
        self._new: dict[str, bytes] = {RANDOM: b"generators"}
        self._asked: dict[str, Callable[[], bytes | None]] = {}

    def older(self, name: str) -> bytes | None:
        return self._older.get(name) or None

    def kept(self, name: str) -> bytes:
        return self._new.get(name) or self._older.get(name) or b""

    def keep(self, name: str, data: bytes) -> None:
        self._new[name] = data

    def asks(self, name: str) -> bool:
        return name in self._asked

    def ask(self, name: str, function: Callable[[], bytes | None]) -> None:
        self._asked[name] = function

    def due(self) -> dict[str, bytes]:
        for name, function in self._asked.items():
            data = function()
            if data is not None:
                self._new[name] = data
        return {**self._older, **self._new}


# --- the forms of a loop --------------------------------------------------------------------------


def data(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def one_loop(worker: Any, dataset: Any, **options: Any) -> Iterator[int]:
    for (batch,) in load(worker, dataset, epochs=EPOCHS, **options):
        yield int(batch[0])


def steps_told(worker: Any, dataset: Any, **options: Any) -> Iterator[int]:
    for (batch,) in load(worker, dataset, steps=EPOCHS * OF_EPOCH, **options):
        yield int(batch[0])


def over_range(worker: Any, dataset: Any, **options: Any) -> Iterator[int]:
    loader = load(worker, dataset, **options)
    for _ in range(EPOCHS):
        for (batch,) in loader:
            yield int(batch[0])


def over_range_anew(worker: Any, dataset: Any, **options: Any) -> Iterator[int]:
    for _ in range(EPOCHS):
        for (batch,) in load(worker, dataset, **options):
            yield int(batch[0])


def over_epochs(worker: Any, dataset: Any, **options: Any) -> Iterator[int]:
    loader = load(worker, dataset, **options)
    for _ in loader.epochs(EPOCHS):
        for (batch,) in loader:
            yield int(batch[0])


def with_evaluation(worker: Any, dataset: Any, **options: Any) -> Iterator[int]:
    loader, other = load(worker, dataset, **options), load(worker, data(16), batch_size=4)
    for _ in range(EPOCHS):
        for (batch,) in loader:
            yield int(batch[0])
        with torch.no_grad():
            assert len(list(other)) in (0, 2), "an evaluation whose epoch is done is left out"


def two_in_turn(worker: Any, dataset: Any, **options: Any) -> Iterator[int]:
    loader, other = (
        load(worker, dataset, **options),
        load(worker, dataset, shuffle=False, **options),
    )
    for epoch in range(EPOCHS):
        for (batch,) in (loader, other)[epoch % 2]:
            yield int(batch[0])


FORMS = {
    form.__name__: form
    for form in (
        one_loop,
        steps_told,
        over_range,
        over_range_anew,
        over_epochs,
        with_evaluation,
        two_in_turn,
    )
}
SHARDS = ["static", "own"]


def broken_off(worker: Any, dataset: Any, **options: Any) -> Iterator[int]:
    loader = load(worker, dataset, **options)
    for _ in loader.epochs(EPOCHS):
        for number, (batch,) in enumerate(loader):
            if number == 3:
                break
            yield int(batch[0])


def broken_off_over_range(worker: Any, dataset: Any, **options: Any) -> Iterator[int]:
    for _ in range(EPOCHS):
        for number, (batch,) in enumerate(load(worker, dataset, **options)):
            yield int(batch[0])
            if number == 2:
                break


def bad_left_out(form: Any) -> Any:
    def loop(worker: Any, dataset: Any, **options: Any) -> Iterator[int]:
        loader = load(worker, dataset, **options)
        bad = bad_samples()
        for _ in loader.epochs(EPOCHS) if form == "epochs" else range(EPOCHS):
            for (batch,) in loader:
                if int(batch[0]) in bad:
                    continue
                yield int(batch[0])

    return loop


def bad_samples() -> set[int]:
    whole = [int(batch[0]) for (batch,) in load(Servers().worker(), data(SIZE), batch_size=BATCH)]
    return {whole[1], whole[3]}


def accumulated(worker: Any, dataset: Any, **options: Any) -> Iterator[int]:
    """Steps with each second batch, which the loader was not told."""
    loader = load(worker, dataset, **options)
    for _ in range(EPOCHS):
        for number, (batch,) in enumerate(loader):
            if number % 2:
                yield int(batch[0])


IRREGULAR = {
    "broken off": broken_off,
    "broken off, over range": broken_off_over_range,
    "bad batches": bad_left_out("epochs"),
    "bad batches, over range": bad_left_out("range"),
    "each second batch": accumulated,
}


def run(servers: Servers, form: Any, **options: Any) -> Made:
    """Train to the end, with a restart where the rank is killed; all steps that were made."""
    while True:
        worker = servers.worker()
        try:
            for sample in form(worker, data(SIZE), batch_size=BATCH, **options):
                worker.step(sample)
        except Killed:
            continue
        return servers.made


# --- restarts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("form", FORMS)
def test_restart_makes_the_steps_of_an_unbroken_run(form: str, shards: str) -> None:
    whole = run(Servers(), FORMS[form], shards=shards)
    assert len(whole) in (EPOCHS * OF_EPOCH, EPOCHS * OF_EPOCH * 2)
    for clock in range(1, len(whole)):
        assert run(Servers(dies_at=clock), FORMS[form], shards=shards) == whole, clock


@pytest.mark.parametrize("form", IRREGULAR)
def test_restart_finds_batches_that_were_in_no_step(form: str) -> None:
    whole = run(Servers(), IRREGULAR[form])
    first = 4 if form.startswith("broken") else 1  # see the next test
    for clock in range(first, len(whole)):
        assert run(Servers(dies_at=clock), IRREGULAR[form]) == whole, clock


def test_restart_in_a_first_pass_that_would_have_been_left_goes_on_in_it() -> None:
    """The program's own count begins anew, and no pass before tells where it leaves its loops."""
    whole = run(Servers(), broken_off)
    found = run(Servers(dies_at=2), broken_off)
    assert found[:3] == whole[:3]
    assert [sample for _, sample in found[-9:]] == [sample for _, sample in whole[-9:]]


# --- clocks that are decided without the rank -----------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("form", FORMS)
def test_missed_clocks_leave_the_end_where_it_is(form: str, shards: str, seed: int) -> None:
    """Each step is with the batch of its clock, and the last clock is everybody's."""
    whole = dict(run(Servers(), FORMS[form], shards=shards))
    chance = random.Random(seed)
    missed, clock, number = dict[int, int](), 0, 0
    while clock < len(whole):
        number += 1
        most = len(whole) - clock - 1
        missed[number] = min(chance.choice([0, 0, 1, 2, OF_EPOCH, 2 * OF_EPOCH + 1]), most)
        clock += 1 + missed[number]
    servers = Servers(missed)
    made = run(servers, FORMS[form], shards=shards)
    assert all(whole[clock] == sample for clock, sample in made)
    assert servers.clock == len(whole)
    again = Servers(missed, dies_at=made[len(made) // 2][0])
    assert run(again, FORMS[form], shards=shards) == made, "with a restart"


def test_missed_clocks_of_a_pass_are_of_the_next_one_where_it_begins_anew() -> None:
    """`resume=False` is for an evaluation too, whose batches are not stepped with."""
    servers = Servers({5: 2})
    worker = servers.worker()
    loader = load(worker, data(SIZE), batch_size=BATCH, resume=False)
    evaluation = load(worker, data(16), batch_size=4, resume=False)
    for _ in range(2):
        for (batch,) in loader:
            worker.step(int(batch[0]))
        assert len(list(evaluation)) == 2
    assert servers.clock == 2 * OF_EPOCH


# --- resumes with other arguments -----------------------------------------------------------------

CHANGES = {
    "a smaller batch": (SIZE, {"batch_size": BATCH // 2}),
    "a larger batch": (SIZE, {"batch_size": BATCH * 2}),
    "more samples": (2 * SIZE, {"batch_size": BATCH}),
    "fewer samples": (SIZE // 2, {"batch_size": BATCH}),
    "more batches in a step": (SIZE, {"batch_size": BATCH, "batches_per_step": 2}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("form", FORMS)
def test_resume_with_other_arguments_is_refused(form: str, shards: str, change: str) -> None:
    servers, (size, options) = Servers(), CHANGES[change]
    whole = len(run(servers, FORMS[form], shards=shards))
    for clock in (1, whole // 2, whole):  # within the first epoch, later, and at the end
        part = Servers()
        with pytest.raises(Killed):
            _until(part, form, clock, shards)
        worker = part.worker(before=2)
        loop = FORMS[form](worker, data(size), shards=shards, **options)
        with pytest.raises(ValueError, match=r"40 samples in batches of 4, and this loader has"):
            next(loop)
        assert part.clock == clock


def _until(servers: Servers, form: str, clock: int, shards: str) -> None:
    worker = servers.worker()
    for sample in FORMS[form](worker, data(SIZE), batch_size=BATCH, shards=shards):
        worker.step(sample)
        if servers.clock == clock:
            raise Killed


@pytest.mark.parametrize("form", FORMS)
def test_resume_with_the_same_arguments_goes_on(form: str) -> None:
    whole, part = run(Servers(), FORMS[form]), Servers()
    with pytest.raises(Killed):
        _until(part, form, OF_EPOCH + 2, "static")
    worker = part.worker(before=2)
    for sample in FORMS[form](worker, data(SIZE), batch_size=BATCH):
        worker.step(sample)
    assert part.made == whole


@pytest.mark.parametrize("ends", [False, True], ids=["", "the first one is taken over"])
def test_clocks_that_two_optimizers_missed_are_left_out_once(ends: bool) -> None:
    """Both step with each batch, and miss the same clocks."""
    worker = Servers().worker()
    worker.groups, steps = ("first", "second"), worker.client.steps
    course = Course(worker)
    for clock in range(3):
        course.look()
        steps.clocks = dict.fromkeys(worker.groups, clock)
    steps.missed_by = {"first": 5, "second": 5}
    course.look()
    assert course.late == 5
    if ends:
        worker.ended.add("first")
    steps.clocks["second"] += 1
    course.look()
    steps.missed_by["second"] += 1
    course.look()
    assert course.late == 6, "one more, of the one that steps"
