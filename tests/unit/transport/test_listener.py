"""What listening asks of the process."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator

import pytest

from paramserve.config import NO_CREDENTIALS, Limits
from paramserve.transport.connection import Connection
from paramserve.transport.listener import listen


class Idle:
    """A handler that is given no peer."""

    def opened(self, conn: Connection, hello: object) -> None: ...
    def frame(self, conn: Connection, header: bytes, payload: object) -> None: ...
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
