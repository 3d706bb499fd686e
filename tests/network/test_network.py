"""Servers and workers on hosts of their own, while links are cut, healed, lossy, slow.

Every push adds a number that can be recognised in the sum, so the values tell for each push, on
each shard, whether it was applied never, once or twice; `paramserve_testing` judges.
"""

from __future__ import annotations

import signal
import time

import pytest
from tests.network.hosts import Network, Process, without_qdisc, without_resets, without_wires
from tests.network.recorded import CLOCKS, Servers, everything

from paramserve_testing import check

pytestmark = pytest.mark.slow

POLICIES = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
CUT_AT = 10
LOSSY_CLOCKS = 15
"""Fewer than elsewhere: TCP is slow where packets are lost."""
SHORT_S = 1.0
"""Well under `lost_s`: TCP doubles the time between its attempts, so it notices a healed link only
after as long again as the cut has lasted."""
NOTICED_WITHIN_S = 9.0
"""`lost_s` (3) and a heartbeat (1), and as much again for a busy machine; far less than `stall_s`
(15), after which silence would be noticed in any case."""
NAMED = ("WorkerFenced", "ServerGone", "CoordinatorGone", "PushTimeout", "ConnectTimeout")


def reached(worker: Process, clock: int) -> None:
    """Wait until a worker is at a clock."""
    worker.wait("step", lambda step: step >= clock)


@pytest.mark.parametrize(("sync", "how"), [(True, "silent"), (False, "unplugged")])
def test_short_cut_of_a_worker_all_is_applied_once(
    network: Network, token: str, sync: bool, how: str
) -> None:
    servers = Servers(network, token, workers=2, sync=sync)
    network.host("a")
    network.host("b")
    workers = [servers.work("a", 0), servers.work("b", 1)]
    reached(workers[1], CUT_AT)
    network.cut("b", how)
    time.sleep(SHORT_S)
    network.heal("b")
    for worker in workers:
        worker.finish()
    history = servers.history(workers)
    check(history)
    everything(history)


@POLICIES
def test_long_cut_of_a_worker_it_is_dead_and_the_others_go_on(
    network: Network, token: str, sync: bool
) -> None:
    servers = Servers(network, token, workers=3, sync=sync)
    for name in ("a", "b", "c"):
        network.host(name)
    watcher = servers.watch()
    workers = [servers.work(name, rank) for rank, name in enumerate(("a", "b", "c"))]
    reached(workers[2], CUT_AT)
    network.cut("c")
    began = time.monotonic()
    watcher.wait("member", lambda member: member == [2, "dead"])
    assert time.monotonic() - began < NOTICED_WITHIN_S
    for worker in workers[:2]:
        worker.finish()
    network.heal("c")
    kind, text = workers[2].error()
    assert kind in NAMED, text
    history = servers.history(workers)
    history.ended.add(2)
    check(history)
    assert all(row.counts[:2] == (CLOCKS, CLOCKS) for row in history.final.values())
    assert all(row.counts[2] < CLOCKS for row in history.final.values())


def test_cut_worker_that_comes_back_is_fenced(network: Network, token: str) -> None:
    servers = Servers(network, token, workers=2, sync=True)
    network.host("a")
    network.host("b")
    watcher = servers.watch()
    patient = {"reconnect_s": 30.0}
    workers = [servers.work("a", 0), servers.work("b", 1, deadlines=patient)]
    reached(workers[1], CUT_AT)
    network.cut("b")
    watcher.wait("member", lambda member: member == [1, "dead"])
    network.heal("b")
    kind, text = workers[1].error()
    assert kind == "WorkerFenced", text
    workers[0].finish()
    history = servers.history(workers)
    history.ended.add(1)
    check(history)


@pytest.mark.parametrize("host", ["s0", "s1"])
def test_cut_server_ends_every_worker_with_its_error(
    network: Network, token: str, host: str
) -> None:
    servers = Servers(network, token, workers=2, sync=host == "s0")
    network.host("a")
    network.host("b")
    hasty = {"request_s": 1.5}
    workers = [servers.work("a", 0), servers.work("b", 1, deadlines=hasty)]
    for worker in workers:
        reached(worker, CUT_AT)
    network.cut(host)
    kind, text = workers[0].error()
    assert kind == "ServerGone", text
    kind, text = workers[1].error()
    assert kind in ("ServerGone", "PushTimeout"), text


@POLICIES
def test_connections_that_break_again_and_again_all_is_applied_once(
    network: Network, token: str, sync: bool
) -> None:
    why = without_resets() or without_wires()
    if why:
        pytest.skip(f"NOT TESTED: broken connections: {why}")
    servers = Servers(network, token, workers=2, sync=sync)
    far = {"loss": 0.0, "delay_s": 0.01}  # so that something is on its way at any time
    network.host("a", wire=far)
    network.host("b", wire=far)
    workers = [servers.work("a", 0, pause_s=0.0), servers.work("b", 1, pause_s=0.0)]
    for clock in range(2, CLOCKS - 4, 4):
        for worker, host in zip(workers, "ab", strict=True):
            reached(worker, clock)
            network.reset(host, "10.77.0.2")  # the second server: the first one coordinates
    for worker in workers:
        worker.finish()
        made = [text for text in worker.all("log") if text.startswith("using tcp:10.77.0.2")]
        assert len(made) > 2, "nothing was broken"
    history = servers.history(workers)
    check(history)
    everything(history)


@POLICIES
def test_lost_and_late_packets_all_is_applied_once(
    network: Network, token: str, sync: bool
) -> None:
    why = without_wires()
    if why:
        pytest.skip(f"NOT TESTED: lost and late packets: {why}")
    patient = {"reconnect_s": 20.0, "lost_s": 10.0}  # TCP doubles its pauses: 3 s are 4 attempts
    servers = Servers(network, token, workers=2, sync=sync, deadlines=patient)
    # Of the packets there and back, one in ten is lost: each shard's part of a step is 100 of them.
    bad = {"loss": 0.05, "delay_s": 0.01}
    network.host("a", wire={**bad, "seed": 1})
    network.host("b", wire={**bad, "seed": 2})
    workers = [
        servers.work(name, rank, pause_s=0.0, clocks=LOSSY_CLOCKS, deadlines=patient)
        for rank, name in enumerate(("a", "b"))
    ]
    for worker in workers:
        worker.finish()
    history = servers.history(workers)
    check(history)
    everything(history, LOSSY_CLOCKS)


def test_narrow_link_finishes_and_a_late_push_is_applied_once(network: Network, token: str) -> None:
    why = without_qdisc("tbf", "rate", "20mbit", "burst", "32kb", "latency", "400ms")
    if why:
        pytest.skip(f"NOT TESTED: a cap on bandwidth: {why}")
    servers = Servers(network, token, workers=1)
    network.host("a")
    network.cap("a", "20mbit")
    pushes = 3
    worker = network.run(
        "a",
        "uploader",
        address=servers.address,
        token=token,
        elements=1 << 17,  # 1 MB
        pushes=pushes,
        hasty_s=0.02,
    )
    worker.finish()
    assert worker.all("late") == ["unknown"]
    assert worker.all("version") == [pushes + 1]
    assert worker.all("values") == [[2.0 ** (pushes + 1) - 1.0] * 2]


def test_memory_is_shared_on_the_servers_host_only(network: Network, token: str) -> None:
    servers = Servers(network, token, workers=2)
    network.host("a")
    workers = [servers.work("s1", 0), servers.work("a", 1)]
    for worker in workers:
        worker.finish()
    beside, away = (worker.all("links")[0] for worker in workers)
    assert [shared for _, shared in beside] == [False, True]
    assert beside[1][0].startswith("unix:@paramserve-")
    assert away == [["tcp:10.77.0.1:7711", False], ["tcp:10.77.0.2:7711", False]]
    passed = [text for text in workers[1].all("log") if text.startswith("using ")]
    assert len(passed) == 2, passed  # once for each server
    for text, address in zip(passed, ("10.77.0.1", "10.77.0.2"), strict=True):
        assert text.startswith(f"using tcp:{address}:7711, because unix:@paramserve-")
        assert "Connection refused" in text
    history = servers.history(workers)
    check(history)
    everything(history)


@POLICIES
def test_worker_restarted_elsewhere_takes_over_its_rank(
    network: Network, token: str, sync: bool
) -> None:
    servers = Servers(network, token, workers=2, sync=sync, restart_s=30.0)
    for name in ("a", "b", "c"):
        network.host(name)
    watcher = servers.watch()
    first = servers.work("a", 0, writers=3)
    old = servers.work("b", 1, writers=3)
    reached(old, CUT_AT)
    network.cut("b")
    watcher.wait("member", lambda member: member == [1, "restarting"])
    again = servers.work("c", 1, writer=2, writers=3, connect_s=20.0)
    again.wait("joined", lambda incarnation: incarnation == 2)
    network.heal("b")
    first.finish()
    again.finish()
    kind, text = old.error()
    assert kind in NAMED, text
    history = servers.history([first, old, again], writers=3)
    history.ended.add(1)
    check(history)
    for part, row in history.final.items():
        assert row.counts[0] == CLOCKS, part
        if sync:  # in Async a shard may have had one more, which is taken again
            assert row.counts[1] + row.counts[2] == CLOCKS, part


def test_killed_worker_frees_its_rank_for_another_host(network: Network, token: str) -> None:
    servers = Servers(network, token, workers=1, sync=True, restart_s=30.0)
    network.host("a")
    network.host("b")
    first = servers.work("a", 0, writers=2)
    reached(first, CUT_AT)
    first.signal(signal.SIGKILL)
    again = servers.work("b", 0, writer=1, writers=2, connect_s=20.0)
    again.finish()
    history = servers.history([first, again], writers=2)
    history.ended.add(0)
    check(history)
    assert all(sum(row.counts) == CLOCKS for row in history.final.values())
