"""Runs of puppets make their folders where the test's other files are."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from paramserve.launch import overview, supervisor


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def _no_coordinator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puppets have none."""
    monkeypatch.setattr(overview, "CONNECT_S", 0.001)
    monkeypatch.setattr(overview, "CONNECT_AGAIN_S", 0.001)
    monkeypatch.setattr(supervisor, "LAST_STATUS_S", 0.001)
