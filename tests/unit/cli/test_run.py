"""`paramserve run` writes the model at the end, however the run ends."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.suites import each_case

import paramserve.cli as cli
import paramserve.launch as launch
import paramserve.pytorch
from paramserve.cli import INTERRUPTED, main
from paramserve.cli.paths import save
from paramserve.errors import ParamServeError, WorkerFailed, warn_user
from paramserve.launch import Result
from paramserve.launch.checkpoints import Checkpoint


def runs_to(values: dict[str, Any] | None, ended_by: type[BaseException] | None) -> Any:
    """A run that leaves these values (None: they could not be read), however it ends."""

    def run(*_: object, **__: object) -> Result | None:
        result = None
        if values is not None:
            result = Result({}, [], 0, {}, {}, [], 1.0, 0, ended_by is not None, values)
        if ended_by is None:
            return result
        error: Any = (
            WorkerFailed("worker 1 raised", fix="fix it")
            if ended_by is WorkerFailed
            else ended_by()
        )
        error.result = result
        raise error

    return run


W = {"w": np.ones(2)}


@each_case(("ended_by", "status"), [(None, 0), (KeyboardInterrupt, INTERRUPTED), (WorkerFailed, 1)])
def test_model_is_written_however_the_run_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ended_by: type[BaseException] | None,
    status: int,
) -> None:
    for values, keys in (
        ({"model": W, "other": W}, {"w"}),
        ({"default": W}, {"w"}),
        ({"actor": W, "critic": W}, {"actor", "critic"}),
    ):
        out = tmp_path / "model.pt"
        monkeypatch.setattr(launch, "run", runs_to(values, ended_by))
        assert run_saving(out) == status
        assert set(torch.load(out, weights_only=True)) == keys
        shown, told = capsys.readouterr()
        assert (f"are in {out}" in shown) is (ended_by is None)
        assert ("model.pt has the model as it was" in told) is (ended_by is not None)
        assert ("WorkerFailed: worker 1 raised" in told) is (ended_by is WorkerFailed)
        out.unlink()


def test_warning_about_no_line_of_the_user_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = {"__name__": "paramserve.launch", "warn_user": warn_user, "end": runs_to({}, None)}
    exec("def run(*_, **__):\n    warn_user('of the run')\n    return end()\n", package)
    monkeypatch.setattr(launch, "run", package["run"])
    script = tmp_path / "script.py"
    script.write_text("import warnings\nwarnings.warn('of line 2')\ndef train(worker): ...\n")

    def shown(message: object, category: object, file: str, line: int, *_: object) -> None:
        print(file, line, message)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = shown
        assert main(["run", f"{script}:train", "--show", "none"]) == 0
        assert warnings.showwarning is shown
    out, told = capsys.readouterr()
    assert told == "paramserve: of the run\n"
    assert out == f"{script} 2 of line 2\n"


def must_not_run(*_: object, **__: object) -> Result:
    raise AssertionError("it was started")


@each_case(
    ("out", "words"),
    [
        ("missing/model.pt", "missing/model.pt cannot be written: No such file or directory"),
        (".", "is a directory"),
        ("script.py/model.pt", "cannot be written: Not a directory"),
        ("/proc/model.pt", "cannot be written"),
    ],
)
def test_file_that_cannot_be_written_is_refused_before_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    out: str,
    words: str,
) -> None:
    monkeypatch.setattr(launch, "run", must_not_run)
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("raise AssertionError('it was loaded')\n")
    assert main(["run", "script.py:train", "--save", out]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert words in told
    assert "--save" in told
    assert main(["get", "127.0.0.1:9", "--out", out]) == 2, "before it connects"
    assert list(tmp_path.iterdir()) == [tmp_path / "script.py"]


@each_case("option", ["--load-state", "--load-tables"])
def test_file_that_is_not_there_is_refused_before_the_script_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("raise AssertionError('it was loaded')\n")
    assert main(["run", "script.py:train", option, "absent"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert option in told
    assert "'absent' does not exist" in told


def test_save_without_torch_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "run", must_not_run)
    monkeypatch.delattr(paramserve.pytorch, "loading", raising=False)
    monkeypatch.delitem(sys.modules, "paramserve.pytorch.loading", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["run", "script.py:train", "--save", str(tmp_path / "model.pt")]) == 1
    told = capsys.readouterr().err
    assert "model.pt: a model is written by torch, which is not installed" in told
    assert "pip install 'paramserve[torch]'" in told


@each_case(("lost", "interrupted"), [("its folder", True), ("the present folder, too", False)])
def test_model_that_cannot_be_written_at_the_end_is_written_elsewhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lost: str,
    interrupted: bool,
) -> None:
    there, here, spare = (tmp_path / name for name in ("there", "here", "spare"))
    for folder in (there, here, spare):
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spare))
    monkeypatch.chdir(here)
    (tmp_path / "script.py").write_text("def train(worker): ...\n")

    def run(*_: object, **__: object) -> Result:
        there.rmdir()
        if lost != "its folder":
            here.rmdir()
        return runs_to({"model": W}, KeyboardInterrupt if interrupted else None)()

    monkeypatch.setattr(launch, "run", run)
    try:
        command = ["run", f"{tmp_path}/script.py:train", "--save", f"{there}/model.pt"]
        assert main(command) == (INTERRUPTED if interrupted else 1)
    finally:
        os.chdir(tmp_path)
    (found,) = [each for each in (here, spare) if each.is_dir() and list(each.iterdir())]
    (written,) = found.iterdir()
    assert found == (here if lost == "its folder" else spare)
    assert torch.load(written, weights_only=True)["w"].tolist() == [1.0, 1.0]
    told = capsys.readouterr().err
    assert f"the model was not written to {there}/model.pt: " in told
    assert f"It is in {written}" in told
    assert f"mv {written} {there}/model.pt" in told


def test_full_disk_is_told_as_such_and_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt"
    path.write_text("of before")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        words = r"not written: to .*model\.pt: File too large; to the present folder: .*"
        with pytest.raises(ParamServeError, match=words):
            save(str(path), {"w": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt"]
    assert path.read_text() == "of before"


NO_VALUES: list[tuple[dict[str, Any] | None, str, type[BaseException] | None, int]] = [
    ({}, "has defined no values", None, 1),
    ({}, "has defined no values", KeyboardInterrupt, INTERRUPTED),
    ({}, "has defined no values", WorkerFailed, 1),
    (None, "could not be read", KeyboardInterrupt, INTERRUPTED),
    (None, "could not be read", WorkerFailed, 1),
]


def test_run_without_values_writes_no_file_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for values, why, ended_by, status in NO_VALUES:
        monkeypatch.setattr(launch, "run", runs_to(values, ended_by))
        assert run_saving(out := tmp_path / "model.pt") == status
        told = capsys.readouterr().err
        assert "model.pt was not written" in told
        assert why in told
        assert not out.exists()


def test_model_that_cannot_be_written_does_not_hide_why_the_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "run", runs_to({"model": W}, WorkerFailed))
    monkeypatch.setattr(cli, "save", unwritable)
    assert run_saving(tmp_path / "model.pt") == 1
    told = capsys.readouterr().err
    assert "model.pt was not written: no space left" in told
    assert "WorkerFailed: worker 1 raised" in told


def unwritable(*_: object) -> None:
    raise OSError("no space left")


def run_saving(out: Path) -> int:
    """What `paramserve run --save` exits with."""
    script = out.with_name("script.py")
    script.write_text("def train(worker): ...\n")
    return main(["run", f"{script}:train", "--show", "none", "--save", str(out)])


@each_case(
    ("options", "expected"),
    [
        ([], (None, False)),
        (["--checkpoint", "runs"], (Checkpoint("runs"), False)),
        (["--checkpoint", "runs", "--resume"], (Checkpoint("runs"), True)),
        (["--resume-from", "."], (None, ".")),
        (["--load-tables", "."], (Checkpoint(load_tables="."), False)),
        (["--load-state", "script.py"], (Checkpoint(load_state="script.py"), False)),
        (
            ["--checkpoint", "runs", "--save-tables", "out"],
            (Checkpoint("runs", save_tables="out"), False),
        ),
    ],
)
def test_options_of_checkpoints_are_those_of_run(
    options: list[str],
    expected: tuple[object, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}

    def run(*_: object, **arguments: Any) -> Any:
        given.update(arguments)
        return runs_to(W, None)()

    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("def train(worker): ...\n")
    monkeypatch.setattr(launch, "run", run)
    assert main(["run", "script.py:train", *options]) == 0
    assert (repr(given["checkpoint"]), given["resume"]) == (repr(expected[0]), expected[1])
