"""Both sides of a tight loop come to poll where waking up is slow, and on cores of their own."""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.suites import each_case

import paramserve.client.links
import paramserve.server.role
from paramserve.config import Limits
from paramserve.core.polling import SHARED_S, AdaptivePolling
from paramserve.rules import SGD
from paramserve.transport.timing import SystemTiming
from paramserve.transport.wakeup import leave_core

WAKE_S = 2e-3
"""Far more than a step takes."""
COUNTED_S = 1.0
"""What a wake-up counts as. Other processes take a core for less: none of them makes a wait sleep
that polls on an idle machine."""
STEPS, LAST = 200, 100
ROUNDS = 10
"""While other processes take the cores, an answer may be there before its wait: one round without
them is needed."""


class SlowPoller:
    """A poller that wakes late whenever it has slept."""

    slept = 0

    def __init__(self) -> None:
        self._poll = select.poll()
        self.register, self.unregister = self._poll.register, self._poll.unregister

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        found = self._poll.poll(0)
        if not found and timeout_ms > 0:
            found = self._poll.poll(timeout_ms)
            time.sleep(WAKE_S)
            type(self).slept += 1
        return found


def slow_selector(loop: Any) -> None:
    """Make an event loop wake late whenever it has slept."""
    wakes_at_once = loop._selector.select

    def selected(timeout: float | None = None) -> Any:
        found = wakes_at_once(0)
        if not found and timeout != 0:
            found = wakes_at_once(timeout)
            time.sleep(WAKE_S)
        return found

    loop._selector.select = selected


@each_case(("poll_s_max", "sleeps"), [(COUNTED_S, False), (0.0, True)])
def test_tight_loop_ends_polling_where_wakeups_are_slow(
    poll_s_max: float, sleeps: bool, make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SystemTiming, "wake_s", staticmethod(lambda: COUNTED_S))
    monkeypatch.setattr(SystemTiming, "poller", SlowPoller)
    limits = Limits(poll_s_max=poll_s_max)
    cluster = make_cluster("unix", limits=limits)
    cluster.on_server(lambda: slow_selector(cluster.serving.loop))
    client = cluster.client(limits=limits)
    client.define("w", np.zeros(2048, np.float32), rule=SGD(0.1))
    time.sleep(10 * WAKE_S)  # both sides sleep
    gradient = np.ones(2048, np.float32)
    slept = list[int]()
    for _ in range(ROUNDS):
        for step in range(STEPS):
            if step == STEPS - LAST:
                SlowPoller.slept = 0
            client.push_pull({"w": gradient})
        slept.append(SlowPoller.slept)
        if slept[-1] == LAST if sleeps else slept[-1] < LAST / 2:
            return
    pytest.fail(f"waits that slept, of {LAST} in each round: {slept}")


def test_who_polls_gives_up_a_shared_core_and_the_server_leaves_it(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up: set[int] = set()
    left: list[int] = []

    def shares_the_core() -> None:
        given_up.add(threading.get_ident())
        time.sleep(2 * SHARED_S)

    monkeypatch.setattr(SystemTiming, "wake_s", staticmethod(lambda: COUNTED_S))
    monkeypatch.setattr(paramserve.client.links, "sched_yield", shares_the_core)
    monkeypatch.setattr(paramserve.server.role.os, "sched_yield", shares_the_core)
    monkeypatch.setattr(
        paramserve.server.role, "leave_core", lambda: left.append(threading.get_ident())
    )
    limits = Limits(poll_s_max=COUNTED_S)
    cluster = make_cluster("unix", limits=limits)
    server: list[int] = []
    cluster.on_server(lambda: server.append(threading.get_ident()))
    client = cluster.client(limits=limits)
    client.define("w", np.zeros(2048, np.float32), rule=SGD(0.1))
    for _ in range(STEPS):
        client.push_pull({"w": np.ones(2048, np.float32)})
    assert given_up == {threading.get_ident(), *server}
    assert set(left) == set(server)
    assert 1 <= len(left) < STEPS / 10


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="there is one core",
)
@each_case(("kind", "tcp"), [("unix", False), ("tcp", True)])
def test_client_polls_by_what_it_reaches_servers_over(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, kind: str, tcp: bool
) -> None:
    asked: list[bool] = []

    class Noted(AdaptivePolling):
        def __init__(self, wake_s: float, most_s: float, *, tcp: bool = False) -> None:
            super().__init__(wake_s, most_s, tcp=tcp)
            asked.append(tcp)

    cluster = make_cluster(kind)
    monkeypatch.setattr(paramserve.client.links, "AdaptivePolling", Noted)
    client = cluster.client()
    client.define("w", np.zeros(4, np.float32), rule=SGD(lr=0.1))
    client.push_pull({"w": np.ones(4, np.float32)})
    assert set(asked) == {tcp}


def test_leave_core_goes_to_another_one_and_may_come_back() -> None:
    found: list[tuple[int, int, bool]] = []

    def look() -> None:
        allowed, core = os.sched_getaffinity(0), this_core()
        leave_core()
        found.append((core, this_core(), os.sched_getaffinity(0) == allowed))

    for _ in range(20):  # the system may take it back at once
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert all(same for _, _, same in found)
    assert any(before != after for before, after, _ in found)


def this_core() -> int:
    return int(Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36])
