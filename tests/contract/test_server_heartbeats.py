"""A server's heartbeats where the coordinator takes them late, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from paramserve.config import NO_CREDENTIALS, Deadlines, Limits, ServerConfig
from paramserve.consistency.built_in import Async
from paramserve.consistency.registry import spec
from paramserve.errors import CoordinatorGone, ProtocolError
from paramserve.messages import Hello, Members, ServerBeat, decoder
from paramserve.server import Control, process_role
from paramserve.transport.control import ControlLink
from paramserve.transport.framing import FrameReader
from paramserve.transport.link import Link

WAIT_S = 10.0
OFTEN_S, RARELY_S = 0.002, 1e4
BEATS = 3


class ScriptedControl:
    """A connection to the coordinator: `beat` says how each heartbeat is answered, and `restores`
    counts how often it was made anew."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.beats = self.restores = 0
        self.on_beat: Callable[[int], None] = lambda number: None
        self.breaks = 0
        """How often it breaks again as soon as it was made anew."""

    def fileno(self) -> int:
        return self.near.fileno()

    def notify(self, message: object, *, waits: bool) -> bool:
        self.beats += 1
        self.on_beat(self.beats)
        return self.fileno() >= 0

    def flush(self) -> bool:
        return self.fileno() >= 0

    def restore(self, *, ended: Callable[[], bool]) -> bool:
        if self.restores < 20 and not ended():
            self.restores += 1
            self.close()
            self.near, self.far = socket.socketpair()
            if self.restores <= self.breaks:
                self.close()
            return True
        return False

    def read_notices(self) -> list[Members]:
        if self.fileno() < 0:
            raise CoordinatorGone("the connection broke", fix="none")
        return []

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def control() -> Iterator[ScriptedControl]:
    found = ScriptedControl()
    yield found
    found.close()


@contextlib.contextmanager
def serving(control: Control, every_s: float) -> Iterator[list[dict[str, object]]]:
    """A server's role on the running loop; gives what was raised out of the loop's callbacks."""
    deadlines = Deadlines(heartbeat_s=every_s, stall_s=2 * RARELY_S)
    config = ServerConfig(0, 1, 1, (), "", spec(Async()), deadlines=deadlines)
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    role = process_role(config, NO_CREDENTIALS, control)
    try:
        yield errors
    finally:
        role.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(OFTEN_S)


def test_heartbeats_go_on_after_one_that_is_too_large(
    control: ScriptedControl, caplog: pytest.LogCaptureFixture
) -> None:
    def too_large(number: int) -> None:
        if 1 < number <= 1 + BEATS:
            raise ProtocolError("a header is over header_bytes_max", fix="raise it")

    async def run() -> None:
        control.on_beat = too_large
        with serving(control, OFTEN_S) as errors:
            await until(lambda: control.beats >= 2 + BEATS)
        assert errors == []

    asyncio.run(run())
    assert caplog.text.count("a header is over header_bytes_max") == 1


def test_rest_of_a_heartbeat_is_sent_as_soon_as_the_coordinator_reads() -> None:
    near, far = socket.socketpair()
    far.setblocking(False)
    control = ControlLink(Link(near, "unix:test", Hello("register"), Limits(), WAIT_S), ())
    filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += near.send(bytes(1000))
    got = bytearray()

    async def run() -> None:
        with serving(control, RARELY_S) as errors:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(WAIT_S):
                while len(got) <= filled:
                    got.extend(await loop.sock_recv(far, 1 << 16))
        assert errors == []

    asyncio.run(run())
    reader = FrameReader(1 << 20, 1 << 20)
    reader.space()[: len(got) - filled] = got[filled:]
    header = reader.filled(len(got) - filled)
    assert header is not None
    assert isinstance(decoder(ServerBeat).decode(header), ServerBeat)
    control.close()
    far.close()


def test_connection_that_breaks_again_at_once_is_made_anew_and_heartbeats_go_on(
    control: ScriptedControl,
) -> None:
    control.breaks = 2

    async def run() -> None:
        with serving(control, OFTEN_S) as errors:
            control.close()
            await until(lambda: control.restores >= 3 and control.fileno() >= 0)
            seen = control.beats
            await until(lambda: control.beats >= seen + BEATS)
        assert errors == []

    asyncio.run(run())
    assert control.restores == 3
