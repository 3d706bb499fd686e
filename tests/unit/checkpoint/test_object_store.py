"""A store of whole objects: the same checkpoints by any writer, and whatever it fails at."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.needs import needs
from tests.unit.checkpoint import sample

from paramserve.checkpoint import claims
from paramserve.checkpoint.folder import Folder, answer_probe
from paramserve.checkpoint.locations import storage_at
from paramserve.checkpoint.object_store import ObjectStore
from paramserve.checkpoint.reader import Checkpoint
from paramserve.checkpoint.storage import Storage
from paramserve.errors import CheckpointDamaged, CheckpointError, CheckpointFolderTaken

whole_objects = needs("tests.whole_objects")
OLD, NEW = 1, 2


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole_objects.register(monkeypatch, tmp_path)
    monkeypatch.setattr(claims, "SETTLE_S", 0.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder that has the objects."""
    return tmp_path / "objects"


def new(root: Path, user: str = "") -> Storage:
    """The store as another process sees it."""
    made = storage_at(whole_objects.url_of(root, user))
    made.filesystem.clear_instance_cache()  # type: ignore[attr-defined]
    made.make()
    return made


def names(root: Path) -> set[str]:
    return {str(each.relative_to(root)) for each in root.rglob("*") if each.is_file()}


def test_checkpoints_are_those_of_a_folder(root: Path) -> None:
    with Folder(new(root)).claimed("first") as folder:
        old = sample.save(folder, OLD)
        sample.save(folder, NEW, old)
        assert folder.owner() == claims.owner_of(new(root))
    there = Folder(new(root))
    for manifest in there.manifests()[0]:
        for shards in 1, 3:
            with Checkpoint(new(root), manifest) as saved:
                saved.verify()
                assert sample.load(saved, shards) == sample.contents(manifest.cut.step)
    found = {name for name in names(root) if name.startswith("step-2/values")}
    assert len(found) == 4, "two servers' ranges of two blocks, the first with the header"
    with Folder(new(root)).claimed("first") as folder:
        assert folder.begin(NEW) == "step-2-2"
        assert folder.begin(NEW) == "step-2-3"
        pruned = folder.prune(keep=1)
    assert pruned.checkpoints == ("step-1",)
    assert pruned.nbytes > 0
    left = names(root)
    assert {name for name in left if "/" not in name} == {"owner.json", "manifest-2.json"}
    assert {name for name in left if name.startswith("step-1/")} == {
        f"step-1/tables/users.{shard}.safetensors" for shard in range(2)
    }, "the increment needs them"


def test_file_system_with_folders_is_a_store_too(tmp_path: Path) -> None:
    """As those that reach other machines."""
    from fsspec.implementations.local import LocalFileSystem

    root = tmp_path / "a" / "b"
    store = ObjectStore(f"other://{root}", LocalFileSystem(), str(root))
    store.make()
    with Folder(store).claimed("first") as folder:
        sample.save(folder, OLD)
        assert folder.begin(OLD) == "step-1-2"
        sample.save(folder, NEW)
        assert folder.prune(keep=1).checkpoints == ("step-1",)
        found, manifest, _ = folder.first_valid(sample.load)
    assert manifest is not None
    assert found == sample.contents(NEW)
    assert {each.name for each in root.iterdir()} == {
        "owner.json",
        "manifest-2.json",
        "step-1-2",
        "step-2",
    }


def test_objects_of_a_file_laid_end_to_end_are_plain_safetensors(
    root: Path, tmp_path: Path
) -> None:
    needs("safetensors")
    from safetensors.numpy import load_file

    with Folder(new(root)).claimed("first") as folder:
        sample.save(folder, OLD)
    parts = sorted((root / "step-1/values").glob("model.safetensors.at-*"))
    whole = tmp_path / "model.safetensors"
    whole.write_bytes(b"".join(each.read_bytes() for each in parts))
    found = load_file(whole)
    assert found["scale"].tobytes() == sample.dense(OLD)[0].tobytes()
    assert found["layer.weight"].tobytes() == sample.dense(OLD)[1][:600].tobytes()
    assert load_file(root / "step-1/tables/users.0.safetensors")["key"].size > 0


def test_missing_or_short_object_is_damage(root: Path) -> None:
    with Folder(new(root)).claimed("first") as folder:
        manifest = sample.save(folder, OLD)
    first, second, *_ = sorted((root / "step-1/values").iterdir())
    data = second.read_bytes()
    second.write_bytes(data[:-1])
    with (
        Checkpoint(new(root), manifest) as saved,
        pytest.raises(CheckpointDamaged, match=r"model\.safetensors: it has \d+ bytes, and the"),
    ):
        saved.check()
    second.write_bytes(data[:-1] + b"x")
    with (
        Checkpoint(new(root), manifest) as saved,
        pytest.raises(CheckpointDamaged, match=r"model\.safetensors: bytes \d+ to"),
    ):
        sample.load(saved)
    first.unlink()
    assert Folder(new(root)).first_valid(sample.load)[0] is None


# --- failures ------------------------------------------------------------------------------------


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Fails the n-th call, or all from it on, as libraries do."""

    class Failing:
        nth, lasting, calls = 0, False, 0

        def __call__(self, call: str, path: str) -> Exception | None:
            self.calls += 1
            failed = self.calls >= self.nth if self.lasting else self.calls == self.nth
            if not failed or not self.nth:
                return None
            url = f"whole://{whole_objects.USER}@bucket/{path}"
            return whole_objects.NoAnswer(f"no answer to {call} {url}")

    failing = Failing()
    monkeypatch.setattr(whole_objects.WholeObjects, "fail", failing)
    return failing


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
def test_failing_call_is_told_and_harms_nothing(root: Path, fails: Any, lasting: bool) -> None:
    with Folder(new(root)).claimed("first") as folder:
        sample.save(folder, OLD)
    before = {name: (root / name).read_bytes() for name in names(root)}
    with Folder(new(root)).claimed("first") as folder:
        fails.calls = 0
        sample.save(folder, NEW)
        folder.prune(keep=1)
    told, calls = list[str](), fails.calls
    assert calls > 60
    for nth in range(1, calls + 1, 1 if not lasting else 7):
        for name in names(root):
            (root / name).unlink()
        for name, data in before.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
        with Folder(new(root, whole_objects.USER + "@")).claimed("first") as folder:
            fails.calls, fails.nth, fails.lasting = 0, nth, lasting
            made = None
            try:
                made = sample.save(folder, NEW)
                folder.prune(keep=1)
            except CheckpointError as error:
                told.append(str(error))
                folder.discard("step-2")
            fails.nth = 0
        found, manifest, refused = Folder(new(root)).first_valid(sample.load)
        assert manifest is not None
        assert found == sample.contents(manifest.cut.step), "a mixture"
        assert manifest.cut.step == NEW or made is None
        assert not refused
    assert len(told) > calls / (7 if lasting else 1) / 2
    assert all("NoAnswer: no answer to " in each and "s3cret" not in each for each in told)


def test_full_disk_of_a_server_is_told_as_its_own(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told = f"whole://.*: No space left on device in {tempfile.gettempdir()}, where files wait"
    with Folder(new(root)).claimed("first") as folder:
        with monkeypatch.context() as broken:
            broken.setattr(os, "pwrite", full)
            with pytest.raises(CheckpointError, match=told):
                sample.save(folder, OLD)
        sample.save(folder, NEW)
    assert Folder(new(root)).numbers() == [1]


def test_store_that_is_not_reached_is_no_damage(root: Path, fails: Any) -> None:
    """Else a run would go back to an older checkpoint, or begin anew."""
    with Folder(new(root)).claimed("first") as folder:
        sample.save(folder, OLD)
    there, told = Folder(new(root)), "cannot be read: NoAnswer: no answer to get"
    there.numbers()
    fails.calls, fails.nth, fails.lasting = 0, 2, True
    with pytest.raises(CheckpointError, match=told) as raised:
        there.first_valid(sample.load)
    assert not isinstance(raised.value, CheckpointDamaged)


def test_file_system_that_cannot_write_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_reads(call: str, path: str) -> Exception | None:
        return NotImplementedError() if call == "put" else None

    monkeypatch.setattr(whole_objects.WholeObjects, "fail", staticmethod(only_reads))
    told = "the folder of checkpoints cannot be used, in whole://.*: Read-only file system"
    with pytest.raises(CheckpointError, match=told), Folder(new(root)).claimed("run"):
        pass


def test_servers_see_the_store_or_are_named(root: Path) -> None:
    folder, nonce = Folder(new(root)), "7f3a"
    folder.begin_probe(nonce)
    answer_probe(new(root), nonce, 0)
    with pytest.raises(
        CheckpointError, match=r"server 1 on .* does not see .* bucket that is ther"
    ):
        answer_probe(new(root / "other"), nonce, 1)
    with pytest.raises(CheckpointError, match=r"server 1 does not see .*: its answer is not here"):
        folder.end_probe(nonce, range(2))
    assert new(root).entries("") == []


# --- whose it is ---------------------------------------------------------------------------------


def owns(root: Path, **fields: Any) -> None:
    """Another run's word that it owns the folder."""
    new(root).put("owner.json", claims._text(claims.Owner(**fields)))


def test_living_owner_is_known_by_its_beats(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BEAT_S": 0.02, "BEAT_POLL_S": 0.01, "SILENT_S": 5.0}.items():
        monkeypatch.setattr(claims, name, value)
    told = "run 'first' writes there, process"
    with Folder(new(root)).claimed("first") as folder:
        with pytest.raises(CheckpointFolderTaken, match=told), Folder(new(root)).claimed("second"):
            pass
        with Folder(new(root)).claimed("first"):  # its coordinator, after its driver
            pass
        assert folder.owner() is not None
    first = claims.owner_of(new(root))
    assert first is not None
    assert first.ended
    with Folder(new(root)).claimed("second") as folder:
        found = folder.owner()
        assert found is not None
        assert found.run == "second"
    with folder.claimed("prunes", passing=True):
        assert claims.owner_of(folder.storage) == claims.Owner("prunes", found.host, found.pid)
    after = claims.owner_of(folder.storage)
    assert after == claims.Owner("second", found.host, found.pid, after.beat, ended=True)


def test_owner_without_beats_is_dead(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(claims, "BEAT_POLL_S", 0.01)
    monkeypatch.setattr(claims, "SILENT_S", 0.05)
    owns(root, run="killed", host="h", pid=7, beat=41)
    with Folder(new(root)).claimed("second"):
        pass
    assert "run 'killed' has not ended in order" in caplog.text


def test_of_two_claims_at_once_one_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims.time, "sleep", lambda s: owns(root, run="later", host="h", pid=7))
    told = "run 'later' writes there, process 7 on h"
    with pytest.raises(CheckpointFolderTaken, match=told), Folder(new(root)).claimed("first"):
        pass


def test_run_that_lost_its_claim_commits_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "BEAT_S", 0.01)
    with Folder(new(root)).claimed("first") as folder:
        beats = next(each for each in threading.enumerate() if each.name == "paramserve-owner")
        owns(root, run="other", host="h", pid=7)
        beats.join(5.0)
        with pytest.raises(CheckpointFolderTaken, match="run 'other' writes there"):
            sample.save(folder, OLD)
    found = claims.owner_of(new(root))
    assert found is not None
    assert found.run == "other"
