"""Servers that are lost: all shards go on from the last cut, and every worker is started again."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.sim.cuts import CutSeen, SimulatedCuts

from paramserve.core.cut_parts import ShardCut
from paramserve.core.restoring import restore
from paramserve.transport.peers import PeerLinks
from paramserve_testing import Violation
from paramserve_testing.simulated import RESTART_S

CRASH_S = 0.25
"""The servers are lost within this time, as soon as there is a cut."""


class SimulatedCrashes(SimulatedCuts):
    """A simulated cluster that loses its servers and its clients once, and goes on from a cut."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.last: list[ShardCut] = []
        self._newest: CutSeen | None = None
        """What it had when it was complete."""
        self.fell_to: CutSeen | None = None
        self.lost: set[int] = set()
        """Writers that were killed with the servers, or had ended before."""
        super().__init__(*arguments, **options)
        self._crash_at = Random(f"crash {self.seed}").random() * CRASH_S

    def _look(self) -> None:
        first = self.servers[0].shard.cuts
        for number in [n for n, part in first.parts_here.items() if part.complete]:
            parts = [server.shard.cuts.parts_here.pop(number, None) for server in self.servers]
            found = [part for part in parts if part is not None]
            defined = all(len(part.blocks) == len(self.workload.blocks) for part in found)
            # The coordinator, which lives on, knows all blocks that it has seen defined.
            if len(found) == len(parts) and defined and self.fell_to is None:
                self._keep(found)
        if self.fell_to is None and self.last and self.clock.now > self._crash_at and not self.done:
            self._crash()
        super()._look()

    def _keep(self, parts: list[ShardCut]) -> None:
        for part in self.last:
            part.close()
        self.last = parts
        torn, seen = frozenset(parts[0].torn), tuple(self._seen(part) for part in parts)
        self._newest = CutSeen(parts[0].number, torn, frozenset(self._ended()), seen)

    def _crash(self) -> None:
        """Every server and client ends at once; servers go on from the last cut, on new links."""
        self.fell_to = self._newest
        self.lost = {client.writer for client in self.clients}
        for client in self.clients:
            if client.alive:
                client.kill()
                self.recorder.ended(client)
                self.history.ended.add(client.writer)
        for server, part in zip(self.servers, self.last, strict=True):
            role: Any = server.role
            for connection in list(role._parties):
                connection.close()
            before = role._peers
            before.close()
            role._peers = PeerLinks(server.number, server._dial, server.loop)
            role._peers.addresses = before.addresses
            shard = self.new_shard(server.number)
            restore(shard, part, server.loop.time())
            role.shard = shard
        for rank in range(self.scenario.workers):
            self.start_worker(self.random.random() * RESTART_S, rank)
        self.start(self.random.random() * RESTART_S, self.reader_script, -1)

    def check(self) -> None:
        """Require that what the cut has is there, no more of what was before, and all of what was
        acknowledged since."""
        wrong = [*self.history.unfinished]
        final, cut = self.history.final, self.fell_to
        if cut is None:
            return
        for place, row in final.items():
            masks = cut.parts[place.shard].pushes[self.workload.group, place]
            for writer in self.lost:
                if row.pushes[writer] != masks[writer]:
                    wrong.append(
                        f"writer {writer} on {place}: {row.pushes[writer]:b} in the end, "
                        f"{masks[writer]:b} in cut {cut.number}"
                    )
            if row.counts != tuple(each.bit_count() for each in row.pushes):
                wrong.append(f"{place}: counts {row.counts}, pushes {row.pushes}")
            for call in self.history.calls:
                if call.push is None or call.writer in self.lost or place.block not in call.blocks:
                    continue
                there = bool(row.pushes[call.writer] >> call.push & 1)
                if call.acknowledged_on(place.shard) and not there:
                    wrong.append(f"writer {call.writer} on {place}: push {call.push} is lost")
                if call.rejected_on(place.shard) and there:
                    wrong.append(f"writer {call.writer} on {place}: push {call.push} was refused")
        if wrong:
            raise Violation(f"{len(wrong)} findings:\n" + "\n".join(wrong[:8]))
