"""A client's part in its groups: by whose terms it steps, other policies while running, rests."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paramserve.client.connection import Connection
from paramserve.client.directory import Directory
from paramserve.client.steps import Steps
from paramserve.config import ConsistencySpec
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import OWN_STEPS
from paramserve.errors import Timeout
from paramserve.messages import GroupPolicy

CHANGE_POLL_S = 0.01
"""How often is asked whether the shards have decided a change of policy."""


class Groups:
    """Which policy a client's groups go by, and whether it takes part in them."""

    def __init__(self, connection: Connection, steps: Steps, directory: Directory) -> None:
        self._connection = connection
        self._steps = steps
        self._directory = directory
        self._exchange = connection.exchange
        self._lock = connection.lock

    def set_consistency(self, name: str, policy: Policy, timeout_s: float | None) -> int:
        """See `Client.set_consistency`."""
        self._connection.check()
        described = self._directory.policy_spec(policy)
        assert described is not None, "given, and checked"
        limit = self._connection.limit(timeout_s)
        until = time.monotonic() + limit
        with self._lock:
            block = self._directory.defined_in(name)
            _check_changeable(policy)
            _check_changeable(self._steps.traits_of(block).policy)
            self._steps.change_policy(block, described, limit)
        while True:
            changes = self._changes(name)
            decided = changes[0]
            same = all(each == decided for each in changes)
            if same and decided is not None and decided.policy == described:
                self._steps.learn(decided)
                return decided.clock
            if time.monotonic() >= until:
                raise _undecided(name, policy, changes, described, limit)
            time.sleep(CHANGE_POLL_S)

    def _changes(self, name: str) -> list[GroupPolicy | None]:
        """A group's newest change of policy on each shard."""
        changes: list[GroupPolicy | None] = [None] * len(self._exchange.shards)
        for beat in self._connection.reports():
            for report in beat.groups:
                if report.name == name:
                    changes[beat.shard] = report.change
        return changes

    def rest(self, group: str, timeout_s: float | None) -> None:
        """See `Client.rest`."""
        self._connection.check()
        with self._lock:
            self._steps.suspend(self._directory.defined_in(group), timeout_s)

    def enter(self, group: str, timeout_s: float | None) -> bool:
        """See `Client.enter`."""
        self._connection.check()
        with self._lock:
            return self._steps.enter_ahead(self._directory.defined_in(group), timeout_s)


def _undecided(
    name: str,
    policy: Policy,
    changes: Sequence[GroupPolicy | None],
    expected: ConsistencySpec,
    limit_s: float,
) -> Timeout:
    missing = [
        shard for shard, change in enumerate(changes) if change is None or change.policy != expected
    ]
    shards = f"shards {missing} have" if len(missing) != 1 else f"shard {missing[0]} has"
    if not missing:
        shards = f"shards {list(range(len(changes)))} have, for one clock,"
    return Timeout(
        f"{type(policy).__name__} for group {name!r}: {shards} not decided it after "
        f"{limit_s:.1f} s",
        applied="unknown",
        fix="look at these servers and at the first one, and whether another client changes the "
        "policy as well; or raise timeout_s",
    )


def _check_changeable(policy: Policy | None) -> None:
    if isinstance(policy, OWN_STEPS):
        raise ValueError(
            f"{type(policy).__name__} cannot be changed to or from while running: the workers' own "
            "optimizers step otherwise under it. Choose it at the start, with consistency=, or as "
            "another group's policy when that is defined"
        )
