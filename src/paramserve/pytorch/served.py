"""What an adopted optimizer does on the servers: define, push, pull, fetch and store."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paramserve.pytorch import state as torch_state
from paramserve.pytorch.block import ServedBlock
from paramserve.pytorch.buffers import BUFFERS_EVERY, Untrained
from paramserve.pytorch.hyper import HyperReader, Kind, ParamGroup, check_options
from paramserve.pytorch.layout import Layout, alias_map, lay_out, names_of

if TYPE_CHECKING:
    from paramserve.client import Client, Ticket
    from paramserve.core.partition import Block


class Worker(Protocol):
    """What an optimizer needs of its worker."""

    @property
    def rank(self) -> int: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def client(self) -> Client: ...
    @property
    def aliases(self) -> dict[str, dict[str, str]]:
        """For each adopted optimizer's name: further names of tied tensors, with the first."""
        ...

    @property
    def finishers(self) -> list[Callable[[], None]]:
        """Called in order when the training function has returned."""
        ...


@dataclass(frozen=True)
class Settings:
    """How one optimizer steps; the arguments of `worker.optimizer`, checked."""

    name: str
    overlap: bool
    weight: float | Callable[[], float] | None
    clip_norm: float | None
    buffers: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a text that is not empty, not {self.name!r}")
        if self.buffers not in ("rank0", "local"):
            raise ValueError(f'buffers must be "rank0" or "local", not {self.buffers!r}')
        if self.clip_norm is not None and not 0.0 < self.clip_norm < math.inf:
            raise ValueError(
                f"clip_norm must be a finite number above 0 or None, not {self.clip_norm!r}"
            )
        if not callable(self.weight):
            self.weight_now()

    def weight_now(self) -> float:
        """The weight of the gradients of this step.

        Raises:
            ValueError: it is not a finite number above 0. Nothing was sent.
        """
        if self.weight is None:
            return 1.0
        value = float(self.weight() if callable(self.weight) else self.weight)
        if not 0.0 < value < math.inf:
            raise ValueError(
                f"weight must be a finite number above 0 (samples behind a gradient), not {value}"
            )
        return value


class Plan(NamedTuple):
    """A block that is checked and not yet defined."""

    layout: Layout
    hyper: HyperReader


class Served:
    """One adopted optimizer's blocks, and its outstanding ticket.

    Args:
        worker: its `rank` decides who defines; it gets the aliases and the final call.
    """

    def __init__(
        self, worker: Worker, model: torch.nn.Module, kind: Kind, settings: Settings
    ) -> None:
        if settings.name in worker.aliases:
            raise ValueError(
                f"this worker has an optimizer called {settings.name!r} already: give the second "
                "one another name="
            )
        self._worker = worker
        self._client = worker.client
        self._model = model
        self._kind = kind
        self._settings = settings
        self._names = names_of(model)
        self._parts: list[ServedBlock] = []
        self._blocks: tuple[Block, ...] = ()
        self._pending: Ticket | None = None
        self._steps = 0
        self._warned = False

    # --- start and end ------------------------------------------------------------------------

    def start(self, groups: Sequence[ParamGroup], state: Mapping[Tensor, Any]) -> None:
        """Check everything, then define on rank 0 or wait for it, and take the values."""
        settings, worker = self._settings, self._worker
        plans = [each for index, group in enumerate(groups) for each in self._plan(index, group)]
        trained = {id(param) for group in groups for param in group["params"]}
        self._untrained = Untrained(
            self._client,
            self._model,
            f"{settings.name}.buffers",
            trained=trained,
            buffers=settings.buffers == "rank0",
        )
        fields = [torch_state.prepare(plan.layout, plan.hyper.defined, state) for plan in plans]
        self._define(plans)
        if state and worker.incarnation <= 1:  # a restarted worker finds the servers' own
            self._store(fields)
        self._untrained.start(define=worker.rank == 0)
        worker.aliases[settings.name] = alias_map(self._model)
        worker.finishers.append(self.finish)

    def finish(self) -> None:
        """Install what is outstanding; on rank 0 assign buffers and untrained parameters."""
        self.install_pending()
        if self._worker.rank == 0:
            self._untrained.assign(everything=True)

    def add_group(self, index: int, group: ParamGroup) -> None:
        """Define the blocks of one more parameter group, as `start` does."""
        self.install_pending()
        self._define(self._plan(index, group))

    def _plan(self, index: int, group: ParamGroup) -> list[Plan]:
        check_options(group)
        layouts = lay_out(self._names, index, group["params"])
        return [Plan(layout, HyperReader(self._kind, group)) for layout in layouts]

    def _define(self, plans: Sequence[Plan]) -> None:
        client, name = self._client, self._settings.name
        parts = []
        for layout, hyper in plans:
            if self._worker.rank == 0:
                block = client.define(layout.values(), rule=hyper.defined, group=name)
            else:
                block = client.await_block(
                    layout.shapes(), dtype=layout.array_dtype, rule=hyper.defined, group=name
                )
            parts.append(ServedBlock(block, layout, hyper))
        self._parts += parts
        self._blocks += tuple(part.block for part in parts)
        ticket = client.step(name, (), pull=[part.block for part in parts], tick=False)
        with torch.no_grad():
            self._install(ticket, parts)

    # --- a step ---------------------------------------------------------------------------------

    def step(
        self, groups: Sequence[ParamGroup], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Push the gradients and pull the values; called under `torch.no_grad()`.

        Args:
            grad_scale: what `GradScaler` multiplied the loss by, if it has not divided yet.
            found_inf: not zero where `GradScaler` found Inf or NaN: this step is skipped.
        """
        if not self._warned:
            self._warn_of_changes()
        client, settings = self._client, self._settings
        weight = settings.weight_now()
        if found_inf is not None and bool(found_inf):
            ticket = client.step(settings.name, (), pull=self._blocks, weight=weight, skip=True)
        else:
            unscale = None
            if grad_scale is not None:
                # Reciprocal in float64, then rounded: as GradScaler.unscale_ does.
                unscale = float(grad_scale.double().reciprocal().float())
            push = [part.gather(client, groups[part.layout.group], unscale) for part in self._parts]
            ticket = client.step(
                settings.name,
                push,
                pull=self._blocks,
                weight=weight,
                clip_norm=settings.clip_norm if settings.clip_norm is not None else 0.0,
            )
        ready: Ticket | None = ticket
        if settings.overlap:
            ready, self._pending = self._pending, ticket
        if ready is not None:
            self._install(ready, self._parts)
        self._steps += 1
        if self._worker.rank == 0 and self._steps % BUFFERS_EVERY == 0:
            self._untrained.assign(everything=False)

    def install_pending(self) -> None:
        """Wait for the push that `overlap` left outstanding, and install its values."""
        ticket, self._pending = self._pending, None
        if ticket is not None:
            with torch.no_grad():
                self._install(ticket, self._parts)

    def _install(self, ticket: Ticket, parts: Sequence[ServedBlock]) -> None:
        values = ticket.result().values
        try:
            for part in parts:
                part.scatter(values[part.block.id])
        finally:
            ticket.release()

    def _warn_of_changes(self) -> None:
        for part in self._parts:
            name = part.changed_outside()
            if name is not None:
                self._warned = True
                warnings.warn(
                    f"parameter {name!r} was changed outside optimizer.step(): the values live on "
                    "the servers, and the next ones overwrite it. Load weights before "
                    "worker.optimizer(...), or write them with worker.client.assign(...)",
                    stacklevel=5,
                )
                return

    # --- state ------------------------------------------------------------------------------------

    def fetch_state(self, groups: Sequence[ParamGroup]) -> torch_state.State:
        """State of all parameters that have had an update, as torch would hold it."""
        self.install_pending()
        state: torch_state.State = {}
        with torch.no_grad():
            for part in self._parts:
                rule = part.hyper.rule(groups[part.layout.group])
                state.update(torch_state.fetch(self._client, part.block, part.layout, rule))
        return state

    def store_state(self, groups: Sequence[ParamGroup], state: Mapping[Tensor, Any]) -> None:
        """On rank 0, overwrite the state on the servers with this one; the others only check it."""
        self.install_pending()
        self._store(
            [
                torch_state.prepare(p.layout, p.hyper.rule(groups[p.layout.group]), state)
                for p in self._parts
            ]
        )

    def _store(self, fields: Sequence[list[torch_state.Field]]) -> None:
        if self._worker.rank == 0:
            for part, arrays in zip(self._parts, fields, strict=True):
                for field in arrays:
                    field.store(self._client, part.block)
