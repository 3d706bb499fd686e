"""Clusters with codecs that are lost and go on from a checkpoint: what was left out of gradients
before its cut was flushed, or its rank is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from tests.sim.resumes import FAULTS, NO_KILLS, SimulatedResumes
from tests.sim.workloads.encoded import (
    LARGEST,
    ROUNDING,
    EncodedTensors,
    WatchedEncoder,
    encoder_of,
    off_by,
)

from paramserve.client.encoding import Encoded
from paramserve.core import flush
from paramserve.core.partition import Block
from paramserve_testing import Counting, Scenario, Setting, Violation, Workload
from paramserve_testing.client import SimulatedClient
from paramserve_testing.history import Part
from paramserve_testing.workload import Pushed

Floats = npt.NDArray[np.float32]
Exact = npt.NDArray[np.float64]

FLUSH_S = 0.05
"""A flush takes some milliseconds; one that a worker does not make is not waited for longer."""


class RemembersChanges(WatchedEncoder):
    """An encoder that remembers what each push left out.

    Attributes:
        changes: (block, number of the push, change), of all that were sent.
        flushes: how many pushes were a flush.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.changes: list[tuple[int, int, Floats]] = []
        self.flushes = 0

    def mark_sent(self, encoded: Sequence[Encoded], flush: int = 0) -> None:
        for each in encoded:
            if each.change is not None:
                self.changes.append((each.block.id, self.pushes[each], each.change.copy()))
        self.flushes += flush > 0
        super().mark_sent(encoded, flush)

    def left_by(self, block: Block, low: int, high: int, applied: int) -> Exact:
        """What these pushes have left out of a part of a block, [high - low].

        Args:
            applied: mask of pushes.
        """
        left = np.zeros(high - low, np.float64)
        for number, which, change in self.changes:
            if number == block.id and applied >> which & 1:
                left += change[low:high]
        return left


class FlushedTensors(EncodedTensors):
    """Tensors with a codec whose clients remember what they leave out.

    Args:
        whole: whether all pieces have gradients: one without keeps what was left out of it.
    """

    def __init__(self, seed: int, *, whole: bool) -> None:
        super().__init__(seed)
        self._whole = whole

    def gradient(self, block: Block, push: Pushed) -> tuple[Floats, tuple[int, ...] | None]:
        values, active = super().gradient(block, push)
        return values, None if self._whole else active

    def enter(self, client: SimulatedClient) -> None:
        client.steps.encoder = RemembersChanges(client.rank, client.exchange.take_each)


def flushed_tensors(setting: Setting, *, whole: bool = False) -> Workload:
    return Workload(Counting(setting.writers), FlushedTensors(setting.seed, whole=whole))


class SimulatedFlushedResumes(SimulatedResumes):
    """Writes checkpoints all the time, is lost once, and goes on.

    Attributes:
        seen: how often what is judged has happened.
    """

    crash_s = 0.3
    all_flush = False
    """Whether no rank may be told."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        scenario: Scenario = arguments[1]
        # Else a part would have pushes that one of the shards before had dropped, and one not.
        self.same_servers = getattr(scenario.consistency, "drop_after", None) is not None
        self.seen: Counter[str] = Counter()
        self._here: set[int] = set()
        """Writers that had not ended before everything was lost."""
        super().__init__(*arguments, **options)

    def _crash(self) -> None:
        if not self.done:
            self._here = {client.writer for client in self.clients if client.alive}
            self._tensors.told.clear()  # of the shards that end now
        super()._crash()

    @property
    def _tensors(self) -> FlushedTensors:
        _, tensors = self.workload.parameters
        assert isinstance(tensors, FlushedTensors)
        return tensors

    def check(self) -> None:
        """Check as `SimulatedResumes.check`; and that shards hold the sum of the gradients that
        they have applied, less what those left out. In a checkpoint nothing is left out of a rank
        that is not told."""
        super().check()
        for client in self.clients:
            encoder = encoder_of(client)
            self.seen["flushes"] += getattr(encoder, "flushes", 0)
        held = self._tensors.held(self)
        wrong = [text for _, *part in held for text in self._wrong_part(*part)]
        if self.fell_to is not None:
            self.seen["checkpoints"] += 1
            self.seen["told"] += bool(self.fell_to.cut.lost_residuals)
        if wrong:
            codecs = ", ".join(map(repr, self._tensors.codecs.values()))
            raise Violation("\n  ".join([f"{self.again}, with {codecs}", *wrong]))

    def _wrong_part(self, block: Block, shard: int, values: Floats) -> list[str]:
        (widest,) = (b for b in self.blocks.values() if b.pieces[0].name == "wide")
        place = Part(widest.id, shard)
        if place not in self.history.final:
            return []
        low, high = block.range(shard)
        row = self.history.final[place]
        if not row.sound or row.counts != tuple(each.bit_count() for each in row.pushes):
            self.seen["torn, on other servers"] += 1  # elements of a part have different pushes
            return []
        wanted, applied = self._tensors.applied(self, block, shard, row.pushes)
        wrong = list[str]()
        for client in self.clients:
            encoder: Any = encoder_of(client)
            if encoder is None:
                continue
            left = encoder.left_by(block, low, high, row.pushes[client.writer])
            wanted -= left
            if client.writer in self.lost:
                wrong += self._not_told(client, block, left)
            elif client.alive:
                wrong += self._wrong_own(encoder, block, low, high, left)
        text = off_by(values, wanted, applied)
        return [*wrong, f"block {block.id} on shard {shard}: {text}"] if text else wrong

    def _not_told(self, client: SimulatedClient, block: Block, left: Exact) -> list[str]:
        """What a client of before has left out in the checkpoint, and no one is told of."""
        if self.fell_to is None or client.rank < 0 or client.writer not in self._here:
            return []
        self.seen["flushed"] += bool(encoder_of(client).changes)  # type: ignore[union-attr]
        told = client.rank in self.fell_to.cut.lost_residuals
        if told and self.all_flush and not self._rests(client.rank):
            return [f"rank {client.rank} is told, which had made its flush"]
        if told or np.abs(left).max(initial=0.0) <= ROUNDING * LARGEST:
            return []
        return [f"block {block.id}: a residual of rank {client.rank} is lost, and no one is told"]

    def _rests(self, rank: int) -> bool:
        """Whether a rank has suspended its membership while the checkpoint was begun or its cut
        taken, so that no clock of the flush was one of its own."""
        assert self.fell_to is not None
        times, rests = self.times[self.fell_to.name], False
        for order, who, resting in self.history.resting:
            if who == rank and order < times.before:
                rests = resting or (rests and order > times.after)
        return rests

    def _wrong_own(
        self, encoder: RemembersChanges, block: Block, low: int, high: int, left: Exact
    ) -> list[str]:
        """A client's residual is what its pushes left out that were applied."""
        own = encoder.residual(block)
        if own is None or any(each.block.id == block.id for each in encoder.open):
            return []
        off = np.abs(own[low:high] - left).max(initial=0.0)
        most = ROUNDING * LARGEST * max(len(encoder.changes), 1)
        return [f"block {block.id}: a residual is not what was left out"] if off > most else []


def resumed_with_flushes(
    seed: int, *, all_flush: bool = False, **options: Any
) -> SimulatedFlushedResumes:
    """Run one seed and check it.

    Args:
        all_flush: no worker dies or stands still, and a cut waits for it.
    """
    plain: dict[str, Any] = {"workers": 2, "steps": 24, "restarts": not all_flush, "others": ()}
    plain["workload"] = partial(flushed_tensors, whole=all_flush)
    plain["faults"] = NO_KILLS if all_flush else FAULTS
    with patch.object(flush, "FLUSH_LIMIT_MAX_S", 1e6 if all_flush else FLUSH_S):
        cluster = SimulatedFlushedResumes(seed, Scenario(**{**plain, "links": "tcp", **options}))
        cluster.all_flush = all_flush
        cluster.run()
    cluster.check()
    return cluster
