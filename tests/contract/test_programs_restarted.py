"""Whole training programs: with a fault they end as without, and as plain torch ends.

A program is data, drawn from a seed: for each step number the operations of a user's loop on a
model with several optimizers. It is a function of the number alone, so that a rank which is started
again freezes, unfreezes and adds what is true at its clock, as users are told to: before it gives
the optimizers to the worker, or after.

The fault is a rank that dies and is started again, a run that goes on from a checkpoint, or a rank
that is added.
"""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from tests.contract.role_cluster import RoleCluster
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import TensorDataset

import paramserve as ps
from paramserve import cli
from paramserve.config import CheckpointPlan
from paramserve.launch import exporting
from paramserve.launch.reading import Reader
from paramserve.pytorch.buffers import Untrained

State = dict[str, torch.Tensor]
Batches = dict[int, torch.Tensor]
Operation = tuple[str, ...]

STEPS = 9
RTOL, ATOL = 1e-4, 1e-5
"""Plain torch rounds in its own order."""
ALLOWED = (
    r"parameter 'book.weight' is stepped by optimizer 'body', and the model has another object",
    r"rank \d joined a run whose optimizer 'body' has trained 'body.2.weight'",
)
"""Warnings that say why something may not be as users think."""
FAULTS = ("death", "death", "resume", "added")
BATCH = 8
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
        fault: which one there is.
        victim: the rank with the fault, before which step number and which of its operations; of
            an added rank the number at which it comes.
        breaks: step numbers behind which an epoch is left; None: the loop is not over epochs.
        freezes_first: a rank that begins later freezes and unfreezes before the adoption.
        head_at: the step number before which the second optimizer is adopted.
    """

    seed: int
    ranks: int
    kinds: tuple[str, str]
    operations: tuple[tuple[Operation, ...], ...]
    by_clock: bool
    book_given: bool
    starts_frozen: bool
    victim: tuple[int, int, int] | None = None
    fault: str = "death"
    breaks: tuple[int, ...] | None = None
    freezes_first: bool = False
    head_at: int = 0

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
        if draw.random() < 0.25:
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
    program = Program(seed, ranks, kinds, operations, by_clock, book_given, starts_frozen, victim)
    return _with_fault(program, draw)


def _with_fault(program: Program, draw: random.Random) -> Program:
    fault = draw.choice(FAULTS)
    freezes_first = draw.random() < 0.5
    # Behind a first epoch that is whole, for where all so far were left at one batch a rank that
    # comes back takes the next one to be left there, too; and not right before the fault, for only
    # the next step tells of it.
    places = [each for each in range(3, STEPS) if each + 1 != (program.victim or (0, 0))[1]]
    breaks = tuple(draw.sample(places, 3)) if draw.random() < 0.5 else None
    head_at = draw.choice([0, 0, 0, 1, 2, 3])
    if fault == "added":
        # It finds target networks and codebooks as at first, and is behind no collective.
        left_out = {"lerp", "replace", "assign"}
        operations = tuple(
            tuple(each for each in now if each[0] not in left_out) for now in program.operations
        )
        steps = tuple((*now[:-1], ("step", draw.choice(["both", "body"]))) for now in operations)
        victim = 1, draw.randrange(1, STEPS), 0
        program = replace(program, ranks=2, operations=steps, by_clock=True, victim=victim)
        breaks = None
    return replace(
        program,
        fault=fault,
        freezes_first=freezes_first,
        breaks=breaks if program.by_clock else None,
        head_at=head_at,
    )


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

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.lerp_(x.mean(0), 0.1)
        coded = x * self.book.weight.detach()
        out = self.head(self.body(coded)) + self.extra(x)
        goal = x.sum(1, keepdim=True) + 0.5 * self.target(x) + self.seen.mean()
        return (out - goal).square().mean()


def drawn_inputs(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))


def own(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# --- one rank -------------------------------------------------------------------------------------


class Loop:
    """The user's program on one rank, in plain torch; the mean of the gradients comes from outside.

    Args:
        batches: of a loop over epochs, by step number.
    """

    def __init__(self, program: Program, rank: int, batches: Batches) -> None:
        self.program = program
        self.rank = rank
        self.batches = batches
        self.model = Model()
        self.head: Any = None
        if program.starts_frozen:
            self.model.body[2].requires_grad_(False)

    def make(self, start: int = 0) -> None:
        """The optimizers."""
        model, program = self.model, self.program
        if program.freezes_first:
            self._freeze(start)
        params = [*model.body.parameters(), *([model.book.weight] if program.book_given else [])]
        self.body = self.adopt("body", KINDS[program.kinds[0]](params))
        if not start:
            self._make_head(start)
        for number in range(start):
            self._make_head(number)
            for name, *_ in program.operations[number]:
                if name == "add":
                    self.add()
        if start:
            self._freeze(start)

    def _make_head(self, number: int) -> None:
        """The second optimizer, if it is time."""
        if self.head is None and number >= self.program.head_at:
            params = self.model.head.parameters()
            self.head = self.adopt("head", KINDS[self.program.kinds[1]](params))

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
        self._make_head(number)
        for place, operation in enumerate(self.program.operations[number]):
            self.at(number, place)
            name, *more = operation
            if name == "step":
                chosen = more[0]
                if chosen == "none":
                    return []
                self.model.zero_grad()
                self.model.loss(self.inputs(number)).backward()
                optimizers = {"body": self.body, "head": self.head}
                names = optimizers if chosen == "both" else [chosen]
                return [optimizers[each] for each in names if optimizers[each] is not None]
            if ("head" not in more and name != "assign") or self.head is not None:
                getattr(self, name)(*more)
        raise AssertionError("a step number ends with a step")

    def inputs(self, number: int) -> torch.Tensor:
        drawn = self.program.breaks is None
        return drawn_inputs(BATCH, 1000 * self.rank + number) if drawn else self.batches[number]

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

    def __init__(self, program: Program, worker: ps.Worker, hooks: Hooks) -> None:
        super().__init__(program, worker.rank, {})
        self.worker = worker
        self.hooks = hooks

    def adopt(self, name: str, optimizer: Optimizer) -> Any:
        return self.worker.optimizer(self.model, optimizer, name=name)

    def at(self, number: int, place: int) -> None:
        if (self.rank, number, place) == self.program.victim and self.worker.incarnation == 1:
            self.worker.client.drain()
            self.hooks.fault(self)

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
        for number in self.numbers(start):
            self.hooks.begin(self, number)
            optimizers = self.before(number)
            if not self.program.by_clock:
                self.worker.save("number", number + 1)
            for each in optimizers:
                each.step()
        return own(self.model)

    def numbers(self, start: int) -> Iterator[int]:
        """The step numbers that are left."""
        breaks = self.program.breaks
        if breaks is None:
            yield from range(start, STEPS)
            return
        data = TensorDataset(drawn_inputs(4 * BATCH * self.program.ranks, self.program.seed))
        loader = self.worker.loader(data, batch_size=BATCH)
        for _ in loader.epochs(STEPS):
            for (x,) in loader:
                number = self.worker.client.clock("body")
                self.batches[number] = x
                yield number
                if number == STEPS - 1:
                    return
                if number in breaks:
                    break

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
        batches: of each rank.
        before: rank 0's model before each step number.
        checkpoint: the folder with one, of the victim's step number.
    """

    models: dict[int, State]
    read: dict[str, State] = field(default_factory=dict)
    middle: list[tuple[int, State, State]] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    batches: dict[int, Batches] = field(default_factory=dict)
    before: dict[int, State] = field(default_factory=dict)
    checkpoint: str = ""


def plain(program: Program, batches: dict[int, Batches]) -> Ended:
    """One process with a model for each rank, whose gradients are averaged."""
    added = program.fault == "added"
    loops = [Loop(program, rank, batches[rank]) for rank in range(program.ranks - added)]
    for loop in loops:
        loop.make()
    ended = Ended({})
    for number in range(STEPS):
        if added and program.victim is not None and number == program.victim[1]:
            loops.append(_joined(program, loops[0], number))
        ended.before[number] = own(loops[0].model)
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
    ended.models = {loop.rank: own(loop.model) for loop in loops}
    return ended


def _joined(program: Program, first: Loop, number: int) -> Loop:
    """A rank that has the parameters and the state of the optimizers that the others have."""
    loop = Loop(program, 1, {})
    loop.make(number)
    with torch.no_grad():
        for mine, theirs in zip(loop.model.parameters(), first.model.parameters(), strict=True):
            mine.copy_(theirs)
    loop.body.load_state_dict(copy.deepcopy(first.body.state_dict()))
    if loop.head is not None:
        loop.head.load_state_dict(copy.deepcopy(first.head.state_dict()))
    return loop


def read(cluster: Any, name: str) -> State:
    found = Reader(cluster.client()).read(name)
    return {key: torch.from_numpy(each) for key, each in found.items()}


class Hooks:
    """What happens beside the ranks of a run, in their threads."""

    def __init__(self, cluster: RoleCluster, ended: Ended) -> None:
        self.cluster = cluster
        self.ended = ended
        self.ranks: Ranks | None = None

    def begin(self, loop: Trained, number: int) -> None:
        """A rank comes to a step number."""
        program, ended = loop.program, self.ended
        ended.batches.setdefault(loop.rank, loop.batches)
        if program.fault == "added" and program.victim is not None:
            joins = program.victim[1]
            if loop.rank == 0 and number == joins:
                assert self.ranks is not None
                self.cluster.scale(2)
                self.ranks.start(1)
                self.ranks.until(lambda: 1 in ended.batches)
        if loop.rank == 0:
            ended.before[number] = own(loop.model)
            if number == STEPS // 2:
                ended.middle.append((number, read(self.cluster, "body"), own(loop.model)))

    def fault(self, loop: Trained) -> None:
        """The victim is at its place."""
        if loop.program.fault == "death":
            raise Killed
        if loop.program.fault == "resume":
            self.cluster.checkpoint()


def served(
    make_cluster: MakeCluster, program: Program, checkpoints: CheckpointPlan | None = None
) -> Ended:
    """A run on servers, with the fault that the program has."""
    at_first = program.ranks - (program.fault == "added")
    options = {"workers": at_first, "restarts": True, "policy": ps.Sync()}
    cluster = make_cluster(**options, checkpoints=checkpoints)
    ended = Ended({})
    hooks = Hooks(cluster, ended)
    told: dict[str, State] = {}

    def train(worker: ps.Worker) -> State:
        worker.tell_extra_state = told.__setitem__  # type: ignore[method-assign]
        return Trained(program, worker, hooks).run()

    hooks.ranks = ranks = Ranks(cluster, train)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ended.models = ranks.start(*range(at_first)).end()
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


def check(program: Program, make_cluster: MakeCluster, folder: Path) -> None:
    """Run a program in all ways, and compare."""
    assert program.victim is not None
    if program.fault == "added":
        unbroken = served(make_cluster, program)
    else:
        unbroken = served(make_cluster, replace(program, victim=None))
    check_one(unbroken)
    alone = plain(program, unbroken.batches)
    assert unbroken.models.keys() == alone.models.keys()
    for rank, model in alone.models.items():
        found = differences(unbroken.models[rank], model, exact=False)
        assert not found, f"rank {rank} against plain torch: {found}"
    if program.fault == "death":
        broken = served(make_cluster, program)
        assert broken.restarts == [program.victim[0]]
        check_as_unbroken(unbroken, broken, "a death")
    elif program.fault == "resume":
        plan = CheckpointPlan(folder=str(folder), run="test")
        first = served(make_cluster, program, plan)
        check_as_unbroken(unbroken, first, "a checkpoint")
        number = program.victim[1]
        groups = ["body", "head"] if number >= program.head_at else ["body"]
        check_exported(folder, groups, unbroken.before[number])
        (name,) = (each.name for each in folder.glob("step-*"))
        plan = CheckpointPlan(resume_folder=str(folder), resume=name)
        check_as_unbroken(unbroken, served(make_cluster, program, plan), "a resume")


def check_as_unbroken(unbroken: Ended, broken: Ended, fault: str) -> None:
    check_one(broken)
    for rank, model in unbroken.models.items():
        found = differences(broken.models[rank], model, exact=True)
        assert not found, f"rank {rank} with {fault}: {found}"
    for name, values in unbroken.read.items():
        found = differences(broken.read[name], values, exact=True)
        assert not found, f"the result of {name!r} with {fault}: {found}"


def check_exported(folder: Path, groups: list[str], model: State) -> None:
    """What is trained is in a file of the checkpoint as the model had it, and torch loads it."""
    for group in groups:
        out = folder / f"{group}.pt"
        arguments = ["export", str(folder), "--to", "torch", "--out", str(out), "--group", group]
        assert cli.main(["checkpoints", *arguments]) == 0
        state = torch.load(out, weights_only=True)
        loaded = Model()
        loaded.load_state_dict(state, strict=False)
        names = [name for name in state if name.startswith(("body.", "head.", "extra."))]
        assert "body.0.weight" in names
        after = own(loaded)
        found = differences({n: after[n] for n in names}, {n: model[n] for n in names}, exact=True)
        assert not found, f"the exported checkpoint of {group!r}: {found}"


def check_one(ended: Ended) -> None:
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


SHOWN = (0, 7, 13, 42)
SLOW = sorted({*range(40), 168, 578} - {*SHOWN})
"""The last two adopt an optimizer behind an added rank."""


@pytest.mark.parametrize(
    "seed", [*SHOWN, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)]
)
def test_program_with_a_fault_ends_as_without(
    make_cluster: MakeCluster, tmp_path: Path, seed: int
) -> None:
    run(drawn(seed), make_cluster, tmp_path)


@pytest.mark.parametrize(("seed", "fault"), [(44, "a death"), (11, "a resume")])
def test_programs_find_a_second_optimizer_that_begins_anew(
    make_cluster: MakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    seed: int,
    fault: str,
) -> None:
    """The programs are worth nothing if they find nothing."""
    start, names = Untrained.start, set(Model().state_dict())
    monkeypatch.setattr(
        Untrained,
        "start",
        lambda self, *args, **options: start(self, *args, **{**options, "take": names}),
    )
    with pytest.raises(AssertionError, match=f"with {fault}"):
        run(drawn(seed), make_cluster, tmp_path)


def test_programs_find_an_export_of_other_values(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = exporting.model_of
    monkeypatch.setattr(
        exporting,
        "model_of",
        lambda *args: {name: value + 1 for name, value in real(*args).items()},
    )
    with pytest.raises(AssertionError, match="the exported checkpoint of 'body'"):
        run(drawn(18), make_cluster, tmp_path)


def run(program: Program, make_cluster: MakeCluster, folder: Path) -> None:
    try:
        check(program, make_cluster, folder)
    except BaseException as error:
        error.add_note(f"the program:\n{program}")
        raise
