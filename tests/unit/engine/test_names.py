"""Names on one machine: one living publisher each, and nothing from those that ended."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserve.engine import names
from paramserve.errors import NameTaken, ParamServeError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"paramserve-names-{os.getuid()}"


@pytest.fixture
def published() -> Iterator[str]:
    withdraw = names.publish("mine", b"where it is")
    yield "mine"
    withdraw()


def test_find_published_name_gives_its_data(published: str) -> None:
    assert names.find(published) == b"where it is"
    assert names.find("another") is None


def test_publish_withdrawn_name_is_free_and_leaves_no_file(folder: Path) -> None:
    names.publish("mine", b"first")()
    assert names.find("mine") is None
    assert list(folder.iterdir()) == []
    withdraw = names.publish("mine", b"second")
    assert names.find("mine") == b"second"
    withdraw()
    withdraw()


def test_publish_taken_name_is_refused_and_the_first_one_stays(published: str) -> None:
    with pytest.raises(NameTaken, match=r"named 'mine'.*ps\.attach\('mine'\)"):
        names.publish(published, b"other")
    assert names.find(published) == b"where it is"


def test_find_name_of_an_ended_process_is_none_and_it_can_be_taken(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "mine").write_bytes(b"a leftover of some length")
    assert names.find("mine") is None
    withdraw = names.publish("mine", b"new")
    assert names.find("mine") == b"new"
    withdraw()


def test_publish_goes_on_while_others_only_look(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    (folder / "mine").touch()
    looking = [os.open(folder / "mine", os.O_RDONLY) for _ in range(2)]
    for fd in looking:
        fcntl.flock(fd, fcntl.LOCK_SH)
    is_owned = names._is_owned

    def ends_looking(fd: int) -> bool:
        os.close(looking.pop())
        return is_owned(fd)

    monkeypatch.setattr(names, "_is_owned", ends_looking)
    withdraw = names.publish("mine", b"here")
    assert looking == []
    monkeypatch.undo()
    withdraw()


def test_withdraw_leaves_the_file_of_a_later_publisher(folder: Path) -> None:
    withdraw = names.publish("mine", b"first")
    (folder / "mine").unlink()  # as a cleaner of the temporary folder does
    later = names.publish("mine", b"second")
    withdraw()
    assert names.find("mine") == b"second"
    later()


def test_withdraw_in_a_forked_child_changes_nothing(
    published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    withdraw = names.publish("other", b"data")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        withdraw()
    assert names.find("other") == b"data"
    withdraw()
    assert names.find("other") is None


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../up", "a b", "a" * 101, "a\n", 7])
def test_name_that_is_none_is_refused(name: str, folder: Path) -> None:
    for call in (lambda: names.publish(name, b""), lambda: names.find(name)):
        with pytest.raises(ValueError, match="a cluster's name has 1 to 100"):
            call()
    assert not folder.exists() or list(folder.iterdir()) == []


def test_folder_that_others_may_enter_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o750)
    for call in (lambda: names.publish("mine", b""), lambda: names.find("mine")):
        with pytest.raises(ParamServeError, match="not a folder of this user alone"):
            call()


def test_folder_that_is_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ParamServeError, match="not a folder of this user alone"):
        names.publish("mine", b"")


def test_files_are_for_this_user_alone(published: str, folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / published).stat().st_mode & 0o777 == 0o600


def test_name_that_is_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(mode=0o700)
    (tmp_path / "precious").write_bytes(b"kept")
    (folder / "mine").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        names.publish("mine", b"overwritten")
    assert (tmp_path / "precious").read_bytes() == b"kept"
