"""Optimizers that step by themselves and meet on the servers, as `ps.LocalSteps` has it.

A worker's own torch optimizer makes the steps, on the worker's own values. After each `every` of
them, or fewer where they are scaled by its speed, there is one exchange, which is one clock of the
group. Who waits for whom is the policy's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from paramserve.client import BlockPush
from paramserve.client.pace import Pace
from paramserve.consistency.built_in import AsyncLocalSteps, ElasticAverage, LocalSteps
from paramserve.pytorch.adopted import Adopted, Plan, reciprocal
from paramserve.pytorch.block import AdoptedBlock, Layout, check_unscalable
from paramserve.pytorch.settings import Settings
from paramserve.rules.delayed_nesterov import DelayedNesterov
from paramserve.rules.sgd import SGD
from paramserve.rules.torch_kinds import ParamGroup

if TYPE_CHECKING:
    from paramserve.client import Client, Ticket
    from paramserve.client.ticket import Outcome
    from paramserve.core.partition import Block
    from paramserve.training.host import Host

LocalPolicy = LocalSteps | AsyncLocalSteps | ElasticAverage
B = TypeVar("B", bound=AdoptedBlock)


class Local(Adopted[B]):
    """Counts a worker's own steps, and exchanges after each `every` of them.

    Raises:
        ValueError: `overlap` was asked for.
    """

    def __init__(
        self, worker: Host, model: torch.nn.Module, settings: Settings, policy: LocalPolicy
    ) -> None:
        self.every = policy.steps_per_clock
        super().__init__(worker, model, settings)
        if settings.overlap:
            raise ValueError(
                f"overlap=True does not go with {type(policy).__name__}: its own steps run between "
                "two exchanges already, and each goes on from the values of the exchange "
                "before. Leave overlap out, or raise every"
            )
        self._policy = policy
        self.count = self.every
        """Own steps until the next exchange: fewer than `every` where they are scaled."""
        self.since = 0
        """Own steps since the last exchange."""
        self._samples = 0.0
        """Behind them, together."""
        self.optimizer: Callable[[], Optimizer | None] = lambda: None
        """Optimizer that makes the own steps; None: there is none any more."""

    def start(self, groups: Sequence[ParamGroup], state: Mapping[Tensor, Any]) -> None:
        """Start as `Adopted.start`; from then on leased loaders know of the own steps."""
        if self.tables.find(groups):
            raise ValueError(
                f"{type(self._policy).__name__} does not step tables, and the model has modules on "
                'some: use dense="local", or another policy for the dense layers'
            )
        super().start(groups, state)
        self._worker.optimizers.step_alone(self)

    def settle(self) -> None:
        """Exchange once more what own steps have changed since."""
        if self.since:
            with torch.no_grad():
                self._exchange()

    def finish(self) -> None:
        """`settle`; then as `Adopted.finish`."""
        self.settle()
        super().finish()

    def run(
        self,
        own_step: Callable[[Callable[[], Any] | None], Any],
        closure: Callable[[], Any] | None,
        groups: Sequence[ParamGroup],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> Any:
        """Make one own step, and the exchange if it is time; what the own step returned.

        Where `GradScaler` found Inf or NaN nothing is changed, but the step counts: the ranks find
        them at different steps, and are to exchange at the same ones.

        Args:
            own_step: of the torch optimizer's class; takes a closure or None.
            grad_scale: what the gradients are multiplied by still; None: nothing.
            found_inf: not zero, NaN included: this step is left out.
        Raises:
            ValueError: the weight. The own step was made, and does not count.
            TypeError: gradients are float16 and to be unscaled. No step was made.
            ValueError, RuntimeError: as `Adopted.regroup`. No step was made.
        """
        if self._registry.begins:
            self._warn_of_repeats()
        self.regroup(groups)
        loss = None
        self.schedules.before_step(groups)
        if found_inf is None or not bool(found_inf):
            params = [param for group in groups for param in group["params"]]
            if grad_scale is not None:
                for part in self._parts:
                    check_unscalable(part.layout)
                unscale(params, reciprocal(grad_scale))
            self._before_own_step()
            loss = own_step(self._clipping(params, closure))
        self.since += 1
        try:
            self._weigh()
        except Exception:
            self.since -= 1
            raise
        self.schedules.count_step()
        self._stepped(groups)
        if self.since >= self.count:
            with torch.no_grad():
                self._exchange()
        self._count_step()
        return loss

    def _weigh(self) -> None:
        """Count the samples behind an own step."""
        samples = self._worker.leases.step_samples
        if self._settings.weight is None and samples is not None:
            self._samples = samples  # the loader counts from exchange to exchange
        else:
            self._samples += self._settings.weight_now(None)

    def _clipping(
        self, params: Sequence[Tensor], closure: Callable[[], Any] | None
    ) -> Callable[[], Any] | None:
        """Clip the gradients: now, or each time that the closure has made them."""
        norm = self._settings.clip_norm
        if norm is None:
            return closure
        if closure is None:
            torch.nn.utils.clip_grad_norm_(params, norm)
            return None

        def clipped() -> Any:
            loss = closure()
            torch.nn.utils.clip_grad_norm_(params, norm)
            return loss

        return clipped

    def _begin_state_anew(self) -> None:
        """Forget what the own optimizer has of a parameter, if that holds NaN or Inf: no step would
        ever change it back."""
        optimizer = self.optimizer()
        state: MutableMapping[Any, Any] = optimizer.state if optimizer is not None else {}
        for param, entry in list(state.items()):
            tensors = [each for each in entry.values() if isinstance(each, Tensor)]
            if not all(map(_is_finite, tensors)):
                del state[param]

    def _before_own_step(self) -> None:
        """Called before the values change."""

    def _stepped(self, groups: Sequence[ParamGroup]) -> None:
        """What the exchange needs of an own step; called after each."""

    @abstractmethod
    def _exchange(self) -> None:
        """Push, tick and pull in one message to each shard.

        Raises:
            NonFinite: this worker's values hold NaN or Inf. Nothing was sent or counted.
        """

    def _send(self, push: Sequence[BlockPush], pull: Sequence[Block], weight: float) -> None:
        """Push, tick and pull, and count from here.

        Args:
            weight: samples behind what is pushed.
        """
        self._forget()
        note = self.schedules.note()
        options: dict[str, Any] = {"note": note} if note else {}
        self._client.dense.step(
            self._settings.name,
            push,
            pull=pull,
            weight=weight,
            numbered=self._numbered,
            **options,
        )

    def _numbered(self, ticket: Ticket) -> None:
        super()._numbered(ticket)
        self.since, self._samples = 0, 0.0
        self.schedules.confirm_note()


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def unscale(params: Sequence[Tensor], factor: float) -> None:
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                param.grad.mul_(factor)


# --- LocalSteps, AsyncLocalSteps ---------------------------------------------------------------


class StartedBlock(AdoptedBlock):
    """A block that remembers the values from which the own steps started."""

    def __init__(self, block: Block, layout: Layout) -> None:
        super().__init__(block, layout)
        self._starts = [torch.empty_like(param) for param in layout.params]

    def scatter(self, values: npt.NDArray[Any]) -> None:
        """Copy the block's values [size] into the parameters: the next steps start there."""
        super().scatter(values)
        self.start_here()

    def start_here(self) -> None:
        """The next difference has the own steps from here on."""
        torch._foreach_copy_(self._starts, self._params)

    def merge(self, values: npt.NDArray[Any], stays: float) -> None:
        """Scatter values, but keep this part of the parameters' own: the next difference has it,
        too."""
        if stays == 0.0:
            self.scatter(values)
            return
        torch._foreach_copy_(self._starts, self._views.of(values)[1])
        for param, start in zip(self._params, self._starts, strict=True):
            param.lerp_(start.to(param.device), 1.0 - stays)

    def difference(self, client: Client) -> BlockPush:
        """What the own steps have subtracted: start - now, of every parameter."""
        slot = client.dense.gradient_slot(self.block)
        views = self._views.of(slot)[1]
        for view, start, param in zip(views, self._starts, self._params, strict=True):
            view.copy_(start.to(param.device) - param)
        return BlockPush(self.block, slot)


class LocalStepping(Local[StartedBlock]):
    """Own steps of `ps.LocalSteps`, whose servers apply the outer rule to the mean difference, and
    of `ps.AsyncLocalSteps`, where they apply it to each."""

    def __init__(
        self,
        worker: Host,
        model: torch.nn.Module,
        settings: Settings,
        policy: LocalSteps | AsyncLocalSteps,
    ) -> None:
        coded = replace(
            settings,
            push=settings.push if settings.push is not None else policy.push,
            pull=settings.pull if settings.pull is not None else policy.pull,
        )
        super().__init__(worker, model, coded, policy)
        self._outer = policy.outer
        self._fragments, self._stays = policy.fragments, policy.merge
        self._delay = policy.delay
        """Own steps until the values of the exchange that is on its way come: below `count`."""
        self._pace: Pace | None = None
        if isinstance(policy, AsyncLocalSteps) and policy.scale_steps:
            self._pace = Pace(worker.client, settings.name)
        self._behind = [0.0] * self._fragments
        """Samples behind the own steps since each was sent, until the last exchange."""
        self._changed: set[int] = set()
        """Fragments that own steps have changed since they were sent."""
        self._turn: set[int] = set()
        """Fragments of the exchange that is about to be sent, or was sent last."""
        self._turn_parts: Sequence[StartedBlock] = ()
        """Blocks of these."""
        self._pushed: Sequence[StartedBlock] = ()
        """Blocks that were sent, and have to start where their difference ended."""
        self._expects = False
        """Whether values of an exchange are to come into the model."""

    def start(self, groups: Sequence[ParamGroup], state: Mapping[Tensor, Any]) -> None:
        """Start as `Local.start`, and divide the tensors into fragments.

        Raises:
            ValueError: there are more fragments than tensors.
        """
        super().start(groups, state)
        if isinstance(self._outer, DelayedNesterov):
            self._worker.notices.warn_of_pushes_unlike_workers(int(self._outer.pushes))
        if len(self._parts) < self._fragments:
            raise ValueError(
                f"fragments={self._fragments} of {type(self._policy).__name__}, and "
                f"{self._settings.name!r} has only {len(self._parts)} tensors to exchange"
            )

    def settle(self) -> None:
        """Exchange all that own steps have changed since, whichever fragment's turn it is."""
        with torch.no_grad():
            self._arrive()
            if self._changed:
                self._exchange_parts(self._changed)
                self._arrive()

    def _plan(self, index: int, group: ParamGroup) -> list[Plan[StartedBlock]]:
        return [
            Plan(layout, self._outer, partial(StartedBlock, layout=layout))
            for layout in self._layouts(index, group)
        ]

    def _cut(self, layout: Layout) -> Iterator[Layout]:
        """Runs of its tensors, one for each fragment, of about as many values."""
        sizes = [param.numel() for param in layout.params]
        total, before, runs = max(sum(sizes), 1), 0, dict[int, list[str]]()
        for name, size in zip(layout.names, sizes, strict=True):
            runs.setdefault(self._fragments * before // total, []).append(name)
            before += size
        yield from map(layout.only, runs.values())

    def _before_own_step(self) -> None:
        self._start_where_pushed()
        self._changed.update(range(self._fragments))

    def _start_where_pushed(self) -> None:
        """What was sent is in no other difference, also where an interrupt or a timeout ended the
        wait for its answer."""
        if self._pushed:
            with torch.no_grad():
                for part in self._pushed:
                    part.start_here()
            self._pushed = ()

    def _stepped(self, groups: Sequence[ParamGroup]) -> None:
        if self._pace is not None:
            self._pace.step()
        if self._expects and self.since == self._delay:
            with torch.no_grad():
                self._arrive()

    def _exchange(self) -> None:
        clock = self._client.steps.clocks.get(self._settings.name, 0)
        self._exchange_parts({clock % self._fragments})
        self._scale()
        if not self._delay:
            self._arrive()

    def _scale(self) -> None:
        """Decide how many own steps come before the next exchange."""
        pace, policy = self._pace, self._policy
        if pace is None or not isinstance(policy, AsyncLocalSteps):
            return
        pace.exchanged()
        if pace.speed and pace.fastest:
            # The fastest worker is compared with itself as it was: it may be a little slower now.
            self.count = policy.steps_at(max(pace.speed, pace.reported_speed), pace.fastest)
            self._delay = min(policy.delay, self.count - 1)

    def _exchange_parts(self, fragments: set[int]) -> None:
        """Send what has changed of these fragments, and ask for their values.

        Blocks go by turns, in the order in which they were defined: so does a rank that comes late.
        """
        self._start_where_pushed()
        self._expects = False
        self._turn = fragments
        self._turn_parts = [
            part for nth, part in enumerate(self._parts) if nth % self._fragments in fragments
        ]
        push = [part.difference(self._client) for part in self._turn_parts]
        weight = max(self._behind[fragment] for fragment in fragments) + self._samples
        self._send(push, [part.block for part in self._turn_parts], weight)

    def _numbered(self, ticket: Ticket) -> None:
        behind = [before + self._samples for before in self._behind]
        super()._numbered(ticket)
        self._behind = [0.0 if f in self._turn else each for f, each in enumerate(behind)]
        self._changed = self._changed - self._turn
        self._pushed, self._expects = self._turn_parts, True

    def _arrive(self) -> None:
        """Wait for the exchange that is on its way, if there is one, and take its values. An
        interrupt or a timeout leaves them out: own steps that follow would be lost in them."""
        if self._expects:
            self._expects = False
            self._take_oldest()
            self._pushed = ()

    def _install(self, outcome: Outcome) -> None:
        if outcome.skipped and not all(part.is_finite() for part in self._parts):
            self._begin_anew()
            return
        for part in self._turn_parts:
            part.merge(outcome.values[part.block.id], self._stays)

    def _begin_anew(self) -> None:
        """Own values that hold NaN or Inf would never recover, and spoil those of the other
        fragments with the next own step: take the servers' values, whole and of all."""
        self._pull(self._parts)
        self._changed = set()
        self._behind = [0.0] * self._fragments
        self._samples = 0.0
        self._begin_state_anew()


# --- ElasticAverage ----------------------------------------------------------------------------


class ElasticBlock(AdoptedBlock):
    """A block whose values here are the worker's own; the servers have the center."""

    def own_values(self, client: Client, alpha: float) -> BlockPush:
        """Copy all parameters into a slot, for the center to move towards them by `alpha`."""
        slot = client.dense.gradient_slot(self.block)
        torch._foreach_copy_(self._views.of(slot)[1], self._params)
        return BlockPush(self.block, slot, None, moving(alpha).hyper())

    def approach(self, center: npt.NDArray[Any], alpha: float) -> None:
        """Move the parameters x by alpha * (c - x), where c is the center before the exchange.

        One message to each shard is enough: its answer has the center after this very push, and
        no other push comes between the two. With c' = c + alpha * (x - c) that is

            x - c' = (1 - alpha) * (x - c),  so  alpha * (x - c) = alpha / (1 - alpha) * (x - c')

        exactly, whatever the other workers did to c before; x is what was pushed, for nothing
        steps while the answer is on its way. What is left is rounding.
        """
        share = alpha / (1.0 - alpha)
        for param, view in zip(self._params, self._views.of(center)[1], strict=True):
            param.lerp_(view.to(param.device), share)


class Elastic(Local[ElasticBlock]):
    """Own steps of `ps.ElasticAverage`: own values and the servers' center attract each other.

    Source: see there. The exchange comes after the own step, so that the next gradient is taken at
    the moved values; in the paper's algorithm 1 it comes between a gradient and its step.
    """

    def __init__(
        self, worker: Host, model: torch.nn.Module, settings: Settings, policy: ElasticAverage
    ) -> None:
        super().__init__(worker, model, settings, policy)
        self._rho = policy.rho
        self._lrs: dict[int, float] = {}
        """Learning rate of each parameter group in its last own step; a scheduler may change it."""
        self._moved: Mapping[int | None, float] = {}
        """Part of the distance by which the center moves in the exchange under way."""

    def _plan(self, index: int, group: ParamGroup) -> list[Plan[ElasticBlock]]:
        self._lrs[index] = _lr_of(index, group)
        self._alpha(index)  # checked
        # Each push has its own rate, so workers of different lr can share a block.
        rule = moving(0.0)
        return [
            Plan(layout, rule, partial(ElasticBlock, layout=layout))
            for layout in self._layouts(index, group)
        ]

    def _stepped(self, groups: Sequence[ParamGroup]) -> None:
        self._lrs = {index: _lr_of(index, group) for index, group in enumerate(groups)}

    def _alpha(self, index: int) -> float:
        lr = self._lrs[index]
        alpha = lr * self._rho
        if not 0.0 <= alpha < 1.0:
            raise ValueError(
                f"ElasticAverage moves the values by lr * rho of their distance, which must be at "
                f"least 0 and below 1; in parameter group {index} it is lr {lr:g} * rho "
                f"{self._rho:g} = {alpha:g}. Lower rho (the paper takes lr * rho = 0.9 / workers), "
                "or lr"
            )
        return alpha

    def _exchange(self) -> None:
        alphas: dict[int | None, float] = {index: self._alpha(index) for index in self._lrs}
        alphas[None] = 0.0  # in no group any more: neither side moves
        push = [part.own_values(self._client, alphas[part.group]) for part in self._parts]
        self._moved = alphas
        self._send(push, self._blocks, self._samples)
        self._take_oldest()

    def _install(self, outcome: Outcome) -> None:
        for part in self._parts:
            center = outcome.values[part.block.id]
            if outcome.skipped:
                # on_nonfinite="skip": own values with NaN or Inf in them would never recover.
                part.scatter(center)
            else:
                part.approach(center, self._moved[part.group])
        if outcome.skipped:
            self._begin_state_anew()


def moving(alpha: float) -> SGD:
    """The rule with which a center c moves towards a pushed x: c -= alpha * (c - x)."""
    return SGD(lr=alpha, weight_decay=1.0, maximize=True)


def _lr_of(index: int, group: ParamGroup) -> float:
    lr = group.get("lr")
    if lr is None:
        raise ValueError(
            f"ElasticAverage moves the values by lr * rho, but parameter group {index} of this "
            "optimizer has no lr. Use one that has, or ps.LocalSteps"
        )
    return float(lr)


def local(
    worker: Host, model: torch.nn.Module, settings: Settings, policy: LocalPolicy
) -> LocalStepping | Elastic:
    """What makes the own steps and the exchanges of this policy."""
    if isinstance(policy, ElasticAverage):
        return Elastic(worker, model, settings, policy)
    return LocalStepping(worker, model, settings, policy)
