"""Deadlines and limits as options and in a file, of `serve` and `run`; nothing is started."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

import paramserve as ps
from paramserve import launch
from paramserve.cli import cli
from paramserve.launch import config_file, connect
from paramserve.launch import serve as serving

KINDS: list[Any] = [("deadlines", ps.Deadlines), ("limits", ps.Limits)]
FIELDS = [(kind, field.name) for _, kind in KINDS for field in msgspec.structs.fields(kind)]
SERVE = ("serve", "--bind", "127.0.0.1:0", "--token-file", "token")
Write = Callable[[str], str]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> str:
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return str(path)

    return written


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """With what `ps.serve` and `ps.run` were called."""
    calls: list[dict[str, Any]] = []

    class Done:
        returns = failures = MappingProxyType[int, Any]({})
        values = ()

    monkeypatch.setattr(serving, "serve", lambda **options: calls.append(options))
    monkeypatch.setattr(launch, "run", lambda train, **options: calls.append(options) or Done())
    return calls


def test_every_field_is_an_option(served: list[dict[str, Any]]) -> None:
    for kind, name in FIELDS:
        number = getattr(kind(), name) * 2
        assert call(*SERVE, f"--{name.replace('_', '-')}", str(number)).exit_code == 0, name
        options = served.pop()
        expected = {of.__name__: of(**{name: number}) if of is kind else None for _, of in KINDS}
        assert {"Deadlines": options["deadlines"], "Limits": options["limits"]} == expected, name
    assert served == []


def test_run_takes_them_too(served: list[dict[str, Any]], write: Write, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def train(worker):\n    pass\n")
    path = write("[run]\nworkers = 3\n[deadlines]\nstall_s = 30\n")
    done = call("run", f"{script}:train", "--config", path, "--clients-max", "7")
    assert done.exit_code == 0, done.output
    (options,) = served
    assert options["workers"] == 3
    expected = ps.Local(deadlines=ps.Deadlines(stall_s=30), limits=ps.Limits(clients_max=7))
    assert options["engine"] == expected


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ((), ps.Local(threads_per_worker=2)),
        (("--threads-per-worker", "3"), ps.Local(threads_per_worker=3)),
        (("--engine", "ray"), ps.OnRay(threads_per_worker=2)),
    ],
)
def test_threads_of_run_are_those_of_its_engine(
    served: list[dict[str, Any]],
    write: Write,
    tmp_path: Path,
    options: tuple[str, ...],
    engine: object,
) -> None:
    script = tmp_path / "script.py"
    script.write_text("def train(worker):\n    pass\n")
    path = write("[run]\nthreads-per-worker = 2\n")
    done = call("run", f"{script}:train", "--config", path, *options)
    assert done.exit_code == 0, done.output
    assert [each["engine"] for each in served] == [engine]


def test_command_line_beats_the_file_which_beats_the_default(
    served: list[dict[str, Any]], write: Write
) -> None:
    path = write(
        '[serve]\nbind = "h:1"\ntoken-file = "t"\nservers = 2\nworkers = 8\nrules = []\n'
        "until-done = true\n[deadlines]\nstall_s = 30\nlost_s = 4\n[run]\nworkers = 5\n"
    )
    done = call("serve", "--config", path, "--workers", "9", "--stall-s", "31.5")
    assert done.exit_code == 0, done.output
    (options,) = served
    found = {name: options[name] for name in ("bind", "token_file", "servers", "workers")}
    assert found == {"bind": "h:1", "token_file": "t", "servers": 2, "workers": 9}
    assert options["until_done"] is True
    assert options["deadlines"] == ps.Deadlines(stall_s=31.5, lost_s=4)
    assert options["limits"] is None


WRONG = [
    ("[deadline]", "no table is called 'deadline': did you mean deadlines?"),
    ("[deadlines]\nstal_s = 3", "[deadlines]: no setting is called 'stal_s'"),
    ("[deadlines]\nstal_s = 3", "did you mean stall_s?"),
    ("[deadlines]\nstall_s = 0", "[deadlines] stall_s must be above 0 and finite, not 0"),
    ("[deadlines]\nstall_s = inf", "stall_s must be above 0 and finite"),
    ("[deadlines]\nstall_s = '3'", "stall_s must be a number, not '3'"),
    ("[limits]\nclients_max = 1.5", "[limits] clients_max must be an int, not 1.5"),
    ("[limits]\nclients_max = true", "clients_max must be an int, not True"),
    ("limits = 3", "limits must be a table"),
    ("[serve]\nserver = 2", "did you mean servers?"),
    ("[serve]\ntoken_file = 't'", "did you mean token-file?"),
    ("[serve]\nservers = 0", "[serve] servers: 0 is not in the range x>=1"),
    ("[serve]\nservers = true", "[serve] servers must be an int, not True"),
    ("[serve]\nservers = '2'", "[serve] servers must be an int, not '2'"),
    ("[serve]\nuntil-done = 1", "[serve] until-done must be true or false, not 1"),
    ("[serve]\nrules = 'a:b'", "[serve] rules must be a list of strings, not 'a:b'"),
    ("[serve]\nlog = 'xml'", "[serve] log: 'xml' is not one of"),
    ("[serve]\nconfig = 'x'", "[serve]: no option is called 'config'"),
    (
        "[run]\nworker = 2",
        "[run]: no option is called 'worker': did you mean workers?",
    ),
    ("[serve", "is no TOML"),
]


def test_file_that_is_wrong_is_refused_whole(served: list[dict[str, Any]], write: Write) -> None:
    for text, words in WRONG:
        done = call(*SERVE, "--config", write(text))
        assert done.exit_code == 2, text
        assert words in " ".join(done.output.split())
    assert served == []


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--stall-s", "soon", "'soon' is not a number"),
        ("--stall-s", "-1", "stall_s must be above 0"),
        ("--clients-max", "1.5", "'1.5' is not an int"),
        ("--stal-s", "1", "--stall-s"),
    ],
)
def test_option_that_is_wrong_is_named(
    served: list[dict[str, Any]], option: str, value: str, told: str
) -> None:
    done = call(*SERVE, option, value)
    assert done.exit_code == 2
    assert told in done.output
    assert served == []


def test_show_config_is_a_file_that_gives_the_same(
    served: list[dict[str, Any]], write: Write
) -> None:
    first = write("[serve]\nworkers = 8\n[limits]\nclients_max = 9\n")
    shown = call("serve", "--config", first, "--stall-s", "31", "--show-config")
    assert shown.exit_code == 0, shown.output
    assert served == []
    tables = tomllib.loads(shown.output)
    for name, kind in KINDS:
        expected = msgspec.structs.asdict(kind())
        expected |= {"stall_s": 31} if name == "deadlines" else {"clients_max": 9}
        assert tables[name] == expected
    lines = shown.output.splitlines()
    assert "stall_s = 31.0  # from the command line" in lines
    assert f"workers = 8  # from {first}" in lines
    assert f"clients_max = 9  # from {first}" in lines
    assert "servers = 1" in lines
    assert "# bind is not given" in lines
    again = call("serve", "--config", write(shown.output), "--show-config")
    assert tomllib.loads(again.output) == tables
    assert call("run", "--show-config").exit_code == 0


def test_worker_of_an_environment_reads_the_same_file(
    monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(connect, "connect", lambda **options: calls.append(options))
    found = {"PARAMSERVE_ADDRESS": "h:1", "RANK": "0", "WORLD_SIZE": "1"}
    connect.from_environment(found)
    path = write("[serve]\nworkers = 8\n[deadlines]\nstall_s = 30\n")
    connect.from_environment({**found, "PARAMSERVE_CONFIG": path})
    assert "deadlines" not in calls[0]
    assert (calls[1]["deadlines"], "limits" in calls[1]) == (ps.Deadlines(stall_s=30), False)
    with pytest.raises(ValueError, match="did you mean limits"):
        config_file.settings_in(write("[limit]"))
