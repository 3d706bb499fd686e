"""Whose a folder is, and which checkpoints it has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from tests.suites import each_case
from tests.unit.checkpoint import sample

from paramserve.checkpoint import claims
from paramserve.checkpoint import manifest as manifest_module
from paramserve.checkpoint.committing import Committer
from paramserve.checkpoint.folder import Folder, answer_probe, split_path
from paramserve.checkpoint.reader import Checkpoint
from paramserve.checkpoint.storage import LocalFolder
from paramserve.checkpoint.writer import Writer
from paramserve.config import CheckpointPlan
from paramserve.errors import CheckpointError, CheckpointFolderTaken

HOLDS = """
import sys, time
from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.storage import LocalFolder
with Folder(LocalFolder(sys.argv[1])).claimed("run of another process"):
    print("holds", flush=True)
    time.sleep(60)
"""


def test_second_run_is_refused_until_the_first_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "CLAIM_S", 0.1)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "holds\n"
        mine = Folder(LocalFolder(tmp_path))
        told = f"'run of another process' writes there, process {other.pid}"
        with pytest.raises(CheckpointFolderTaken, match=told), mine.claimed("mine"):
            pass
        other.kill()
    with mine.claimed("mine"):
        owner = mine.owner()
        assert owner is not None
        assert owner.run == "mine"
    with mine.claimed("mine again"):
        pass


@each_case("taken", ["by another run", "by none"])
def test_run_whose_folder_was_removed_leaves_what_is_there(tmp_path: Path, taken: str) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    with ExitStack() as held:
        first = held.enter_context(Folder(LocalFolder(root)).claimed("first"))
        sample.save(first, 1)
        first.begin(2)
        shutil.rmtree(root)
        root.mkdir()
        told = "its owner.json was removed, so the folder may be another run's"
        if taken == "by another run":
            told = f"cannot write its checkpoints to {root}: run 'other' writes there"
            other = held.enter_context(Folder(LocalFolder(root)).claimed("other"))
            other.begin_probe("nonce")
            other.begin(2)
            LocalFolder(root).make_folder("step-2/values")
            (root / "step-2/values/model.safetensors").touch()
            sample.save(other, 5)
            sample.save(other, 6)
        there = sorted(root.rglob("*"))
        for call in (
            lambda: first.begin(3),
            lambda: first.commit("step-2", [], sample.Cut(step=2, shards=2)),
            lambda: first.prune(keep=1),
        ):
            with pytest.raises(CheckpointFolderTaken, match=told):
                call()
        first.discard("step-2")
        assert sorted(root.rglob("*")) == there


def test_folder_that_is_taken_while_a_checkpoint_is_committed_gets_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Folder(LocalFolder(tmp_path)).claimed("first") as first:
        name = first.begin(1)
        reports = [sample.write_server(first.storage, name, 1, k, full=True) for k in range(2)]
        reports.append(sample.write_cluster(first.storage, name, 1))
        whole = Checkpoint.check

        def late(checkpoint: Checkpoint) -> None:
            whole(checkpoint)
            (tmp_path / "owner.json").unlink()

        monkeypatch.setattr(Checkpoint, "check", late)
        with pytest.raises(CheckpointFolderTaken, match=r"its owner\.json was removed"):
            first.commit(name, reports, sample.Cut(step=1, shards=2))
    assert not list(tmp_path.glob("manifest-*"))


def test_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"thesis-{number}.tex").touch()
    with (
        pytest.raises(CheckpointError, match=r"it has thesis-0\.tex, .* and 2 more"),
        Folder(LocalFolder(tmp_path)).claimed("run"),
    ):
        pass
    assert not (tmp_path / "owner.json").exists()


def test_folder_that_is_missing_or_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        Folder(LocalFolder(tmp_path / "none")).numbers()
    file = tmp_path / "file"
    file.touch()
    with (
        pytest.raises(CheckpointError, match="Not a dir"),
        Folder(LocalFolder(file)).claimed("run"),
    ):
        pass


def test_names_numbers_and_keep(tmp_path: Path) -> None:
    with Folder(LocalFolder(tmp_path)).claimed("run") as folder:
        assert folder.first_valid(sample.load) == (None, None, ())
        names = [sample.save(folder, number).name for number in (3, 3, 1, 3)]
        assert names == ["step-3", "step-3-2", "step-1", "step-3-3"]
        assert folder.numbers() == [4, 3, 2, 1]
        assert folder.named("step-3-2").number == 2
        with pytest.raises(CheckpointError, match="it has step-3-3, step-1, step-3-2, step-3"):
            folder.named("step-7")
        (tmp_path / "step-1" / "notes.txt").touch()
        (tmp_path / "plots").mkdir()
        assert folder.prune(keep=2).checkpoints == ("step-3-2", "step-3")
        assert folder.prune(keep=1).checkpoints == ("step-1",)
        assert sorted(each.name for each in tmp_path.iterdir()) == [
            "manifest-4.json",
            "owner.json",
            "plots",
            "step-1",
            "step-3-3",
        ]
        assert [each.name for each in (tmp_path / "step-1").iterdir()] == ["notes.txt"]


EVERY_PATH = {
    "values_path": ("a.b",),
    "state_path": ("momentum", "model"),
    "sums_path": ("model", 1),
    "table_path": ("users", 1),
    "shard_path": (2,),
    "worker_path": (3,),
}
"""What makes the path of a file within a checkpoint, with arguments."""


def test_prune_removes_every_kind_of_file(tmp_path: Path) -> None:
    made = {name for name in vars(manifest_module) if name.endswith("_path")} - {"manifest_path"}
    assert made == EVERY_PATH.keys()
    paths = [getattr(manifest_module, name)(*given) for name, given in EVERY_PATH.items()]
    paths += ["residuals/model.0.3.safetensors"]  # of earlier versions
    with Folder(LocalFolder(tmp_path)).claimed("run") as folder:
        name = folder.begin(1)
        with Writer(folder.storage, name) as writer:
            for path in (*paths, manifest_module.CLUSTER_PATH):
                writer.write_message(path, b"content")
            writer.write_saved(0, {"tensor": np.zeros(2)})
            with pytest.raises(ValueError, match=r"notes\.txt would stay behind"):
                writer.write_message("notes.txt", b"content")
            folder.commit(name, [writer.finish()], sample.Cut(step=1, shards=1))
        sample.save(folder, 2)
        assert folder.prune(keep=1).checkpoints == (name,)
    assert not (tmp_path / name).exists()


def test_prune_leaves_what_a_damaged_manifest_may_need(tmp_path: Path) -> None:
    with Folder(LocalFolder(tmp_path)).claimed("run") as folder:
        for number in range(4):
            sample.save(folder, number)
        newest = tmp_path / "manifest-4.json"
        newest.write_bytes(newest.read_bytes()[:-9])
        whole = sorted(tmp_path.rglob("*"))
        assert folder.prune(keep=1).checkpoints == ()
        assert sorted(tmp_path.rglob("*")) == whole
        for number in (4, 5, 6):
            sample.save(folder, number)
        assert folder.prune(keep=1).checkpoints == ("step-5", "step-4"), "none of before it"
        found, refused = folder.manifests()
        assert set(whole) <= set(tmp_path.rglob("*"))
        assert not list((tmp_path / "step-5").rglob("*.*"))
        newest.unlink()
        assert folder.prune(keep=1).checkpoints == ("step-2", "step-1", "step-0")
    assert [each.name for each in found] == ["step-6", "step-2", "step-1", "step-0"]
    assert list(refused) == [4]


def test_pruning_leaves_what_is_being_written(tmp_path: Path) -> None:
    with Folder(LocalFolder(tmp_path)).claimed("run") as folder:
        sample.save(folder, 1)
        name = folder.begin(2)
        reports = [sample.write_server(folder.storage, name, 2, k, full=True) for k in range(2)]
        folder.prune(keep=1)
        reports.append(sample.write_cluster(folder.storage, name, 2))
        made = folder.commit(name, reports, sample.Cut(step=2, shards=2))
        folder.prune(keep=1)
        found, manifest, _ = folder.first_valid(sample.load)
    assert manifest == made
    assert found == sample.contents(2)


def test_pipe_in_the_place_of_a_manifest_is_a_damaged_one(tmp_path: Path) -> None:
    folder = Folder(LocalFolder(tmp_path))
    os.mkfifo(tmp_path / "manifest-900.json")
    assert folder.first_valid(sample.load)[0] is None
    assert list(folder.manifests()[1]) == [900]


def test_coordinator_that_ends_before_its_servers_came_leaves_no_probe(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    committer = Committer(storage, CheckpointPlan(run="run"), 2, "7f3a")
    answer_probe(storage, "7f3a", 1)
    assert sorted(tmp_path.glob(".probe-*")) == [
        tmp_path / ".probe-7f3a",
        tmp_path / ".probe-7f3a-1",
    ]
    committer.close()
    assert not list(tmp_path.glob(".probe-*"))


def test_servers_see_the_folder_or_are_named(tmp_path: Path) -> None:
    shared, other = LocalFolder(tmp_path / "shared"), LocalFolder(tmp_path / "other")
    shared.make()
    other.make()
    folder = Folder(shared)
    nonce = "7f3a"
    folder.begin_probe(nonce)
    for server in range(3):
        answer_probe(LocalFolder(tmp_path / "shared"), nonce, server)
    folder.end_probe(nonce, range(3))
    assert shared.entries("") == []
    folder.begin_probe("of a run that crashed")
    folder.begin_probe(nonce)
    answer_probe(shared, nonce, 0)
    with pytest.raises(CheckpointError, match=r"server 1 on .* does not see .*: No such file"):
        answer_probe(other, nonce, 1)
    with pytest.raises(CheckpointError, match=r"server 1 does not see .*: its answer is not here"):
        folder.end_probe(nonce, range(2))
    assert shared.entries("") == []


def test_path_of_a_user_is_split(tmp_path: Path) -> None:
    assert split_path("runs/a") == ("runs/a", None)
    assert split_path("runs/a/step-40-2/") == ("runs/a", "step-40-2")
    assert split_path("step-4") == (".", "step-4")
    own = tmp_path / "step-9"
    own.mkdir()
    with Folder(LocalFolder(own)).claimed("run"):
        assert split_path(own) == (str(own), None)
