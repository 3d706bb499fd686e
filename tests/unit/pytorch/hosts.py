"""What loaders and optimizers are given in place of a worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paramserve.training.course import Course
from paramserve.training.leases import Leases
from paramserve.training.optimizers import Optimizers


class FakeOptimizers(Optimizers):
    """Steps on these groups, with as many batches as it is told."""

    groups: tuple[str, ...] = ("model",)  # type: ignore[assignment]
    batches_per_step = 1  # type: ignore[assignment]


def host(client: Any, **about: Any) -> Any:
    """A `paramserve.training.host.Host` of this client, for loaders."""
    optimizers: Any = FakeOptimizers(client)
    made = SimpleNamespace(
        client=client,
        rank=0,
        workers=1,
        seed=3,
        incarnation=1,
        optimizers=optimizers,
        leases=Leases(client, optimizers),
        course=Course(client, optimizers),
        passes={},
        retiring=False,
        trains_alone=False,
        returned_before=False,
        loop_with_gradients=lambda: None,
        go_on_drawing=lambda **first: None,
        compare_size=lambda arguments, size: None,
        agree_on_batches=lambda batches: batches,
    )
    vars(made).update(about)
    return made
