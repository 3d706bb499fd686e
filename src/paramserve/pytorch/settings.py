"""How one adopted optimizer steps: what `worker.optimizer` was given, checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paramserve.consistency.base import Policy
from paramserve.pytorch.codecs import Codecs, CodecsByName


@dataclass(frozen=True)
class Settings:
    """How one optimizer steps; the arguments of `worker.optimizer`, checked."""

    name: str
    overlap: bool
    weight: float | Callable[[], float] | None
    clip_norm: float | None
    buffers: str
    consistency: Policy | None = None
    push: Codecs | None = None
    pull: Codecs | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a text that is not empty, not {self.name!r}")
        if self.buffers not in ("rank0", "mean", "local"):
            raise ValueError(f'buffers must be "rank0", "mean" or "local", not {self.buffers!r}')
        if self.clip_norm is not None and not 0.0 < self.clip_norm < math.inf:
            raise ValueError(
                f"clip_norm must be a finite number above 0 or None, not {self.clip_norm!r}"
            )
        if self.consistency is not None and not isinstance(self.consistency, Policy):
            raise TypeError(
                "consistency must be a policy, as in ps.Sync(), or None for the run's, not "
                f"{self.consistency!r}"
            )
        CodecsByName.of(self.push, "push")
        CodecsByName.of(self.pull, "pull")
        if self.weight is not None and not callable(self.weight):
            self.weight_now(None)

    def weight_now(self, samples: float | None) -> float:
        """The weight of the gradients of this step.

        Args:
            samples: behind them, as the worker's loader knows; None: it does not.
        Raises:
            ValueError: it is not a finite number above 0. Nothing was sent.
        """
        if self.weight is None:
            value = float(samples) if samples is not None else 1.0
        else:
            value = float(self.weight() if callable(self.weight) else self.weight)
        if not 0.0 < value < math.inf:
            raise ValueError(
                f"weight must be a finite number above 0 (samples behind a gradient), not {value}"
            )
        return value
