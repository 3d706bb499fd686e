"""Every form of loop: where it goes on after a restart or a resume, and where it ends if the others
decide clocks without this rank. Counted are samples and clocks, on servers in memory."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from itertools import islice, product
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.unit.pytorch.hosts import host
from torch.utils.data import TensorDataset

from paramserve.client.loop_progress import LoopProgress
from paramserve.client.saving import RANDOM
from paramserve.pytorch.batches import order
from paramserve.pytorch.loader import load
from paramserve.training.course import SHAPES, SHAPES_MAX
from paramserve.training.irregular import LOADERS_MAX, RUNS_MAX

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
        stepping: the groups that are stepped on with the batch of a clock of the run.
    """

    def __init__(
        self,
        missed: dict[int, int] | None = None,
        dies_at: int = -1,
        stepping: Callable[[int], tuple[str, ...]] = lambda clock: ("model",),
    ) -> None:
        self.clock = 0
        self.saved: dict[str, bytes] = {}
        self.made: Made = []
        self.missed = missed if missed is not None else {}
        self.dies_at = dies_at
        self.dies_next: list[int] = []
        self.decided = 0
        """Clocks that are decided while the rank is dead."""
        self.stepping = stepping
        self.clocks: dict[str, int] = {}
        """By group."""
        self.groups: tuple[str, ...] = ("model",)
        self.incarnation = 0

    def worker(self, *, before: int = 0) -> Any:
        self.incarnation += 1
        again = self.incarnation > 1
        steps = SimpleNamespace(
            clocks=dict(self.clocks) if again else {},
            resumed=dict(self.clocks) if again else {},
            missed_by={},
            loop=LoopProgress(),
            clock_read=False,
            epochs=0,
        )
        connection = SimpleNamespace(
            before=before,
            restarts=True,
            workers=2,
            members=list,
            incarnation=self.incarnation,
        )
        client: Any = SimpleNamespace(
            rank=1, connection=connection, steps=steps, saving=Saving(dict(self.saved))
        )
        made = host(
            client,
            rank=1,
            workers=2,
            incarnation=self.incarnation,
            notices=SimpleNamespace(report_behind_epoch=lambda epoch: None),
        )
        made.optimizers.groups = self.groups
        made.step = lambda sample: self.step(made, sample)
        return made

    def step(self, worker: Any, sample: int) -> None:
        steps, saving = worker.client.steps, worker.client.saving
        if self.clock == self.dies_at:
            self.dies_at = self.dies_next.pop(0) if self.dies_next else -1
            raise Killed
        self.made.append((self.clock, sample))
        missed = self.missed.get(len(self.made), 0)
        for group in self.stepping(self.clock):
            self.saved = saving.due([group])
            self.clocks[group] = steps.clocks[group] = self.clocks.get(group, 0) + 1
        self.clock += 1
        for group in self.decide(missed):
            steps.clocks[group] = self.clocks[group]
            steps.missed_by[group] = steps.missed_by.get(group, 0) + 1

    def decide(self, clocks: int) -> list[str]:
        """Clocks without the rank; on which groups."""
        groups = [each for _ in range(clocks) for each in self._next()]
        for group in groups:
            self.clocks[group] = self.clocks.get(group, 0) + 1
        return groups

    def _next(self) -> tuple[str, ...]:
        self.clock += 1
        return self.stepping(self.clock - 1)


class Saving:
    """As `client.saving` where what it keeps goes out with each step."""

    def __init__(self, older: dict[str, bytes]) -> None:
        self._older = older
        self._new: dict[str, bytes] = {RANDOM: b"generators"}
        self._asked: dict[str, Callable[[], bytes | None]] = {}

    def older(self, name: str) -> bytes | None:
        return self._older.get(name) or None

    def latest(self, name: str) -> bytes:
        return self._new.get(name) or self._older.get(name) or b""

    def keep(self, name: str, data: bytes) -> None:
        self._new[name] = data

    def asks(self, name: str) -> bool:
        return name in self._asked

    def ask(self, name: str, function: Callable[[], bytes | None]) -> None:
        self._asked[name] = function

    def due(self, groups: list[str]) -> dict[str, bytes]:
        self.stepping = groups
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


LEFT_AT = 3
"""Steps of a first epoch that is left early."""


def first_broken_off(form: str) -> Any:
    def loop(worker: Any, dataset: Any, **options: Any) -> Iterator[int]:
        loader = load(worker, dataset, **options)
        for epoch in loader.epochs(EPOCHS) if form == "epochs" else range(EPOCHS):
            for number, (batch,) in enumerate(loader):
                yield int(batch[0])
                if epoch == 0 and number == LEFT_AT - 1:
                    break

    return loop


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
            servers.decide(servers.decided)
            continue
        return servers.made


# --- restarts -------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[[int], tuple[str, ...]]] = {
    "one": lambda clock: ("model",),
    "both with each batch": lambda clock: ("model", "head"),
    "the second now and then": lambda clock: ("model", "head") if clock % 3 == 1 else ("model",),
    "the first now and then": lambda clock: ("model", "head") if clock % 3 == 1 else ("head",),
    "in turn": lambda clock: ("model",) if clock % 2 else ("head",),
}
"""Which of a worker's optimizers step with a batch."""


def with_optimizers(which: str, **options: Any) -> Servers:
    servers = Servers(stepping=OPTIMIZERS[which], **options)
    servers.groups = ("model",) if which == "one" else ("model", "head")
    return servers


@pytest.mark.parametrize("form", FORMS)
def test_restart_makes_the_steps_of_an_unbroken_run(form: str) -> None:
    for shards, optimizers in product(SHARDS, OPTIMIZERS):
        whole = run(with_optimizers(optimizers), FORMS[form], shards=shards)
        assert len(whole) in (EPOCHS * OF_EPOCH, EPOCHS * OF_EPOCH * 2)
        for clock in range(1, len(whole)):
            servers = with_optimizers(optimizers, dies_at=clock)
            found = run(servers, FORMS[form], shards=shards)
            assert found == whole, (shards, optimizers, clock)


@pytest.mark.parametrize("form", IRREGULAR)
def test_restart_finds_batches_that_were_in_no_step(form: str) -> None:
    first = 4 if form.startswith("broken") else 1  # see the next test
    for optimizers in OPTIMIZERS:
        whole = run(with_optimizers(optimizers), IRREGULAR[form])
        for clock in range(first, len(whole)):
            found = run(with_optimizers(optimizers, dies_at=clock), IRREGULAR[form])
            assert found == whole, (optimizers, clock)


def test_restart_in_a_first_pass_that_would_have_been_left_goes_on_in_it() -> None:
    """The program's own count begins anew, and no pass before tells where it leaves its loops."""
    whole = run(Servers(), broken_off)
    found = run(Servers(dies_at=2), broken_off)
    assert found[:3] == whole[:3]
    assert [sample for _, sample in found[-9:]] == [sample for _, sample in whole[-9:]]


@pytest.mark.parametrize("form", ["epochs", "range"])
def test_restart_behind_a_pass_that_was_left_goes_through_whole_ones(form: str) -> None:
    loop = first_broken_off(form)
    whole = run(Servers(), loop)
    assert len(whole) == LEFT_AT + (EPOCHS - 1) * OF_EPOCH
    # With fewer steps the second pass may be one that ends as the first: it is taken for one.
    for clock in range(2 * LEFT_AT + 1, len(whole)):
        assert run(Servers(dies_at=clock), loop) == whole, clock


# --- many passes, each with other batches that were in no step ------------------------------------

MANY = 300
"""Passes over a loader, of which few are known one by one."""


def is_bad(epoch: int, number: int) -> bool:
    return random.Random(7 * epoch + number).random() < 0.4


def left_out_by_place(form: str) -> Any:
    """Steps that depend on epoch and batch alone, so that a program that begins again makes the
    same ones."""

    def of_epoch(loader: Any, epoch: int) -> Iterator[int]:
        for (batch,) in loader:
            if not is_bad(epoch, int(batch[0])):
                yield int(batch[0])

    def loop(worker: Any, dataset: Any, **options: Any) -> Iterator[int]:
        loader = load(worker, dataset, **options)
        other = load(worker, dataset, shuffle=False, **options)
        evaluation = load(worker, data(16), batch_size=4)
        epochs = loader.epochs(MANY) if form == "epochs" else range(MANY)
        for epoch in epochs:
            yield from of_epoch(loader, epoch)
            if form == "in turn" and epoch % 3 == 0:
                yield from of_epoch(other, epoch)
            if form == "evaluated":
                with torch.no_grad():
                    next(islice(evaluation, epoch % 3, None), None)

    return loop


MANY_CLOCKS = (1, 10, 400, 600, 780)


@pytest.mark.parametrize("form", ["range", "epochs", "in turn", "evaluated"])
def test_restart_behind_many_irregular_passes(form: str) -> None:
    loop = left_out_by_place(form)
    whole = run(Servers(), loop)
    assert len(whole) > MANY_CLOCKS[-1]
    for clock in MANY_CLOCKS:
        assert run(Servers(dies_at=clock), loop) == whole, clock
    often = Servers(dies_at=MANY_CLOCKS[0])
    often.dies_next = [*MANY_CLOCKS[1:]]
    assert run(often, loop) == whole


def phases(*, other: bool) -> Any:
    """A second optimizer takes over; there may be another loader, for an epoch now and then."""

    def loop(worker: Any, dataset: Any, **options: Any) -> Iterator[int]:
        loader = load(worker, dataset, **options)
        rest = load(worker, dataset, shuffle=False, **options)
        for epoch in range(MANY):
            if epoch == 200:
                worker.optimizers.groups = ("model", "second")
                worker.optimizers.replace("model")
            for (batch,) in loader:
                if not is_bad(epoch, int(batch[0])):
                    yield int(batch[0])
            if other and epoch % 20 == 0:
                for (batch,) in rest:
                    yield int(batch[0])

    return loop


@pytest.mark.parametrize("other", [False, True], ids=["", "another loader"])
def test_optimizer_that_takes_over_behind_many_irregular_passes(other: bool) -> None:
    """Wherever the rank dies, in the first phase or the second."""
    first = sum(not is_bad(epoch, each) for epoch in range(200) for each in first_samples(epoch))
    first += 10 * OF_EPOCH if other else 0

    def stepping(clock: int) -> tuple[str, ...]:
        return ("model",) if clock < first else ("second",)

    whole = run(Servers(stepping=stepping), phases(other=other))
    for clock in (3, 300, first, first + 1, first + 50, len(whole) - 2):
        assert run(Servers(dies_at=clock, stepping=stepping), phases(other=other)) == whole, clock


def first_samples(epoch: int) -> list[int]:
    """Of this rank's batches in an epoch."""
    rows = order(SIZE, 3, epoch)[1 : SIZE // 2 * 2 : 2]
    return [int(each) for each in rows[: OF_EPOCH * BATCH : BATCH]]


def test_many_irregular_passes_take_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has not changed since the step before is not encoded: a step in a pass encodes what is
    new in this one, the first step of the next pass what a bound allows."""
    encoded = list[int]()
    encode = msgspec.msgpack.encode

    def count(value: Any) -> bytes:
        packed = encode(value)
        encoded.append(len(packed))
        return packed

    servers = Servers()
    worker, of_step, of_regular = servers.worker(), list[int](), list[int]()
    loader = load(worker, data(SIZE), batch_size=BATCH)
    monkeypatch.setattr(msgspec.msgpack, "encode", count)
    for epoch in range(2_000):
        for number, (batch,) in enumerate(loader):
            if number == OF_EPOCH - 1 - epoch % 3:
                break
            del encoded[:]
            worker.step(int(batch[0]))
            (of_regular if number else of_step).append(sum(encoded))
    assert not any(of_regular)
    assert 0 < max(of_step[1:]) < 16 * RUNS_MAX
    assert sum(len(each) for each in servers.saved.values()) < 16 * RUNS_MAX


def test_many_loaders_with_irregular_passes_are_forgotten_with_a_warning() -> None:
    """Evaluations too, which are made anew."""

    def days(worker: Any, count: int, *, trains: bool) -> None:
        worker.kept = [data(8 * (2 + day % 5)) for day in range(count)]
        for day, dataset in enumerate(worker.kept):
            with torch.set_grad_enabled(trains):
                for (batch,) in load(worker, dataset, batch_size=BATCH):
                    if trains:
                        worker.step(int(batch[0]))
                        break
            if day:
                saved = worker.client.saving.due(["model"])
                assert sum(map(len, saved.values())) < 32 * LOADERS_MAX

    for trains, count in ((True, LOADERS_MAX), (False, 3 * LOADERS_MAX), (True, LOADERS_MAX + 5)):
        servers = Servers()
        worker = servers.worker()
        days(worker, count, trains=trains)
        worker.step(0)
        again = servers.worker()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            next(iter(load(again, data(SIZE), batch_size=BATCH)), None)
        told = [str(each.message) for each in caught]
        if trains and count > LOADERS_MAX:
            assert len(told) == 1
            assert "rank 1 goes on behind loops over more loaders" in told[0]
            assert "of 5 with batches that were in no step" in told[0]
        else:
            assert not told


# --- clocks that are decided without the rank -----------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_missed_clocks_leave_the_end_where_it_is(form: str) -> None:
    """Each step is with the batch of its clock, and the last clock is everybody's."""
    optimizers = sorted(set(OPTIMIZERS) - {"in turn"})  # its misses are its own
    for shards, which in product(SHARDS, optimizers):
        leave_out_clocks(form, shards, which)


def leave_out_clocks(form: str, shards: str, optimizers: str) -> None:
    whole = dict(run(with_optimizers(optimizers), FORMS[form], shards=shards))
    for seed in range(6 if optimizers == "one" else 2):
        case = (shards, optimizers, seed)
        chance = random.Random(seed)
        missed, clock, number = dict[int, int](), 0, 0
        while clock < len(whole):
            number += 1
            most = len(whole) - clock - 1
            missed[number] = min(chance.choice([0, 0, 1, 2, OF_EPOCH, 2 * OF_EPOCH + 1]), most)
            clock += 1 + missed[number]
        servers = with_optimizers(optimizers, missed=missed)
        made = run(servers, FORMS[form], shards=shards)
        assert all(whole[clock] == sample for clock, sample in made), case
        assert servers.clock == len(whole), case
        again = with_optimizers(optimizers, missed=missed, dies_at=made[len(made) // 2][0])
        assert run(again, FORMS[form], shards=shards) == made, ("with a restart", case)


@pytest.mark.parametrize("form", FORMS)
def test_clocks_that_are_decided_while_the_rank_is_dead(form: str) -> None:
    for optimizers in ("one", "both with each batch", "the second now and then"):
        whole = run(with_optimizers(optimizers), FORMS[form])
        for clock, dead in ((1, 2), (OF_EPOCH, 1), (7, OF_EPOCH + 2)):
            servers = with_optimizers(optimizers, dies_at=clock)
            servers.decided = dead
            found = run(servers, FORMS[form])
            assert found == whole[:clock] + whole[clock + dead :], (optimizers, clock)


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
@pytest.mark.parametrize("form", FORMS)
def test_resume_with_other_arguments_is_refused(form: str, change: str) -> None:
    size, options = CHANGES[change]
    whole = {shards: len(run(Servers(), FORMS[form], shards=shards)) for shards in SHARDS}
    # Within the first epoch, later, and at the end.
    for shards, clock in [(each, at) for each, n in whole.items() for at in (1, n // 2, n)]:
        part = Servers()
        with pytest.raises(Killed):
            _until(part, form, clock, shards)
        worker = part.worker(before=2)
        loop = FORMS[form](worker, data(size), shards=shards, **options)
        with pytest.raises(ValueError, match=r"40 samples in batches of 4, and this loader has"):
            next(loop)
        assert part.clock == clock


@pytest.mark.parametrize("shapes", [2, SHAPES_MAX, 3 * SHAPES_MAX])
def test_shapes_of_many_loaders_take_few_bytes(shapes: int) -> None:
    """And where not all are known, none is refused."""
    servers = Servers()
    worker = servers.worker()
    for number in range(shapes):
        for (batch,) in load(worker, data(8 + 8 * number), batch_size=BATCH, steps=1):
            worker.step(int(batch[0]))
    assert len(servers.saved[SHAPES]) < 8 * SHAPES_MAX
    loop = load(servers.worker(before=2), data(7), batch_size=2)
    if shapes < SHAPES_MAX:
        with pytest.raises(ValueError, match="8 samples in batches of 4 and 16 samples in batches"):
            next(iter(loop))
    else:
        list(loop)


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
    worker.optimizers.groups, steps = ("first", "second"), worker.client.steps
    course = worker.course
    for clock in range(3):
        course.look()
        steps.clocks = dict.fromkeys(worker.optimizers.groups, clock)
    steps.missed_by = {"first": 5, "second": 5}
    course.look()
    assert course.late == 5
    if ends:
        worker.optimizers.replace("first")
    steps.clocks["second"] += 1
    course.look()
    steps.missed_by["second"] += 1
    course.look()
    assert course.late == 6, "one more, of the one that steps"
