"""`paramserve run` writes the model at the end, however the run ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paramserve.launch as launch
from paramserve.cli import INTERRUPTED, main
from paramserve.launch import Result


def runs_to(values: dict[str, Any], interrupted: bool) -> Callable[..., Result]:
    """A run that leaves these values, whether it ends or is interrupted."""

    def run(*_: object, **__: object) -> Result:
        result = Result({}, [], 0, {}, {}, [], 1.0, 0, interrupted, values)
        if interrupted:
            interrupt = KeyboardInterrupt()
            interrupt.result = result  # type: ignore[attr-defined]  # as ps.run does
            raise interrupt
        return result

    return run


W = {"w": np.ones(2)}


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"model": W, "other": W}, {"w"}),
        ({"default": W}, {"w"}),
        ({"actor": W, "critic": W}, {"actor", "critic"}),
    ],
)
def test_model_is_written_also_after_ctrl_c(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interrupted: bool,
    values: dict[str, Any],
    keys: set[str],
) -> None:
    monkeypatch.setattr(launch, "run", runs_to(values, interrupted))
    script, out = tmp_path / "script.py", tmp_path / "model.pt"
    script.write_text("def train(worker): ...\n")
    status = main(["run", f"{script}:train", "--quiet", "--save", str(out)])
    assert status == (INTERRUPTED if interrupted else 0)
    assert set(torch.load(out, weights_only=True)) == keys


def test_run_without_values_writes_no_file_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "run", runs_to({}, False))
    script, out = tmp_path / "script.py", tmp_path / "model.pt"
    script.write_text("def train(worker): ...\n")
    assert main(["run", f"{script}:train", "--quiet", "--save", str(out)]) == 0
    assert "model.pt was not written" in capsys.readouterr().err
    assert not out.exists()
