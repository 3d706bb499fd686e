"""Where a user says that checkpoints are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.needs import needs
from tests.suites import each_case

from paramserve.checkpoint.folder import Folder, split_path
from paramserve.checkpoint.locations import storage_at, whole_path
from paramserve.checkpoint.storage import LocalFolder
from paramserve.errors import CheckpointError, ParamServeError, shown


@each_case(
    ("given", "told"),
    [
        ("memory://runs/a", "memory:// is of one process"),
        ("simplecache::s3://bucket/a", "a chain of file systems"),
        ("s3://ann:s3cret@/", "it is 's3:///', without the name of a folder"),
        ("file://runs/a", r"it is 'file://runs/a': file:// takes a whole path"),
    ],
)
def test_url_that_cannot_do_is_refused(given: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        whole_path("it", given)


def test_url_of_a_folder_of_this_machine_is_its_path(tmp_path: Path) -> None:
    path = whole_path("it", f"file://{tmp_path}/a/")
    assert path == str(tmp_path / "a")
    assert isinstance(storage_at(path), LocalFolder)
    assert whole_path("it", "s3://bucket/a/") == "s3://bucket/a"


@each_case(
    ("url", "told"),
    [
        ("sftp://ann:p@ss@host/a is full", "sftp://host/a is full"),
        ("github://token@org/a", "github://org/a"),
        ("abfs://container@account.dfs.core.windows.net/a", None),
        ("s3://bucket/a@b", None),
        ("runs/a@b", None),
    ],
)
def test_passwords_are_not_shown(url: str, told: str | None) -> None:
    assert shown(url) == (told if told is not None else url)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "fsspec.core", None)
        with pytest.raises(ParamServeError, match=r"pip install 'paramserve\[fsspec\]'"):
            storage_at("s3://bucket/a")
    needs("tests.whole_objects")
    monkeypatch.setitem(sys.modules, "paramiko", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    with pytest.raises(ParamServeError, match=r"sftp://host/a: .* requires \"paramiko\""):
        storage_at("sftp://ann:s3cret@host/a")
    with pytest.raises(CheckpointError, match="no://bucket/a: ValueError: Protocol not known: no"):
        storage_at("no://bucket/a")


def test_url_of_a_checkpoint_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_objects = needs("tests.whole_objects")
    whole_objects.register(monkeypatch, tmp_path)
    url = whole_objects.url_of(tmp_path / "objects")
    assert split_path(url) == (url, None)
    assert split_path(f"{url}/step-40-2") == (url, "step-40-2")
    assert split_path("s3://step-4") == ("s3://step-4", None)
    monkeypatch.setattr("paramserve.checkpoint.claims.SETTLE_S", 0.0)
    with Folder(storage_at(f"{url}/step-9")).claimed("run"):
        assert split_path(f"{url}/step-9/") == (f"{url}/step-9", None)
