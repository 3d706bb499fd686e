"""A client's part in its groups: by whose terms it steps, other policies while running, rests."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paramserve.client.defining import DefiningClient
from paramserve.client.exchange import done
from paramserve.config import ConsistencySpec
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import ElasticAverage, LocalSteps
from paramserve.consistency.registry import PolicyTraits
from paramserve.errors import ParamServeError, Timeout
from paramserve.messages import GroupPolicy, SetPolicy, Step, SuspendMembership

CHANGE_POLL_S = 0.01
"""How often is asked whether the shards have decided a change of policy."""


class ChangingClient(DefiningClient):
    """The part of a client that changes policies, and rests; see `client.Client`."""

    def terms(self, group: str = "default") -> PolicyTraits:
        """What this client's next step of a group goes by; the cluster's policy if it knows of
        nothing that is defined there."""
        with self._lock:
            for block in self._exchange.blocks.values():
                if block.group_name == group:
                    return self._steps.traits_of(block)
        return self._terms.cluster

    def set_consistency(self, name: str, policy: Policy, *, timeout_s: float | None = None) -> int:
        """Give a group another policy while it is trained.

        Returns when all shards have agreed from which clock on it holds. Steps of earlier clocks
        go by the old policy on all shards, later ones by the new one. Nobody has to stop for it.

        Args:
            name: of the group.
            policy: built in, or of a class that the servers were started with. Not
                `ps.LocalSteps` or `ps.ElasticAverage`.
        Returns:
            The first clock of the new policy.
        Raises:
            UnknownName: nothing is defined in the group. UnknownRule: a server, which is named,
                does not know the policy. TypeError: it is no policy. ValueError: it cannot work
                with this many workers, or the change needs another optimizer in the workers. In
                all these cases nothing was changed on any server, and training goes on.
            ParamServeError: not all workers are past the clock of an earlier change. Nothing was
                changed.
            Timeout: not all shards have decided in `timeout_s`; the text names them. The change
                may still come.
        """
        self._check()
        described = self._policy_spec(policy)
        assert described is not None, "given, and checked"
        limit = self._limit(timeout_s)
        until = time.monotonic() + limit
        with self._lock:
            block = self._defined_in(name)
            _check_changeable(policy)
            _check_changeable(self._steps.traits_of(block).policy)
            try:  # No shard begins before all have said that they can.
                self._ask_for(SetPolicy(0, block.group, described, check=True), limit)
            except ParamServeError as error:
                error.applied = "no"
                raise
            self._ask_for(SetPolicy(0, block.group, described), limit)
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

    def _ask_for(self, change: SetPolicy, limit_s: float) -> None:
        requests = [change] * len(self._exchange.shards)
        self._steps.finish("set_consistency", requests, limit_s, ())

    def _changes(self, name: str) -> list[GroupPolicy | None]:
        """A group's newest change of policy on each shard."""
        found: list[GroupPolicy | None] = [None] * len(self._exchange.shards)
        for beat in self.reports():
            for report in beat.groups:
                if report.name == name:
                    found[beat.shard] = report.change
        return found

    def rest(self, group: str = "default", *, timeout_s: float | None = None) -> None:
        """Take no part in a group until the next step there: nobody waits for this worker.

        A pull is no step, and ends no rest: it reads what is there, whatever bound others have.
        What was sent is answered first. The next step may go on at a later clock, as that of a
        worker that joins.

        Raises:
            UnknownName: nothing is defined in the group. Nothing was sent.
            PushTimeout: something is unanswered after `timeout_s`.
        """
        self._check()
        with self._lock:
            block = self._defined_in(group)
            self.drain(timeout_s)
            requests = [SuspendMembership(0, block.group)] * len(self._exchange.shards)
            self._steps.finish("rest", requests, timeout_s, ())
            self._steps.rests(group)

    def enter(self, group: str = "default", *, timeout_s: float | None = None) -> bool:
        """Take part in a group from now on, if this worker joined late or rests.

        The next step does the same by itself. To enter before the gradient is computed, and to pull
        then, is better under a policy that collects: that gradient comes from present values. Where
        several groups collect, only the one that this worker steps first can be entered ahead: it
        has to be known from the steps that it has made, or else nothing happens here.

        Returns:
            Whether it took no part before: then the values may have changed since the last pull.
        Raises:
            UnknownName: nothing is defined in the group.
            PushTimeout: the others' clock was not decided in `timeout_s`, by default as long as a
                step waits, or, under a policy that does not collect, not all shards have answered.
        """
        self._check()
        with self._lock:
            block = self._defined_in(group)
            if self._steps.is_pending(group) and not self._steps.traits_of(block).collects:
                clock, number = self.clock(group), block.group
                enters = Step(0, number, clock, False, (), (), enters=(number,))
                requests = [enters] * len(self._exchange.shards)
                replies = done(self._steps.finish("enter", requests, timeout_s, ()))
                self._steps.go_on(group, max(reply.at for reply in replies))
            return self._steps.enter_ahead(block, timeout_s)


def _undecided(
    name: str,
    policy: Policy,
    changes: Sequence[GroupPolicy | None],
    wanted: ConsistencySpec,
    limit_s: float,
) -> Timeout:
    missing = [
        shard for shard, change in enumerate(changes) if change is None or change.policy != wanted
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
    if isinstance(policy, LocalSteps | ElasticAverage):
        raise ValueError(
            f"{type(policy).__name__} cannot be changed to or from while running: the workers' own "
            "optimizers step otherwise under it. Choose it at the start, with consistency=, or as "
            "another group's policy when that is defined"
        )
