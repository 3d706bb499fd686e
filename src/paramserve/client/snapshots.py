"""Snapshots of a group: the shards keep them at given versions, and a client reads them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy.typing as npt

from paramserve.client.client import Client
from paramserve.client.exchange import answers_by_shard
from paramserve.client.step_parts import kept_offset
from paramserve.messages import ReadTarget, TakeSnapshot, Watch

Array = npt.NDArray[Any]


class GroupSnapshot(NamedTuple):
    """A group's values at one version, the same on all shards.

    `dropped` counts earlier snapshots that were not read in time.
    """

    version: int
    values: dict[str, Array]
    dropped: int


class Snapshots:
    """Reads snapshots of whole groups by a client, for which the shards keep one watch."""

    def __init__(self, client: Client) -> None:
        self._connection = client.connection
        self._steps = client.steps
        self._directory = client.directory
        self._exchange = client.connection.exchange
        self._lock = client.connection.lock

    def watch(self, group: str, every: int, keep: int = 8) -> bool:
        """Have the shards keep a snapshot of a group at every `every`-th version, at most `keep`.

        Returns:
            False if nothing is defined in the group yet.
        """
        self._connection.check()
        with self._lock:
            block = self._directory.any_in(group)
            if block is None:
                return False
            watch = Watch(0, block.group, every, keep)
            self._steps.ask_all("watch", watch, self._steps.waits.timeout_s)
            return True

    def take(self, group: str, after: int) -> GroupSnapshot | None:
        """The oldest kept snapshot of a version past `after` that all shards have, or None."""
        self._connection.check()
        with self._lock:
            first = self._directory.any_in(group)
            if first is None:
                return None
            blocks = [b for b in self._exchange.blocks.values() if b.group == first.group]
            while True:
                slots = [self._exchange.take(block.kept_bytes) for block in blocks]
                requests = []
                for shard in range(len(self._exchange.shards)):
                    pull = tuple(
                        ReadTarget(block.id, slot.arena, kept_offset(block, slot, shard))
                        for block, slot in zip(blocks, slots, strict=True)
                    )
                    requests.append(TakeSnapshot(0, first.group, after, pull))
                replies = answers_by_shard(
                    self._steps.finish("snapshot", requests, self._steps.waits.timeout_s, slots)
                )
                versions = {reply.snapshot for reply in replies}
                if -1 in versions:
                    return None
                if len(versions) == 1:
                    break
                after = max(versions) - 1  # A shard has dropped the older ones.
            values = {}
            for block, slot in zip(blocks, slots, strict=True):
                flat = slot.kept_values(block)
                for piece in self._directory.names.pieces(block):
                    values[piece.name] = piece.view(flat).copy()
            return GroupSnapshot(versions.pop(), values, max(reply.dropped for reply in replies))
