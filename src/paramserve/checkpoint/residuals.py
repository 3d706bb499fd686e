"""What workers have left out of their gradients, in a checkpoint: a file of each rank and block.

It has the tensors of the block, as the file of its values has. A file that is not whole on all
servers is in no manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from msgspec import structs

from paramserve.checkpoint.manifest import Manifest, residual_path
from paramserve.checkpoint.reader import Checkpoint
from paramserve.checkpoint.storage import Storage
from paramserve.checkpoint.writer import DenseFile, Writer
from paramserve.errors import CheckpointDamaged, ProtocolError
from paramserve.messages import BlockSpec, KeepResidual

Floats = npt.NDArray[np.float32]

SHOWN_MAX = 3
"""Tensors that an error names."""


class _Coming:
    """A rank's residual of a block, as far as it is here."""

    def __init__(self, rank: int, spec: BlockSpec, shard: int) -> None:
        self.spec = spec
        self.path = residual_path(spec.group_name, spec.block, rank)
        self.next, self.end = spec.cuts[shard], spec.cuts[shard + 1]
        self.file: DenseFile | None = None


class ResidualFiles:
    """One server's ranges of the residuals that a checkpoint is to have, as they come.

    Args:
        writer: of the checkpoint. `write`, `lose` and its other methods: one thread at a time.
        shard: whose ranges they are.
        ranks: by client.
        blocks: that all clients keep residuals of. A server without elements of one writes only
            what begins its file, if it is the first.
    """

    def __init__(
        self,
        writer: Writer,
        shard: int,
        ranks: Iterable[tuple[int, int]],
        blocks: Sequence[BlockSpec],
    ) -> None:
        self.lost: set[tuple[int, int]] = set()
        """(client, block) of those that the checkpoint does without."""
        self._writer = writer
        self._shard = shard
        here = [each for each in blocks if shard == 0 or each.cuts[shard] < each.cuts[shard + 1]]
        self._coming = {
            (client, spec.block): _Coming(rank, spec, shard)
            for client, rank in ranks
            for spec in here
        }

    @property
    def clients(self) -> frozenset[int]:
        """Those of whom something is still to come."""
        return frozenset(client for client, _ in self._coming)

    def rest(self, client: int) -> list[BlockSpec]:
        """Blocks of whose residual nothing has come of a client."""
        return [
            each.spec
            for (of, _), each in self._coming.items()
            if of == client and each.file is None
        ]

    def check(self, client: int, message: KeepResidual) -> bool:
        """Whether elements that came are the next ones; not if they are here already, or are not
        wanted.

        Raises:
            ProtocolError: they are none that follow. Nothing was written.
        """
        coming = self._coming.get((client, message.block))
        if coming is None or (message.start < coming.next and message.count > 0):
            return False
        none = message.count == -1 and coming.file is None
        more = 0 < message.count <= coming.end - coming.next or coming.next == coming.end
        if none or (more and message.start == coming.next and message.count >= 0):
            return True
        raise ProtocolError(
            f"client {client} sent elements {message.start} to {message.start + message.count} of "
            f"its residual of block {message.block}; the next are {coming.next} to {coming.end}",
            applied="no",
            fix="run the same version on both sides",
        )

    def write(self, client: int, message: KeepResidual, values: Floats) -> None:
        """Write elements that `check` has let through.

        Raises:
            CheckpointError: the storage failed.
        """
        coming = self._coming[client, message.block]
        if message.count >= 0:
            if coming.file is None:
                coming.file = self._writer.dense(coming.path, [coming.spec], self._shard)
            coming.file.write(message.block, values)
            coming.next += values.size
        if message.count < 0 or coming.next == coming.end:
            del self._coming[client, message.block]

    def lose(self, clients: Iterable[int]) -> None:
        """Do without what is still to come of these clients.

        Raises:
            CheckpointError: the storage failed.
        """
        gone = frozenset(clients)
        for key in [key for key in self._coming if key[0] in gone]:
            coming = self._coming.pop(key)
            self.lost.add(key)
            self._writer.lost(coming.path, [coming.spec])


class Found(NamedTuple):
    """What a checkpoint has for a rank.

    Attributes:
        values: elements of a block's residual; None: there is none.
        lost: ranks of which the checkpoint has none for this block.
    """

    values: Floats | None
    lost: tuple[int, ...]


class SavedResiduals:
    """The residuals of the checkpoint that a run goes on from, read by any thread.

    Args:
        manifest: of the checkpoint.
        specs: of all blocks, as they are cut now.
        workers: ranks that go on; rank 0 takes over what the others have left out.
    Raises:
        CheckpointDamaged: a file is missing, too short, or has other tensors than its block.
    """

    def __init__(
        self, storage: Storage, manifest: Manifest, specs: Sequence[BlockSpec], workers: int
    ) -> None:
        self._saved = Checkpoint(storage, manifest)
        self._workers = workers
        self._specs = {spec.block: spec for spec in specs}
        ranks = range(max(manifest.cut.workers, workers))
        paths = {each.path.partition("/")[2] for each in manifest.files}
        self._paths = {
            (spec.block, rank): path
            for spec in specs
            for rank in ranks
            if (path := residual_path(spec.group_name, spec.block, rank)) in paths
        }
        try:
            for (block, _), path in self._paths.items():
                self._check(path, self._specs[block])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._saved.close()

    def _check(self, path: str, spec: BlockSpec) -> None:
        there = {name: each[1:3] for name, each in self._saved.tensors(path).items()}
        wanted = {each.name: (spec.dtype, tuple(each.shape)) for each in spec.pieces}
        if there != wanted:
            raise CheckpointDamaged(
                f"checkpoint {self._saved.manifest.name} is damaged: {path} has the tensors "
                f"{_shown(there)}, and its block has {_shown(wanted)}",
                fix="use the checkpoint before, or a copy of this one",
            )

    def _for(self, block: int, rank: int) -> list[str]:
        """The files that a rank goes on with."""
        return [
            path
            for (each, of), path in self._paths.items()
            if each == block and (of == rank or (rank == 0 and of >= self._workers))
        ]

    def has(self, block: int, rank: int) -> bool:
        """Whether there is something for a rank to go on with."""
        return bool(self._for(block, rank))

    def unclaimed(self) -> set[tuple[int, int]]:
        """As `Shard.unclaimed`."""
        return {
            (spec.group, rank)
            for spec in self._specs.values()
            for rank in range(self._workers)
            if self._for(spec.block, rank)
        }

    def read(self, block: int, rank: int, start: int, count: int) -> Found:
        """Some elements of what a rank goes on with, in new memory.

        Args:
            start, count: elements [start, start + count) of the block.
        Raises:
            CheckpointDamaged: a file is, or holds NaN or Inf. CheckpointError: the store cannot be
                reached.
        """
        total: Floats | None = None
        for path in self._for(block, rank):
            part = structs.replace(self._specs[block], cuts=(start, start + count))
            found = np.empty(count, np.float32)
            self._saved.dense(path, part, 0, found)
            if not np.isfinite(found).all():
                raise CheckpointDamaged(
                    f"checkpoint {self._saved.manifest.name} is damaged: {path} holds NaN or Inf",
                    fix="use the checkpoint before",
                )
            total = found if total is None else total + found
        return Found(total, self.lost(block))

    def lost(self, block: int) -> tuple[int, ...]:
        """The ranks of which the checkpoint has no residual of a block."""
        before = range(self._saved.manifest.cut.workers)
        return tuple(each for each in before if (block, each) not in self._paths)


def _shown(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    named = [f"{name!r} {dtype}{list(shape)}" for name, (dtype, shape) in tensors.items()]
    more = f" and {len(named) - SHOWN_MAX} more" if len(named) > SHOWN_MAX else ""
    return ", ".join(named[:SHOWN_MAX]) + more
