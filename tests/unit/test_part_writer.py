"""A server's part of a checkpoint on a virtual loop and disk: in turns, given up, told again."""

from __future__ import annotations

import errno
import os
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.disk import Disk
from tests.suites import each_case
from tests.unit.core.rig import Rig, block_spec

from paramserve.checkpoint.manifest import Written
from paramserve.core.cut import CUT_KEEP_S
from paramserve.core.cut_parts import BlockCopy
from paramserve.core.events import CutWanted, DeadlineReached
from paramserve.messages import BeginCheckpoint, CheckpointOver, CutTaken, CutWritten, WriteCut
from paramserve.server.checkpoints import PartWriter
from paramserve.virtual import VirtualClock
from paramserve_testing.loop import VirtualLoop

THREAD_S = 0.01
"""What every job takes."""
SIZE = 40
DENSE = block_spec((SIZE,))


class Bench:
    """One shard with one block, and what writes its part of checkpoints."""

    def __init__(self, disk: Disk | None) -> None:
        self.clock = VirtualClock()
        self.rig = Rig(workers=0)
        self.rig.join(1)
        self.rig.define(1, DENSE)
        self.told: list[CutTaken | CutWritten] = []
        self.flushes: list[float] = []
        """How long each cut may wait for a flush."""
        loop = VirtualLoop(self.clock, lambda: THREAD_S)
        self.parts = PartWriter(self.rig.shards[0], loop, disk, self.told.append, self._cut)
        self.cuts = self.rig.shards[0].cuts

    def _cut(self, notice: BeginCheckpoint) -> None:
        self.flushes.append(notice.flush_s)
        effects = self.rig.happen(CutWanted(notice.checkpoint, notice.full, notice.flush_s))
        self.told += effects.notices

    def run(self, seconds: float = 10.0) -> None:
        self.clock.run(self.clock.now + seconds)

    def cut(self, checkpoint: int) -> WriteCut:
        """Have a cut taken; what the coordinator then asks for."""
        self.parts.prepare(BeginCheckpoint(checkpoint))
        self.run(0.05)
        taken = [each for each in self.told if isinstance(each, CutTaken)][-1]
        assert taken.checkpoint == checkpoint
        return WriteCut(checkpoint, taken.cut, f"step-{checkpoint}", taken.blocks)

    def outcomes(self) -> list[CutWritten]:
        return [each for each in self.told if isinstance(each, CutWritten)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserve.checkpoint.shard_writer.PIECE_BYTES", 16)


def values(disk: Disk, told: CutWritten) -> np.ndarray:
    """What was written of the block."""
    written = msgspec.msgpack.decode(told.files, type=tuple[Written, ...])
    (path,) = (each.path for each in written if "values" in each.path)
    _, _, number = disk._at(path)
    return np.frombuffer(bytes(disk.now.files[number or 0][-8 * SIZE :]), np.float64)


@each_case("turns", [0.5, 2.5, 3.5, 4.5, 9.5])
def test_part_is_as_it_was_at_the_cut_whatever_comes_between_turns(turns: float) -> None:
    disk = Disk()
    bench = Bench(disk)
    bench.parts.write(bench.cut(1))
    for _ in range(5):
        bench.run(turns * THREAD_S)
        bench.rig.step(1, {0: np.ones(SIZE)}, tick=False)
    bench.run()
    (told,) = bench.outcomes()
    assert not told.failed
    assert (values(disk, told) == 0.0).all()
    assert not bench.cuts.parts_here
    bench.parts.write(bench.cut(2))
    bench.run()
    assert (values(disk, bench.outcomes()[-1]) == 5.0).all()


def test_notices_that_come_again_are_answered_again() -> None:
    bench = Bench(Disk())
    asked = bench.cut(1)
    bench.parts.prepare(BeginCheckpoint(1))
    assert [type(each) for each in bench.told] == [CutTaken] * 2
    bench.parts.write(asked)
    bench.parts.write(asked)
    bench.run()
    bench.parts.write(asked)
    first, again = bench.outcomes()
    assert first == again


def test_flush_gets_less_time_where_that_is_told_while_memory_is_prepared() -> None:
    bench = Bench(Disk())
    bench.parts.prepare(BeginCheckpoint(1))
    bench.parts.prepare(BeginCheckpoint(1, flush_s=5.0))
    bench.run(0.05)
    bench.parts.prepare(BeginCheckpoint(1, flush_s=3.0))
    assert bench.flushes == [5.0, 3.0]


def test_checkpoint_that_is_given_up_is_written_no_further() -> None:
    disk = Disk()
    bench = Bench(disk)
    bench.parts.write(bench.cut(1))
    bench.run(2.5 * THREAD_S)
    bench.parts.over(CheckpointOver(1, 0, False))
    bench.run()
    assert not any(one.kind == "sync" for one in disk.log)
    assert not bench.outcomes()
    bench.parts.write(bench.cut(2))
    bench.run()
    assert not bench.outcomes()[0].failed


def test_part_is_kept_while_the_disk_takes_longer_than_others_keep_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Disk()
    bench = Bench(disk)
    asked = bench.cut(1)
    monkeypatch.setattr(f"{__name__}.THREAD_S", 2 * CUT_KEEP_S)
    bench.parts.write(asked)
    for _ in range(200):
        bench.run(CUT_KEEP_S)
        bench.rig.shards[0].step(DeadlineReached(), bench.clock.now)
    (told,) = bench.outcomes()
    assert not told.failed
    assert not bench.cuts.parts_here


def test_part_that_is_given_up_is_let_go() -> None:
    bench = Bench(Disk())
    bench.parts.write(bench.cut(1))
    bench.run(2.5 * THREAD_S)
    bench.parts.over(CheckpointOver(1, 0, False))
    assert not bench.cuts.parts_here


def test_next_checkpoint_ends_the_one_before() -> None:
    bench = Bench(Disk())
    bench.parts.write(bench.cut(1))
    bench.run(2.5 * THREAD_S)
    bench.parts.write(bench.cut(2))
    bench.run()
    before, new = bench.outcomes()
    assert "has released cut" in before.failed
    assert not new.failed


@each_case("nth", [1, 4, 9, 14])
def test_failure_of_the_disk_is_told_and_the_next_part_is_written(nth: int) -> None:
    failing: list[Any] = []

    def fail(number: int, method: str) -> OSError | None:
        failing.append(method)
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if len(failing) == nth else None

    bench = Bench(Disk(fail=fail))
    bench.parts.write(bench.cut(1))
    bench.run()
    (told,) = bench.outcomes()
    assert told.failed.startswith("server 0: checkpoint step-1 was not written")
    assert "No space left" in told.failed
    assert not bench.cuts.parts_here
    bench.parts.write(bench.cut(2))
    bench.run()
    assert not bench.outcomes()[-1].failed


def test_cut_that_is_gone_is_told() -> None:
    bench = Bench(Disk())
    asked = bench.cut(1)
    bench.parts.write(asked)
    bench.run(2.5 * THREAD_S)
    bench.cuts.let_go(asked.cut)
    bench.run()
    assert "has released cut" in bench.outcomes()[0].failed


def test_server_without_a_folder_says_so() -> None:
    bench = Bench(None)
    bench.parts.write(bench.cut(1))
    assert "without a folder" in bench.outcomes()[0].failed


def test_cut_that_is_not_written_is_let_go() -> None:
    """Its copies take memory: the coordinator has a minute to ask for it."""
    bench = Bench(Disk())
    bench.cut(1)
    assert bench.cuts.parts_here
    bench.rig.now += 61.0
    bench.rig.happen(DeadlineReached())
    assert not bench.cuts.parts_here


@each_case("turns", [-1.0, 0.5, 2.5, 3.5])
def test_server_that_ends_within_a_checkpoint_begins_no_job(
    monkeypatch: pytest.MonkeyPatch, turns: float
) -> None:
    """asyncio's executor takes none then: that would be a traceback out of the event loop."""
    disk = Disk()
    bench = Bench(disk)
    if turns < 0:
        bench.parts.prepare(BeginCheckpoint(1))  # its memory is on the way
    else:
        bench.parts.write(bench.cut(1))
        bench.run(turns * THREAD_S)
    before = len(bench.told)
    bench.parts.close()

    def refuse(self: VirtualLoop, executor: None, function: Any, /) -> Any:
        raise RuntimeError("Executor shutdown has been called")

    monkeypatch.setattr(VirtualLoop, "run_in_executor", refuse)
    bench.run()
    assert bench.told[before:] == []
    assert not bench.cuts.parts_here


def test_bug_ends_one_checkpoint_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(Disk())
    with monkeypatch.context() as patched:
        patched.setattr(BlockCopy, "piece", lambda *arguments: {}["key"])
        bench.parts.write(bench.cut(1))
        bench.run()
    assert bench.outcomes()[0].failed == "server 0: 'key'"
    assert "could not be written" in caplog.text
    bench.parts.write(bench.cut(2))
    bench.run()
    assert not bench.outcomes()[-1].failed
