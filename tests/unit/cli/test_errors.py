"""Commands that cannot do what they are told say so in one line, without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from paramserve.cli import cli, main
from paramserve.cli.cluster import _ask
from paramserve.errors import CoordinatorGone, ParamServeError
from paramserve.launch import overview
from paramserve.launch import serve as serving
from paramserve.messages import Status


@pytest.mark.parametrize("command", [("token",), ("plan", "--workers", "2", "--out")])
def test_file_that_cannot_be_written_is_told_in_one_line(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "x.png"
    assert main([*command, str(path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("paramserve: FileNotFoundError: ")
    assert str(path) in told


class Line:
    """A line to a coordinator that answers once, and then does what it is told to."""

    def __init__(self, error: Exception | None) -> None:
        self.status: Status | None = None
        self.error: Exception | None = None
        self._then = error

    def ask_now(self, now: float, timeout_s: float) -> None:
        if self.status is None:
            self.status = Status(1, (), (), (), (), 0)
        else:
            self.error = self._then


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (None, ParamServeError, "did not answer in 5.0 s"),
        (ConnectionResetError(104, "reset"), CoordinatorGone, "has closed the connection"),
        (ParamServeError("other", fix="look"), ParamServeError, "other"),
    ],
)
def test_status_of_a_coordinator_that_answers_no_more_is_not_repeated(
    error: Exception | None, kind: type[Exception], text: str
) -> None:
    line = Line(error)
    assert _ask(line, "host:1").call == 1
    with pytest.raises(kind, match=text):
        _ask(line, "host:1")


@pytest.mark.parametrize("host", ["1.2.3.4:77", "name:77", "[::1]:77"])
def test_advertise_with_a_port_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a host without a port") as told:
        serving.serve("127.0.0.1:0", token_file=tmp_path / "token", advertise=host)
    assert repr(host) in str(told.value)


@pytest.mark.parametrize("host", ["", "1.2.3.4", "name", "::1", "[fe80::1]"])
def test_advertise_takes_names_and_addresses(host: str, tmp_path: Path) -> None:
    with pytest.raises(ParamServeError, match="token"):  # the next thing that is looked at
        serving.serve("127.0.0.1:0", token_file=tmp_path / "token", advertise=host)


def test_status_is_printed_where_the_locale_lacks_its_letters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Answers:
        error = None
        status: Status | None = None

        def __init__(self, *args: object, **options: object) -> None: ...
        def close(self) -> None: ...
        def ask_now(self, now: float, timeout_s: float) -> None:
            self.status = Status(1, (), (), (), (), 0)

    monkeypatch.setattr(overview, "Overview", Answers)
    monkeypatch.setenv("COLUMNS", "40")
    told = CliRunner(charset="ascii").invoke(cli, ["status", "127.0.0.1:1"])
    assert told.exception is None
    assert "cluster at 127.0.0.1:1: 0 servers" in told.output
