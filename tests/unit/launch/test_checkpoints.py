"""What a run is told of checkpoints, and which one it goes on from."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.needs import needs
from tests.suites import each_case
from tests.unit.checkpoint import sample

import paramserve as ps
from paramserve.checkpoint import claims
from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.storage import LocalFolder
from paramserve.errors import CheckpointDamaged, CheckpointError, CheckpointFolderTaken, ServerGone
from paramserve.launch.checkpoints import Checkpoint, Recovery, recovery_of
from paramserve.launch.life import Selection
from paramserve.messages import CheckpointReport, Status
from paramserve.observe.checkpoints import CheckpointStatus, Rollback

GONE = ServerGone("server 0 was killed by SIGKILL", fix="none")
STATUS = Status(1, (), (), (), (), 0, checkpoints=CheckpointReport(committed=1))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes checkpoints of a run; the folder."""

    def written(run: str, *numbers: int, folder: str = "a") -> str:
        root = tmp_path / folder
        root.mkdir(exist_ok=True)
        with Folder(LocalFolder(root)).claimed(run) as made:
            for number in numbers:
                sample.save(made, number)
        return str(root)

    return written


def cut_off(folder: str, path: str) -> None:
    file = Path(folder) / path
    file.write_bytes(file.read_bytes()[:-1])


def name_of(recovery: Recovery | None) -> str | None:
    assert recovery is not None
    return recovery.resume_point.manifest.name if recovery.resume_point is not None else None


@each_case(
    ("options", "told"),
    [
        ({"every_s": 0}, "every_s of Checkpoint must be above 0"),
        ({"every_s": "60"}, "every_s of Checkpoint must be a number"),
        ({"every_steps": 0}, "every_steps of Checkpoint must be at least 1"),
        ({"keep": 0}, "keep of Checkpoint must be at least 1"),
        ({"strict": 1}, "strict of Checkpoint must be True or False"),
        ({"on_server_death": "again"}, 'on_server_death of Checkpoint must be "resume", "stop" or'),
        ({"path": 3}, "path of Checkpoint must be the path of a folder, not 3"),
        ({"path": b"runs"}, "path of Checkpoint must be the path of a folder"),
        ({"path": ""}, "is empty"),
        ({"path": "memory://a"}, "'memory://a', and memory:// is of one process"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises((ValueError, TypeError), match=told):
        Checkpoint(**{"path": "runs/a", **options})


@each_case(
    "option",
    [
        {"every_s": 5.0},
        {"every_steps": 9},
        {"keep": 5},
        {"strict": True},
        {"on_server_death": "stop"},
    ],
)
def test_option_of_checkpoints_needs_their_path(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=rf"^{name}=.* needs their folder: Checkpoint\(path, "):
        Checkpoint(load_tables="users", **option)


def test_checkpoint_without_anything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs a path .* or load_state=, load_tables= or"):
        Checkpoint()


@each_case("resume", [False, True])
def test_checkpoint_without_a_path_is_no_folder_to_write_to(
    resume: bool, write: Callable[..., str], tmp_path: Path
) -> None:
    """Of one to go on from the path is given by `resume`."""
    values = Checkpoint(save_tables=tmp_path / "tables")
    recovery = recovery_of("train", values, write("before", 1) if resume else False)
    assert (recovery is not None) is resume
    if recovery is not None:
        assert name_of(recovery) == "step-1"
        assert recovery.plan(7).folder == ""
    assert not (tmp_path / "tables").exists()


def test_values_of_a_model_are_not_in_the_text_of_a_checkpoint() -> None:
    assert "load_state" not in repr(Checkpoint(load_state={"w": [1.0] * 1000}))


@each_case("name", ["load_state", "load_tables", "save_tables"])
def test_served_cluster_loads_and_saves_no_files_besides_checkpoints(name: str) -> None:
    checkpoint = Checkpoint("runs", **{name: "here"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"^{name}= of Checkpoint is for ps.run and ps.start"):
        ps.serve("127.0.0.1:0", token_file="missing", checkpoint=checkpoint)


@each_case(
    ("options", "every"),
    [({}, (60.0, 0)), ({"every_steps": 9}, (0.0, 9)), ({"every_s": 5, "every_steps": 9}, (5.0, 9))],
)
def test_checkpoints_come_each_minute_unless_something_else_is_said(
    options: dict[str, Any], every: tuple[float, int], tmp_path: Path
) -> None:
    plan = Recovery("run", Checkpoint(tmp_path / "a", keep=5, **options)).plan(seed=7)
    assert (plan.every_s, plan.every_steps) == every
    assert (plan.folder, plan.run, plan.seed, plan.keep) == (str(tmp_path / "a"), "run", 7, 5)
    assert (plan.resume_folder, plan.resume) == ("", "")


def test_run_without_any_of_it_has_no_recovery() -> None:
    assert recovery_of("train", None, False) is None


@each_case(
    ("arguments", "told"),
    [
        ((None, True), "resume=True goes on from the newest checkpoint .* which has none"),
        ((Checkpoint(save_tables="a"), True), "resume=True goes on from .* which has none"),
        ((None, 3), "resume must be the path of a folder, not 3"),
        ((3, False), "path of Checkpoint must be the path of a folder"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(
    arguments: tuple[Any, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError), match=told):
        recovery_of("train", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_resume_goes_on_from_the_newest_or_the_named_one(
    write: Callable[..., str], tmp_path: Path
) -> None:
    folder = write("before", 1, 2)
    same = recovery_of("train", folder, True)
    assert name_of(same) == "step-2"
    assert same is not None
    assert same.plan(0).resumed is not None
    assert name_of(recovery_of("train", None, folder)) == "step-2"
    assert name_of(recovery_of("train", None, Path(folder) / "step-1")) == "step-1"
    other = recovery_of("train", tmp_path / "new", folder)
    assert name_of(other) == "step-2"
    assert other is not None
    assert other.plan(0).resume_folder == folder
    assert other.plan(0).resumed is None  # its own folder has none yet
    assert other.folder == str(tmp_path / "new")
    anew = recovery_of("train", tmp_path / "none", True)
    assert name_of(anew) is None
    assert anew is not None
    assert anew.line() == f"{tmp_path}/none has no checkpoint to go on from: the run begins anew"
    assert other.line().startswith(f"the run goes on from the checkpoint {folder}/step-2 ('")
    with pytest.raises(CheckpointError, match="has no checkpoint to go on from"):
        recovery_of("train", None, tmp_path / "none")
    with pytest.raises(CheckpointError, match="has no checkpoint 'step-3'; it has step-2, step-1"):
        recovery_of("train", None, Path(folder) / "step-3")


def test_folder_with_something_else_or_of_another_run_is_refused(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "CLAIM_S", 0.05)
    folder = write("before", 1)
    with pytest.raises(CheckpointError, match="has 1 checkpoint of run 'before' already"):
        recovery_of("train", folder, False)
    with (
        Folder(LocalFolder(folder)).claimed("living"),
        pytest.raises(CheckpointFolderTaken, match="run 'living' writes there"),
    ):
        recovery_of("train", folder, True)
    ends = Folder(LocalFolder(tmp_path / "ends"))
    ends.storage.make()
    monkeypatch.setattr(claims, "CLAIM_S", 5.0)
    with ThreadPoolExecutor(1) as other:
        with ends.claimed("ending"):
            begins = other.submit(recovery_of, "train", tmp_path / "ends", False)
            time.sleep(0.1)
            sample.save(ends, 1)  # its last one, which the other has not seen
        with pytest.raises(CheckpointError, match="has 1 checkpoint of run 'ending' already"):
            begins.result()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match=r"it has thesis\.tex"):
        recovery_of("train", tmp_path / "thesis", False)


def test_store_that_does_not_answer_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_objects = needs("tests.whole_objects")
    whole_objects.register(monkeypatch, tmp_path)
    url = f"whole://{whole_objects.USER}@nowhere/run"
    told = "whole://nowhere/run: No such file or directory.* To fix: name a bucket that is there"
    for resume in False, True:
        with pytest.raises(CheckpointError, match=told) as raised:
            recovery_of("train", url, resume)
        assert "s3cret" not in str(raised.value)


def test_damaged_checkpoints_are_left_out_and_told(
    write: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write("before", 1, 2, 3)
    cut_off(folder, "manifest-3.json")
    cut_off(folder, "step-2/shard-0.msgpack")
    recovery = recovery_of("train", folder, True)
    assert name_of(recovery) == "step-1"
    assert ["left out" in each.message for each in caplog.records] == [True, True]
    assert "step-2/shard-0.msgpack" in caplog.text
    assert recovery is not None
    damage = CheckpointDamaged("a hash differs", fix="none")  # a server found it
    why = recovery.select(damage, damaged=True).error
    assert re.search(r"none of the 3 .* be read: .*; a hash differs", str(why))
    named = recovery_of("train", None, folder + "/step-1")
    assert named is not None
    assert named.select(damage, damaged=True).error is damage


def test_run_does_not_begin_anew_where_all_checkpoints_are_damaged(
    write: Callable[..., str], tmp_path: Path
) -> None:
    folder = write("before", 1, 2)
    cut_off(folder, "manifest-2.json")
    (first := Path(folder) / "manifest-1.json").unlink()
    first.mkdir()  # the system cannot read it
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* can be") as refused:
        recovery_of("train", folder, True)
    told = str(refused.value)
    assert told.index("manifest-2.json") < told.index("manifest-1.json")
    assert "Is a directory" in told
    assert "to begin anew, remove the folder or name another one" in told
    recovery = recovery_of("train", tmp_path / "b", True)
    assert recovery is not None
    write(recovery.run, 1, folder="b")
    assert recovery.select(GONE, damaged=False).path == f"{tmp_path}/b/step-1"
    (tmp_path / "b" / "step-1").rename(tmp_path / "moved")
    why = recovery.select(GONE, damaged=False).error
    assert re.search(r"the only checkpoint in .* cannot be read: .*step-1", str(why))
    (tmp_path / "b").rename(tmp_path / "c")
    why = recovery.select(GONE, damaged=False, last=STATUS).error
    assert re.search(r"has written 1 checkpoint to .*, and none", str(why))
    assert recovery.select(GONE, damaged=False) == Selection(), "it had not written any"


def test_after_a_death_it_goes_on_from_its_own_newest_one(write: Callable[..., str]) -> None:
    folder = write("before", 8, 9)
    recovery = recovery_of("train", folder, folder + "/step-8")
    assert recovery is not None
    assert recovery.resumes
    # The one it began with, not a newer one of another run.
    assert recovery.select(GONE, damaged=False).path.endswith("step-8")
    write(recovery.run, 5)
    assert recovery.select(GONE, damaged=False).path.endswith("step-5")
    write(recovery.run, 6)
    assert recovery.select(GONE, damaged=False).path.endswith("step-6")
    stops = recovery_of("train", Checkpoint(folder, on_server_death="stop"), True)
    assert stops is not None
    assert not stops.resumes


def test_status_and_rollback_in_words() -> None:
    assert CheckpointStatus().line() == "no checkpoint yet"
    there = CheckpointStatus("runs/a/step-9", {"model": 9}, 12.3, 85_200_000, 0.0042, written=1)
    assert there.line() == "checkpoint 12 s old (85.2 MB, pause 4 ms)"
    failed = CheckpointStatus("runs/a/step-9", age_s=7200, failed=2, why="no space left")
    assert failed.line() == "checkpoint 2 h old, 2 failed: no space left"
    gone = ServerGone("server 1 was killed by SIGKILL", fix="none")
    back = Rollback(gone, "runs/a/step-9", {"model": 12}, {"model": 9}, 3, 1.5)
    assert back.line() == (
        "server 1 was killed by SIGKILL: the run goes on from the checkpoint runs/a/step-9 ('model'"
        " from clock 12 to 9); at least 3 updates are lost"
    )
    anew = Rollback(gone, "", dict.fromkeys("abcd", 2), {}, 1, 1.5)
    assert "from its beginning, without a checkpoint ('a' from clock 2 to 0, " in anew.line()
    assert anew.line().endswith("and 1 more); at least 1 update is lost")


def test_checkpoints_with_tensors_are_compared_as_objects() -> None:
    one, other = (Checkpoint(load_state={"w": torch.zeros(2)}) for _ in range(2))
    assert len({one, other}) == 2
