"""What goes wrong with whole processes and ways: what a script says, and what the seed draws.

A scripted fault happens once: right after the named worker, or any, has sent its step of `clock`
to the first shard, so in the middle of a push; without a clock at the very beginning. It names
workers by rank: whichever incarnation has it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

from paramserve.consistency.base import Policy

if TYPE_CHECKING:
    from paramserve_testing.client import SimulatedClient
    from paramserve_testing.simulated import SimulatedCluster

COORDINATOR = "coordinator"
ALWAYS_S = 1e6
LONG_STALL_S = 0.7
"""Longer than what the coordinator takes for a pause of its own process."""


def worker_place(rank: int) -> str:
    """Where the worker of a rank is; clients without a rank are in one place."""
    return f"worker {rank}" if rank >= 0 else "readers"


def shard_place(shard: int) -> str:
    """Where a shard's server is."""
    return f"shard {shard}"


@dataclass(frozen=True, kw_only=True)
class ScriptedFault(ABC):
    """One entry of `Scenario.script`.

    Attributes:
        worker: a rank; None: any.
        clock: of the step that causes it; None: it happens at the beginning.
    """

    worker: int | None = None
    clock: int | None = None

    @property
    def lasts_s(self) -> float:
        """Virtual seconds until it is over."""
        return 0.0

    def is_due(self, client: SimulatedClient) -> bool:
        """Whether it happens now that a client has sent a request of a step."""
        own = self.worker is None or client.rank == self.worker
        return own and client.rank >= 0 and client.stepping == self.clock

    @abstractmethod
    def happen(self, cluster: SimulatedCluster, client: SimulatedClient | None) -> None:
        """Do it.

        Args:
            client: whose step has caused it; None at the beginning.
        """

    def __repr__(self) -> str:
        """Call of the fault's function."""
        given = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.default is MISSING or value != each.default:
                name = "" if each.name == "policy" else f"{each.name}="
                given.append(f"{name}{value!r}")
        given.sort(key=lambda text: "=" in text.partition("(")[0])
        name = {"_SetPolicy": "set_policy"}.get(type(self).__name__, type(self).__name__.lower())
        return f"{name.removeprefix('_')}({', '.join(given)})"


def _process(cluster: SimulatedCluster, rank: int | None) -> SimulatedClient | None:
    found = [each for each in cluster.clients if each.rank == rank and each.alive]
    return found[-1] if found else None


@dataclass(frozen=True, kw_only=True, repr=False)
class _Kill(ScriptedFault):
    def happen(self, cluster: SimulatedCluster, client: SimulatedClient | None) -> None:
        victim = client if client is not None else _process(cluster, self.worker)
        if victim is not None:
            cluster.kill(victim)


@dataclass(frozen=True, kw_only=True, repr=False)
class _Stop(ScriptedFault):
    shard: int | None = None
    coordinator: bool = False
    seconds: float

    @property
    def lasts_s(self) -> float:
        return 0.0 if self.coordinator else self.seconds  # training goes on without it

    def happen(self, cluster: SimulatedCluster, client: SimulatedClient | None) -> None:
        if self.shard is not None or self.coordinator:
            cluster.stall(self.shard, self.seconds)
            return
        victim = client if client is not None else _process(cluster, self.worker)
        if victim is not None:
            cluster.stop(victim, self.seconds)


@dataclass(frozen=True, kw_only=True, repr=False)
class _Leave(ScriptedFault):
    def happen(self, cluster: SimulatedCluster, client: SimulatedClient | None) -> None:
        victim = client if client is not None else _process(cluster, self.worker)
        if victim is not None:
            cluster.leave(victim)


@dataclass(frozen=True, kw_only=True, repr=False)
class _Cut(ScriptedFault):
    shard: int | None = None
    shards: tuple[int, int] | None = None
    coordinator: bool = False
    seconds: float
    both: bool = True

    @property
    def lasts_s(self) -> float:
        return self.seconds

    def happen(self, cluster: SimulatedCluster, client: SimulatedClient | None) -> None:
        worker = self.worker if self.worker is not None else getattr(client, "rank", None)
        if self.shards is not None:
            source, target = shard_place(self.shards[0]), shard_place(self.shards[1])
        else:
            assert worker is not None, "cut() has checked it"
            source = worker_place(worker)
            target = COORDINATOR if self.coordinator else shard_place(self.shard or 0)
        cluster.network.cut(source, target, self.seconds, both=self.both)


@dataclass(frozen=True, kw_only=True, repr=False)
class _Slow(ScriptedFault):
    shard: int | None = None
    factor: float
    seconds: float | None = None

    def happen(self, cluster: SimulatedCluster, client: SimulatedClient | None) -> None:
        seconds = self.seconds if self.seconds is not None else ALWAYS_S
        rank = self.worker if self.worker is not None else getattr(client, "rank", None)
        assert rank is not None, "slow() has checked it"
        if self.shard is None:
            cluster.slow_worker(rank, self.factor, seconds)
        else:
            place, shard = worker_place(rank), shard_place(self.shard)
            cluster.network.slow(place, shard, self.factor, seconds)


@dataclass(frozen=True, kw_only=True, repr=False)
class _Join(ScriptedFault):
    def happen(self, cluster: SimulatedCluster, client: SimulatedClient | None) -> None:
        cluster.scale_by(1)


@dataclass(frozen=True, kw_only=True, repr=False)
class _SetPolicy(ScriptedFault):
    policy: Policy

    def happen(self, cluster: SimulatedCluster, client: SimulatedClient | None) -> None:
        cluster.change_policy(client, self.policy)


def kill(*, worker: int, clock: int) -> ScriptedFault:
    """End a worker's process in the middle of its step of a clock."""
    return _Kill(worker=_rank(worker), clock=_clock(clock))


def stop(
    *,
    worker: int | None = None,
    shard: int | None = None,
    coordinator: bool = False,
    seconds: float,
    clock: int,
) -> ScriptedFault:
    """Let a process stand still: a worker's in the middle of its step of a clock; or a shard's
    server or the coordinator, when any worker sends its step of that clock."""
    if (worker is not None) + (shard is not None) + coordinator != 1:
        raise ValueError("stop takes worker=, or shard=, or coordinator=True")
    return _Stop(
        worker=worker if worker is None else _rank(worker),
        shard=shard,
        coordinator=coordinator,
        clock=_clock(clock),
        seconds=_positive("seconds", seconds),
    )


def leave(*, worker: int, clock: int) -> ScriptedFault:
    """Let a worker end in order after its step of a clock."""
    return _Leave(worker=_rank(worker), clock=_clock(clock))


def join(*, clock: int) -> ScriptedFault:
    """Tell the run to have one worker more, when any worker sends its step of a clock."""
    return _Join(clock=_clock(clock))


def set_policy(policy: Policy, *, clock: int, worker: int | None = None) -> ScriptedFault:
    """Let a worker, or the first that comes there, change the policy in its step of a clock."""
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must be a policy object such as Async(), not {policy!r}")
    return _SetPolicy(policy=policy, clock=_clock(clock), worker=worker)


def cut(
    *,
    worker: int | None = None,
    shard: int | None = None,
    shards: tuple[int, int] | None = None,
    coordinator: bool = False,
    seconds: float,
    clock: int | None = None,
    both: bool = True,
) -> ScriptedFault:
    """Cut the way between a worker and a shard or the coordinator, or between two `shards`.

    Args:
        both: in both directions, or only from the first place named to the second.
    """
    ends = (shard is not None) + coordinator + (shards is not None)
    if ends != 1 or (shards is None) != (worker is not None):
        raise ValueError(
            "cut takes worker= and shard=, or worker= and coordinator=True, or shards=(a, b)"
        )
    return _Cut(
        worker=worker,
        clock=clock,
        shard=shard,
        shards=shards,
        coordinator=coordinator,
        seconds=_positive("seconds", seconds),
        both=both,
    )


def slow(
    *,
    worker: int,
    factor: float,
    shard: int | None = None,
    seconds: float | None = None,
    clock: int | None = None,
) -> ScriptedFault:
    """Let a worker, or its link to one shard, take `factor` times as long.

    Args:
        seconds: for so long; None: until the network heals (a link), or to the end (a worker).
    """
    return _Slow(
        worker=_rank(worker),
        clock=clock,
        shard=shard,
        factor=_positive("factor", factor),
        seconds=seconds,
    )


def _rank(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"worker must be a rank, an int of at least 0, not {value!r}")
    return value


def _clock(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"clock must be an int of at least 0, not {value!r}")
    return value


def _positive(name: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be above 0 and finite, not {value!r}")
    return value


class Nemesis:
    """Injects faults: those of the script, and those that the seed draws.

    Args:
        cluster: whose network, processes and policies it meddles with.
    """

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._script = [each for each in cluster.scenario.script if each.clock is not None]
        self.lasts_s = sum(each.lasts_s for each in cluster.scenario.script)
        """Seconds of all scripted faults together."""

    def begin(self) -> None:
        """The scripted faults that wait for no clock."""
        for each in self._cluster.scenario.script:
            if each.clock is None:
                each.happen(self._cluster, None)

    def sent(self, client: SimulatedClient) -> None:
        """A worker has sent a request: the moment for a fault."""
        if self._script and client.stepping is not None:
            due = [each for each in self._script if each.is_due(client)]
            for each in due:
                self._script.remove(each)
                each.happen(self._cluster, client)
        if client.rank < 0 or not client.alive:
            return
        cluster = self._cluster
        faults, draw = cluster.network.faults, cluster.random.random
        if faults.kill and draw() < faults.kill:
            cluster.kill(client)
            return
        if faults.interrupt and draw() < faults.interrupt:
            client.interrupt()
        if faults.freeze and draw() < faults.freeze:
            cluster.stop(client, draw() * faults.freeze_s)
        if faults.partition and draw() < faults.partition:
            self._partition(client)
        if faults.sluggish and draw() < faults.sluggish:
            self._slow(client)
        if faults.change and draw() < faults.change and cluster.scenario.others:
            cluster.change_policy(client, cluster.random.choice(cluster.scenario.others))
        if faults.join and draw() < faults.join:
            cluster.scale_by(1)
        if faults.leave and draw() < faults.leave:
            if draw() < 0.5:
                cluster.scale_by(-1)
            else:
                cluster.leave(client)
        if faults.stall and draw() < faults.stall:
            self._stall()
        if faults.reset and draw() < faults.reset:
            cluster.reset(int(draw() * cluster.scenario.servers))

    def _stall(self) -> None:
        cluster, draw = self._cluster, self._cluster.random.random
        seconds = draw() * cluster.network.faults.stall_s
        if draw() < 0.7:
            cluster.stall(int(draw() * cluster.scenario.servers), seconds)
        else:
            cluster.stall(None, seconds + (LONG_STALL_S if draw() < 0.5 else 0.0))

    def _partition(self, client: SimulatedClient) -> None:
        cluster, draw = self._cluster, self._cluster.random.random
        shards = cluster.scenario.servers
        kind, seconds = draw(), draw() * cluster.network.faults.partition_s
        ends = [worker_place(client.rank), shard_place(int(draw() * shards))]
        if kind < 0.2:
            ends[1] = COORDINATOR
        elif kind < 0.5 and shards > 1:
            first = int(draw() * shards)
            ends = [shard_place(first), shard_place((first + 1) % shards)]
        if draw() < 0.5:
            ends.reverse()
        cluster.network.cut(ends[0], ends[1], seconds, both=draw() < 0.5)

    def _slow(self, client: SimulatedClient) -> None:
        cluster, draw = self._cluster, self._cluster.random.random
        faults = cluster.network.faults
        factor, seconds = 1.0 + draw() * (faults.factor - 1.0), draw() * faults.sluggish_s
        if draw() < 0.5:
            cluster.slow_worker(client.rank, factor, seconds)
        else:
            shard = shard_place(int(draw() * cluster.scenario.servers))
            cluster.network.slow(worker_place(client.rank), shard, factor, seconds)
