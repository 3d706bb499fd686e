"""A cluster in this process: the client face that `paramserve.pytorch` uses, over plain numpy.

It applies the rules by torch's formulas, stated again here. Gradient slots are given out with NaN
in them and value slots are overwritten when they are released, so that reading what is not yours
shows at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from paramserve.client import BlockPush
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Sync
from paramserve.consistency.registry import PolicyTraits
from paramserve.errors import DefineTimeout, NonFinite
from paramserve.messages import Piece
from paramserve.rules import SGD, Adam, PushInfo, Run
from paramserve.training.optimizers import Optimizers

WAIT_S = 20.0
PUSH = PushInfo(-1, 0, 0, 0, 1.0, 1.0)


@dataclass(eq=False)
class FakeBlock:
    id: int
    group_name: str
    dtype: np.dtype
    rule: Any
    pieces: tuple[Piece, ...]
    values: np.ndarray
    state: list[np.ndarray] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(np.cumsum([0, *(prod(piece.shape) for piece in self.pieces)]).tolist())

    def part(self, array: np.ndarray, piece: int) -> np.ndarray:
        return array[self.starts[piece] : self.starts[piece + 1]]

    def values_of(self, name: str) -> np.ndarray:
        piece = next(i for i, each in enumerate(self.pieces) if each.name == name)
        return self.part(self.values, piece).reshape(self.pieces[piece].shape)

    def apply(self, gradient: np.ndarray, active: Sequence[int], hyper: Sequence[float]) -> None:
        if not isinstance(self.rule, SGD | Adam):
            self.rule.prepare(self.values.dtype)
            ends = self.starts[1:]
            runs = [
                Run(self.starts[i], ends[i], self.counts[i], self.pieces[i].shape) for i in active
            ]
            state = tuple(self.state)
            self.rule.apply(self.values, gradient, state, tuple(hyper), runs, PUSH)
            for piece in active:
                self.counts[piece] += 1
            return
        update = sgd_update if isinstance(self.rule, SGD) else adam_update
        for piece in active:
            update(
                self.part(self.values, piece),
                self.part(gradient, piece),
                [self.part(array, piece) for array in self.state],
                hyper,
                self.counts[piece],
            )
            self.counts[piece] += 1


def sgd_update(value, gradient, state, hyper, count) -> None:
    lr, momentum, dampening, decay, nesterov, maximize = hyper
    gradient = (-gradient if maximize else gradient) + value.dtype.type(decay) * value
    if momentum:
        buffer = state[0]
        buffer[:] = momentum * buffer + (1 - dampening) * gradient if count else gradient
        gradient = gradient + momentum * buffer if nesterov else buffer
    value -= lr * gradient


def adam_update(value, gradient, state, hyper, count) -> None:
    lr, beta1, beta2, eps, decay, decoupled, maximize = hyper
    mean, square = state
    gradient = -gradient if maximize else gradient
    if decoupled:
        value *= 1 - lr * decay
    else:
        gradient = gradient + value.dtype.type(decay) * value
    mean[:] = beta1 * mean + (1 - beta1) * gradient
    square[:] = beta2 * square + (1 - beta2) * gradient * gradient
    root = np.sqrt(square) / np.sqrt(1 - beta2 ** (count + 1))
    value -= lr / (1 - beta1 ** (count + 1)) * mean / (root + eps)


@dataclass
class Sent:
    """One call of `Dense.step`."""

    rank: int
    group: str
    push: tuple[BlockPush, ...]
    tick: bool
    weight: float
    skip: bool
    clip_norm: float


class FakeCluster:
    """Servers and coordinator. What collects applies the mean when all ranks ended a clock.

    A rank whose training function has returned is not waited for. `policies` has the groups' own.
    """

    def __init__(
        self, workers: int = 1, *, sync: bool = True, policy: Policy | None = None
    ) -> None:
        self.workers = workers
        self.policy = policy if policy is not None else Sync() if sync else Async()
        self.policies: dict[str, Policy] = {}
        self.gone: set[int] = set()
        self.blocks: list[FakeBlock] = []
        self.sent: list[Sent] = []
        self.stored: list[tuple[int, FakeBlock, int]] = []
        self.held: dict[str, list[deque[tuple[Sent, list[np.ndarray], FakeTicket]]]] = {}
        self.extra: dict[str, dict[str, Any]] = {}
        """Told by group at the end, for the result."""
        self.changed = threading.Condition()

    def policy_of(self, group: str) -> Policy:
        return self.policies.get(group, self.policy)

    def leave(self, rank: int) -> None:
        with self.changed:
            self.gone.add(rank)
            for group in list(self.held):
                self.decide(group)

    def worker(self, rank: int = 0, seed: int = 7) -> Any:
        client: Any = FakeClient(self, rank)
        return SimpleNamespace(
            rank=rank,
            workers=self.workers,
            seed=seed,
            client=client,
            incarnation=1,
            registry=None,
            course=SimpleNamespace(take_over=nullcontext),
            optimizers=Optimizers(client),
            leases=SimpleNamespace(step_samples=None),
            load_state={},
            tell_extra_state=self.extra.__setitem__,
            go_on_drawing=lambda *, first: None,
        )

    def block(self, group: str) -> FakeBlock:
        (found,) = (block for block in self.blocks if block.group_name == group)
        return found

    def result(self, group: str = "model") -> dict[str, np.ndarray]:
        """What `Result.state_dict` is made of: the untrained values first, then the trained."""
        return {
            piece.name: block.values_of(piece.name)
            for name in (f"{group}.buffers", group)
            for block in self.blocks
            if block.group_name == name
            for piece in block.pieces
        }

    def steps(self, group: str = "model") -> list[Sent]:
        return [sent for sent in self.sent if sent.group == group and sent.tick]

    def take(self, sent: Sent, ticket: FakeTicket) -> None:
        """Apply a push, or hold it until its clock is complete; then the tickets get values."""
        gradients = [push.gradient.copy() for push in sent.push]
        for push in sent.push:
            push.gradient.fill(np.nan)
        if not sent.tick:
            ticket.fill()
            return
        if not self.policy_of(sent.group).collects:
            self.apply([(sent, gradients)])
            ticket.fill()
            return
        queues = self.held.setdefault(sent.group, [deque() for _ in range(self.workers)])
        queues[sent.rank].append((sent, gradients, ticket))
        self.decide(sent.group)

    def decide(self, group: str) -> None:
        queues = self.held[group]
        while any(queues) and all(queue or rank in self.gone for rank, queue in enumerate(queues)):
            contributions = [queue.popleft() for queue in queues if queue]
            self.apply([(each, arrays) for each, arrays, _ in contributions])
            for _, _, waiting in contributions:
                waiting.fill()
            self.changed.notify_all()

    def apply(self, contributions: Sequence[tuple[Sent, list[np.ndarray]]]) -> None:
        policy = self.policy_of(contributions[0][0].group)
        if policy.skips_alone:
            contributions = [each for each in contributions if not each[0].skip]
        if not contributions or any(sent.skip for sent, _ in contributions):
            return
        sync = policy.collects
        weight = sum(sent.weight for sent, _ in contributions) if sync else 1.0
        sums: dict[int, tuple[FakeBlock, np.ndarray, set[int], Any]] = {}
        for sent, gradients in contributions:
            factor = (sent.weight if sync else 1.0) / weight
            for push, gradient in zip(sent.push, gradients, strict=True):
                block = push.block
                every = range(len(block.pieces))
                active = every if push.active is None else push.active
                _, total, pieces, _ = sums.setdefault(
                    block.id, (block, np.zeros_like(gradient), set(), push.hyper)
                )
                for piece in active:
                    block.part(total, piece)[:] += factor * block.part(gradient, piece)
                pieces.update(active)
        clip = contributions[0][0].clip_norm
        if clip:
            norm = np.sqrt(sum(float(np.sum(total**2)) for _, total, _, _ in sums.values()))
            for _, total, _, _ in sums.values():
                total *= min(1.0, clip / (norm + 1e-6))
        for block, total, pieces, hyper in sums.values():
            block.apply(total, sorted(pieces), hyper if hyper is not None else block.rule.hyper())


class FakeTicket:
    def __init__(
        self, cluster: FakeCluster, pull: Sequence[FakeBlock], skipped: bool = False
    ) -> None:
        self._cluster = cluster
        self._pull = pull
        self._skipped = skipped
        self._slots: dict[int, np.ndarray] | None = None
        self.released = False

    def fill(self) -> None:
        self._slots = {block.id: block.values.copy() for block in self._pull}

    def result(self, timeout_s: float | None = None) -> Any:
        with self._cluster.changed:
            filled = self._cluster.changed.wait_for(lambda: self._slots is not None, WAIT_S)
        assert filled, "a rank is missing"
        return SimpleNamespace(values=self._slots, version=0, staleness=0, skipped=self._skipped)

    def release(self) -> None:
        self.released = True
        for slot in (self._slots or {}).values():
            slot.fill(-99)


class FakeClient:
    added_late = restarts = False
    epochs = 0
    run = 0

    def __init__(self, cluster: FakeCluster, rank: int) -> None:
        self._cluster = cluster
        self._rank = rank
        self.connection = self.steps = self.directory = self.dense = self
        self.saving = SimpleNamespace(older=lambda name: None)
        self.resume_reports: list[Any] = []
        self._slots: dict[int, list[np.ndarray]] = {}
        self.clocks: dict[str, int] = {}
        self.resumed: dict[str, int] = {}
        self.missed_by: dict[str, int] = {}
        self.tickets: list[FakeTicket] = []

    def blocks(self) -> list[FakeBlock]:
        return list(self._cluster.blocks)

    def enter(self, group: str) -> bool:
        """No rank is pending: all are members from the beginning."""
        return False

    def clock(self, group: str) -> int:
        return 0

    def is_dead(self, ranks: Any) -> bool:
        return False

    def notes(self, group: str) -> dict[int, dict[int, bytes]]:
        return {}

    def terms(self, group: str) -> PolicyTraits:
        policy = self._cluster.policy_of(group)
        return PolicyTraits(policy.collects, policy.on_nonfinite == "refuse", policy)

    def define(
        self,
        name,
        value=None,
        *,
        rule=None,
        group="default",
        consistency: Policy | None = None,
        nth=-1,
        push=None,
        pull=None,
        aliases=None,
        links=(),
        dtypes=None,
        timeout_s=None,
    ):
        names = [
            piece.name for b in self._cluster.blocks if b.group_name == group for piece in b.pieces
        ]
        assert not set(names) & set(name), "defined twice"
        arrays = {key: np.asarray(each) for key, each in name.items()}
        (dtype,) = {array.dtype for array in arrays.values()}
        flat = np.concatenate([array.ravel() for array in arrays.values()])
        states = rule.states(rule.hyper()) if rule is not None else ()
        with self._cluster.changed:
            if consistency is not None:
                self._cluster.policies[group] = consistency
            block = FakeBlock(
                len(self._cluster.blocks),
                group,
                dtype,
                rule,
                tuple(Piece(key, array.shape) for key, array in arrays.items()),
                flat.copy(),
                [np.zeros_like(flat) for _ in states],
                [0] * len(arrays),
                dict(aliases or {}),
            )
            self._cluster.blocks.append(block)
            self._cluster.changed.notify_all()
        return block

    def await_block(
        self,
        shapes: Mapping[str, Any],
        *,
        dtype,
        rule,
        group,
        consistency=None,
        nth=-1,
        push=None,
        pull=None,
        half=None,
        timeout_s=None,
    ):
        pieces = tuple(Piece(name, tuple(shape)) for name, shape in shapes.items())

        def find() -> FakeBlock | None:
            wanted = (group, np.dtype(dtype), rule, pieces)
            return next(
                (
                    block
                    for block in self._cluster.blocks
                    if (block.group_name, block.dtype, block.rule, block.pieces) == wanted
                ),
                None,
            )

        with self._cluster.changed:
            found = self._cluster.changed.wait_for(find, WAIT_S)
        assert consistency == self._cluster.policies.get(group), "all ranks say the same"
        if found is None:
            raise DefineTimeout(f"no rank defined {pieces}", fix="define it on rank 0")
        return found

    def gradient_slot(self, block: FakeBlock) -> np.ndarray:
        slots = self._slots.setdefault(
            block.id, [np.full(block.size, np.nan, block.dtype) for _ in range(2)]
        )
        slots.append(slots.pop(0))
        return slots[-1]

    def step(
        self,
        group,
        push,
        *,
        pull=(),
        tick=True,
        weight=1.0,
        skip=False,
        clip_norm=0.0,
        note=b"",
        numbered=lambda ticket: None,
    ) -> FakeTicket:
        for each in push:
            for i, piece in enumerate(each.block.pieces):
                active = each.active is None or i in each.active
                if active and not np.isfinite(each.block.part(each.gradient, i)).all():
                    if self.terms(group).refuses:
                        raise NonFinite(f"{piece.name} on rank {self._rank}", fix="lower lr")
                    skip = True
        self.clocks[group] = self.clocks.get(group, 0) + tick
        sent = Sent(self._rank, group, tuple(push), tick, weight, skip, clip_norm)
        with self._cluster.changed:
            self._cluster.sent.append(sent)
            ticket = FakeTicket(self._cluster, tuple(pull), skip)
            self._cluster.take(sent, ticket)
        self.tickets.append(ticket)
        outstanding = [t for t in self.tickets if not t.released]
        assert len(outstanding) <= 2, "more than two steps outstanding"
        self.tickets = outstanding
        numbered(ticket)
        return ticket

    def forget(self, ticket: FakeTicket) -> None:
        ticket.released = True

    def fetch(self, block: FakeBlock, field: int) -> tuple[np.ndarray, tuple[int, ...]]:
        array = block.state[field - 1] if field else block.values
        return array.copy(), tuple(block.counts)

    def store(self, block: FakeBlock, field: int, array, *, active=None, counts=None) -> None:
        target = block.state[field - 1] if field else block.values
        assert array.dtype == target.dtype
        assert array.shape == target.shape
        self._cluster.stored.append((self._rank, block, field))
        target[:] = array
        if counts is not None:
            block.counts[:] = counts


def on_all_ranks(cluster: FakeCluster, function: Callable[[Any], Any]) -> list[Any]:
    """Run a training function on every rank, each in a thread; finishers run at its end."""

    def run(rank: int) -> Any:
        worker = cluster.worker(rank)
        returned = function(worker)
        worker.optimizers.finish()
        cluster.leave(rank)
        return returned

    with ThreadPoolExecutor(cluster.workers) as pool:
        return list(pool.map(run, range(cluster.workers)))
