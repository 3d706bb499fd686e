"""How a server that is started by itself ends where something unexpected fails."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paramserve as ps
from paramserve.errors import RunTimeout
from paramserve.launch import serve as module


def new_token(folder: Path) -> Path:
    token = folder / "token"
    token.write_text("a" * 64)
    token.chmod(0o600)
    return token


def test_last_checkpoint_that_cannot_be_asked_for_ends_the_cluster_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(served: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(module._ServedProcess, "_ask_checkpoint", fail)
    monkeypatch.setattr(module.CoordinatorRole, "can_be_saved", True)
    monkeypatch.setattr(module.CoordinatorRole, "is_as_saved", False)
    token = new_token(tmp_path)
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


def test_joined_server_of_a_cluster_that_has_ended_waits_for_no_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LAST_CHECKPOINT_S", 600.0)
    told: list[object] = []
    monkeypatch.setattr(module.ServerRole, "tell_end", lambda role: told.append(role))
    token, addresses = new_token(tmp_path), queue.Queue[str]()

    def serve(**options: Any) -> threading.Thread:
        settings = {"token_file": token, "until_done": True, "ready": addresses.put, **options}
        args = ("127.0.0.1:0",)
        thread = threading.Thread(target=ps.serve, args=args, kwargs=settings, daemon=True)
        thread.start()
        return thread

    first = serve(servers=2, workers=1, checkpoint=tmp_path / "saved")
    address = addresses.get(timeout=60.0)
    second = serve(join=address)
    addresses.get(timeout=60.0)
    with ps.connect(address, rank=0, workers=1, token_file=token) as worker:
        worker.client.define({"w": np.zeros(4)}, rule=ps.Add())
    for thread in (first, second):
        thread.join(30.0)
        assert not thread.is_alive(), "it waits for a coordinator that is gone"
    assert told == []
