"""Messages of checkpoints: how a checkpoint of a run is taken and written.

The coordinator has shard 0 take a whole cut (`BeginCheckpoint`, `CutTaken`), names the checkpoint,
has every server write its part (`WriteCut`, `CutWritten`), and commits it or gives it up
(`CheckpointOver`). `checkpoint` counts those that it has begun.
"""

from __future__ import annotations

from math import inf

from msgspec import Struct


class BeginCheckpoint(Struct, frozen=True, array_like=True, tag="begin-checkpoint"):
    """Coordinator to all servers: have memory for the copies of a cut; to shard 0: take the cut.

    `full`: with all rows of tables, else those that have changed since the last checkpoint that was
    committed, where there is one. `flush_s`: how long shard 0 may wait from now on for what clients
    flush before the cut; told again where a caller has less time.
    """

    checkpoint: int
    full: bool = True
    flush_s: float = inf


class CutTaken(Struct, frozen=True, array_like=True, tag="cut-taken"):
    """Shard 0 to the coordinator: all shards have their part of the cut with this number, or why
    there is none (`failed`), and what to do (`fix`).

    `clocks`: by group, the first that is not committed, or that the slowest worker has not ended.
    `torn`: clients that ended, or stood still, while they were sending, whom the shards have up to
    different numbers. `left_out`: names of those that stood still. `updates`: of all groups, how
    many the shards count. `blocks`: those that all shards have; the rest were being defined.
    """

    checkpoint: int
    cut: int = 0
    clocks: dict[str, int] = {}
    torn: tuple[int, ...] = ()
    updates: int = 0
    blocks: tuple[int, ...] = ()
    failed: str = ""
    fix: str = ""
    left_out: str = ""


class WriteCut(Struct, frozen=True, array_like=True, tag="write-cut"):
    """Coordinator to all servers: write your part of a cut to the checkpoint of this name.

    `blocks`: those that are written, as `CutTaken` says.
    """

    checkpoint: int
    cut: int
    name: str
    blocks: tuple[int, ...] = ()


class CutWritten(Struct, frozen=True, array_like=True, tag="cut-written"):
    """A server to the coordinator: its part is written and synced, or why not (`failed`).

    `files`: `checkpoint.manifest.Written` of each file, in msgpack. `pause_s`: the longest that the
    shard executed nothing for this checkpoint. `marks`: as `GroupReport.marks`, of the cut, of all
    groups; `begun`: the same with calls that are not over in it. `left_out`: ranks that keep
    something that was left out of their gradients before the cut.
    """

    checkpoint: int
    shard: int
    files: bytes = b""
    pause_s: float = 0.0
    marks: tuple[tuple[int, int, int], ...] = ()
    failed: str = ""
    begun: tuple[tuple[int, int, int], ...] = ()
    left_out: tuple[int, ...] = ()


class CheckpointOver(Struct, frozen=True, array_like=True, tag="checkpoint-over"):
    """Coordinator to all servers: a checkpoint is committed or given up; release the cut."""

    checkpoint: int
    cut: int
    committed: bool


class AskCheckpoint(Struct, frozen=True, array_like=True, tag="ask-checkpoint"):
    """A client asks for a checkpoint that begins now, or when the one under way is over, and waits
    up to `wait_s` for it."""

    call: int
    wait_s: float


class Checkpointed(Struct, frozen=True, array_like=True, tag="checkpointed"):
    """Notice that a checkpoint is committed.

    `clocks`: as in `CutTaken`. `nbytes`: of the files that were written for it. `pause_s`: the
    longest that a shard executed nothing for it. `seconds`: from its beginning to the commit.
    """

    call: int
    path: str
    clocks: dict[str, int]
    nbytes: int
    pause_s: float
    seconds: float


class CheckpointReport(Struct, frozen=True, array_like=True):
    """How checkpoints stand.

    `folder`: that they are written to. `name`: of the last one that was committed, empty: none yet;
    `age_s` since then, its `nbytes`, `pause_s` and `seconds` as in `Checkpointed`. `committed`,
    `failed`: how many in this run, and why the last one that failed did. `writes`: one is under
    way. `left_out`: as in `CutTaken`, of the last one.
    """

    name: str = ""
    clocks: dict[str, int] = {}
    age_s: float = 0.0
    nbytes: int = 0
    pause_s: float = 0.0
    seconds: float = 0.0
    committed: int = 0
    failed: int = 0
    why: str = ""
    writes: bool = False
    folder: str = ""
    left_out: str = ""
