"""Every test here has a temporary folder of its own, so that it sees only its own runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.leftovers import nothing_left
from tests.faults.servers import Servers
from tests.network.hosts import Keeper


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Not below tmp_path, which is too long for the address of a Unix socket; and after it, because
    # pytest makes its own folders in the usual place at their first use.
    with tempfile.TemporaryDirectory(prefix="ps-test-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        monkeypatch.undo()


@pytest.fixture
def leaves_nothing(_own_temporary_folder: None) -> Iterator[None]:
    """After the test this process is as it was before its runs."""
    with nothing_left():
        yield


@pytest.fixture
def pipe(tmp_path: Path) -> str:
    """A named pipe: opening it to read waits until a worker tells something."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return str(path)


@pytest.fixture(scope="module")
def keeper() -> Iterator[Keeper]:
    found = Keeper()
    yield found
    found.close()


@pytest.fixture
def servers(keeper: Keeper, tmp_path: Path) -> Iterator[Servers]:
    found = Servers(keeper, tmp_path)
    yield found
    found.close()
