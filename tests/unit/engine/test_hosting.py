"""What runs around an entry in an actor, without a cluster: its calls come from threads here."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from paramserve.engine.base import Failure
from paramserve.engine.child import EXIT_FAILED, EXIT_TERMINATED, Bootstrap, Package
from paramserve.engine.hosting import Host, HostReport, Stopped, silence_stops

WAIT_S = 10.0
WHERE = __name__
SECRET = b"opens the ports"


def tells_twice(boot: Bootstrap) -> None:
    boot.report("one", boot.payload)
    boot.report("two", boot.host.encode())


def raises(boot: Bootstrap) -> None:
    raise LookupError("no such thing")


def tells_its_secret(boot: Bootstrap) -> None:
    boot.report("secret", boot.secret)


def exits(boot: Bootstrap) -> None:
    sys.exit(int(boot.payload) if boot.payload else None)


def serves(boot: Bootstrap) -> None:
    ended = threading.Event()
    boot.on_stop(ended.set)
    boot.report("up", b"")
    ended.wait(WAIT_S)


def loops(boot: Bootstrap) -> None:
    never = threading.Event()
    boot.report("up", b"")
    while True:
        never.wait(0.001)


class Caller:
    """Calls a host as a driver does."""

    def __init__(self) -> None:
        self.host = Host("worker 3", "10.0.0.9", "node7")
        self._threads = ThreadPoolExecutor(8)

    def run(self, entry: Any, payload: bytes = b"") -> Future[None]:
        package = Package("worker 3", f"{WHERE}:{entry.__name__}", payload, b"", b"", "")
        return self._threads.submit(self.host.run, msgspec.msgpack.encode(package), SECRET, {}, [])

    def hear(self, taken: int) -> HostReport:
        return self.later(taken).result(WAIT_S)

    def later(self, taken: int) -> Future[HostReport]:
        return self._threads.submit(self.host.poll, taken)

    def until_ended(self) -> HostReport:
        taken, reports = 0, []
        while True:
            heard = self.hear(taken)
            reports += heard.reports
            taken += len(heard.reports)
            if heard.status is not None:
                return heard._replace(reports=reports)


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> Caller:
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    return Caller()


def test_secret_that_comes_beside_the_package_is_the_entrys(caller: Caller) -> None:
    caller.run(tells_its_secret).result(WAIT_S)
    assert caller.until_ended().reports == [("secret", SECRET)]


def test_reports_come_in_order_before_the_end(caller: Caller) -> None:
    caller.run(tells_twice, b"first").result(WAIT_S)
    heard = caller.hear(0)
    assert heard.reports == [("one", b"first"), ("two", b"10.0.0.9")]
    assert (heard.node, heard.status) == ("node7", 0)


def test_reports_that_did_not_arrive_are_told_again(caller: Caller) -> None:
    caller.run(tells_twice).result(WAIT_S)
    assert caller.hear(0) == caller.hear(0)
    assert [kind for kind, _ in caller.hear(1).reports] == ["two"]
    assert caller.hear(2).reports == []


def test_process_that_is_up_says_so_at_once(caller: Caller) -> None:
    assert caller.hear(-1) == HostReport(caller.hear(-1).pid, "node7", [], None)


def test_later_listener_takes_the_place_of_an_earlier_one(caller: Caller) -> None:
    earlier = caller.later(0)
    while not caller.host._hearers:
        pass
    later = caller.later(0)
    assert earlier.result(WAIT_S).reports == []
    caller.run(tells_twice)
    assert later.result(WAIT_S).reports


@pytest.mark.parametrize(("payload", "status"), [(b"", 0), (b"7", 7), (b"256", 0), (b"-1", 255)])
def test_exit_code_is_that_of_a_process(caller: Caller, payload: bytes, status: int) -> None:
    caller.run(exits, payload)
    assert caller.until_ended().status == status


def test_exception_is_reported(caller: Caller) -> None:
    caller.run(raises)
    heard = caller.until_ended()
    failure = msgspec.msgpack.decode(dict(heard.reports)["failed"], type=Failure)
    assert (failure.kind, failure.text) == ("LookupError", "no such thing")
    assert heard.status == EXIT_FAILED


@pytest.mark.parametrize(("entry", "status"), [(serves, 0), (loops, EXIT_TERMINATED)])
def test_stop_ends_the_entry(caller: Caller, entry: Any, status: int) -> None:
    caller.run(entry)
    assert caller.hear(0).reports == [("up", b"")]
    caller.host.stop()
    caller.host.stop()
    assert caller.until_ended().status == status


def test_stop_before_the_run_keeps_the_entry_from_starting(caller: Caller) -> None:
    caller.host.stop()
    caller.run(tells_twice)
    assert caller.until_ended() == HostReport(caller.hear(-1).pid, "node7", [], EXIT_TERMINATED)


def test_stop_that_comes_late_is_not_told_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_type))
    silence_stops()

    def ends(error: type[BaseException]) -> None:
        raise error

    for error in (Stopped, KeyError):
        thread = threading.Thread(target=ends, args=(error,))
        thread.start()
        thread.join(WAIT_S)
    assert told == [KeyError]
