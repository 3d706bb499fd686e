"""A coordinator takes checkpoints of puppets, and goes on from one."""

from __future__ import annotations

import errno
import os
from math import inf
from typing import Any

import pytest
from msgspec import structs
from tests.disk import Disk
from tests.suites import each_case
from tests.unit.checkpoint.puppets import DRIVER, PLAN, SERVER, Puppets, started

from paramserve.checkpoint.folder import Folder
from paramserve.config import Resumed, RuleSpec
from paramserve.core import checkpointing
from paramserve.core.coordination import ConnectionLost, FilesWorked, Noticed
from paramserve.messages import (
    AskStatus,
    BeginCheckpoint,
    Checkpointed,
    CheckpointOver,
    CutTaken,
    CutWritten,
    Defined,
    Failed,
    GroupReport,
    Joined,
    Piece,
    PlaceBlock,
    Reconnect,
    Scale,
    ServerBeat,
    TableSpec,
    WriteCut,
)


def names(disk: Disk) -> list[str]:
    return [each.name for each in Folder(disk).manifests()[0]]


def test_checkpoints_come_by_time_and_the_oldest_go() -> None:
    disk = Disk()
    run = started(disk, structs.replace(PLAN, keep=2, full_every=3, seed=5))
    for clock in (4, 8, 12, 16):
        run.clock = clock
        run.pass_time(10.0)
    assert names(disk) == ["step-16", "step-12"]
    newest = Folder(disk).named("step-16")
    cut = newest.cut
    assert (newest.run, cut.clocks, cut.shards, cut.workers, cut.seed, cut.updates) == (
        "puppets",
        {"model": 16},
        2,
        2,
        5,
        50,
    )
    assert [block.pieces[0].name for block in cut.blocks] == ["w"]
    assert {each.path for each in newest.files} == {
        f"step-16/{name}.msgpack" for name in ("cluster", "shard-0", "shard-1")
    }
    begun = [each for shard, each in run.told if shard == 0 and isinstance(each, BeginCheckpoint)]
    assert [each.full for each in begun] == [True, False, False, True]
    assert run.overs() == [True] * 4
    report = run.call(DRIVER, AskStatus(1)).checkpoints
    assert (report.name, report.committed, report.failed, report.pause_s) == (
        "step-16",
        4,
        0,
        0.001,
    )
    run.pass_time(3.0)
    assert run.call(DRIVER, AskStatus(1)).checkpoints.age_s == 3.0


def test_checkpoints_come_by_steps_of_the_slowest_worker() -> None:
    disk = Disk()
    run = started(disk, structs.replace(PLAN, every_s=0.0, every_steps=100))

    def beat(*clocks: int) -> None:
        told = tuple(enumerate(clocks))
        groups = (
            GroupReport("model", 0, told, 0, ()),
            GroupReport("slow", 0, ((0, 1),), 0, ()),
            GroupReport("model.buffers", 0, ((0, 9000),), 0, ()),
        )
        for shard in (1, 0):
            run.happen(Noticed(SERVER + shard, ServerBeat(shard, groups)))
        run.pass_time(1.0)

    beat(99, 400)
    assert run.overs() == []
    beat(100, 400)
    assert run.overs() == [True]
    beat(199, 400)
    assert run.overs() == [True]
    beat(230, 400)
    assert run.overs() == [True, True]


def test_no_checkpoint_falls_due_before_the_servers_are_seen() -> None:
    disk = Disk()
    first = started(disk)
    first.pass_time(11.0)
    first.committer.close()
    run = Puppets(disk, resume="step-0")  # it knows a block at once
    run.pass_time(12.0)
    assert run.overs() == []
    run.join(0)
    run.pass_time(9.0)
    assert run.overs() == []
    run.pass_time(2.0)
    assert run.overs() == [True]


def test_nothing_is_saved_before_a_block_is_defined() -> None:
    run = Puppets(Disk())
    run.join(0)
    run.pass_time(12.0)
    assert run.told == []
    run.define()
    run.pass_time(11.0)
    assert run.overs() == [True]


def test_run_goes_on_with_what_the_coordinator_knew() -> None:
    disk = Disk()
    run = started(disk)
    run.clock = 3
    run.pass_time(11.0)
    run.committer.close()
    again = Puppets(disk, resume="step-3", servers=2)
    joined = again.join(0)
    assert isinstance(joined, Joined)
    assert (joined.incarnation, joined.client) == (2, 3)
    again.join(1)
    assert again.define(1).attempt == 0
    again.clock = 5
    again.pass_time(11.0)
    assert names(disk) == ["step-5", "step-3"]
    assert again.told[1][1] == WriteCut(1, 7, "step-5", (0,))


def resumed(disk: Disk, **options: Any) -> Puppets:
    """A cluster that goes on from a checkpoint of two minutes ago, before any client has come."""
    first = started(disk)
    first.clock = 3
    first.pass_time(11.0)
    first.committer.close()
    before = Resumed({"model": 3}, age_s=120.0, nbytes=5000, pause_s=0.5)
    plan = structs.replace(PLAN, resume="step-3", resumed=before)
    return Puppets(disk, plan, resume="step-3", **options)


def test_cluster_that_goes_on_writes_a_checkpoint_when_asked_before_a_client_comes() -> None:
    run = resumed(Disk())
    assert isinstance(run.ask(), Checkpointed)


def test_checkpoint_is_refused_where_a_server_does_not_see_the_folder_and_no_client_has_come() -> (
    None
):
    disk = Disk()
    run = resumed(disk)
    disk.remove(".probe-nonce-1")
    refused = run.ask()
    assert isinstance(refused, Failed)
    assert refused.kind == "CheckpointError"


def test_status_tells_the_checkpoint_that_the_cluster_goes_on_from() -> None:
    run = resumed(Disk())
    run.pass_time(30.0)
    told = run.call(DRIVER, AskStatus(1)).checkpoints
    assert (told.name, told.clocks, told.nbytes, told.pause_s) == (
        "step-3",
        {"model": 3},
        5000,
        0.5,
    )
    assert (told.age_s, told.committed) == (150.0, 0)
    run.join(0)
    run.clock = 5
    run.pass_time(11.0)
    told = run.call(DRIVER, AskStatus(1)).checkpoints
    assert (told.name, told.committed) == ("step-5", 1)
    assert told.age_s < 2.0


def test_cluster_is_as_saved_until_a_client_comes_or_it_is_scaled() -> None:
    run = resumed(Disk())
    run.pass_time(30.0)
    assert run.one.as_saved
    run.join(-1)
    assert not run.one.as_saved
    run = resumed(Disk())
    run.call(DRIVER, Scale(1, 3))
    assert not run.one.as_saved
    assert not started(Disk()).one.as_saved


def test_other_servers_get_the_blocks_cut_anew() -> None:
    disk = Disk()
    run = started(disk, servers=3)
    run.define(0, "large", 1 << 20)
    run.define(0, "comes after the cut", 1)
    run.blocks = (0, 1)
    run.pass_time(11.0)
    run.committer.close()
    again = Puppets(disk, resume="step-0", servers=2, workers=3)
    blocks = again.one.directory.find(None)
    assert blocks is not None
    assert [block.cuts for block in blocks] == [(0, 3, 3), (0, 1 << 19, 1 << 20)]
    again.join(0)
    assert again.define(0, "comes after the cut", 1).attempt == 2
    states = {rank: each.state for rank, each in again.one.membership.members.items()}
    assert states == {0: "live", 1: "expected", 2: "expected"}


def test_failed_checkpoint_is_told_and_the_next_one_is_tried_again() -> None:
    full = False

    def fail(number: int, method: str) -> OSError | None:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if full else None

    disk = Disk(fail=fail)
    run = started(disk, structs.replace(PLAN, every_s=100.0))
    run.pass_time(101.0)
    full = True
    refused = run.ask()
    full = False
    assert isinstance(refused, Failed)
    assert refused.kind == "CheckpointError"
    assert refused.failed.startswith("checkpoint step-0 was not begun")
    assert "No space left on device" in refused.failed
    assert "make room" in refused.fix
    run.pass_time(checkpointing.RETRY_S + 1)
    assert run.overs() == [True, False, True]
    report = run.call(DRIVER, AskStatus(1)).checkpoints
    assert (report.committed, report.failed) == (2, 1)
    assert "No space left" in report.why


@each_case("whose", [0, 1])
def test_server_that_fails_gives_the_checkpoint_up(whose: int) -> None:
    disk = Disk()
    run = started(disk)

    def fail(shard: int, notice: WriteCut) -> None:
        if shard == whose:
            failed = CutWritten(
                notice.checkpoint, shard, failed=f"server {shard}: the disk is full"
            )
            run.happen(Noticed(SERVER + shard, failed))
        else:
            run.write(shard, notice)

    run.answers[WriteCut] = fail
    run.pass_time(11.0)
    assert run.overs()[0] is False
    assert names(disk) == []
    assert f"server {whose}: the disk is full" in run.call(DRIVER, AskStatus(1)).checkpoints.why
    del run.answers[WriteCut]
    run.pass_time(10.0)
    (name,) = names(disk)
    left = {".probe-nonce", ".probe-nonce-0", ".probe-nonce-1", "manifest-1.json", "owner.json"}
    assert {each.name for each in disk.entries("")} - left == {name}  # what was left is pruned


def test_caller_gets_a_checkpoint_that_began_after_its_call() -> None:
    run = started(Disk(), structs.replace(PLAN, every_s=0.0))
    writes: list[tuple[int, WriteCut]] = []
    run.answers[WriteCut] = lambda shard, notice: writes.append((shard, notice))
    assert run.ask(1) is None
    assert run.ask(2) is None  # the first one's cut may lie before this call
    for each in list(writes):
        run.write(*each)
    (first,) = [reply for to, reply in run.replies if to == DRIVER]
    assert isinstance(first, Checkpointed)
    assert (first.call, first.path) == (1, "a disk in memory/step-0")
    run.pass_time(1.0)
    for each in writes[2:]:
        run.write(*each)
    second = run.replies[-1][1]
    assert isinstance(second, Checkpointed)
    assert (second.call, second.path) == (2, "a disk in memory/step-0-2")
    assert run.ask(3, wait_s=2.0) is None
    run.pass_time(3.0)
    late = run.replies[-1][1]
    assert isinstance(late, Failed)
    assert "in 2.0 s: its parts are written" in late.failed


def test_tables_are_written_whole_where_changes_would_lack_a_base() -> None:
    run = started(Disk())

    def full() -> bool:
        run.pass_time(11.0)
        return [n for k, n in run.told if k == 0 and isinstance(n, BeginCheckpoint)][-1].full

    assert [full(), full()] == [True, False]
    pieces, rule = (Piece("users", (4,)),), RuleSpec("Add")
    table = TableSpec(4, "float32", 0, RuleSpec("options"))
    place = PlaceBlock(2, "users", "float32", rule, pieces, True, 1.0, table=table)
    placed = run.call(DRIVER, place)
    run.blocks = (0, 1)  # the shards have it, and count this checkpoint as its base
    assert not full()
    run.call(DRIVER, Defined(3, placed.spec.block, placed.attempt))
    assert [full(), full()] == [True, False]
    run.answers[WriteCut] = lambda shard, notice: run.happen(
        Noticed(SERVER + shard, CutWritten(notice.checkpoint, shard, failed="broken"))
    )
    assert not full()
    del run.answers[WriteCut]
    assert [full(), full()] == [True, False]


def test_checkpoint_of_changes_begins_anew_where_a_table_has_come_meanwhile() -> None:
    run = started(Disk())
    run.pass_time(11.0)
    table = TableSpec(4, "float32", 0, RuleSpec("options"))
    place = PlaceBlock(
        2, "users", "float32", RuleSpec("Add"), (Piece("users", (4,)),), True, 1.0, table=table
    )
    placed = run.call(DRIVER, place)
    run.blocks = (0, 1)

    def defined(shard: int, notice: BeginCheckpoint) -> None:
        run.answers.pop(BeginCheckpoint)
        run.call(DRIVER, Defined(3, placed.spec.block, placed.attempt))
        taken = CutTaken(notice.checkpoint, 7, {"model": 0}, updates=50, blocks=run.blocks)
        run.happen(Noticed(SERVER + shard, taken))

    run.answers[BeginCheckpoint] = defined
    run.pass_time(11.0)
    told = [n.full for k, n in run.told if k == 0 and isinstance(n, BeginCheckpoint)]
    assert told == [True, False, True]
    assert run.overs() == [True, False, True]
    report = run.one.checkpoints.report(run.now)
    assert (report.committed, report.failed) == (2, 0)


def test_silent_servers_are_named_and_slow_ones_waited_for() -> None:
    run = started(Disk(), structs.replace(PLAN, every_s=0.0))
    run.answers[WriteCut] = lambda shard, notice: run.write(0, notice) if shard == 0 else None
    assert run.ask(wait_s=1e4) is None
    for written in range(10):
        run.pass_time(checkpointing.WRITE_LIMIT_S / 2)
        run.happen(Noticed(SERVER + 1, ServerBeat(1, (), written=written + 1)))
    run.pass_time(checkpointing.WRITE_LIMIT_S + 1)
    (refused,) = [reply for to, reply in run.replies if to == DRIVER]
    assert "servers of shards [1] have written nothing for 300 s" in refused.failed


def test_flush_has_half_of_the_time_of_the_caller_that_waits() -> None:
    """Also of a checkpoint that was begun before; else it has all the time that it needs."""
    run = started(Disk())
    run.answers[BeginCheckpoint] = lambda shard, notice: None
    run.pass_time(PLAN.every_s)
    assert run.ask(1, wait_s=60.0) is None
    run.pass_time(10.0)
    assert run.ask(2, wait_s=1000.0) is None
    run.happen(Noticed(SERVER, CutTaken(1, failed="it was busy")))
    begun = [n for k, n in run.told if k == 0 and isinstance(n, BeginCheckpoint)]
    assert [(each.checkpoint, each.flush_s) for each in begun] == [
        (1, inf),
        (1, 30.0),
        (1, 20.0),
        (2, 20.0),
    ]


def test_cut_that_does_not_come_is_given_up_and_let_go_when_it_does() -> None:
    run = started(Disk(), structs.replace(PLAN, every_s=0.0))
    run.answers[BeginCheckpoint] = lambda shard, notice: None
    assert run.ask(wait_s=1e4) is None
    run.pass_time(checkpointing.TAKE_LIMIT_S + 2)
    assert run.overs() == [False]
    run.happen(Noticed(SERVER, CutTaken(1, 7)))
    assert run.told[-1] == (1, CheckpointOver(1, 7, False))
    del run.answers[BeginCheckpoint]
    assert isinstance(run.ask(2), Checkpointed)


def test_refused_cut_tells_who_asks_what_to_do() -> None:
    run = started(Disk(), structs.replace(PLAN, every_s=0.0))
    run.answers[BeginCheckpoint] = lambda shard, notice: None
    assert run.ask(wait_s=1e4) is None
    run.happen(Noticed(SERVER, CutTaken(1, failed="pushes take long", fix="take more servers")))
    (refused,) = [reply for to, reply in run.replies if to == DRIVER]
    assert refused.failed == "checkpoint number 1 was given up: pushes take long"
    assert refused.fix == "take more servers"


def test_folder_that_is_not_made_ends_a_checkpoint_and_is_removed_when_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Disk()
    run = started(disk, structs.replace(PLAN, every_s=0.0))
    begun = list[Any]()
    do = run.committer.do

    def slow(work: Any) -> Any:
        if isinstance(work, checkpointing.MakeFolder):
            begun.append(work)
            return None
        return do(work)

    monkeypatch.setattr(run.committer, "do", slow)
    assert run.ask(wait_s=1e4) is None
    run.pass_time(checkpointing.WRITE_LIMIT_S + 1)
    (refused,) = [reply for to, reply in run.replies if to == DRIVER]
    assert "its folder was not made in 300 s" in refused.failed
    made = do(begun[0])
    run.happen(FilesWorked(made))
    assert made.name not in [each.name for each in disk.entries("")]
    monkeypatch.undo()
    assert isinstance(run.ask(2), Checkpointed)


def test_server_that_connects_again_is_told_again() -> None:
    run = started(Disk(), structs.replace(PLAN, every_s=0.0))
    run.answers[WriteCut] = lambda shard, notice: None
    run.ask()
    told = len(run.told)
    run.happen(ConnectionLost(SERVER + 1, reset=True))
    run.call(SERVER + 1, Reconnect(1, b"", shard=1, pid=1, addresses=("unix:1",)))
    assert run.told[told:] == [(1, WriteCut(1, 7, "step-0", (0,)))]


def test_lost_server_ends_the_checkpoint() -> None:
    run = started(Disk(), structs.replace(PLAN, every_s=0.0))
    run.answers[WriteCut] = lambda shard, notice: None
    assert run.ask() is None
    run.happen(ConnectionLost(SERVER + 1))
    assert run.replies[-1][1].failed.endswith("the server of shard 1 is gone")


def test_workers_are_refused_where_a_server_does_not_see_the_folder() -> None:
    disk = Disk()
    run = Puppets(disk, up=False)
    assert run.join(0) is None
    run.start_server(0)
    disk.remove(".probe-nonce-0")
    run.start_server(1)
    refused = run.replies[-1][1]
    assert (type(refused), refused.kind) == (Failed, "CheckpointError")
    assert "server 0 does not see the folder of checkpoints" in refused.failed
