"""The notebooks run from the first cell to the last, and are kept without outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.needs import needs
from tests.suites import each_case

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELLS_TIMEOUT_S = 100


def test_notebooks_are_three_and_linked() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    assert [path.stem for path in NOTEBOOKS] == ["embeddings", "first_steps", "policies_compared"]
    assert all(f"](../notebooks/{path.name})" in page for path in NOTEBOOKS)


@each_case("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}, "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "".join(cell["source"])
            assert cell["execution_count"] is None
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert set(notebook["metadata"]["language_info"]) == {"name"}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    """In an empty folder, by the kernel of this interpreter."""
    needs("nbmake")
    if path.stem == "embeddings":
        needs("pyarrow")
    (tmp_path / path.name).write_bytes(path.read_bytes())
    options = ["--nbmake", f"--nbmake-timeout={CELLS_TIMEOUT_S}", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", tmp_path, path.name],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
