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


@pytest.mark.parametrize(
    ("count", "told"), [(7, "7 kernels were compiled in 0 s"), (0, "all are compiled")]
)
def test_every_kernel_is_compiled_once(
    count: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[KernelSet]] = []

    def compile_missing(sets: list[KernelSet]) -> int:
        asked.append(sets)
        return count

    monkeypatch.setattr(compilers, "compile_missing", compile_missing)
    monkeypatch.setattr(kernel_folder, "choose", lambda: Choice(tmp_path, (), (tmp_path,)))
    done = CliRunner().invoke(cli, ["warm"])
    assert done.exit_code == 0
    assert done.output == f"paramserve: {told}; kernels are kept in {tmp_path}\n"
    assert asked == [every()]


def test_without_a_folder_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ("/a: belongs to user 7", "/b: cannot be written to")
    monkeypatch.setattr(kernel_folder, "choose", lambda: Choice(None, refused))
    done = CliRunner().invoke(cli, ["warm"])
    assert isinstance(done.exception, ParamServeError)
    assert "not in /a: belongs to user 7; not in /b" in done.exception.failed
    assert "NUMBA_CACHE_DIR" in done.exception.fix
