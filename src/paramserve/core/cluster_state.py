"""What the coordinator saves with a checkpoint, and goes on from: plain records of its parts.

What is done of the leases, the cut's marks say; so what goes from the book is kept from before the
cut on. Blocks are saved as defined where they were when the cut had been taken and are in it.
Members and client ids are saved last: what comes after has higher numbers.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from paramserve.config import ConsistencySpec
from paramserve.core.collectives import Collectives, CollectivesRecord
from paramserve.core.directory import BlockRecord, Directory, Stage
from paramserve.core.leases import LeaseBook, LeasesRecord, Marks
from paramserve.core.membership import Membership, MembershipRecord
from paramserve.messages import BlockSpec


class ClusterRecord(Struct, frozen=True):
    """The coordinator's part of a checkpoint: `cluster.msgpack`.

    Attributes:
        consistency: the policy of groups without one of their own.
    """

    membership: MembershipRecord
    blocks: tuple[BlockRecord, ...]
    leases: LeasesRecord
    collectives: CollectivesRecord
    consistency: ConsistencySpec


def blocks_for(record: ClusterRecord, shards: int) -> tuple[BlockSpec, ...]:
    """The blocks that a checkpoint has, cut for so many shards."""
    directory = Directory(shards)
    directory.restore(record.blocks)
    return directory.find(None) or ()


class ClusterState:
    """The parts of the coordinator that are saved with a checkpoint.

    Args:
        consistency: the cluster's policy.
        record: that they go on from; None: they begin.
    """

    def __init__(
        self,
        servers: int,
        workers: int,
        reduce_bytes_max: int,
        consistency: ConsistencySpec,
        record: ClusterRecord | None,
    ) -> None:
        self._consistency = consistency
        self.membership = Membership(servers, workers)
        self.directory = Directory(servers, consistency)
        self.leases = LeaseBook()
        self.collectives = Collectives(self.membership, reduce_bytes_max)
        if record is not None:
            self.membership.restore(record.membership)
            self.directory.restore(record.blocks)
            self.leases.restore(record.leases)
            same = {each.rank for each in record.membership.members} == set(range(workers))
            if same or not record.collectives.agreed:
                # Other ranks would not agree on what these have as parts of their own.
                self.collectives.restore(record.collectives)
        self._blocks: tuple[BlockRecord, ...] = ()
        self._ended = self.collectives.record()

    def tables(self) -> frozenset[int]:
        """The numbers of all tables that are defined."""
        specs = self.directory.find(None) or ()
        return frozenset(spec.block for spec in specs if spec.table is not None)

    def begin(self) -> None:
        """A cut for a checkpoint is about to be asked for."""
        self.leases.keep_past()

    def cut_taken(self, blocks: Collection[int]) -> tuple[int, ...]:
        """Note a taken cut with these blocks, and return those that are saved.

        Of a block that is not known as defined, its definer has pushed nothing."""
        self._blocks = self.directory.record(blocks)
        self._ended = self.collectives.record()
        return tuple(each.spec.block for each in self._blocks if each.stage == Stage.DEFINED.value)

    def record(self, marks: Marks) -> ClusterRecord:
        """What is saved with that cut; so much of the clients' leased samples is in it."""
        return ClusterRecord(
            self.membership.record(),
            self._blocks,
            self.leases.record_at_cut(marks),
            self._ended,
            self._consistency,
        )

    def let_go(self) -> None:
        """The checkpoint is over."""
        self.leases.keep_past(False)
        self._blocks = ()
