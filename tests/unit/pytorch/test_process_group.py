"""Where the workers of a process group meet, and who may not."""

from __future__ import annotations

import contextlib
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from paramserve.client.staging import Staging
from paramserve.errors import ParamServeError
from paramserve.pytorch import process_group
from paramserve.pytorch.process_group import _backend, _Card, own_host, start
from paramserve.worker import Worker


@pytest.mark.parametrize(
    ("addresses", "host"),
    [
        (("unix:/run/c",), "127.0.0.1"),
        (("unix:/run/c", "tcp:10.1.2.3:5555"), "10.1.2.3"),
        (("unix:/run/c", "tcp:[fd00::7]:5555"), "fd00::7"),
        (("tcp:127.0.0.1:5555", "unix:/run/c"), "127.0.0.1"),
        (("tcp:[::1]:5555",), "::1"),
    ],
)
def test_own_host_is_the_one_that_the_cluster_uses(addresses: tuple[str, ...], host: str) -> None:
    assert own_host(addresses) == host


def test_card_comes_back_as_it_was() -> None:
    for card in (
        _Card("127.0.0.1", 65535, ""),
        _Card("h" * 253, 0, "GPU-8f6a-4e"),
    ):
        assert _Card.read(card.written()) == card


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        (["", ""], "gloo"),
        (["a", "a"], "gloo"),
        (["a", ""], "gloo"),
        (["a", "b"], "cpu:gloo,cuda:nccl"),
    ],
)
def test_backend_is_nccl_where_each_has_a_device_of_its_own(
    devices: list[str], backend: str
) -> None:
    assert _backend([_Card("h", 0, device) for device in devices]) == backend


def client(**changes: Any) -> Any:
    facts = {
        "rank": 1,
        "workers": 2,
        "incarnation": 1,
        "added_late": False,
        "restarts": False,
    } | changes
    joined = SimpleNamespace(**facts)
    ends = {"drain": lambda: None, "close": lambda leave=True: None}
    steps = SimpleNamespace(staged=Staging(), clocks={}, tell_saved=lambda: None)
    return SimpleNamespace(rank=joined.rank, timeout_s=1.0, connection=joined, steps=steps, **ends)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rank": -1}, "has no rank"),
        ({"incarnation": 3}, r"started again \(incarnation 3\)"),
        ({"added_late": True}, "came later than the others"),
    ],
)
def test_start_refuses_who_cannot_be_in_a_group(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ParamServeError, match=match):
        start(client(**changes))


def test_start_refuses_a_process_that_has_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ParamServeError, match="rank 1 has a process group"):
        start(client())


def test_start_that_fails_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    seen = []

    def meet(*_: Any) -> None:
        seen.append(os.environ["GLOO_SOCKET_IFNAME"])
        raise OSError("the servers are gone")

    monkeypatch.setattr(process_group, "_meet", meet)
    with pytest.raises(OSError, match="the servers are gone"):
        start(client(addresses=("unix:/run/c",)))
    loopback = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    assert seen == [loopback]
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_start_leaves_gloo_to_the_user_who_told_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setattr(process_group, "_meet", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        start(client(addresses=("unix:/run/c",)))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


class Ends:
    """A group that notes that it was ended."""

    def __init__(self) -> None:
        self.group = object()
        self.ended = 0

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("fails", [False, True])
def test_worker_has_one_group_and_ends_it(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    made: list[Ends] = []

    def made_one(*_: Any, **options: Any) -> Ends:
        assert options == {"host": "h", "timeout_s": 3.0}
        made.append(Ends())
        return made[-1]

    monkeypatch.setattr(process_group, "start", made_one)
    with contextlib.suppress(ZeroDivisionError), Worker(client(), seed=1) as worker:
        group = worker.process_group(host="h", timeout_s=3.0)
        assert worker.process_group() is group is made[0].group
        assert made[0].ended == 0
        if fails:
            raise ZeroDivisionError
    assert [each.ended for each in made] == [1]
