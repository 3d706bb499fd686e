"""The commands around a cluster that runs by itself, as far as no process is needed."""

from __future__ import annotations

import io
import re
import signal
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec import structs
from rich.console import Console
from tests.suites import each_case

from paramserve.cli import cli, main
from paramserve.launch import serve as serving
from paramserve.messages import (
    CheckpointReport,
    GroupReport,
    LeaseReport,
    Member,
    SentGradients,
    ServerBeat,
    Status,
    TableReport,
)
from paramserve.observe.amounts import in_bytes
from paramserve.observe.cluster import as_table, as_text


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def test_token_is_for_this_user_only_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert call("token", str(path)).exit_code == 0
    first = path.read_text()
    assert len(first.strip()) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = call("token", str(path))
    assert again.exit_code == 2
    assert "not overwritten" in again.output
    assert path.read_text() == first
    assert first.strip() not in again.output


@each_case("name", ["", "-"])
def test_token_without_a_path_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = call("token", "--", name)
    assert refused.exit_code == 2
    assert f"the path of a new file, not {name!r}" in refused.output
    assert not list(tmp_path.iterdir())


def test_serve_wrong_option_is_named() -> None:
    given = ("--bind", "x:1", "--token-file", "t")
    for arguments, text in (
        (("--bind", "127.0.0.1:0"), "--token-file"),
        (("--token-file", "t"), "--bind"),
        ((*given, "--servers", "0"), "--servers"),
        ((*given, "--consistency", "eventual"), "--consistency"),
        ((*given, "--rules", "no_such:Rule"), "no_such"),
        ((*given, "--rules", "json"), "MODULE:NAME"),
        ((*given, "--tls-key", __file__), "--tls-certificate"),
        ((*given, "--restart", "0"), "--restart"),
    ):
        done = call("serve", *arguments)
        assert done.exit_code == 2, arguments
        assert text in done.output


def test_serve_options_that_do_not_fit_exit_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call("token", path := str(tmp_path / "token"))
    for options, text in (
        (("--until-done",), "number of workers"),
        (("--timeout", "5"), "until_done"),
        (("--metrics-port", "0", "--join", "127.0.0.1:1"), "report_to"),
        (("--heartbeat-s", "2", "--stall-s", "1"), "heartbeat_s"),
        (("--rules", "os:path"), "takes classes"),
        (("--advertise", "name:77"), "a host without a port"),
    ):
        assert main(["serve", "--bind", "127.0.0.1:0", "--token-file", path, *options]) == 2
        assert text in capsys.readouterr().err


def test_serve_without_a_port_says_only_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    call("token", path := str(tmp_path / "token"))
    assert main(["serve", "--bind", "127.0.0.1", "--token-file", path]) == 2
    assert "'127.0.0.1' is no place: expected host:port" in capsys.readouterr().err
    assert "without TLS" not in caplog.text


@each_case("host", ["0.0.0.0", "10.0.0.1", "127.0.0.1", "[::1]", "localhost"])
def test_serve_beyond_this_machine_without_tls_warns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    host: str,
) -> None:
    async def serve_no_client(*_: object) -> None: ...

    monkeypatch.setattr(serving, "_serve", serve_no_client)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it ignores the next ones
    path = str(tmp_path / "token")
    call("token", path)
    assert call("serve", "--bind", f"{host}:1", "--token-file", path).exit_code == 0
    assert ("without TLS" in caplog.text) == (host in ("0.0.0.0", "10.0.0.1"))


def test_status_table_shows_servers_workers_and_groups() -> None:
    counted = {"policy": "Async", "dropped": ((1, 4),), "buffered": 2, "kept_bytes": 2000}
    stale = ((0, 6, 3, 2), (1, 5, 0, 0))
    report = GroupReport("model", 12, ((0, 6), (1, 5)), 1, stale, **counted)
    behind = GroupReport("model", 11, ((0, 5), (1, 5)), 1, stale, policy="Async")
    members = (Member(0, 4, 2, "live"), Member(1, 5, 1, "restarting"))
    kept = GroupReport("model.rank1.buffers", 3, ((0, 2),), 0, (), policy="Sync")
    first = ServerBeat(0, (report, kept), 3, 1_500_000, refused=7)
    beats = (first, ServerBeat(1, (behind,), 3, 500, refused=2))
    shared = (LeaseReport("train", ((0, 600, 512), (1, 100, 96)), 3),)
    sent = ((0, SentGradients("model", 254_000, 1_000_000, 0.123456, 5_000, 20_000)),)
    status = Status(1, members, beats, (1,), (), 0, leases=shared, expected_servers=2, sent=sent)
    out = io.StringIO()
    Console(file=out, width=120).print(as_table("host:1", status, 120))
    lines = out.getvalue().splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert "2 servers, 2 workers" in lines[0]
    assert lines[1] == "9 peers were refused before they were known"
    assert ["0", "serving", "3", "1.5 MB"] in rows
    assert ["1", "silent", "3", "500 B"] in rows
    assert ["0", "live", "2", "model 5", "6", "0.50 (largest 2)", "0"] in rows
    assert ["1", "restarting", "1", "model 5", "5", "0.00 (largest 0)", "4"] in rows
    stale_all, counts = "0.27 (largest 2)", ["1", "4", "2", "2.0 KB"]
    assert ["model", "Async", "11", "5", stale_all, *counts] in rows
    assert "buffers" not in out.getvalue(), "no step trains them"
    assert ["model", "0", "1.0 MB", "254.0 KB", "0.123", "20.0 KB", "5.0 KB"] in rows
    assert ["train", "0", "600", "512", "3"] in rows
    assert ["", "1", "100", "96", ""] in rows
    text = as_text("host:1", status)
    assert text.splitlines()[:2] == lines[:2]
    plain = [re.split(" {2,}", line) for line in text.splitlines()]
    assert [row for row in rows if "" not in row and row not in plain] == []
    assert max(map(len, text.splitlines())) < 120
    incomplete = structs.replace(status, expected_servers=3)
    assert as_text("host:1", incomplete).startswith("cluster at host:1: 2 of 3 servers, 2 workers")
    alone = structs.replace(
        status,
        expected_servers=1,
        members=members[:1],
        servers=(structs.replace(first, refused=1),),
        silent_servers=(),
    )
    assert as_text("host:1", alone).splitlines()[:2] == [
        "cluster at host:1: 1 server, 1 worker",
        "1 peer was refused before it was known",
    ]


def test_status_tells_of_the_last_checkpoint_and_of_the_last_failure() -> None:
    status = Status(1, (), (), (), (), 0)
    assert "checkpoint" not in as_text("host:1", status), "the cluster writes none"
    report = CheckpointReport(folder="/runs/a")
    none_yet = structs.replace(status, checkpoints=report)
    assert as_text("host:1", none_yet).splitlines()[1] == "no checkpoint yet"
    report = structs.replace(report, name="step-40", age_s=12.3, nbytes=1_000_000, pause_s=0.003)
    line = "checkpoint 12 s old (1.0 MB, pause 3 ms) in /runs/a/step-40"
    written = structs.replace(status, checkpoints=report)
    assert as_text("host:1", written).splitlines()[1] == line
    report = structs.replace(report, failed=2, why="server 1: the disk is full")
    failed = structs.replace(status, checkpoints=report)
    assert as_text("host:1", failed).splitlines()[1] == f"{line}, 2 failed: {report.why}"


def test_status_table_shows_keyed_tables_where_there_are_some() -> None:
    plain = GroupReport("model", 12, (), 0, ())
    part = TableReport(1500, 2_000_000, 1, 1600, 100, 7, 3)
    keyed = GroupReport("users", 4, (), 0, (), table=part)
    shown = []
    for groups in ((plain, keyed), (plain,)):
        status = Status(1, (), tuple(ServerBeat(n, groups) for n in range(2)), (), (), 0)
        out = io.StringIO()
        Console(file=out, width=120).print(as_table("host:1", status, 120))
        shown.append(out.getvalue())
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown[0].splitlines()]
    assert ["users", "3,000", "4.0 MB", "3,200", "200", "6", "14"] in rows
    assert "refused" not in shown[0]
    assert "unadmitted" in shown[0]
    assert "unadmitted" not in shown[1]


def test_bytes_are_shown_by_thousands() -> None:
    found = [in_bytes(count) for count in (0, 999, 1000, 2_500_000, 10**15)]
    assert found == ["0 B", "999 B", "1.0 KB", "2.5 MB", "1000.0 TB"]
