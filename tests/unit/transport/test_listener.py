"""What listening asks of the process."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Iterator
from typing import NoReturn

import pytest

from paramserve.config import NO_CREDENTIALS, Limits
from paramserve.transport import listener as module
from paramserve.transport.connection import Connection
from paramserve.transport.listener import listen


class Idle:
    """A handler that is given no peer."""

    def opened(self, conn: Connection, hello: object) -> None: ...
    def frame(self, conn: Connection, header: bytes) -> None: ...
    def closed(self, conn: Connection) -> None: ...


@pytest.fixture
def hard() -> Iterator[int]:
    """The hard limit of open files; the soft one is low for the time of the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Above what this process has open, whatever ran in it before.
    highest = max(int(each) for each in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("clients", [500, 10**9])
def test_listen_opens_as_many_files_as_its_clients_need(hard: int, clients: int) -> None:
    async def run() -> None:
        limits = Limits(clients_max=clients)
        for listener in await listen("", "x", "", NO_CREDENTIALS, Idle(), limits):
            listener.close()

    asyncio.run(run())
    soft, still = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert still == hard
    assert soft > 3 * clients or soft == hard


def test_peers_that_cannot_be_accepted_are_told_of_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_NO_DESCRIPTORS_PAUSE_S", 0.0)
    failures = 0

    class Full(socket.socket):
        def accept(self) -> NoReturn:
            nonlocal failures
            failures += 1
            raise OSError(errno.EMFILE, "Too many open files")

    async def run() -> None:
        limits = Limits()
        with Full(socket.AF_INET, socket.SOCK_STREAM) as full:
            full.bind(("127.0.0.1", 0))
            full.listen()
            listener = module.Listener(full, "tcp", "tcp:here", Idle(), limits)
            with socket.create_connection(full.getsockname()):
                while failures < 5:
                    await asyncio.sleep(0)
                assert len(caplog.messages) == 1
                listener._accept_told_at -= 60.0
                while failures < 10:
                    await asyncio.sleep(0)
            listener.close()

    asyncio.run(run())
    assert caplog.messages == ["cannot accept at tcp:here: [Errno 24] Too many open files"] * 2
