"""How a server that is started by itself ends where something unexpected fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import paramserve as ps
from paramserve.errors import RunTimeout
from paramserve.launch import serve as module


def test_last_checkpoint_that_cannot_be_asked_for_ends_the_cluster_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(served: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(module._ServedProcess, "_ask_checkpoint", fail)
    monkeypatch.setattr(module.CoordinatorRole, "can_be_saved", True)
    monkeypatch.setattr(module.CoordinatorRole, "is_as_saved", False)
    token = tmp_path / "token"
    token.write_text("a" * 64)
    token.chmod(0o600)
    raised: list[BaseException] = []

    def serve() -> None:
        options: dict[str, Any] = {"until_done": True, "timeout_s": 0.2, "workers": 1}
        try:
            ps.serve("127.0.0.1:0", token_file=token, checkpoint=tmp_path / "saved", **options)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive(), "it waits for ever"
    assert [type(each) for each in raised] == [RunTimeout]
