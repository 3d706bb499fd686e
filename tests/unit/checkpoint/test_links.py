"""Links in a folder of checkpoints, and files that cannot be removed."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from tests.unit.checkpoint import sample

from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.reader import Checkpoint
from paramserve.checkpoint.storage import LocalFolder
from paramserve.errors import CheckpointError


def test_a_checkpoint_behind_a_link_is_read_and_left_alone(tmp_path: Path) -> None:
    root, away = tmp_path / "run", tmp_path / "larger disk"
    root.mkdir()
    with Folder(LocalFolder(root)).claimed("run") as folder:
        for number in range(3):
            sample.save(folder, number)
        shutil.move(root / "step-0", away)
        (root / "step-0").symlink_to(away)
        with Checkpoint(folder.storage, folder.named("step-0")) as saved:
            assert sample.load(saved) == sample.contents(0)
        there = sorted(away.rglob("*"))
        assert folder.prune(keep=1).checkpoints == ("step-1", "step-0")
        sample.save(folder, 3)
        assert folder.prune(keep=1).checkpoints == ("step-2",)
    assert sorted(away.rglob("*")) == there
    assert sorted(each.name for each in root.iterdir() if each.is_dir()) == ["step-0", "step-3"]


def test_pruning_goes_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = LocalFolder.remove

    def fails_once(self: LocalFolder, path: str) -> None:
        if path.startswith("step-1/values"):
            raise PermissionError(errno.EACCES, "Permission denied")
        remove(self, path)

    with Folder(LocalFolder(tmp_path)).claimed("run") as folder:
        for number in range(4):
            sample.save(folder, number)
        monkeypatch.setattr(LocalFolder, "remove", fails_once)
        with pytest.raises(CheckpointError, match=r"not removed.*Permission denied"):
            folder.prune(keep=1)
        assert sorted(each.name for each in tmp_path.glob("step-*")) == ["step-1", "step-3"]
        monkeypatch.undo()
        folder.prune(keep=1)
    assert [each.name for each in tmp_path.glob("step-*")] == ["step-3"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    root, other = tmp_path / "run", tmp_path / "thesis.tex"
    root.mkdir()
    other.write_text("thesis")
    (root / "owner.json").symlink_to(other)
    with (
        pytest.raises(CheckpointError, match="put a file in place of the link"),
        Folder(LocalFolder(root)).claimed("run"),
    ):
        pass
    (root / "owner.json").unlink()
    with Folder(LocalFolder(root)).claimed("run") as folder:
        (root / ".manifest-1.json.part").symlink_to(other)
        with pytest.raises(CheckpointError, match=r"not committed.*in place of the link"):
            sample.save(folder, 1)
    assert other.read_text() == "thesis"
