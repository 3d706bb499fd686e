"""Servers that were started by themselves, and workers that join them, over loopback."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from deploy.certificates import make_certificates
from tests.faults.servers import SOON_S, Servers, new_token
from tests.needs import needs_ipv6
from tests.network.roles import Doubled
from tests.suites import each_case

import paramserve as ps
from paramserve.cli import cli, main
from paramserve.cli.doctor import of_cluster
from paramserve.client import timeouts
from paramserve.errors import (
    ConnectTimeout,
    CoordinatorGone,
    NotAuthenticated,
    ParamServeError,
    ProtocolError,
    RankTaken,
    ServerGone,
    UnknownRule,
)
from paramserve.launch import connect as connecting
from paramserve.launch import serve as serving
from paramserve.launch.connect import Handle
from paramserve.transport.auth import credentials_of
from paramserve.transport.link import Link
from paramserve.transport.renewing import LOOK_S

COMMAND = (sys.executable, "-c", "import sys; from paramserve.cli import main; sys.exit(main())")
SERVERS_THERE = "the server is there: workers may come"
ENDED = "ended in order"
POLICIES = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def told_to_end(errors: str) -> list[str]:
    """What `paramserve serve` has logged, apart from where it serves."""
    lines = [line.rpartition("paramserve: ")[2] for line in errors.splitlines()]
    return [line for line in lines if not line.startswith("serving shard 0 of 1 at ")]


def eventually(
    call: Callable[[], Any], error: type[Exception] | tuple[type[Exception], ...]
) -> Any:
    """What a call returns, once it does not raise `error` any more."""
    until = time.monotonic() + SOON_S
    while True:
        try:
            return call()
        except error:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


# --- working together ----------------------------------------------------------------------------


@POLICIES
def test_serve_two_servers_two_workers_until_done(servers: Servers, sync: bool) -> None:
    processes, address = servers.pair(workers=2, sync=sync, until_done=True)

    def train(rank: int) -> Any:
        joined = ps.connect(address, rank=rank, workers=2, token_file=servers.token)
        with joined as worker:
            worker.client.define({"left": np.zeros(4), "right": np.zeros(4)}, rule=ps.Add())
            both.wait()
            for _ in range(10):
                worker.client.push({"left": np.ones(4), "right": np.full(4, rank + 1.0)})
                worker.client.tick().result()
            both.wait()
            found = worker.client.pull(["left", "right"])
            both.wait()
            return [found["left"].tolist(), found["right"].tolist()]

    both = threading.Barrier(2, timeout=30.0)
    with ThreadPoolExecutor(2) as pool:
        values = list(pool.map(train, range(2)))
    assert values == [[[20.0] * 4, [30.0] * 4]] * 2
    for process in processes:
        process.finish(SOON_S)


def test_serve_own_rule_works_where_it_was_registered(servers: Servers) -> None:
    _, plain = servers.serve(workers=1)
    _, told = servers.serve(workers=1, rules=True)
    with ps.connect(plain, rank=0, token_file=servers.token) as worker:
        with pytest.raises(UnknownRule, match=r"rules=\[Doubled\].*--rules module:Doubled"):
            worker.client.define("w", np.zeros(3), rule=Doubled())
        worker.client.define("w", np.zeros(3), rule=ps.Add())  # the name is still free
    with ps.connect(told, rank=0, token_file=servers.token) as worker:
        worker.client.define("w", np.zeros(3), rule=Doubled())
        worker.client.push("w", np.ones(3)).result()
        np.testing.assert_array_equal(worker.client.pull("w"), np.full(3, 2.0))


def test_two_clusters_in_one_process_stay_apart(servers: Servers) -> None:
    (_, one), (_, two) = servers.pair(workers=1), servers.pair(workers=1)
    with (
        ps.connect(one, rank=0, token_file=servers.token) as first,
        ps.connect(two, rank=0, token_file=servers.token) as second,
    ):
        for worker, value in ((first, 1.0), (second, 10.0)):
            worker.client.define("w", np.zeros(20_000), rule=ps.Add())
            worker.client.push("w", np.full(20_000, value)).result()
        for worker, value in ((first, 1.0), (second, 10.0)):
            np.testing.assert_array_equal(worker.client.pull("w"), np.full(20_000, value))


# --- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_command_serve_ends_in_order_when_told(
    servers: Servers, tmp_path: Path, number: signal.Signals
) -> None:
    command = [*COMMAND, "serve", "--bind", "127.0.0.1:0", "--token-file", servers.token]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        told = process.stdout.readline()
        assert told.startswith("paramserve: serving at 127.0.0.1:")
        address = told.rpartition(" ")[2].strip()
        shown = subprocess.run(
            [*COMMAND, "status", address, "--token-file", servers.token],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert shown.returncode == 0, shown.stderr
        assert address in shown.stdout
        for _ in range(2 if number == signal.SIGHUP else 1):  # of the kernel and of the shell
            process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert told_to_end(errors) == [SERVERS_THERE, "told to end (SIGTERM or Ctrl-C)", ENDED]


def test_command_serves_metrics_of_the_cluster(tmp_path: Path, servers: Servers) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    def steps(url: str) -> float:
        with urllib.request.urlopen(url, timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        samples = [s for each in families for s in each.samples]
        (found,) = (s.value for s in samples if s.name == "paramserve_updates_total")
        return float(found)

    command = [*COMMAND, "serve", "--bind", "127.0.0.1:0", "--token-file", servers.token]
    with subprocess.Popen(
        [*command, "--workers", "1", "--metrics-port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().rpartition(" ")[2].strip()
            url = process.stdout.readline().rpartition(" ")[2].strip()
            assert url.startswith("http://127.0.0.1:")
            found = list(of_cluster(address, str(servers.token), None))
            assert [(each.what, each.verdict) for each in found] == [
                ("reachable", "ok"),
                ("version", "ok"),
                ("clock there", "ok"),
                ("cluster", "ok"),
            ]
            assert "1 of 1 servers, 0 of 1 workers" in found[3].found
            other = list(of_cluster(address, str(new_token(tmp_path / "other")), None))
            assert [each.verdict for each in other] == ["ok", "wrong"]
            with ps.connect(address, rank=0, token_file=servers.token) as worker:
                worker.client.define("w", np.zeros(3), rule=ps.Add())
                for _ in range(3):
                    worker.client.push("w", np.ones(3)).result()
                until = time.monotonic() + SOON_S
                while (found := eventually(lambda: steps(url), ValueError)) < 3.0:
                    assert time.monotonic() < until, found
                    time.sleep(0.1)
            process.terminate()
            process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    with pytest.raises(OSError):
        steps(url)


def test_command_tells_a_cluster_as_json_and_probes_each_server(servers: Servers) -> None:
    def told(*arguments: str) -> Result:
        return CliRunner().invoke(cli, ["status", *arguments, "--token-file", servers.token])

    first, address = servers.serve(servers=2, workers=1)
    _, other = servers.serve(join=address)
    with ps.connect(address, rank=0, token_file=servers.token) as worker:
        worker.client.define("w", np.zeros(3), rule=ps.Add())
        worker.client.push("w", np.ones(3)).result()

        def has_heard_of_the_push() -> None:
            found = json.loads(told(address, "--json").stdout)
            assert (found["state"], found["workers"]) == ("running", {"0": "running"})
            assert found["groups"]["default"]["version"] == 1

        eventually(has_heard_of_the_push, (AssertionError, KeyError))
    for each in (address, other):
        assert told(each, "--probe").exit_code == 0
    words = f"shard 1 of 2, and not of the cluster's first server.*tcp:{address}"
    assert re.search(words, str(told(other).exception))
    with pytest.raises(ProtocolError, match=words):
        ps.connect(other, rank=0, token_file=servers.token, timeout_s=SOON_S)
    os.kill(first.pid, signal.SIGSTOP)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("paramserve.cli.cluster.STATUS_S", 0.5)
            silent = told(address, "--probe")
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert isinstance(silent.exception, ConnectTimeout)
    assert told(address, "--probe", "--json").exit_code == 2


LATE = """
import atexit, os, signal
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
def damped(staleness):
    return 1.0
"""


def test_command_serve_that_has_ended_is_not_killed_by_being_told_once_more(
    servers: Servers, tmp_path: Path
) -> None:
    (tmp_path / "late.py").write_text(LATE)
    command = [*COMMAND, "serve", "--bind", "127.0.0.1:0", "--token-file", servers.token]
    with subprocess.Popen(
        [*command, "--rules", "late:damped"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("paramserve: serving at 127.0.0.1:")
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert told_to_end(errors) == [SERVERS_THERE, "told to end (SIGTERM or Ctrl-C)", ENDED]


def test_joining_server_without_a_first_one_ends_when_told(servers: Servers) -> None:
    process = servers.start(
        "server", bind="127.0.0.1:0", token=servers.token, join=f"127.0.0.1:{free_port()}"
    )
    assert not process.ended(0.5)  # it waits for the first one to come
    process.signal(signal.SIGTERM)
    process.finish(SOON_S)


def test_joining_server_waits_for_the_first_one(servers: Servers) -> None:
    port = free_port()
    second = servers.start(
        "server", bind="127.0.0.1:0", token=servers.token, join=f"127.0.0.1:{port}"
    )
    servers.serve(f"127.0.0.1:{port}", servers=2, workers=1)
    second.wait("ready")


def test_joined_server_ends_with_an_error_when_the_coordinator_is_killed(
    servers: Servers,
) -> None:
    (first, second), address = servers.pair(workers=1)
    with contextlib.ExitStack() as stack:
        worker = ps.connect(address, rank=0, token_file=servers.token)
        stack.callback(worker.client.close, leave=False)
        worker.client.define("w", np.zeros(20_000), rule=ps.Add())
        first.signal(signal.SIGKILL)
        kind, text = second.error(SOON_S)
        assert kind == "ParamServeError"
        assert f"the coordinator at {address} is gone" in text
        with pytest.raises(ServerGone):
            worker.client.pull("w")
        with pytest.raises(ServerGone, match="Applied: no"):
            worker.client.push("w", np.ones(20_000))


def test_stopped_server_is_gone_for_its_workers(servers: Servers) -> None:
    (_, second), address = servers.pair(workers=1)
    with contextlib.ExitStack() as stack:
        worker = ps.connect(address, rank=0, token_file=servers.token)
        stack.callback(worker.client.close, leave=False)
        worker.client.define("w", np.zeros(20_000), rule=ps.Add())
        second.signal(signal.SIGTERM)
        second.finish(SOON_S)
        with pytest.raises(ServerGone):
            worker.client.pull("w")


def test_killed_server_is_the_one_that_workers_are_told_of(servers: Servers) -> None:
    first, address = servers.serve(servers=2, workers=2)
    second, lost = servers.serve(join=address)
    with contextlib.ExitStack() as stack:
        workers = []
        for rank in range(2):
            worker = ps.connect(address, rank=rank, token_file=servers.token)
            stack.callback(worker.client.close, leave=False)
            workers.append(worker)
        for worker in workers:
            worker.client.define("w", np.zeros(20_000), rule=ps.Add())
        second.signal(signal.SIGKILL)
        kind, text = first.error(SOON_S)  # until it has ended: what follows meets closed links
        assert kind == "ServerGone"
        assert f"the server of shard 1 at {lost}" in text
        told = f"the server of shard 1 at {lost} has ended or is lost"
        with pytest.raises(ServerGone, match=told):
            workers[0].client.push("w", np.ones(20_000)).result()
        with pytest.raises(ServerGone, match=told):
            workers[1].client.pull("w")
        with pytest.raises(ServerGone, match=told):  # once more: the first loss stays the reason
            workers[1].client.push("w", np.ones(20_000)).result()


# --- ranks ---------------------------------------------------------------------------------------


def test_rank_of_a_living_worker_is_taken_and_free_once_it_is_killed(servers: Servers) -> None:
    _, address = servers.serve(workers=2)
    holder = servers.start("holder", address=address, token=servers.token, rank=1, workers=2)
    holder.wait("joined")
    with pytest.raises(RankTaken, match="rank 1 is taken by a live worker"):
        ps.connect(address, rank=1, workers=2, token_file=servers.token)
    holder.signal(signal.SIGKILL)

    def join() -> ps.Worker:
        return ps.connect(address, rank=1, workers=2, token_file=servers.token)

    with eventually(join, RankTaken) as worker:
        assert worker.incarnation == 2


def test_rank_is_free_again_after_an_error_of_its_worker(servers: Servers) -> None:
    _, address = servers.serve(workers=1, restart_s=30.0)

    def fail() -> None:
        with ps.connect(address, rank=0, token_file=servers.token):
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    with ps.connect(address, rank=0, token_file=servers.token) as worker:
        assert worker.incarnation == 2


def test_more_ranks_than_workers_is_refused(servers: Servers) -> None:
    _, address = servers.serve(workers=2)
    with pytest.raises(ParamServeError, match=r"more ranks than workers.*use ranks 0 to 1"):
        ps.connect(address, rank=2, token_file=servers.token)


def test_another_number_of_workers_is_refused_and_the_rank_stays_free(servers: Servers) -> None:
    _, address = servers.serve(workers=2)
    with pytest.raises(ParamServeError, match=r"started for 2 workers, but rank 1.*as one of 4"):
        ps.connect(address, rank=1, workers=4, token_file=servers.token)
    with ps.connect(address, rank=1, workers=2, token_file=servers.token) as worker:
        assert worker.incarnation == 1, "the one that was refused has not been there"


# --- who may come --------------------------------------------------------------------------------


def test_wrong_token_is_refused_for_workers_and_servers(servers: Servers, tmp_path: Path) -> None:
    _, address = servers.serve(servers=2, workers=1)
    other = new_token(tmp_path / "other")
    with pytest.raises(NotAuthenticated, match="refused this side's token"):
        ps.connect(address, rank=0, token_file=other)
    with pytest.raises(NotAuthenticated, match="there is none here"):
        ps.connect(address, rank=0)
    kind, _ = servers.start("server", bind="127.0.0.1:0", token=other, join=address).error(SOON_S)
    assert kind == "NotAuthenticated"


def test_token_that_others_may_read_is_refused(servers: Servers) -> None:
    os.chmod(servers.token, 0o644)
    kind, text = servers.start("server", bind="127.0.0.1:0", token=servers.token).error(SOON_S)
    assert kind == "ParamServeError"
    assert f"chmod 600 {servers.token}" in text


def test_tls_is_spoken_by_all_or_refused(servers: Servers, tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "ours", ["127.0.0.1", "localhost"])
    files = [made.certificate, made.key, made.authority]
    _, address = servers.pair(workers=1, tls=files)
    with ps.connect(address, rank=0, token_file=servers.token, tls=made) as worker:
        worker.client.define("w", np.zeros(20_000), rule=ps.Add())
        worker.client.push("w", np.ones(20_000)).result()
        np.testing.assert_array_equal(worker.client.pull("w"), np.ones(20_000))
    with pytest.raises(NotAuthenticated, match="speaks TLS, and this side has no certificates"):
        ps.connect(address, rank=0, token_file=servers.token)
    others = make_certificates(tmp_path / "others", ["127.0.0.1"])
    with pytest.raises(NotAuthenticated, match="certificate"):
        ps.connect(address, rank=0, token_file=servers.token, tls=others)
    _, plain = servers.serve(workers=1)
    with pytest.raises(NotAuthenticated, match="does not speak TLS"):
        ps.connect(plain, rank=0, token_file=servers.token, tls=made)


# --- another cluster at the same address ---------------------------------------------------------


def test_handle_of_an_ended_cluster_is_told_so(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, address = servers.serve()
    handle = Handle.of(
        (f"tcp:{address}",),
        credentials_of(servers.token),
        seed=0,
        limits=ps.Limits(),
        deadlines=ps.Deadlines(),
    )
    with handle.connect() as client:
        client.define("w", np.zeros(3))
    first.signal(signal.SIGTERM)
    first.finish(SOON_S)
    monkeypatch.setattr(connecting, "HANDLE_CONNECT_S", 0.5)
    with pytest.raises(CoordinatorGone, match="a handle lives as long as its cluster"):
        handle.connect()


def test_handle_of_an_ended_cluster_opens_no_other_one(servers: Servers, tmp_path: Path) -> None:
    first, address = servers.serve()
    handle = Handle.of(
        (f"tcp:{address}",),
        credentials_of(servers.token),
        seed=0,
        limits=ps.Limits(),
        deadlines=ps.Deadlines(),
    )
    first.signal(signal.SIGKILL)
    assert first.ended(SOON_S)
    servers.serve(address, token=new_token(tmp_path / "other"))
    with pytest.raises(NotAuthenticated, match="token of the cluster at that address"):
        handle.connect()


@pytest.mark.parametrize(
    ("same_token", "error", "words"),
    [
        (False, NotAuthenticated, "refused this side's token"),
        (True, ServerGone, "a client of another cluster connected to shard 0"),
    ],
    ids=["another_token", "same_token"],
)
def test_worker_that_comes_back_to_another_cluster_changes_nothing_there(
    servers: Servers, tmp_path: Path, same_token: bool, error: type[Exception], words: str
) -> None:
    token = servers.token if same_token else new_token(tmp_path / "other")
    lost, address = servers.serve(workers=1)
    patient = ps.Deadlines(reconnect_s=20.0)  # it is refused at once
    with contextlib.ExitStack() as stack:
        lost_worker = ps.connect(address, rank=0, token_file=servers.token, deadlines=patient)
        stack.callback(lost_worker.client.close, leave=False)
        lost_worker.client.define("w", np.zeros(20_000), rule=ps.Add())
        lost.signal(signal.SIGKILL)
        assert lost.ended(SOON_S)
        # Of another cluster: the same shard at the same place, with a worker of the same number.
        servers.serve(address, workers=1, token=token)
        with ps.connect(address, rank=0, token_file=token) as owner:
            owner.client.define("w", np.zeros(20_000), rule=ps.Add())
            with pytest.raises(error, match=words):
                lost_worker.client.push("w", np.ones(20_000)).result()
            np.testing.assert_array_equal(owner.client.pull("w"), np.zeros(20_000))
            owner.client.push("w", np.ones(20_000)).result()
            np.testing.assert_array_equal(owner.client.pull("w"), np.ones(20_000))


def test_address_without_a_listener_is_told_in_time(servers: Servers) -> None:
    with pytest.raises(ConnectTimeout, match="no process answered"):
        ps.connect(f"127.0.0.1:{free_port()}", rank=0, token_file=servers.token, timeout_s=0.2)


def test_wait_for_a_cluster_says_what_is_missing_and_ends_with_it(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timeouts, "SAY_S", 0.1)
    empty = f"127.0.0.1:{free_port()}"
    told = rf"rank 0 has waited 0 s for the cluster at {empty}: nothing listens there \(.*; it wa"
    with (
        pytest.warns(UserWarning, match=told) as warned,
        pytest.raises(ConnectTimeout, match=r"no process answered.*; waited 0\.3 s"),
    ):
        ps.connect(empty, rank=0, token_file=servers.token, timeout_s=0.3)
    assert [each.filename for each in warned] == [__file__], "once, with the user's line"

    _, address = servers.serve(servers=2, workers=1)
    missing = r"1 of 2 servers have registered, those of shards \[1\] have not"
    with (
        pytest.warns(
            UserWarning, match=rf"{missing}; it waits up to 0 s \(change it with timeout_s="
        ),
        pytest.raises(ConnectTimeout, match=rf"{missing}; waited 0\.3 s"),
    ):
        ps.connect(address, rank=0, token_file=servers.token, timeout_s=0.3)
    monkeypatch.setattr(connecting, "HANDLE_CONNECT_S", 0.2)
    with pytest.raises(ConnectTimeout, match=rf"{missing}.*start the missing servers"):
        ps.attach(address, token_file=servers.token)
    assert main(["status", address, "--token-file", servers.token]) == 0
    assert "1 of 2 servers, 1 worker\n" in capsys.readouterr().out


def test_limit_of_a_rank_that_joins_holds_for_servers_that_it_does_not_reach(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, address = servers.serve(workers=1)
    limits: list[float] = []
    reach = Link.connect

    def reach_no_shard(addresses: Any, hello: Any, **options: Any) -> Link:
        if hello.role == "client":
            limits.append(options["timeout_s"])
            raise ConnectTimeout("no process answered", fix="")
        return reach(addresses, hello, **options)

    monkeypatch.setattr(Link, "connect", reach_no_shard)
    with pytest.raises(ConnectTimeout, match="no process answered"):
        ps.connect(address, rank=0, token_file=servers.token, timeout_s=SOON_S)
    (limit_s,) = limits
    assert 0.0 < limit_s <= SOON_S
    monkeypatch.undo()
    with ps.connect(address, rank=0, token_file=servers.token, timeout_s=SOON_S) as worker:
        assert worker.incarnation == 2, "the rank is free again"


def test_server_that_waits_for_the_first_one_says_so(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving, "SAY_S", 0.0)
    monkeypatch.setattr(serving, "ATTEMPT_S", 0.1)
    empty = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConnectTimeout, match="start the cluster's first server"):
        ps.serve(
            "127.0.0.1:0",
            token_file=servers.token,
            join=empty,
            deadlines=ps.Deadlines(start_s=0.3),
        )
    (told,) = caplog.messages
    assert told.startswith(f"no server answers at {empty} yet (")
    assert "waits up to 0 s (--start-s, or deadlines=ps.Deadlines(start_s=...))" in told


@each_case(
    ("options", "text"),
    [
        ({"servers": 0}, "servers must be at least 1"),
        ({"workers": -1}, "and workers 0, not 1 and -1"),
        ({"until_done": True}, "without any it would never end"),
        ({"restart_s": 0.0}, "restart_s must be above 0"),
        ({"until_done": True, "workers": 1, "timeout_s": 0.0}, "timeout_s must be above 0"),
        ({"workers": 1, "timeout_s": 5.0}, "timeout_s is for until_done"),
    ],
)
def test_serve_wrong_number_is_refused_at_once(
    servers: Servers, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        ps.serve("127.0.0.1:0", token_file=servers.token, **options)


# --- servers that fail to join --------------------------------------------------------------------


def test_refused_extra_server_leaves_the_first_one_serving(servers: Servers) -> None:
    first, address = servers.serve(workers=1)
    extra = servers.start("server", bind="127.0.0.1:0", token=servers.token, join=address)
    _, text = extra.error(SOON_S)
    assert "one more server registered at a cluster of 1" in text
    with ps.connect(address, rank=0, token_file=servers.token) as worker:
        worker.client.define("w", np.zeros(3), rule=ps.Add())
        worker.client.push("w", np.ones(3)).result()
        assert worker.client.pull("w").tolist() == [1.0] * 3
    assert not first.ended()


def test_joiner_whose_port_is_taken_leaves_its_shard_to_the_next_one(servers: Servers) -> None:
    first, address = servers.serve(servers=2, workers=1)
    failing = servers.start("server", bind=address, token=servers.token, join=address)
    _, text = failing.error(SOON_S)
    assert "another process listens there" in text
    servers.serve(join=address)
    with ps.connect(address, rank=0, token_file=servers.token) as worker:
        worker.client.define("w", np.zeros(20_000), rule=ps.Add())
        worker.client.push("w", np.ones(20_000)).result()
        np.testing.assert_array_equal(worker.client.pull("w"), np.ones(20_000))
    assert not first.ended()


@pytest.mark.parametrize("trained", [False, True], ids=["before", "after"])
def test_first_server_names_the_one_that_is_killed_before_or_after_all_workers(
    servers: Servers, trained: bool
) -> None:
    first, address = servers.serve(servers=2, workers=1)
    second, at = servers.serve(join=address)
    if trained:
        with ps.connect(address, rank=0, token_file=servers.token) as worker:
            worker.client.define("w", np.zeros(4), rule=ps.Add())
            second.signal(signal.SIGSTOP)
    # After that it ends with bytes unread, which resets its connection as the network may.
    second.close()
    kind, text = first.error(SOON_S)
    assert kind == "ServerGone"
    assert f"the server of shard 1 at {at} has ended or is lost" in text


def test_renewed_certificates_and_token_are_read_without_a_restart(
    servers: Servers, tmp_path: Path
) -> None:
    # What processes have at hand lies behind these paths, as a volume of secrets does.
    paths = [tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem")]
    mine = ps.TLS(*map(str, paths))

    def replace(made: ps.TLS) -> None:
        for path, new in zip(paths, (made.certificate, made.key, made.authority), strict=True):
            (link := path.with_suffix(".new")).symlink_to(new)
            os.replace(link, path)

    old, new = (make_certificates(tmp_path / name) for name in ("old", "new"))
    replace(old)
    _, address = servers.serve(tls=(mine.certificate, mine.key, mine.authority), workers=2)

    def join(token: str, tls: ps.TLS, rank: int = 0) -> Any:
        return ps.connect(address, rank=rank, token_file=token, tls=tls, timeout_s=SOON_S)

    with join(servers.token, mine, rank=1) as stays:
        stays.client.define("w", np.zeros(3), rule=ps.Add())
        replace(new)
        time.sleep(LOOK_S)
        with pytest.raises(NotAuthenticated, match="certificate"):
            join(servers.token, old)
        with join(servers.token, new):
            pass
        before = new_token(tmp_path / "before")
        Path(before).write_text(Path(servers.token).read_text())
        renewed = new_token(tmp_path / "renewed")
        os.replace(renewed, servers.token)
        time.sleep(LOOK_S)
        for path in (servers.token, before):  # the old one holds for `token_grace_s`
            with join(path, new):
                pass
        with pytest.raises(NotAuthenticated, match="token"):
            join(new_token(tmp_path / "wrong"), new)
        stays.client.push("w", np.ones(3)).result()
        np.testing.assert_array_equal(stays.client.pull("w"), np.ones(3))


def test_cluster_on_ipv6_is_served_shown_and_asked(servers: Servers, tmp_path: Path) -> None:
    needs_ipv6()
    options = ("--bind", "[::1]:0", "--token-file", servers.token, "--servers", "2")
    metrics = ("--metrics-port", "0", "--metrics-host", "[::1]")
    with subprocess.Popen(
        [*COMMAND, "serve", *options, "--workers", "1", *metrics], stdout=-1, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().rpartition(" ")[2].strip()
            url = process.stdout.readline().rpartition(" ")[2].strip()
            assert address.startswith("[::1]:")
            assert url.startswith("http://[::1]:")
            _, second = servers.serve(bind="[::1]:0", join=address)
            assert second.startswith("[::1]:")
            with ps.connect(address, rank=0, token_file=servers.token) as worker:
                worker.client.define("w", np.zeros(3), rule=ps.Add())
                worker.client.push("w", np.ones(3)).result()
                told = ["--token-file", servers.token]
                shown = CliRunner().invoke(cli, ["status", address, *told])
                assert f"cluster at {address}: 2 servers, 1 worker" in shown.output
                assert CliRunner().invoke(cli, ["status", second, "--probe", *told]).exit_code == 0
                found = {each.what: each for each in of_cluster(address, servers.token, None)}
                assert {each.verdict for each in found.values()} == {"ok"}, found
                out = ["--out", str(tmp_path / "debug")]
                done = CliRunner().invoke(cli, ["debug", address, *told, *out])
                assert done.exit_code == 0, done.output
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert answer.status == 200
        finally:
            process.terminate()
            process.wait(30)


def test_server_until_done_ends_with_an_error_where_all_workers_have_died(
    servers: Servers,
) -> None:
    first, address = servers.serve(workers=1, until_done=True)
    worker = ps.connect(address, rank=0, token_file=servers.token)
    worker.client.close(leave=False)
    kind, text = first.error(SOON_S)
    assert kind == "WorkerFailed"
    assert "no worker has returned, rank 0 died, and the values end" in text
