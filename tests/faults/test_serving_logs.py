"""What `paramserve serve` logs as JSON; `test_serving` reads the lines for people."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults.servers import Servers, new_token
from tests.faults.test_serving import COMMAND

import paramserve as ps
from paramserve.cluster_log import ClusterLog
from paramserve.errors import NotAuthenticated, RankTaken, ServerGone
from paramserve.messages import Member, Members


def test_log_tells_deaths_returns_and_who_never_came(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paramserve")
    log = ClusterLog(servers=1, workers=3, warns=True)
    absent = Member(2, 0, 0, "expected")
    for number, (state, incarnation) in enumerate(
        [("live", 1), ("restarting", 1), ("live", 2), ("live", 2), ("dead", 2), ("live", 3)]
    ):
        member = Member(1, 5, incarnation, state)
        log.on_members(Members(number, (Member(0, 4, 1, "live"), member, absent)))
    log.tell_missing()
    log.tell_missing_servers([])
    log.tell_missing_servers([0])
    assert caplog.messages == [
        "rank 0 has come",
        "rank 1 has come",
        "rank 1 counts as dead, and may come again",
        "rank 1 has come (incarnation 2)",
        "rank 1 counts as dead (incarnation 2)",
        "rank 1 has come after it had died: it goes on where the others are, not where it was "
        "(incarnation 3); restart_s (--restart) would keep its place for a while",
        "not done yet. still there: 0, 1; never came: 2",
        "0 of 1 servers have registered: workers wait for those of shards [0]",
    ]


def read_events(process: subprocess.Popen[str], last: str) -> list[dict[str, Any]]:
    """The lines of the log of `serve --log json` up to the one of this event."""
    assert process.stderr is not None
    lines: list[dict[str, Any]] = []
    while not lines or lines[-1]["event"] != last:
        lines.append(json.loads(process.stderr.readline()))
    return lines


def test_serve_log_json_is_one_object_a_line(tmp_path: Path) -> None:
    token = new_token(tmp_path / "token")
    options = ("--bind", "127.0.0.1:0", "--token-file", token, "--workers", "1", "--log", "json")
    with subprocess.Popen(
        [*COMMAND, "serve", *options, "--until-done"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            (first, serving) = read_events(process, "serving")
            address = serving["address"]
            with pytest.raises(NotAuthenticated):
                ps.connect(address, rank=0, token_file=new_token(tmp_path / "other"))
            with ps.connect(address, rank=0, token_file=token), pytest.raises(RankTaken):
                ps.connect(address, rank=0, token_file=token)
            output, told = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert output == "", "collectors read both streams as one"
    lines = [first, serving, *map(json.loads, told.splitlines())]
    assert [line["event"] for line in lines] == [
        "servers-complete",
        "serving",
        "peer-refused",
        "worker-joined",
        "request-refused",
        "worker-left",
        "done",
        "ended",
    ]
    by_event = {line["event"]: line for line in lines}
    said = {name: line["message"] for name, line in by_event.items()}
    assert said["servers-complete"] == "the server is there: workers may come"
    assert said["serving"] == f"serving shard 0 of 1 at {address}"
    assert said["worker-joined"] == "rank 0 has come"
    assert said["request-refused"].startswith("refused: rank 0 is taken by a live worker")
    assert said["worker-left"] == "rank 0 has left"
    assert said["done"] == "all workers have left: the cluster ends, as until_done asks"
    assert said["ended"] == "ended in order"
    serving, refused = by_event["serving"], by_event["request-refused"]
    assert (serving["role"], serving["server"], serving["address"]) == ("server", 0, address)
    assert (refused["level"], refused["error"]) == ("warning", "RankTaken")
    joined = by_event["worker-joined"]
    assert (joined["role"], joined["rank"], joined["level"]) == ("coordinator", 0, "info")
    assert by_event["peer-refused"]["peer"] == "127.0.0.1"
    assert Path(token).read_text().strip() not in told


def test_serve_until_done_ends_with_its_own_status_when_the_time_is_up(servers: Servers) -> None:
    options = ("--bind", "127.0.0.1:0", "--token-file", servers.token, "--workers", "3")
    ending = ("--until-done", "--timeout", "3", "--log", "json")
    with subprocess.Popen(
        [*COMMAND, "serve", *options, *ending], stdout=-1, stderr=-1, text=True
    ) as process:
        try:
            address = read_events(process, "serving")[-1]["address"]
            with ps.connect(address, rank=0, token_file=servers.token):
                pass
            with ps.connect(address, rank=1, token_file=servers.token) as worker:
                worker.client.define("w", np.zeros(3), rule=ps.Add())
                _, told = process.communicate(timeout=60)
                with pytest.raises(ServerGone, match="the cluster ends: after 3 s"):
                    worker.client.pull("w")
        finally:
            process.kill()
    assert process.returncode == 124
    last = json.loads(told.splitlines()[-1])
    assert (last["event"], last["level"]) == ("timed-out", "error")
    assert "still there: 1; never came: 2" in last["message"]


def test_serve_log_json_tells_why_it_failed(servers: Servers) -> None:
    _, address = servers.serve()
    options = ("--token-file", servers.token, "--log", "json")
    done = subprocess.run(
        [*COMMAND, "serve", "--bind", address, *options], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (line["event"], line["level"], line["error"]) == ("failed", "error", "ParamServeError")
    assert "another process listens there" in line["message"]
    wrong = ["--bind", "127.0.0.1", *options]
    done = subprocess.run([*COMMAND, "serve", *wrong], capture_output=True, text=True, timeout=60)
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (done.returncode, line["error"]) == (2, "ValueError")
