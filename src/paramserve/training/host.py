"""What optimizers and loaders need of the worker that they were made by."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from paramserve.client import Client
from paramserve.training.course import Course
from paramserve.training.leases import Leases
from paramserve.training.notices import Notices
from paramserve.training.optimizers import Optimizers

PassesByDataset = dict[tuple[int, ...], tuple[tuple[Any, ...], dict[Hashable, Any]]]
"""Passes by the identity of a dataset: what it is known by (weak references, which drop the entry,
or the object), and what its loaders have in common, by their arguments."""


class Host(Protocol):
    """A worker, as what it makes sees it; `paramserve.worker.Worker` is one.

    Attributes:
        client: the key-value API.
        seed: of the run, equal on all ranks.
        optimizers: those that were adopted.
        leases: its leased loaders.
        course: its passes over loaders.
        notices: what the user is told of a run that goes otherwise than it looks.
        passes: what loaders and samplers of one dataset have in common.
        registry: who owns the value of each tensor of the optimizers' models, once there is one; a
            `paramserve.pytorch.registry.Registry`.
        load_state: what the models start from, by the name of their optimizer.
    """

    client: Client
    seed: int
    optimizers: Optimizers
    leases: Leases
    course: Course
    notices: Notices
    passes: PassesByDataset
    registry: Any
    load_state: dict[str, dict[str, Any]]

    @property
    def rank(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def retiring(self) -> bool: ...
    @property
    def trains_alone(self) -> bool: ...
    @property
    def returned_before(self) -> bool: ...
    def loop_with_gradients(self) -> None:
        """A loader is iterated over with gradients on."""

    def go_on_drawing(self, *, first: bool = False) -> None:
        """Let the random generators go on where an older incarnation's were."""

    def agree_on_batches(self, batches: int) -> int:
        """Agree on the batches of the rank whose part is the smallest; all ranks call this."""

    def compare_size(self, arguments: tuple[object, ...], size: int) -> None:
        """Warn where a dataset has another length than on the other ranks."""

    def tell_extra_state(self, group: str, states: dict[str, Any]) -> None:
        """Give the run's result what modules keep beside parameters and buffers."""

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks are here."""
