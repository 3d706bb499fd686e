"""Whole training programs: with a rank that dies they end as without, and as plain torch ends.

A program is data, drawn from a seed: for each step number the operations of a user's loop on a
model with several optimizers. It is a function of the number alone, so that a rank which is started
again freezes, unfreezes and adds what is true at its clock, as users are told to.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import paramserve as ps
from paramserve.launch.reading import Reader
from paramserve.pytorch.buffers import Untrained

State = dict[str, torch.Tensor]
Operation = tuple[str, ...]

STEPS = 9
RTOL, ATOL = 1e-4, 1e-5
"""Plain torch rounds in its own order."""
ALLOWED = (
    r"parameter 'book.weight' is stepped by optimizer 'body', and the model has another object",
    r"rank \d came to a run whose optimizer 'body' has trained 'body.2.weight'",
)
"""Warnings that say why something may not be as users think."""
STRUCTURE = ("freeze", "unfreeze", "add")
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: SGD(params, lr=0.1),
    "momentum": lambda params: SGD(params, lr=0.05, momentum=0.9),
    "Adam": lambda params: Adam(params, lr=0.02),
}


@dataclass(frozen=True)
class Program:
    """What each rank does.

    Attributes:
        kinds: of the optimizers of the body and of the head.
        operations: by step number.
        by_clock: the loop goes by `worker.clock`; else by a number that it saves.
        book_given: the optimizer of the body has the codebook, too.
        victim: which rank dies, before which step number and which of its operations.
    """

    seed: int
    ranks: int
    kinds: tuple[str, str]
    operations: tuple[tuple[Operation, ...], ...]
    by_clock: bool
    book_given: bool
    starts_frozen: bool
    victim: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        lines = [f"{number}: {each}" for number, each in enumerate(self.operations)]
        return "\n".join([repr(replace(self, operations=())), *lines])


def drawn(seed: int) -> Program:
    """The program of this seed."""
    draw = random.Random(seed)
    by_clock = draw.random() < 0.6
    starts_frozen = draw.random() < 0.6
    frozen, added = starts_frozen, False
    steps = ["both", "both", "body"] if by_clock else ["both", "body", "head", "none"]
    loads = draw.random() < 0.4
    assigns = draw.random() < 0.4
    moves = draw.random() < 0.6
    found = []
    for _ in range(STEPS):
        now: list[Operation] = []
        step = draw.choice(steps)
        if loads and step != "none" and draw.random() < 0.3:
            now.append(("load", draw.choice(["body", "head"]), draw.choice(["halve", "drop"])))
        if assigns and step != "none" and draw.random() < 0.3:
            now.append(("assign",))
        if draw.random() < 0.25 and (frozen or not starts_frozen):
            now.append(("unfreeze",) if frozen else ("freeze",))
            frozen = not frozen
        if not added and draw.random() < 0.2:
            now.append(("add",))
            added = True
        if moves and draw.random() < 0.7:
            now.append(("lerp",))
        if moves and draw.random() < 0.3:
            now.append(("replace",))
        if draw.random() < 0.15:
            now.append(("edit", draw.choice(["body", "head"])))
        now.append(("step", step))
        found.append(tuple(now))
    kinds = draw.choice([*KINDS]), draw.choice([*KINDS])
    ranks = draw.choice([1, 2, 2])
    # A write at the very step at which a rank dies may be made or not.
    numbers = [
        number
        for number in range(1, STEPS)
        if not {"load", "assign"} & {name for name, *_ in found[number]}
    ]
    number = draw.choice(numbers or [STEPS - 1])
    victim = draw.randrange(ranks), number, draw.randrange(len(found[number]))
    draw.random()
    book_given = draw.random() < 0.2
    operations = tuple(found)
    return Program(seed, ranks, kinds, operations, by_clock, book_given, starts_frozen, victim)


# --- the model ------------------------------------------------------------------------------------


class Book(nn.Module):
    """A codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 1)
        self.extra = nn.Linear(3, 1)
        self.target = nn.Linear(3, 1)
        self.book = Book()
        self.register_buffer("seen", torch.zeros(3))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) / 2)
        self.target.requires_grad_(False)

    def loss(self, rank: int, number: int) -> torch.Tensor:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1000 * rank + number))
        self.seen.lerp_(x.mean(0), 0.1)
        coded = x * self.book.weight.detach()
        out = self.head(self.body(coded)) + self.extra(x)
        goal = x.sum(1, keepdim=True) + 0.5 * self.target(x) + self.seen.mean()
        return (out - goal).square().mean()


def own(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# --- one rank -------------------------------------------------------------------------------------


class Loop:
    """The user's program on one rank, in plain torch; the mean of the gradients comes from outside.

    Attributes:
        models_at: what the optimizers have stepped, before each step number.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self.program = program
        self.rank = rank
        self.model = Model()
        if program.starts_frozen:
            self.model.body[2].requires_grad_(False)

    def make(self, start: int = 0) -> None:
        """The optimizers."""
        model, program = self.model, self.program
        params = [*model.body.parameters(), *([model.book.weight] if program.book_given else [])]
        self.body = self.adopt("body", KINDS[program.kinds[0]](params))
        self.head = self.adopt("head", KINDS[program.kinds[1]](model.head.parameters()))
        for number in range(start):
            for name, *_ in program.operations[number]:
                if name == "add":
                    self.add()
        if start:
            self._freeze(start)

    def adopt(self, name: str, optimizer: Optimizer) -> Any:
        return optimizer

    def _freeze(self, stop: int) -> None:
        """As the steps before this one have left it."""
        for number in range(stop):
            for name, *_ in self.program.operations[number]:
                if name in ("freeze", "unfreeze"):
                    self.model.body[2].requires_grad_(name == "unfreeze")

    def add(self) -> None:
        self.body.add_param_group({"params": list(self.model.extra.parameters()), "lr": 0.03})

    def optimizer(self, name: str) -> Any:
        return self.body if name == "body" else self.head

    def before(self, number: int) -> list[Any]:
        """Do a step number up to its gradients; the optimizers that step then."""
        for place, operation in enumerate(self.program.operations[number]):
            self.at(number, place)
            name, *more = operation
            if name == "step":
                chosen = more[0]
                if chosen == "none":
                    return []
                self.model.zero_grad()
                self.model.loss(self.rank, number).backward()
                return [self.body, self.head] if chosen == "both" else [self.optimizer(chosen)]
            getattr(self, name)(*more)
        raise AssertionError("a step number ends with a step")

    def at(self, number: int, place: int) -> None:
        """Before an operation."""

    def freeze(self) -> None:
        self.model.body[2].requires_grad_(False)

    def unfreeze(self) -> None:
        self.model.body[2].requires_grad_(True)

    def lerp(self) -> None:
        with torch.no_grad():
            for name, mine in self.model.target.named_parameters():
                source = self.model.extra.get_parameter(name)
                mine.lerp_(source.data + 0.1 * self.model.head.weight.mean(), 0.2)

    def replace(self) -> None:
        book = self.model.book
        book.weight = nn.Parameter(0.9 * book.weight.detach() + 0.1 * self.model.target.weight[0])

    def load(self, name: str, change: str) -> None:
        optimizer = self.optimizer(name)
        state = optimizer.state_dict()
        for number, entry in list(state["state"].items()):
            if change == "drop":
                del state["state"][number]
                continue
            for key, value in entry.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    entry[key] = value * 0.5
        optimizer.load_state_dict(state)

    def assign(self) -> None:
        with torch.no_grad():
            for param in self.model.head.parameters():
                param.mul_(0.75)

    def edit(self, name: str) -> None:
        """Refused of a served one, with nothing changed."""


class Trained(Loop):
    """The same with a worker."""

    def __init__(self, program: Program, worker: ps.Worker, seen: Callable[[int, State], None]):
        super().__init__(program, worker.rank)
        self.worker = worker
        self.seen = seen

    def adopt(self, name: str, optimizer: Optimizer) -> Any:
        return self.worker.optimizer(self.model, optimizer, name=name)

    def at(self, number: int, place: int) -> None:
        if (self.rank, number, place) == self.program.victim and self.worker.incarnation == 1:
            self.worker.client.drain()
            raise Killed

    def start(self) -> int:
        """The step number to go on with."""
        worker = self.worker
        if self.program.by_clock:
            return worker.client.clock("body")
        found: int = worker.saved("number", 0)
        return found

    def run(self) -> State:
        start = self.start()
        self.make(start)
        for number in range(start, STEPS):
            self.seen(number, own(self.model))
            optimizers = self.before(number)
            if not self.program.by_clock:
                self.worker.save("number", number + 1)
            for each in optimizers:
                each.step()
        return own(self.model)

    def assign(self) -> None:
        if self.rank == 0:
            super().assign()
        self.worker.assign()

    def edit(self, name: str) -> None:
        optimizer = self.optimizer(name)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.state[params[0]]["another"] = torch.ones(1)
        with pytest.raises(RuntimeError, match=r"optimizer.state was changed.*Applied: no"):
            optimizer.step()


@dataclass
class Ended:
    """What a run has left.

    Attributes:
        models: of each rank.
        read: the result, by group: what a reader finds, and what rank 0 told at the end.
        middle: of a snapshot in the middle, by group: number, what was read, and rank 0's model.
    """

    models: dict[int, State]
    read: dict[str, State] = field(default_factory=dict)
    middle: list[tuple[int, State, State]] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)


def plain(program: Program) -> Ended:
    """One process with a model for each rank, whose gradients are averaged."""
    loops = [Loop(program, rank) for rank in range(program.ranks)]
    for loop in loops:
        loop.make()
    for number in range(STEPS):
        optimizers = [loop.before(number) for loop in loops]
        for params in zip(*(loop.model.parameters() for loop in loops), strict=True):
            grads = [param.grad for param in params]
            if grads[0] is not None:
                mean = torch.stack(grads).mean(0)
                for param in params:
                    param.grad = mean.clone()
        for chosen in optimizers:
            for each in chosen:
                each.step()
    return Ended({loop.rank: own(loop.model) for loop in loops})


def read(cluster: Any, name: str) -> State:
    found = Reader(cluster.client()).read(name)
    return {key: torch.from_numpy(each) for key, each in found.items()}


def served(make_cluster: MakeCluster, program: Program) -> Ended:
    """A run on servers, with the death that the program has."""
    cluster = make_cluster(workers=program.ranks, restarts=True, policy=ps.Sync())
    ended = Ended({})

    told: dict[str, State] = {}

    def train(worker: ps.Worker) -> State:
        worker.tell_extra_state = told.__setitem__  # type: ignore[method-assign]

        def seen(number: int, model: State) -> None:
            if worker.rank == 0 and number == STEPS // 2:
                ended.middle.append((number, read(cluster, "body"), model))

        return Trained(program, worker, seen).run()

    ranks = Ranks(cluster, train)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ended.models = ranks.start(*range(program.ranks)).end()
    ended.warned = [str(each.message) for each in caught]
    ended.restarts = ranks.restarts
    ended.read = {name: told.get(name, {}) | read(cluster, name) for name in ("body", "head")}
    return ended


# --- comparing ------------------------------------------------------------------------------------


def differences(first: State, second: State, *, exact: bool) -> list[str]:
    """The names whose values differ."""
    return [
        name
        for name in sorted(first.keys() | second.keys())
        if name not in first
        or name not in second
        or not (
            torch.equal(first[name], second[name])
            if exact
            else torch.allclose(first[name], second[name], rtol=RTOL, atol=ATOL)
        )
    ]


def check(program: Program, make_cluster: MakeCluster) -> None:
    """Run a program in all ways, and compare."""
    alone = plain(program)
    unbroken = served(make_cluster, replace(program, victim=None))
    check_one(program, unbroken)
    for rank, model in alone.models.items():
        found = differences(unbroken.models[rank], model, exact=False)
        assert not found, f"rank {rank} against plain torch: {found}"
    broken = served(make_cluster, program)
    assert program.victim is not None
    assert broken.restarts == [program.victim[0]]
    check_one(program, broken)
    if any(re.search(ALLOWED[0], text) for text in broken.warned):
        return  # it says why they may differ
    for rank, model in unbroken.models.items():
        found = differences(broken.models[rank], model, exact=True)
        assert not found, f"rank {rank} with a death: {found}"
    for name, values in unbroken.read.items():
        found = differences(broken.read[name], values, exact=True)
        assert not found, f"the result of {name!r} with a death: {found}"


def check_one(program: Program, ended: Ended) -> None:
    """The result, and a snapshot, are what rank 0 has."""
    others = [each for each in ended.warned if not any(re.search(p, each) for p in ALLOWED)]
    assert not others
    for name, values in ended.read.items():
        found = differences(values, ended.models[0], exact=True)
        assert not found, f"the result of {name!r}: {found}"
    for number, values, model in ended.middle:
        stepped = [key for key in values if key.startswith(("body.", "head."))]
        assert {"body.0.weight", "head.weight"} <= {*stepped}
        found = differences(
            {key: values[key] for key in stepped}, {k: model[k] for k in stepped}, exact=True
        )
        assert not found, f"a snapshot at {number}: {found}"


SHOWN = (0, 1, 3, 4, 5, 6, 9, 13)


@pytest.mark.parametrize("seed", SHOWN)
def test_program_with_a_death_ends_as_without(make_cluster: MakeCluster, seed: int) -> None:
    run(drawn(seed), make_cluster)


def test_programs_find_a_second_optimizer_that_begins_anew(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs are worth nothing if they find nothing."""
    start, names = Untrained.start, set(Model().state_dict())
    monkeypatch.setattr(
        Untrained,
        "start",
        lambda self, *args, **options: start(self, *args, **{**options, "take": names}),
    )
    with pytest.raises(AssertionError, match="with a death"):
        run(drawn(SHOWN[2]), make_cluster)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_programs_with_a_death_end_as_without(make_cluster: MakeCluster) -> None:
    for seed in range(15):
        run(drawn(seed), make_cluster)


def run(program: Program, make_cluster: MakeCluster) -> None:
    try:
        check(program, make_cluster)
    except BaseException as error:
        error.add_note(f"the program:\n{program}")
        raise
