"""A client that was told other deadlines than its cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs
from tests.contract.role_cluster import DEADLINES, WAIT_S, RoleCluster, wait_until

from paramserve.messages import CoordinatorNotice, WorkerBeat
from paramserve.transport.control import ControlLink

RARE = structs.replace(DEADLINES, heartbeat_s=10 * WAIT_S, stall_s=20 * WAIT_S)


def test_client_sends_heartbeats_as_often_as_its_cluster_expects_them(
    make_cluster: Callable[..., RoleCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster("unix", workers=1)
    notify = ControlLink.notify
    sent: list[ControlLink] = []

    def noted(control: ControlLink, message: CoordinatorNotice, **how: bool) -> bool:
        if isinstance(message, WorkerBeat):
            sent.append(control)
        return notify(control, message, **how)

    monkeypatch.setattr(ControlLink, "notify", noted)
    worker = cluster.client(0, deadlines=RARE)
    wait_until(lambda: sent.count(worker.connection.control) >= 3)
