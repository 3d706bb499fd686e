"""A coordinator with servers that write what they are told to: a folder of checkpoints without a
cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from paramserve.checkpoint.committing import Committer, read_cluster
from paramserve.checkpoint.folder import answer_probe
from paramserve.checkpoint.manifest import shard_path
from paramserve.checkpoint.storage import Storage
from paramserve.checkpoint.writer import Writer
from paramserve.config import CheckpointPlan, ConsistencySpec, CoordinatorConfig
from paramserve.core.coordination import (
    Called,
    Coordination,
    Decided,
    FilesWorked,
    Noticed,
    TimePassed,
)
from paramserve.messages import (
    AskCheckpoint,
    BeginCheckpoint,
    CheckpointOver,
    CoordinatorRequest,
    CutTaken,
    CutWritten,
    Defined,
    Join,
    Piece,
    PlaceBlock,
    Register,
    ServerNotice,
    WriteCut,
)

SERVER, DRIVER = 90, 99
"""Connections; a worker's is its rank."""
PLAN = CheckpointPlan(folder="runs/a", run="puppets", every_s=10.0)


class Puppets:
    """A coordinator whose time goes by `pass_time`, and its servers.

    Attributes:
        told: what each server was told, in order.
        replies: what each connection was answered, in order.
        answers: by kind of notice, what a server does instead of its part.
    """

    def __init__(
        self,
        storage: Storage,
        plan: CheckpointPlan = PLAN,
        *,
        servers: int = 2,
        workers: int = 2,
        resume: str = "",
        up: bool = True,
    ) -> None:
        self.storage = storage
        self.servers = servers
        config = CoordinatorConfig(servers, workers, "", ConsistencySpec("Async"), checkpoints=plan)
        record = read_cluster(storage, resume) if resume else None
        self.committer = Committer(storage, plan, servers, "nonce")
        self.one = Coordination(config, record)
        self.now = 0.0
        self.clock = 0
        self.marks: tuple[tuple[int, int, int], ...] = ()
        """Marks of the next cut."""
        self.blocks: tuple[int, ...] = (0,)
        """Blocks of the next cut."""
        self.told: list[tuple[int, ServerNotice]] = []
        self.replies: list[tuple[int, Any]] = []
        self.answers: dict[type[ServerNotice], Callable[[int, Any], None]] = {}
        for shard in range(servers if up else 0):
            self.start_server(shard)

    def start_server(self, shard: int) -> None:
        answer_probe(self.storage, "nonce", shard)
        self.call(SERVER + shard, Register(1, shard, 1, (f"unix:{shard}",)))

    def happen(self, event: Any) -> Decided:
        """Let an event happen, and all that follows from it at once."""
        decided = self.one.step(event, self.now)
        self.replies += decided.replies
        for work in decided.work:
            done = self.committer.do(work)
            if done is not None:
                self.happen(FilesWorked(done))
        for connection, notice in decided.notices:
            self._serve(connection - SERVER, notice)
        return decided

    def _serve(self, shard: int, notice: ServerNotice) -> None:
        self.told.append((shard, notice))
        if type(notice) in self.answers:
            self.answers[type(notice)](shard, notice)
        elif isinstance(notice, BeginCheckpoint) and shard == 0:
            taken = CutTaken(
                notice.checkpoint, 7, {"model": self.clock}, updates=50, blocks=self.blocks
            )
            self.happen(Noticed(SERVER + shard, taken))
        elif isinstance(notice, WriteCut):
            self.write(shard, notice)

    def write(self, shard: int, notice: WriteCut) -> None:
        """Do a server's part."""
        with Writer(self.storage, notice.name) as writer:
            writer.write_message(shard_path(shard), b"all of it")
            files = msgspec.msgpack.encode(writer.finish())
        part = CutWritten(notice.checkpoint, shard, files, 0.001 * shard, self.marks)
        self.happen(Noticed(SERVER + shard, part))

    def call(self, connection: int, message: CoordinatorRequest) -> Any:
        """The reply to a call, or None while it waits."""
        before = len(self.replies)
        self.happen(Called(connection, message))
        mine = [reply for to, reply in self.replies[before:] if to == connection]
        return mine[0] if mine else None

    def join(self, rank: int) -> Any:
        return self.call(rank, Join(1, rank, 1))

    def define(self, rank: int = 0, name: str = "w", elements: int = 3) -> Any:
        """Let a rank define a block."""
        pieces = (Piece(name, (elements,)),)
        placed = self.call(rank, PlaceBlock(2, "model", "float32", None, pieces, True, 1.0))
        if placed is not None and placed.attempt:
            self.call(rank, Defined(3, placed.spec.block, placed.attempt))
        return placed

    def pass_time(self, seconds: float) -> None:
        """Let time pass, tick by tick."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now = min(self.now + 1.0, until)
            self.happen(TimePassed())

    def ask(self, call: int = 9, wait_s: float = 30.0) -> Any:
        """Ask for a checkpoint; its reply, None while it waits."""
        return self.call(DRIVER, AskCheckpoint(call, wait_s))

    def overs(self) -> list[bool]:
        """Whether each checkpoint that is over was committed, as the first server was told."""
        return [n.committed for k, n in self.told if k == 0 and isinstance(n, CheckpointOver)]


def started(storage: Storage, plan: CheckpointPlan = PLAN, **options: Any) -> Puppets:
    """With all workers there, and a block defined."""
    made = Puppets(storage, plan, **options)
    for rank in range(made.one.config.workers):
        made.join(rank)
    made.define()
    return made
