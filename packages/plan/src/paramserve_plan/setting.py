"""What is planned: how many workers and shards, their links, their compute, what servers cost."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import exp, log, sqrt

from paramserve.config import check_count, check_number

GBPS = 1e9 / 8
"""Bytes a second in one Gb/s."""
MB = 1_000_000


@dataclass(frozen=True)
class Network:
    """Every worker and every server has one link, full duplex; in between nothing is short.

    Args:
        worker_gbps, server_gbps: of each direction of each link.
        latency_s: one way, of every message.
    """

    worker_gbps: float = 10.0
    server_gbps: float = 10.0
    latency_s: float = 50e-6

    def __post_init__(self) -> None:
        for name in ("worker_gbps", "server_gbps"):
            check_number(f"{name} of Network", getattr(self, name), above=0.0)
        check_number("latency_s of Network", self.latency_s)


@dataclass(frozen=True)
class Compute:
    """How long a worker takes from values to gradient.

    Args:
        step_s: mean of a worker of average speed that does not straggle.
        spread: standard deviation over mean of the workers' speeds, which they keep: a lognormal
            factor for each worker.
        jitter: the same of each worker's single steps.
        straggler_p, straggler_factor: a step takes `straggler_factor` times longer with this
            probability.
        slow, slow_factor: so many workers take `slow_factor` times longer in each step.
    """

    step_s: float = 0.1
    spread: float = 0.0
    jitter: float = 0.0
    straggler_p: float = 0.0
    straggler_factor: float = 1.0
    slow: int = 0
    slow_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("step_s", "spread", "jitter", "straggler_p"):
            check_number(f"{name} of Compute", getattr(self, name))
        for name in ("straggler_factor", "slow_factor"):
            check_number(f"{name} of Compute", getattr(self, name), above=0.0)
        check_count("slow of Compute", self.slow, least=0)
        if self.straggler_p > 1.0:
            raise ValueError(f"straggler_p of Compute must be at most 1, not {self.straggler_p}")

    def mean_of(self, rank: int, source: random.Random) -> float:
        """A worker's own mean step, in seconds: drawn once for each worker."""
        own = self.step_s * lognormal(self.spread, source)
        return own * self.slow_factor if rank < self.slow else own

    def draw(self, mean_s: float, source: random.Random) -> float:
        """One step of a worker with this mean."""
        taken = mean_s
        if self.jitter:
            taken *= lognormal(self.jitter, source)
        if self.straggler_p and source.random() < self.straggler_p:
            taken *= self.straggler_factor
        return taken


def lognormal(spread: float, source: random.Random) -> float:
    """A factor of mean 1 with this standard deviation."""
    if not spread:
        return 1.0
    variance = log(1.0 + spread * spread)
    return exp(source.gauss(-variance / 2, sqrt(variance)))


@dataclass(frozen=True)
class Costs:
    """Processor time, in seconds. A server handles its messages one after the other.

    Args:
        message_s: of each message, at a worker and at a server.
        byte_s: of one pass of a server over one byte: to check, add, update or copy it.
        cores: workers and servers share so many; None: each has one of its own.
        contention: a pass takes so many times longer while another process on these cores works.
    """

    message_s: float = 20e-6
    """A `push_pull` of 8 KB takes about 100 us on a common server, in two messages at each end."""
    byte_s: float = 0.1e-9
    """10 GB/s: what one core reads from memory."""
    cores: int | None = None
    contention: float = 1.0

    def __post_init__(self) -> None:
        check_number("message_s of Costs", self.message_s)
        check_number("byte_s of Costs", self.byte_s)
        check_number("contention of Costs", self.contention, above=0.0)
        if self.cores is not None:
            check_count("cores of Costs", self.cores)


@dataclass(frozen=True)
class Setting:
    """A cluster and its work.

    Args:
        workers, shards: how many; each shard is on a server of its own.
        model_bytes: of the values on the servers: what each worker pushes, and pulls, in each step.
        push_share, pull_share: the part of them that a link carries, where a codec encodes them.
    """

    workers: int
    shards: int
    model_bytes: float
    network: Network = field(default_factory=Network)
    compute: Compute = field(default_factory=Compute)
    costs: Costs = field(default_factory=Costs)
    push_share: float = 1.0
    pull_share: float = 1.0

    def __post_init__(self) -> None:
        check_number("push_share", self.push_share, above=0.0)
        check_number("pull_share", self.pull_share, above=0.0)
        check_count("workers", self.workers)
        check_count("shards", self.shards)
        check_number("model_bytes", self.model_bytes)

    @property
    def link_bytes(self) -> float:
        """What one worker's link carries in a step, in the direction in which it is more."""
        return self.model_bytes * max(self.push_share, self.pull_share)

    @property
    def worker_link_s(self) -> float:
        """What one worker's gradients, or its values, take over its own link."""
        return self.link_bytes / (self.network.worker_gbps * GBPS)

    @property
    def server_link_s(self) -> float:
        """What all workers' gradients take into one server's link, or their values out of it."""
        into_one = self.workers * self.link_bytes / self.shards
        return into_one / (self.network.server_gbps * GBPS)

    @property
    def one_way_s(self) -> float:
        """All workers' gradients to the servers, or the values back: by the narrower link."""
        return max(self.worker_link_s, self.server_link_s)
