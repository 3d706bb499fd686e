"""Events of the log: their names, their JSON, and what the coordinator's log says of a cluster."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from paramserve import logs
from paramserve.cluster_log import STATES, ClusterLog
from paramserve.config import ConsistencySpec
from paramserve.core.membership import ServerEntry
from paramserve.logs import EVENTS, JSONFormatter, event
from paramserve.messages import GroupPolicy, GroupReport, Member, Members, ServerBeat

ROOT = Path(__file__).parents[2]


def line(level: int, message: str, *args: Any, **options: Any) -> dict[str, Any]:
    """What the formatter makes of one call, as a reader of the log sees it."""
    logger = logging.Logger("paramserve")
    lines: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler = Keeps()
    handler.setFormatter(JSONFormatter("server", host="a"))
    logger.addHandler(handler)
    logger.log(level, message, *args, **options)
    (text,) = lines
    assert "\n" not in text
    assert text.isascii()
    told: dict[str, Any] = json.loads(text)
    return told


def events(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    formatter = JSONFormatter("server")
    return [json.loads(formatter.format(record)) for record in caplog.records]


def test_line_has_time_level_role_event_fields_and_message() -> None:
    told = line(logging.WARNING, "rank %d\nhas gone", 3, extra=event("worker-died", rank=3))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", told.pop("time"))
    assert told == {
        "level": "warning",
        "role": "server",
        "host": "a",
        "event": "worker-died",
        "rank": 3,
        "message": "rank 3\nhas gone",
    }


def test_role_of_an_event_stands_before_that_of_the_process() -> None:
    assert line(logging.INFO, "x", extra=event("done", role="coordinator"))["role"] == "coordinator"
    assert line(logging.INFO, "x")["event"] == "log"


def test_exception_stands_in_the_same_line_without_a_password() -> None:
    try:
        raise OSError("ftp://me:secret@host/folder")
    except OSError as error:
        told = line(logging.ERROR, "s3://me:secret@b/c", exc_info=error)
    assert told["traceback"].splitlines()[-1] == "OSError: ftp://host/folder"
    assert told["message"] == "s3://b/c"


def test_event_without_a_name_of_the_list_is_refused() -> None:
    with pytest.raises(ValueError, match="'worker-gone' is no event"):
        event("worker-gone")


def test_every_event_is_logged_somewhere() -> None:
    source = [path.read_text() for path in (ROOT / "src" / "paramserve").rglob("*.py")]
    used = {name for text in source for name in re.findall(r'[( ]"([a-z-]+)"', text)}
    called = {n for text in source for n in re.findall(r'\bevent\(\s*"([a-z-]+)"', text)}
    assert called <= set(EVENTS)
    assert {name for name, _ in STATES.values()} <= set(EVENTS)
    assert set(EVENTS) <= used | {"log"}


def test_servers_that_come_and_are_lost_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paramserve")
    log = ClusterLog(servers=2, workers=0, warns=True)
    servers = {
        shard: ServerEntry(1, ("unix:@x", f"tcp:h{shard}:5"), 0.0, ServerBeat(shard, ()))
        for shard in range(2)
    }
    log.on_servers(servers)
    log.on_servers(servers)
    servers[1].lost = True
    log.on_servers(servers)
    log.on_servers(servers)
    told = [(e["event"], e["server"], e["address"], e["level"]) for e in events(caplog)]
    assert told == [
        ("server-joined", 0, "h0:5", "info"),
        ("server-joined", 1, "h1:5", "info"),
        ("server-lost", 1, "h1:5", "warning"),
    ]


def test_policy_that_changes_is_told_once_by_all_servers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paramserve")
    log = ClusterLog(servers=2, workers=1, warns=True)
    first = GroupPolicy(1, 1, 40, ConsistencySpec("Sync"))
    second = GroupPolicy(1, 2, 90, ConsistencySpec("Async"))
    for changes in ((), (first,), (first, second)):
        group = GroupReport("model", 3, (), 0, (), changes=changes)
        for shard in range(2):
            log.on_beat(ServerBeat(shard, (group,)))
    assert caplog.messages == [
        "group 'model' goes on under Sync from clock 40",
        "group 'model' goes on under Async from clock 90",
    ]
    assert [(e["event"], e["clock"]) for e in events(caplog)] == [
        ("policy-changed", 40),
        ("policy-changed", 90),
    ]


def test_deaths_are_no_warnings_where_a_driver_tells_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "paramserve")
    for warns in (True, False):
        log = ClusterLog(servers=1, workers=1, warns=warns)
        log.on_members(Members(1, (Member(0, 4, 1, "dead"),)))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_tokens_that_are_hidden_are_bounded_and_the_newest_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "_secrets", ())
    tokens = [b"token of run %d ...." % number for number in range(1000)]
    for token in tokens:
        logs.hide(token)
        logs.hide(token)
    assert len(logs._secrets) <= logs._SECRETS_MAX
    assert all(
        each.decode() not in logs.without_secrets(f"a {each.decode()}") for each in tokens[-64:]
    )
