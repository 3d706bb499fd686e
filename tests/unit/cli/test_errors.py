"""Commands that cannot do what they are told say so in one line, without a traceback."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.suites import each_case

from paramserve.cli import cli, cluster, main
from paramserve.cli.commands import REMOVED
from paramserve.errors import ParamServeError
from paramserve.launch import overview
from paramserve.launch import serve as serving
from paramserve.messages import Member, Status

ROOT = Path(__file__).parents[3]


@each_case("command", [("token",), ("plan", "--workers", "2", "--out")])
def test_file_that_cannot_be_written_is_told_in_one_line(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "x.png"
    assert main([*command, str(path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("paramserve: FileNotFoundError: ")
    assert str(path) in told


@each_case("command", REMOVED)
def test_command_that_was_removed_is_told_with_what_replaces_it(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--option", "argument"]) == 2
    told = capsys.readouterr().err
    assert f"the command {command!r} was removed: {REMOVED[command]}." in told
    for path in re.findall(r"[a-z_]+/[\w/]+\.(?:py|md)", told):
        assert (ROOT / path).exists()


def test_advertise_takes_names_and_addresses_without_a_port(tmp_path: Path) -> None:
    token = tmp_path / "token"
    for host in ("1.2.3.4:77", "name:77", "[::1]:77"):
        with pytest.raises(ValueError, match="a host without a port") as error:
            serving.serve("127.0.0.1:0", token_file=token, advertise=host)
        assert repr(host) in str(error.value)
    for host in ("", "1.2.3.4", "name", "::1", "[fe80::1]"):
        with pytest.raises(ParamServeError, match="token"):  # the next thing that is looked at
            serving.serve("127.0.0.1:0", token_file=token, advertise=host)


def test_status_is_printed_where_the_locale_lacks_its_letters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Answers:
        def __init__(self, *args: object, **options: object) -> None: ...
        def close(self) -> None: ...
        def fresh(self, timeout_s: float) -> Status:
            return Status(1, (Member(0, 0, 0, "läuft"),), (), (), (), 0)

    monkeypatch.setattr(overview, "Overview", Answers)
    told = CliRunner(charset="ascii").invoke(cli, ["status", "127.0.0.1:1"])
    assert told.exception is None
    assert told.output.startswith("cluster at 127.0.0.1:1: 0 servers, 1 worker\n\nservers\n")
    assert "l?uft" in told.output


def test_status_without_a_token_or_a_port_tells_one_error_with_what_to_give(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["status", "127.0.0.1:1"]) == 1
    told = capsys.readouterr().err
    assert told.count("TCP needs the cluster's token") == 1
    assert "--token-file" in told
    assert "PARAMSERVE_TOKEN_FILE" in told
    assert main(["status", "127.0.0.1"]) == 2
    assert "'127.0.0.1' is no address: expected HOST:PORT" in capsys.readouterr().err
    assert main(["scale", "127.0.0.1:1", "--workers", "2"]) == 1
    assert not caplog.records, "the error that is raised is not logged as well"


def test_status_of_a_cluster_that_has_ended_advises_what_a_served_one_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "STATUS_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    token = tmp_path / "token"
    assert main(["token", str(token)]) == 0
    assert main(["status", f"127.0.0.1:{port}", "--token-file", str(token)]) == 1
    told = capsys.readouterr().err
    assert "first `paramserve serve` of the cluster runs" in told
    assert "job.wait" not in told
