"""What a simulated run is made of, besides its seed. It runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from random import Random
from types import FunctionType
from typing import Any, Literal

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Sync
from paramserve.consistency.registry import registered
from paramserve_testing.counting import counting
from paramserve_testing.nemesis import ScriptedFault, _SetPolicy
from paramserve_testing.network import Faults
from paramserve_testing.workload import WorkloadFactory

OTHERS: tuple[Policy, ...] = (Sync(reduce="sum"), Async(), BoundedStaleness(bound=1))


@dataclass(frozen=True)
class Scenario:
    """What is simulated, besides the seed.

    Attributes:
        outstanding: calls that a client leaves unanswered at most.
        steps: calls of each client.
        links: where payloads lie. "shared": in the client's memory, by reference, so that a slot
            that is used again too early shows; "tcp": copied when sent; "mixed": drawn for each
            client and shard.
        restarts: whether the clocks of Sync wait for a worker that died until it is started again,
            or not at all. None: drawn from the seed.
        evaluates: whether a worker that rests computes for seconds and reads now and then before it
            goes on, as one that evaluates; None: drawn from the seed.
        slow_readers: whether clients read nothing while they compute, connections hold few frames,
            and servers keep little of what is unread before they take no more of a client.
        faults: None: drawn from the seed.
        script: faults that happen besides, as `kill(worker=1, clock=7)`.
        others: what the policy may be changed to while running, if the faults have changes.
        second: policy of a second group, which has blocks of its own; None: there is one group.
        unregistered: shards whose servers were started without what is registered: they build only
            policies that are built in.
        samples: that the workers share by lease; 0: each takes `steps` steps. Not more than 90.
        collectives: whether the workers reduce a value after each few clocks.
        deletes: whether clients of a table delete some of its rows now and then.
        workload: makes what the clients train.
    """

    servers: int = 2
    workers: int = 3
    outstanding: int = 2
    steps: int = 10
    consistency: Policy = field(default_factory=lambda: Sync(reduce="sum"))
    links: Literal["mixed", "shared", "tcp"] = "mixed"
    restarts: bool | None = None
    evaluates: bool | None = None
    slow_readers: bool = False
    faults: Faults | None = None
    script: tuple[ScriptedFault, ...] = ()
    others: tuple[Policy, ...] = OTHERS
    samples: int = 0
    collectives: bool = False
    second: Policy | None = None
    unregistered: tuple[int, ...] = ()
    deletes: bool = False
    workload: WorkloadFactory = counting

    @property
    def policies(self) -> tuple[Policy, ...]:
        """All policies that may hold."""
        scripted = (each.policy for each in self.script if isinstance(each, _SetPolicy))
        return (self.consistency, *self.others, *scripted)

    @property
    def registered(self) -> Mapping[str, Any]:
        """Classes and functions of all policies that are not built in, as a run registers them."""
        found: dict[str, Any] = {}
        for policy in self.policies:
            found |= registered((), policy).all
        return found

    @property
    def counts_updates(self) -> bool:
        """Whether each update must show on each shard."""
        own = set(map(type, self.policies)) <= {Sync, Async, BoundedStaleness}
        return not own or any(
            isinstance(each, Async) and each.drop_after is not None for each in self.policies
        )

    def is_shared(self, random: Random) -> bool:
        """Whether a client that is made now reaches a shard through shared memory."""
        return self.links == "shared" or (self.links == "mixed" and random.random() < 0.5)

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        plain = Scenario()
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {n: each for n, each in values.items() if each != getattr(plain, n)}
        return ", ".join(f"{name}={_as_code(each)}" for name, each in changed.items())


def _as_code(value: Any) -> str:
    """A value as code: functions by their names."""
    function = isinstance(value, FunctionType | type)
    return f"{value.__module__}.{value.__qualname__}" if function else repr(value)
