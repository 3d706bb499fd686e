"""A coordinator that stands still: how long one waits for it who is about to end."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.contract.role_cluster import LoopThread

from paramserve.client.heartbeat import Heartbeat
from paramserve.config import NO_CREDENTIALS, Deadlines, Limits
from paramserve.messages import Hello, Reconnect, WorkerBeat
from paramserve.transport.control import ControlLink
from paramserve.transport.listener import Connection, listen_unix

FROZEN_S = 1e4
WAIT_S = 10.0
NEVER_S = 1e6


class Frozen:
    """A coordinator that finishes handshakes, and answers nothing."""

    def __init__(self) -> None:
        self.conns: list[Connection] = []
        self.asked = threading.Event()

    def opened(self, conn: Connection, hello: Hello) -> None:
        self.conns.append(conn)

    def frame(self, conn: Connection, header: bytes) -> None:
        self.asked.set()

    def closed(self, conn: Connection) -> None:
        self.conns.remove(conn)


class Meeting:
    """A link to a coordinator that stands still."""

    def __init__(self, folder: str) -> None:
        self.coordinator = Frozen()
        self.loop = LoopThread()
        self._wake = threading.Event()
        self._listener: Any = self.loop.run(
            lambda: listen_unix(f"{folder}/c.sock", self.coordinator, Limits())
        )
        self.link = ControlLink.connect(
            [self._listener.address],
            Hello("join"),
            credentials=NO_CREDENTIALS,
            limits=Limits(),
            timeout_s=WAIT_S,
        )
        self.link.identify(Reconnect(0, b"", client=1), Deadlines(stall_s=FROZEN_S))

    def cut(self) -> None:
        """End the connection from the coordinator's side."""
        (conn,) = self.coordinator.conns
        self.loop.call(conn.close)

    def stand_still(self) -> None:
        """The coordinator reads nothing until `close`, as under SIGSTOP."""
        self.loop.loop.call_soon_threadsafe(self._wake.wait, FROZEN_S)

    def close(self) -> None:
        self._wake.set()
        self.link.close()
        self.loop.call(self._listener.close)
        self.loop.close()
        assert self.loop.errors == []


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    with tempfile.TemporaryDirectory(prefix="ps-") as folder:
        found = Meeting(folder)
        yield found
        found.close()


def in_time(do: Callable[[], object], then: Callable[[], object] = lambda: None) -> bool:
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    then()
    thread.join(WAIT_S)
    return not thread.is_alive()


@pytest.mark.parametrize("how", ["ended", "closed", "hurried"])
def test_ending_does_not_wait_for_an_answer_to_reconnect(meeting: Meeting, how: str) -> None:
    end = threading.Event()
    meeting.cut()
    while meeting.link.notify(WorkerBeat(0)):  # shows the end of the connection
        pass
    meeting.coordinator.asked.clear()

    def restore() -> None:
        meeting.link.restore(ended=end.is_set)

    def let_end() -> None:
        assert meeting.coordinator.asked.wait(WAIT_S)
        {"ended": end.set, "closed": meeting.link.close, "hurried": meeting.link.hurry}[how]()

    assert in_time(restore, let_end)


@pytest.mark.parametrize("how", ["stop", "send", "stop while the thread sends"])
def test_ending_does_not_wait_long_for_a_coordinator_that_takes_no_records(
    meeting: Meeting, how: str
) -> None:
    meeting.stand_still()
    threaded = how == "stop while the thread sends"
    heartbeat = Heartbeat(meeting.link, 0, 0.01 if threaded else NEVER_S, Limits())
    values = dict.fromkeys(map(str, range(2000)), 1.0)
    for clock in range(200):  # several MB: more than a socket holds
        heartbeat.log(clock, values)
    if threaded:
        left = -1
        while len(heartbeat._records) != left:  # until it waits within a beat
            left = len(heartbeat._records)
            time.sleep(0.1)
    meeting.link.hurry()
    assert in_time(heartbeat.send_all if how == "send" else heartbeat.stop)
    meeting.link.close()
    heartbeat.stop()
