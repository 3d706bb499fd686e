"""Shards that are restored in the middle of a run, and have to go on as the original does.

At some event each shard of a simulated cluster is restored from a cut to a new one, its twin. From
then on both are given the same events, and have to answer alike.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
from msgspec import structs

from paramserve.config import Limits
from paramserve.core.block import ShardBlock
from paramserve.core.cut_parts import ShardCut
from paramserve.core.events import ClientHere, Effects, Event
from paramserve.core.restoring import restore
from paramserve.core.shard import Shard
from paramserve.core.table.store import clocks_of
from paramserve.messages import CutAsk, GroupReport
from paramserve_testing import SimulatedCluster
from paramserve_testing.simulated import RESEND_S

RATE = 0.2
"""Share of events after which a shard that has nothing under way gets a twin."""


class Differs(AssertionError):
    """A restored shard did something else than the original."""


class ShardWithTwin(Shard):
    """A shard that is restored to a twin at some time, and compares its effects with those."""

    twin: Shard | None = None
    compared = 0
    _random: Random | None = None

    def step(self, event: Event, now: float) -> Effects:
        effects = super().step(event, now)
        if self.twin is not None:
            for client, session in self.sessions.by_client.items():
                if client in self.twin.sessions.by_client:
                    self.twin.sessions.by_client[client].mirror = session.mirror
            compare(effects, self.twin.step(event, now))
            if state_of(self) != state_of(self.twin):
                raise Differs(f"the shard is {state_of(self)}\nits twin {state_of(self.twin)}")
            if contents(self) != contents(self.twin):
                raise Differs("the shard and its twin hold other values")
            self.compared += 1
        elif self._random is None:
            self._random = Random(self.number)
        elif self.idle() and self._random.random() < RATE:
            self.twin = twin_of(self, now)
        return effects

    def idle(self) -> bool:
        """Whether nothing is under way here that a cut does not have."""
        sessions = self.sessions.by_client.values()
        return bool(self.groups) and not (
            self.cuts.stops
            or self.followers.joiners
            or self.decisions._early
            or any(s.held is not None or s.queue or s.gone_at is not None for s in sessions)
            or any(
                each.state.collect.pending
                or each.state.changes.paused
                or (each.lead is not None and each.lead._votes)
                or (each.policies.changing and each.policies.changing.decided is None)
                for each in self.groups.values()
            )
        )


def twin_of(shard: Shard, now: float) -> Shard:
    """A new shard, restored from a cut of this one, to which its clients have come back."""
    twin = Shard(
        shard.number,
        shard.shards,
        len(shard.sessions.first),
        shard.policy,
        limits=Limits(),
        resend_s=RESEND_S,
        rules=shard.rules,
        policies=shard.policies,
    )
    ask = CutAsk(1, 0, (), True)
    part = ShardCut(shard.number, ask, shard.cuts.numbers(), shard.groups, shard.sessions)
    restore(twin, part, now)
    part.close()
    known = shard.sessions
    for client, session in known.by_client.items():
        here = ClientHere(
            client, session.incarnation, session.rank, session.window, True, session.requests
        )
        twin.step(here, now)
        twin.sessions.by_client[client]._written = dict(session._written)
    log, own = shard.decisions, twin.decisions  # a cluster that is restored begins a new one
    own.number, own.deadline = log.number, log.deadline
    own._highest, own._pending = dict(log._highest), dict(log._pending)
    for number, machine in shard.groups.items():
        twin.groups[number].membership.newest = machine.membership.newest
    return twin


def state_of(shard: Shard) -> list[GroupReport]:
    """What a shard reports, without its memory, and the clocks passed over by ranks that resumed,
    which are in no checkpoint."""
    return [
        structs.replace(
            each,
            kept_bytes=0,
            passed=(),
            table=None if each.table is None else structs.replace(each.table, memory_bytes=0),
        )
        for each in shard.report(notes=True)
    ]


def contents(shard: Shard) -> list[Any]:
    """Values, rule states and update counts of a shard; of tables, also the rows' last use and the
    keys that wait for admission."""
    found: list[Any] = []
    for _, block in sorted(shard.blocks.items()):
        if isinstance(block, ShardBlock):
            arrays = (block.value, *block.state)
            found.append(([each.tobytes() for each in arrays], block.counts))
            continue
        store = block.store
        keys, rows, _ = store.scan(0, 1 << 20)
        values = np.empty((keys.size, block.dim), np.float32)
        store.read(rows, keys, values)
        found.append(sorted(zip(keys.tolist(), values.tolist(), strict=True)))
        if store._use is not None:
            oldest = store._use.oldest(len(store))
            clocks = clocks_of(store.uses(oldest))
            found.append([*zip(store.keys_of(oldest).tolist(), clocks.tolist(), strict=True)])
        if store._candidates is not None:
            generations = store._candidates.counted().entries()
            found.append([dict(zip(*map(list, each), strict=True)) for each in generations])
    return found


def told(effects: Effects) -> list[Any]:
    """What effects come to, as values that can be compared."""
    replies: list[Any] = [
        (client, answer.message, answer.written) for client, answer in effects.replies
    ]
    return [*replies, *effects.peers, effects.drops, type(effects.refused)]


def compare(effects: Effects, twin: Effects) -> None:
    """Require that both shards have done the same."""
    one, other = told(effects), told(twin)
    if one != other:
        raise Differs(f"the shard did {one}\nits twin {other}")


class SimulatedTwins(SimulatedCluster):
    shard_type = ShardWithTwin
