"""A worker and a shard of the model: where they stand, and when their links will be free."""

from __future__ import annotations

import random

from paramserve.planning.group_view import ShardGroupView
from paramserve.planning.processor import Processor
from paramserve.planning.setting import Compute


class Worker:
    __slots__ = (
        "_compute",
        "_mean_s",
        "_source",
        "answers",
        "base",
        "clock",
        "cpu",
        "down_at",
        "freed_at",
        "had_at",
        "next",
        "rank",
        "skipped",
        "up_at",
        "whole_at",
    )

    def __init__(
        self, rank: int, compute: Compute, source: random.Random, cpu: Processor, shards: int
    ) -> None:
        self.rank = rank
        self._compute = compute
        self._source = source
        self._mean_s = compute.mean_of(rank, source)
        self.cpu = cpu
        self.clock = self.next = 0
        """Steps finished, and what that is after the step under way."""
        self.base = [0] * shards
        """By shard, the version that it has read."""
        self.up_at = self.down_at = 0.0
        """When its link will be free, in each direction."""
        self.answers = 0
        self.whole_at = 0.0
        """When the last answer will be here as a whole."""
        self.had_at = self.freed_at = 0.0
        """When the last shard had its gradients; when the last one stopped holding it up."""
        self.skipped = False

    def draw(self) -> float:
        """How long its next step takes: the same one whatever the others do."""
        return self._compute.draw(self._mean_s, self._source)


class Shard:
    __slots__ = (
        "cpu",
        "early",
        "first_at",
        "in_at",
        "number",
        "out_at",
        "since",
        "standing",
        "steps",
        "told",
        "waiting",
    )

    def __init__(self, number: int, cpu: Processor, workers: int) -> None:
        self.number = number
        self.cpu = cpu
        self.standing = ShardGroupView(workers)
        self.in_at = self.out_at = 0.0
        """When its link will be free, in each direction."""
        self.waiting: list[Worker] = []
        """Their pulls are held."""
        self.steps: dict[int, Worker] = {}
        """By rank, whose gradients of the clock under way are here."""
        self.early: list[Worker] = []
        """They bring a later clock, of which this shard does not know yet."""
        self.told = False
        """Whether the lead knows that this shard is ready."""
        self.since = 0.0
        """Of the clock under way."""
        self.first_at = 0.0
