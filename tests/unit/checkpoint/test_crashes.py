"""Whatever a crash or a failing disk leaves: the old checkpoint or the new one, never a mixture."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest
from tests.disk import Disk, Image, Operation
from tests.suites import each_case
from tests.unit.checkpoint import sample

from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.manifest import Manifest
from paramserve.checkpoint.reader import Checkpoint
from paramserve.errors import CheckpointError

OLD, NEW = 1, 2
STATES = 1_000


def write_old(disk: Disk) -> Manifest:
    with Folder(disk).claimed("first") as folder:
        return sample.save(folder, OLD)


def one_server(saved: Checkpoint) -> sample.Contents:
    return sample.load(saved, shards=1)


def newest(image: Image) -> tuple[int | None, int]:
    """Which checkpoint a run finds on a disk, and how many it refused; its contents must be its
    own."""
    found, manifest, refused = Folder(Disk(image)).first_valid(one_server)
    if manifest is None:
        return None, len(refused)
    assert found == sample.contents(manifest.cut.step), "a mixture"
    return manifest.cut.step, len(refused)


def crash(disk: Disk, write: Callable[[Folder, Manifest], object]) -> int:
    """Check every state that a crash could leave while `write` makes the new checkpoint; how many
    there were."""
    old = write_old(disk)
    start, states = len(disk.log), 0
    with Folder(disk).claimed("second") as folder:
        write(folder, old)
    for done, image in disk.crashes(start, each=11):
        states += 1
        found, refused = newest(image)
        assert found in (OLD, NEW), (done, found)
        assert not refused, (done, "a checkpoint is there, and is not whole")
        assert found == NEW or done < len(disk.log), "committed, and lost"
    return states


@each_case("full", [True, False])
def test_crash_at_any_write_leaves_old_or_new(full: bool) -> None:
    assert (
        crash(Disk(), lambda folder, old: sample.save(folder, NEW, None if full else old)) >= STATES
    )


def test_crash_while_pruning_leaves_the_new_one() -> None:
    disk = Disk()
    with Folder(disk).claimed("first") as folder:
        old = sample.save(folder, OLD)
        sample.save(folder, NEW, old)
        start = len(disk.log)
        assert folder.prune(keep=1).checkpoints == ("step-1",)
    for _, image in disk.crashes(start):
        assert newest(image) == (NEW, 0)


class _Planted(Disk):
    """Leaves out what a commit rests on."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug = bug

    def do(self, one: Operation) -> None:
        if (
            self.bug == "folder not synced"
            and one.kind == "sync"
            and one.target in self.now.folders
        ):
            return
        if self.bug == "file not synced" and one.kind == "sync" and one.target in self.now.files:
            return
        if self.bug == "rename not synced" and one.kind == "sync" and one.target == 0:
            return
        super().do(one)


class _ManifestFirst(Folder):
    """Commits what is not written yet."""

    def __init__(self, storage: Disk) -> None:
        super().__init__(storage)
        self.disk = storage

    def save(self, old: Manifest) -> None:
        before = len(self.disk.log)
        sample.save(self, NEW, old)
        log = self.disk.log[before:]
        manifest = next(one.target for one in log if b'"format"' in one.data)
        late = [one for one in log if one.kind == "write" and one.target != manifest]
        syncs = [
            one for one in log if one.kind == "sync" and one.target in {w.target for w in late}
        ]
        early = [one for one in log if one not in late and one not in syncs]
        self.disk.log[before:] = early + late + syncs


@each_case("bug", ["folder not synced", "file not synced", "rename not synced"])
def test_planted_bug_of_syncs_is_found(bug: str) -> None:
    with pytest.raises(AssertionError):
        crash(_Planted(bug), lambda folder, old: sample.save(folder, NEW, old))


def test_planted_manifest_before_data_is_found() -> None:
    disk = Disk()

    def write(folder: Folder, old: Manifest) -> None:
        _ManifestFirst(disk).save(old)

    with pytest.raises(AssertionError, match="not whole"):
        crash(disk, write)


def error(number: int | None) -> OSError:
    return OSError(number, os.strerror(number)) if number is not None else OSError()


@pytest.mark.parametrize(
    ("number", "lasting"),
    [
        pytest.param(errno.EIO, False, id="EIO once"),
        pytest.param(errno.EIO, True, id="EIO", marks=pytest.mark.slow),
        pytest.param(errno.ENOSPC, True, id="ENOSPC"),
        pytest.param(None, False, id="short once"),
        pytest.param(None, True, id="short", marks=pytest.mark.slow),
    ],
)
def test_failing_call_is_told_and_harms_nothing(number: int | None, lasting: bool) -> None:
    whole = Disk()
    old = write_old(whole)
    before, calls = whole.now.copy(), whole.calls
    with Folder(whole).claimed("second") as folder:
        sample.save(folder, NEW, old)
        folder.prune(keep=1)
    calls = whole.calls - calls
    assert calls > 100
    told = 0
    for nth in range(1, calls + 1):

        def fail(call: int, method: str, nth: int = nth) -> OSError | None:
            failed = call >= nth if lasting else call == nth
            return error(number) if failed and method != "close" else None

        disk, manifest = Disk(before, fail), None
        try:
            with Folder(disk).claimed("second") as folder:
                try:
                    manifest = sample.save(folder, NEW, old)
                except CheckpointError:
                    folder.discard("step-2")
                    raise
                folder.prune(keep=1)
        except CheckpointError as failed:
            told += number is not None and os.strerror(number) in str(failed)
        allowed = (NEW,) if manifest is not None else (OLD, NEW) if lasting else (OLD,)
        assert newest(disk.now)[0] in allowed
        with Folder(again := Disk(disk.now)).claimed("third") as folder:  # training went on
            sample.save(folder, 3)
            folder.prune(keep=1)
        assert newest(again.now) == (3, 0)
        assert len(again.now.folders[0]) == 3, "owner, manifest, folder"
    assert told >= (0 if number is None else calls - 20), "but for calls whose failure is no matter"


def test_short_write_that_takes_nothing_ends() -> None:
    class Full(Disk):
        def asked(self, method: str, length: int = 0) -> int:
            super().asked(method)
            return 0 if method == "write" else length

    with pytest.raises(CheckpointError), Folder(Full()).claimed("first"):
        pass
