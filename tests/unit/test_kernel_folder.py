"""Which folder keeps compiled kernels, and what of it is believed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserve import kernel_folder
from paramserve.kernel_folder import choose, distrust, read

DIRECTORY = stat.S_IFDIR


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel_folder, "PACKAGE", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    choose.cache_clear()
    yield
    choose.cache_clear()


def status(mode: int, uid: int, gid: int) -> os.stat_result:
    return os.stat_result((mode, 1, 1, 1, uid, gid, 0, 0, 0, 0))


def test_folder_beside_the_sources_comes_first_and_that_of_the_variable_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose()[:2] == (tmp_path / "__pycache__", ())
    choose.cache_clear()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "named" / "deep"))
    folder = choose().folder
    assert folder is not None
    assert folder.parent == tmp_path / "named" / "deep"
    assert folder.is_dir()


@pytest.mark.parametrize("spoil", ["others", "link", "file"])
def test_folder_that_others_control_is_refused_and_the_next_one_used(
    spoil: str, tmp_path: Path
) -> None:
    beside = tmp_path / "__pycache__"
    if spoil == "others":
        beside.mkdir()
        beside.chmod(0o777)
    elif spoil == "link":
        (tmp_path / "elsewhere").mkdir()
        beside.symlink_to(tmp_path / "elsewhere")
    else:
        beside.write_text("")
    folder, refused, trusted = choose()
    assert folder is not None
    assert trusted == (folder,)
    assert folder.parent == tmp_path / "home" / "numba"
    assert len(refused) == 1
    assert refused[0].startswith(f"{beside}: ")


def test_no_folder_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(kernel_folder, "PACKAGE", tmp_path / "file")
    monkeypatch.setattr(kernel_folder, "distrust", lambda status: "not asked")
    folder, refused, trusted = choose()
    assert folder is None
    assert len(refused) == 2
    assert trusted == ()


def test_folder_that_cannot_be_written_to_is_read_and_the_next_one_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of an image, which its builder filled."""
    beside = tmp_path / "__pycache__"
    monkeypatch.setattr(os, "access", lambda path, mode: path != beside)
    folder, refused, trusted = choose()
    assert folder is not None
    assert folder.parent == tmp_path / "home" / "numba"
    assert refused == (f"{beside}: cannot be written to",)
    assert trusted == (beside, folder)


def test_owner_and_mode_decide_what_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, package = os.geteuid(), os.stat(tmp_path)
    monkeypatch.setattr(kernel_folder, "PACKAGE", tmp_path)
    assert distrust(status(DIRECTORY | 0o755, own, 5)) == ""
    assert distrust(status(DIRECTORY | 0o755, 0, 5)) == ""
    assert distrust(status(DIRECTORY | 0o755, 54321, 5)) == "belongs to user 54321"
    assert distrust(status(DIRECTORY | 0o757, own, 5)) == "others may write to it"
    group = status(DIRECTORY | 0o775, own, package.st_gid)
    assert distrust(group) == f"group {package.st_gid} may write to it"
    tmp_path.chmod(0o775)
    assert distrust(group) == "", "this group may change the package's code anyway"


def test_file_is_read_only_if_no_other_user_could_have_written_it(tmp_path: Path) -> None:
    file = tmp_path / "kernel"
    file.write_bytes(b"code")
    file.chmod(0o644)
    assert read(file) == b"code"
    link = tmp_path / "link"
    link.symlink_to(file)
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert read(link) is None
    assert read(tmp_path / "pipe") is None
    assert read(tmp_path / "none") is None
    file.chmod(0o666)
    assert read(file) is None
