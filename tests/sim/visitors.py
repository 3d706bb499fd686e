"""Clients without a rank that come and go beside the cuts of a simulated cluster.

Each pushes or reads a little and says goodbye: when all is answered, or right behind what it has
sent. Goodbyes to different shards arrive in different orders.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from tests.sim.cuts import SimulatedCuts

from paramserve.core.shard_sessions import SESSION_KEEP_S
from paramserve_testing.checkers import Violation
from paramserve_testing.client import SimulatedClient
from paramserve_testing.history import History
from paramserve_testing.network import NEAR
from paramserve_testing.scripts import ReaderScript
from paramserve_testing.simulated import REST_S, SAFETY_S, SimulatedCluster, rerun

VISITORS = 12
CALLS_MAX = 3
HASTY_RATE = 0.5
"""Share of visitors that wait for no answer to their last call."""
LAST_CUTS = 2
"""Taken when no shard has a session of any client: in the first one the shards agree about those
that have ended, and the second one names none."""


class Visitor(ReaderScript):
    """A client that makes some calls and ends."""

    def __init__(self, client: SimulatedClient) -> None:
        super().__init__(client)
        random = Random(f"visitor {self.cluster.seed} {client.writer}")
        client.left = random.randint(1, CALLS_MAX)
        self._hasty = random.random() < HASTY_RATE

    def next(self) -> bool:
        more = super().next()
        if self._hasty and not self.client.left and self.client.alive:
            self._hurry_away()
            return False
        return more

    def _hurry_away(self) -> None:
        """Say goodbye behind calls whose answers are not read."""
        client = self.client
        client.exchange.close()
        client._coordinator.close(NEAR)
        client.dead = True
        self.cluster.ended(client)


class SimulatedVisits(SimulatedCuts):
    """A simulated cluster with visitors, of which cuts are taken as it runs."""

    replayed_by = "tests.sim.visitors.replay"
    writers_more = VISITORS

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        faults = replace(self.network.faults, slow=0.0)
        self._lossless = faults == faults.healed()

    def _run(self) -> History:
        history = super()._run()
        self.clock.run(self.clock.now + SESSION_KEEP_S + REST_S)
        for _ in range(LAST_CUTS):
            self.servers[0].loop.call_soon(self.servers[0].role.begin_cut)
            self.clock.run(self.clock.now + REST_S)
        return history

    def _start_clients(self) -> None:
        super()._start_clients()
        random = Random(f"visits {self.seed}")
        for _ in range(VISITORS):
            self.start(random.random() * SAFETY_S / 4, Visitor, -1)

    def ended(self, client: SimulatedClient) -> None:
        if not isinstance(client.script, Visitor):
            super().ended(client)
            return
        self.recorder.ended(client)
        if client.dead:
            self.history.ended.add(client.writer)
        if self.done:
            self.clock.stop()

    def check(self) -> None:
        """Check as `SimulatedCuts.check`, and that no client is named in cuts for good; where no
        message is lost, that no cut was given up, and that none has a client in part."""
        super().check()
        named = sorted({client for part in self.cuts[-1].parts for client in part.clients})
        if named:
            raise Violation(
                f"all clients ended over {SESSION_KEEP_S:.0f} s before cut {self.cuts[-1].number}, "
                f"and it has clients {named}\nagain: {self.again}"
            )
        if not self._lossless:
            return
        numbers = [cut.number for cut in self.cuts]
        given_up = sorted(set(range(1, max(numbers, default=0))) - set(numbers))
        torn = [cut.number for cut in self.cuts if cut.torn]
        if given_up or torn:
            raise Violation(
                f"no message was lost, and cuts {given_up} were given up, cuts {torn} have clients "
                f"in part\nagain: {self.again}"
            )


def replay(seed: int, log: Any = None, **options: Any) -> SimulatedCluster:
    """Run one seed with visitors again; else as `paramserve_testing.replay`."""
    return rerun(SimulatedVisits, seed, log, **options)
