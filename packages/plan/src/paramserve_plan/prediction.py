"""What a play of the model says, in figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class StalenessFigures(NamedTuple):
    """Updates between reading values and applying the gradient from them, over all pushes."""

    mean: float
    p95: int
    largest: int


@dataclass(frozen=True)
class Prediction:
    """Means over the modelled steps, without the first ones.

    A step is one gradient of one worker; a policy with `every` exchanges after that many.

    Attributes:
        step_s: of one worker.
        steps_per_s: of all workers together.
        compute_share, waiting_share, exchange_share: of a worker's time: computing; held back
            because of other workers; all else (links, servers, messages). Their sum is 1.
        dropped_share: of the gradients, those that came too late or were too stale.
        worker_bytes, server_bytes: over one link in one direction, in one step of all workers.
        worker_link_use, server_link_use: of each direction of each link.
        server_use: of the busiest server's processor.
        events: things that happened in the model.
    """

    workers: int
    shards: int
    step_s: float
    steps_per_s: float
    compute_share: float
    waiting_share: float
    exchange_share: float
    dropped_share: float
    staleness: StalenessFigures
    worker_bytes: float
    server_bytes: float
    worker_link_use: float
    server_link_use: float
    server_use: float
    events: int

    @property
    def limit(self) -> str:
        """What most of the time goes into: the part that is used nearly always, or the largest."""
        uses = {
            "server links": self.server_link_use,
            "worker links": self.worker_link_use,
            "servers": self.server_use,
        }
        part, use = max(uses.items(), key=lambda each: each[1])
        if use > BUSY:
            return part
        shares = {
            "compute": self.compute_share,
            "waiting": self.waiting_share,
            part: self.exchange_share,
        }
        return max(shares.items(), key=lambda each: each[1])[0]


BUSY = 0.85
"""A part that is used for more than this share of the time is what limits all."""


def staleness_figures(counts: Mapping[int, int]) -> StalenessFigures:
    """Figures of pushes counted by their staleness."""
    total = sum(counts.values())
    if not total:
        return StalenessFigures(0.0, 0, 0)
    mean = sum(staleness * count for staleness, count in counts.items()) / total
    ordered = sorted(counts)
    seen = accumulate(counts[staleness] for staleness in ordered)
    p95 = next(s for s, pushes in zip(ordered, seen, strict=True) if pushes >= 0.95 * total)
    return StalenessFigures(mean, p95, max(counts))
