"""`paramserve warm` says what it compiled and where that is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from paramserve import compilers, kernel_folder
from paramserve.cli import cli
from paramserve.errors import ParamServeError
from paramserve.kernel_folder import Choice
from paramserve.kernel_sets import KernelSet, every


def test_every_kernel_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, asked = [7, 7, 7, 0], list[list[KernelSet]]()

    def compile_missing(sets: list[KernelSet]) -> int:
        asked.append(sets)
        return 7

    monkeypatch.setattr(compilers, "missing", lambda sets: left.pop(0))
    monkeypatch.setattr(compilers, "compile_missing", compile_missing)
    monkeypatch.setattr(kernel_folder, "choose", lambda: Choice(tmp_path, (), (tmp_path,)))
    done = CliRunner().invoke(cli, ["warm"])
    assert done.exit_code == 0
    assert done.output == f"paramserve: 7 kernels compiled in 0 s, kept in {tmp_path}\n"
    assert asked == [every()]
    left[:] = [0]
    done = CliRunner().invoke(cli, ["warm"])
    assert done.output == f"paramserve: every kernel is compiled, in {tmp_path}\n"
    assert len(asked) == 1


def test_without_a_folder_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ("/a: belongs to user 7", "/b: cannot be written to")
    monkeypatch.setattr(kernel_folder, "choose", lambda: Choice(None, refused, (Path("/b"),)))
    monkeypatch.setattr(compilers, "missing", lambda sets: 1)
    done = CliRunner().invoke(cli, ["warm"])
    assert isinstance(done.exception, ParamServeError)
    assert done.exception.failed.startswith("1 kernel not compiled")
    assert "not in /a: belongs to user 7; not in /b" in done.exception.failed
    assert "NUMBA_CACHE_DIR" in done.exception.fix
    monkeypatch.setattr(compilers, "missing", lambda sets: 0)
    done = CliRunner().invoke(cli, ["warm"])
    assert done.output == "paramserve: every kernel is compiled, in /b\n"
