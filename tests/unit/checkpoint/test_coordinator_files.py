"""The coordinator's driver: it claims the folder, and does the work on files in another thread."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.unit.checkpoint.puppets import PLAN, started

from paramserve.checkpoint import claims, committing
from paramserve.checkpoint.claims import owner_of
from paramserve.checkpoint.manifest import CLUSTER_PATH
from paramserve.checkpoint.storage import LocalFolder
from paramserve.config import CheckpointPlan, ConsistencySpec, CoordinatorConfig
from paramserve.coordinator import CoordinatorRole, open_checkpoints
from paramserve.core.checkpointing import FileEvent, FilesFailed, FileWork, ServersSeen
from paramserve.core.coordination import Coordination, CoordinatorEvent, Decided, FilesWorked
from paramserve.errors import CheckpointDamaged, CheckpointError, CheckpointFolderTaken
from paramserve.launch.checkpoints import recovery_of
from paramserve.messages import CheckpointReport
from paramserve.virtual import VirtualClock
from paramserve_testing.loop import VirtualLoop


def config(folder: Path, **options: Any) -> CoordinatorConfig:
    plan = CheckpointPlan(folder=str(folder), run="mine", **options)
    return CoordinatorConfig(2, 2, "", ConsistencySpec("Async"), cluster=b"0123", checkpoints=plan)


def test_folder_is_made_and_held_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "CLAIM_S", 0.01)
    committer, record = open_checkpoints(config(tmp_path / "runs" / "a"))
    assert record is None
    assert committer is not None
    with pytest.raises(CheckpointFolderTaken, match="run 'mine' writes there"):
        open_checkpoints(config(tmp_path / "runs" / "a"))
    committer.close()
    again, _ = open_checkpoints(config(tmp_path / "runs" / "a"))
    assert again is not None
    again.close()


def test_folder_that_the_driver_does_not_see_is_refused_and_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committing, "CLAIM_SEEN_S", 0.05)
    drivers, here = tmp_path / "driver", tmp_path / "here"
    recovery = recovery_of("train", drivers, False)
    assert recovery is not None
    plan = structs.replace(recovery.plan(None), folder=str(here))
    told = structs.replace(config(here), checkpoints=plan)
    with pytest.raises(CheckpointError, match=r"the coordinator on .* does not see") as caught:
        open_checkpoints(told)
    assert str(here) in caught.value.failed
    assert f"left there for run {plan.run!r}, is not there" in caught.value.failed
    assert "driver and servers all see under this path" in caught.value.fix
    assert not here.exists()
    other = recovery_of("other", here, False)
    assert other is not None
    with pytest.raises(CheckpointError, match=f"is of run '{other.run}'"):
        open_checkpoints(told)
    assert owner_of(LocalFolder(here)).run == other.run  # type: ignore[union-attr]  # it is there


def test_folder_of_the_driver_is_taken_again_and_again(tmp_path: Path) -> None:
    """As by the coordinators of a run that goes on from checkpoints."""
    recovery = recovery_of("train", tmp_path, False)
    assert recovery is not None
    for _ in range(2):
        told = structs.replace(config(tmp_path), checkpoints=recovery.plan(None))
        committer, _ = open_checkpoints(told)
        assert committer is not None
        committer.close()


def test_cluster_without_a_folder_opens_nothing() -> None:
    assert open_checkpoints(CoordinatorConfig(1, 1, "", ConsistencySpec("Async"))) == (None, None)


def test_checkpoint_to_go_on_from_is_read_before_the_folder_is_claimed(tmp_path: Path) -> None:
    run = started(LocalFolder(tmp_path), structs.replace(PLAN, folder=str(tmp_path)))
    run.clock = 3
    run.pass_time(11.0)
    run.committer.close()
    to = {"resume_folder": str(tmp_path), "resume": "step-3"}
    committer, record = open_checkpoints(config(tmp_path / "other", **to))
    assert committer is not None
    assert record is not None
    assert record.membership.workers == 2
    committer.close()
    with pytest.raises(CheckpointError, match="no checkpoint 'step-4'; it has step-3"):
        open_checkpoints(config(tmp_path / "third", **(to | {"resume": "step-4"})))
    file = tmp_path / "step-3" / CLUSTER_PATH
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointDamaged, match=CLUSTER_PATH):
        open_checkpoints(config(tmp_path / "third", **to))
    assert not (tmp_path / "third").exists()


class Decides(Coordination):
    """Has the next steps want some work, and notes its result."""

    def __init__(self, wanted: list[list[FileWork]]) -> None:
        super().__init__(CoordinatorConfig(1, 1, "", ConsistencySpec("Async")))
        self.wanted = wanted
        self.came: list[FileEvent] = []
        self.tells: list[CheckpointReport] = []

    def step(self, event: CoordinatorEvent, now: float) -> Decided:
        if isinstance(event, FilesWorked):
            self.came.append(event.event)
        made = Decided(work=self.wanted.pop(0) if self.wanted else [], checkpoints=self.tells)
        self.tells = []
        return made


def test_work_is_done_in_order_and_what_it_raises_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    loop = VirtualLoop(clock, lambda: 0.25)
    done: list[tuple[float, Any]] = []

    def work(each: Any) -> FileEvent | None:
        done.append((round(clock.now, 2), each))
        if each == 2:
            raise RuntimeError("a bug")
        return ServersSeen() if each == 3 else None

    wanted: list[list[Any]] = [[1, 2], [3]]
    one = Decides(wanted)
    CoordinatorRole(one, loop, work=work)
    with caplog.at_level(logging.ERROR, "paramserve"):
        clock.run(2.0)
    assert done == [(0.35, 1), (0.6, 2), (0.85, 3)]
    assert one.came == [FilesFailed(0, "RuntimeError('a bug')", "report this"), ServersSeen()]
    assert "work on the files of checkpoints failed" in caplog.text


def test_closed_coordinator_begins_no_more_work() -> None:
    clock = VirtualClock()
    done: list[Any] = []
    one = Decides([[1, 2], [3]])  # type: ignore[list-item]
    role = CoordinatorRole(one, VirtualLoop(clock, lambda: 0.25), work=done.append)
    clock.run(0.2)
    role.close()
    clock.run(2.0)
    assert done == [1]
    assert one.came == []
    assert one.wanted == []


def test_outcome_of_each_checkpoint_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    one = Decides([])
    CoordinatorRole(one, VirtualLoop(clock), work=lambda work: None)
    one.tells = [
        CheckpointReport("step-4", nbytes=2_000_000, pause_s=0.002, seconds=0.5, committed=1),
        CheckpointReport("step-4", committed=1, failed=1, why="the disk is full"),
        CheckpointReport("step-8", committed=2, failed=1, why="the disk is full"),
        CheckpointReport("step-9", committed=3, failed=1, left_out="rank 3"),
    ]
    with caplog.at_level(logging.INFO, "paramserve"):
        clock.run(0.2)
    assert [(each.levelname, each.message[:22]) for each in caplog.records] == [
        ("INFO", "checkpoint step-4: 2.0"),
        ("WARNING", "the disk is full. Trai"),
        ("INFO", "checkpoint step-8: 0.0"),
        ("INFO", "checkpoint step-9: 0.0"),
        ("WARNING", "checkpoint step-9 has "),
    ]
    assert "the last push of rank 3 on some servers only" in caplog.messages[-1]
