"""Cuts of simulated clusters: taken all the time, and judged by the pushes that are in them.

A mixin of `SimulatedCluster`. Cuts begin at random moments while clients push; each shard's part is
looked at some time after it was taken, when values have changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any, NamedTuple

import numpy as np
from tests.sim.workloads.tables import KEYS, Rows

from paramserve.core.cut_parts import ShardCut, TableCopy
from paramserve_testing.checkers import SHOWN_MAX, Violation
from paramserve_testing.counting import Counting
from paramserve_testing.history import Part, Row
from paramserve_testing.simulated import SimulatedCluster, rerun

PAUSE_S = 0.01
"""The longest time between two looks whether a cut is complete; then the next one begins."""


class PartSeen(NamedTuple):
    """What one shard has of a cut.

    Attributes:
        clients: by client, the last number that is in it. A client that has ended there with all
            its calls answered is none of them, nor is one that has not come yet.
        clocks: by group, the first clock that is not committed.
        pushes: by group and part, the masks of all writers.
        marks: (group, client, how much of its leased samples is in the values).
    """

    clients: Mapping[int, int]
    clocks: Mapping[int, int]
    pushes: Mapping[tuple[str, Part], tuple[int, ...]]
    marks: frozenset[tuple[int, int, int, int]]


class CutSeen(NamedTuple):
    """A complete cut, shard by shard.

    Attributes:
        torn: clients whom the shards have up to different numbers.
        ended: clients that had ended, or counted as dead on a shard: only they may be torn.
    """

    number: int
    torn: frozenset[int]
    ended: frozenset[int]
    parts: tuple[PartSeen, ...]


class SimulatedCuts(SimulatedCluster):
    """A simulated cluster of which cuts are taken as it runs."""

    replayed_by = "tests.sim.cuts.replay"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.cuts: list[CutSeen] = []
        super().__init__(*arguments, **options)
        self._cut_random = Random(f"cuts {self.seed}")
        self.clock.after(self._cut_random.random() * PAUSE_S, self._look)

    def _look(self) -> None:
        """Take over a cut that is complete; begin one."""
        first = self.servers[0].shard.cuts
        for number, part in list(first.parts_here.items()):
            parts = [server.shard.cuts.parts_here.get(number) for server in self.servers]
            if part.complete and all(parts):
                seen = tuple(self._seen(each) for each in parts if each is not None)
                torn, ended = frozenset(part.torn), frozenset(self._ended())
                self.cuts.append(CutSeen(number, torn, ended, seen))
            if part.complete:
                for server in self.servers:
                    server.shard.cuts.let_go(number)
        if not first.under_way and not self.done:
            self.servers[0].loop.call_soon(self.servers[0].role.begin_cut)
        self.clock.after(self._cut_random.random() * PAUSE_S, self._look)

    def _ended(self) -> list[int]:
        """Clients that send no more, or are known as dead somewhere."""
        fenced = {writer for _, writer in self.history.fences}
        return [each.id for each in self.clients if not each.alive or each.writer in fenced]

    def _seen(self, part: ShardCut) -> PartSeen:
        pushes: dict[tuple[str, Part], tuple[int, ...]] = {}
        for number, block in part.blocks.items():
            values = block.field(0)
            if values.size:
                kind = self.workload.owner(block.spec)
                assert isinstance(kind, Counting)
                masks = self._masks(kind.read(values, block.low))
                pushes[block.spec.group_name, Part(number, part.shard)] = masks
        for table in part.tables.values():
            pushes |= self._rows_seen(part.shard, table)
        marks = frozenset((each.id, *mark) for each in part.groups for mark in each.marks)
        return PartSeen(part.clients, part.clocks, pushes, marks)

    def _rows_seen(self, shard: int, table: TableCopy) -> dict[tuple[str, Part], tuple[int, ...]]:
        kind = self.workload.owner(table.spec)
        assert isinstance(kind, Rows)
        found = dict[int, Any]()
        for rows in table.batches(table.layout):
            values = table.layout.parts(rows.raw)["value"]
            found |= zip(rows.keys.tolist(), values, strict=True)
        pushes: dict[tuple[str, Part], tuple[int, ...]] = {}
        for number, key in enumerate(KEYS.tolist()):
            row = kind.form.row(number, found.get(key, np.zeros(kind.form.dim)))
            pushes[table.spec.group_name, Part(number, shard)] = self._masks(row)
        return pushes

    def _masks(self, row: Row) -> tuple[int, ...]:
        """Which pushes are in some values, by writer; -1 where they make no sense."""
        whole = row.sound and row.counts == tuple(each.bit_count() for each in row.pushes)
        return row.pushes if whole else (-1,) * len(row.pushes)

    def check(self) -> None:
        """Check as `SimulatedCluster.check`, and that each cut is whole."""
        super().check()
        wrong = [text for cut in self.cuts for text in self._wrong(cut)]
        if wrong:
            shown = "\n".join(wrong[:SHOWN_MAX])
            raise Violation(f"{len(wrong)} findings about cuts:\n{shown}\nagain: {self.again}")

    def _wrong(self, cut: CutSeen) -> list[str]:
        """What is wrong with a cut: numbers or clocks that differ; pushes that are missing, or came
        after it."""
        wrong = []
        numbers: dict[int, set[int]] = {}
        clocks: dict[int, set[int]] = {}
        for part in cut.parts:
            for client, seq in part.clients.items():
                numbers.setdefault(client, set()).add(seq)
            for number, clock in part.clocks.items():
                clocks.setdefault(number, set()).add(clock)
        wrong += [
            f"cut {cut.number}: client {client} up to {sorted(seqs)}"
            for client, seqs in numbers.items()
            if len(seqs) > 1 and client not in cut.torn & cut.ended
        ]
        wrong += [
            f"cut {cut.number}: group {number} at clocks {sorted(each)}"
            for number, each in clocks.items()
            if len(each) > 1
        ]
        whole = [
            {mark for mark in part.marks if mark[1] not in cut.torn & cut.ended}
            for part in cut.parts
        ]
        if any(marks != whole[0] for marks in whole):
            wrong.append(f"cut {cut.number}: marks of leases differ: {[sorted(m) for m in whole]}")
        ids = {writer: client for client, writer in self.writers.items()}
        done = self._done_before(cut)
        for (writer, shard, seq), (name, call) in self.call_of.items():
            if call.push is None or writer not in ids:
                continue
            part, final = cut.parts[shard], self.histories[name].final
            client = ids[writer]
            last = part.clients.get(client, 0)
            for (group, place), masks in part.pushes.items():
                if group != name or place.block not in call.blocks or place not in final:
                    continue
                there = bool(masks[writer] >> call.push & 1)
                comes = bool(final[place].pushes[writer] >> call.push & 1)
                if there != (comes and (seq <= last or client in done)):
                    wrong.append(
                        f"cut {cut.number} has writer {writer} on shard {shard} up to {last}; push "
                        f"{call.push}, number {seq}, is {'' if there else 'not '}in it (block "
                        f"{place.block})"
                    )
        return wrong

    def _done_before(self, cut: CutSeen) -> set[int]:
        """Clients that had ended before a cut with all their calls answered, as far as a shard
        shows: it does not name them, and has some of their pushes."""
        return {
            client
            for client, writer in self.writers.items()
            for part in cut.parts
            if client not in part.clients and any(m[writer] > 0 for m in part.pushes.values())
        }


def replay(seed: int, log: Any = None, **options: Any) -> SimulatedCluster:
    """Run one seed with cuts again; else as `paramserve_testing.replay`."""
    return rerun(SimulatedCuts, seed, log, **options)
