"""What a process keeps of its log and tells of itself: bounded, at all levels, without secrets."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from tests.suites import each_case

from paramserve import debugging, logs, recent
from paramserve.config import (
    CheckpointPlan,
    ConsistencySpec,
    CoordinatorConfig,
    ServerConfig,
)
from paramserve.coordinator import CoordinatorRole
from paramserve.core.coordination import Coordination
from paramserve.messages import AskDebug, DebugReport, Hello, Register, decoder, encode
from paramserve.recent import KEPT_S, LINES_MAX, REPORT_BYTES_MAX, TEXT_MAX, recorded
from paramserve.virtual import VirtualClock
from paramserve_testing.loop import VirtualLoop

POLICY = ConsistencySpec("Async")
TOKEN = b"5f" * 32
logger = logging.getLogger("paramserve")


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(logs, "_secrets", ())
    logs.hide(TOKEN)
    return TOKEN.decode()


class Keeps(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def messages() -> list[str]:
    return [json.loads(line)["message"] for line in recent.lines()]


@each_case("level", [logging.NOTSET, logging.INFO, logging.WARNING])
def test_record_has_what_the_log_leaves_out_which_stays_as_it_was(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = Keeps()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    logging.getLogger().setLevel(logging.WARNING)
    logger.setLevel(level)
    try:
        with recorded("server"):
            for name in ("debug", "info", "warning"):
                getattr(logger, name)(name)
            assert messages() == ["debug", "info", "warning"]
            logger.setLevel(logging.INFO)  # by the program, meanwhile
            logger.info("wanted")
            logger.setLevel(logging.DEBUG)
        expected = ["info", "warning"] if level == logging.INFO else ["warning"]
        assert handler.messages == [*expected, "wanted"]
        assert recent.lines() == ()
        assert logger.level == level
        assert logger.filters == []
    finally:
        logger.setLevel(logging.NOTSET)


def test_record_is_bounded_by_number_age_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logs, "_secrets", ())  # tests have tokens that look like this text
    with recorded("server"):
        for number in range(LINES_MAX + 10):
            logger.debug("%d %s", number, "x" * 2 * TEXT_MAX)
        kept = recent.lines()
        assert json.loads(kept[-1])["message"].startswith(f"{LINES_MAX + 9} ")
        assert REPORT_BYTES_MAX // 2 < sum(map(len, kept)) <= REPORT_BYTES_MAX
        now = json.loads(kept[-1])
        assert len(now["message"]) == TEXT_MAX
        assert recent.lines(recent.time.time() + KEPT_S + 60.0) == ()


def test_wrong_call_of_the_logger_harms_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with recorded("server"):
        logger.debug("%d", "no number")
        logger.debug("fine")
        assert messages() == ["fine"]


def test_secrets_are_in_no_part_of_a_report(secret: str) -> None:
    folder = "s3://me:password@bucket/run"
    config = ServerConfig(
        1, 2, 3, ("tcp:h:1",), "", POLICY, cluster=b"c" * 16, checkpoints=CheckpointPlan(folder)
    )
    with recorded("server"):
        logger.debug("the token is %s, in %s", secret, folder)
        logger.warning("as bytes %r", TOKEN)
        try:
            raise ValueError(secret)
        except ValueError:
            logger.exception("failed")
        told = debugging.report(AskDebug(7), config)
    text = encode(told).decode("utf-8", "replace")
    for planted in (secret, "password", TOKEN.hex(), (b"c" * 16).decode()):
        assert planted not in text
    assert (told.call, told.role, told.number) == (7, "server", 1)
    assert told.versions["paramserve"]
    first, second, third = map(json.loads, told.record)
    assert first["message"] == "the token is [secret], in s3://bucket/run"
    assert second["message"] == "as bytes b'[secret]'"
    assert third["traceback"].endswith("ValueError: [secret]")
    assert json.loads(told.config)["checkpoints"]["folder"] == "s3://bucket/run"
    assert "test_secrets_are_in_no_part_of_a_report" in told.stacks
    assert "thread MainThread" in told.stacks


def test_coordinator_answers_with_the_addresses_of_its_servers() -> None:
    config = CoordinatorConfig(1, 0, "", POLICY)
    role = CoordinatorRole(Coordination(config), VirtualLoop(VirtualClock()))
    sent: list[Any] = []

    class Peer:
        reset = False

        def send(self, header: bytes) -> None:
            sent.append(decoder(DebugReport).decode(header) if not self.servers else None)

        servers = False

    server, reader = Peer(), Peer()
    server.servers = True
    role.opened(server, Hello("register"))  # type: ignore[arg-type]  # as far as it is used
    role.frame(server, encode(Register(1, 0, 9, ("unix:a", "tcp:h:1"))))  # type: ignore[arg-type]
    role.opened(reader, Hello("driver"))  # type: ignore[arg-type]
    for whole in (False, True):
        role.frame(reader, encode(AskDebug(2, whole)))  # type: ignore[arg-type]
    short, whole_report = sent[-2:]
    assert short.servers == (("unix:a", "tcp:h:1"),)
    assert (short.config, short.record, short.stacks) == ("", (), "")
    assert json.loads(whole_report.config)["servers"] == 1
    assert whole_report.role == "coordinator"
