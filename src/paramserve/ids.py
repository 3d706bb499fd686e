"""Names for the integers that identify things, so that a signature says which one it takes."""

from __future__ import annotations

from typing import NewType

ClientId = NewType("ClientId", int)
"""Given out by the coordinator, never reused within a cluster."""
Rank = NewType("Rank", int)
"""0 to workers - 1; `NO_RANK` for a client that is not a worker."""
ShardId = NewType("ShardId", int)
"""0 to servers - 1: the embedded cluster has one shard on each server."""
GroupId = NewType("GroupId", int)
BlockId = NewType("BlockId", int)
Sequence = NewType("Sequence", int)
"""Numbers one client's requests to one shard: 1, 2, 3, ..."""
Incarnation = NewType("Incarnation", int)

NO_RANK = Rank(-1)
