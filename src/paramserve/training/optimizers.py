"""The adopted optimizers of one worker: on what they step, and what they want to be called for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from paramserve.consistency.built_in import OWN_STEPS
from paramserve.observe.history import History

if TYPE_CHECKING:
    from paramserve.client import Client


class OwnSteps(Protocol):
    """An optimizer that steps by itself, and exchanges after each `every` steps.

    Attributes:
        since: own steps since the last exchange.
    """

    @property
    def every(self) -> int: ...
    @property
    def since(self) -> int: ...
    def settle(self) -> None:
        """Exchange what own steps have changed since the last exchange."""


class Optimizers:
    """The adopted optimizers of one worker, in the order in which they were adopted."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._histories: dict[str, History] = {}
        self._stepped: list[str] = []
        self._replaced: set[str] = set()
        self._own_steps: list[OwnSteps] = []
        self._refreshers: list[Callable[[], None]] = []
        self._finishers: list[Callable[[], None]] = []

    @property
    def histories(self) -> Mapping[str, History]:
        """Outcomes of each optimizer's steps, by its name."""
        return MappingProxyType(self._histories)

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups that the worker steps on, of dense layers and of tables. Before an optimizer
        is adopted: "model", where one is put, if steps are known there, else "default"."""
        if self._stepped or self._histories:
            return tuple(self._stepped or self._histories)
        return ("model",) if self._client.steps.clocks.get("model") else ("default",)

    @property
    def batches_per_step(self) -> int:
        """Batches of one clock on the first group, with one for each call of the optimizer."""
        policy = self._client.steps.terms(self.groups[0]).policy
        return policy.steps_per_clock if isinstance(policy, OWN_STEPS) else 1

    @property
    def own_steps(self) -> Sequence[OwnSteps]:
        """Optimizers that step by themselves."""
        return self._own_steps

    def adopt(
        self, name: str, groups: Iterable[str], history: History, finish: Callable[[], None]
    ) -> None:
        """Add an optimizer that steps from now on.

        Args:
            groups: whose clocks its steps end.
            finish: called at the worker's end.
        """
        self._histories[name] = history
        self.step_with(groups)
        self.finish_by(finish)

    def step_with(self, groups: Iterable[str]) -> None:
        """Steps of an adopted one end the clocks of these groups, too."""
        self._stepped.extend(groups)

    def step_alone(self, optimizer: OwnSteps) -> None:
        """Note that an adopted optimizer steps by itself."""
        self._own_steps.append(optimizer)

    def replace(self, name: str) -> None:
        """Note that an optimizer steps no more: another one has parameters of it."""
        self._replaced.add(name)

    def steps(self, group: str) -> bool:
        """Whether steps are still made on a group."""
        return group not in self._replaced

    def settle(self) -> None:
        """Exchange what own steps have changed since the last exchange."""
        for each in self._own_steps:
            each.settle()

    def refresh_by(self, function: Callable[[], None]) -> None:
        """Call a function that takes present values, when the worker took no part for a while."""
        self._refreshers.append(function)

    def refresh(self) -> None:
        """The worker took no part for a while: take present values."""
        for function in self._refreshers:
            function()

    def finish_by(self, function: Callable[[], None]) -> None:
        """Call a function when the training function has returned, in this order."""
        self._finishers.append(function)

    def finish(self) -> None:
        """Call what adopted optimizers do at the end: the training function has returned."""
        for function in self._finishers:
            function()
