"""When a server looks at its shard's deadlines: at each of them, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from paramserve.compiling import load_kernels
from paramserve.config import Deadlines, ServerConfig
from paramserve.consistency.built_in import Sync
from paramserve.consistency.registry import spec
from paramserve.messages import (
    BlockSpec,
    Commit,
    Define,
    Done,
    Gradient,
    Hello,
    LogEntry,
    Members,
    PeerMessage,
    Piece,
    ShardReply,
    Step,
    Vote,
    decoder,
    encode,
)
from paramserve.rules import Add
from paramserve.rules.registry import spec as rule_spec
from paramserve.server import ServerRole, new_shard
from paramserve.virtual import VirtualClock
from paramserve_testing.loop import VirtualLoop

RESEND_S = 0.25
SIZE = 8
"""Elements of float64."""
NBYTES = 8 * SIZE

_decode_reply = decoder(ShardReply).decode
_decode_peer = decoder(PeerMessage).decode


class Peer:
    """A connection to the server, which notes when it was answered."""

    kind = "unix"
    shared = True

    def __init__(self, loop: VirtualLoop, hello: Hello) -> None:
        self._loop = loop
        self.hello = hello
        self.arenas: dict[int, Any] = {1: np.zeros(NBYTES, np.uint8)}
        self.replies: list[tuple[float, Any]] = []

    def send(self, header: bytes, runs: Any = (), arenas: Any = None) -> None:
        self.replies.append((self._loop.time(), _decode_reply(header)))


class OtherServer:
    """A link to another server, which notes what was sent, and when."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.sent: list[tuple[float, Any]] = []

    def offer(self, header: bytes) -> bool:
        self.sent.append((self._loop.time(), _decode_peer(header)))
        return True

    def flush(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Harness:
    """One server whose heartbeats are too rare to help, and its two workers."""

    def __init__(self, loop: VirtualLoop, *, shard: int, servers: int) -> None:
        config = ServerConfig(
            shard,
            servers,
            2,
            (),
            "",
            spec(Sync(reduce="sum")),
            deadlines=Deadlines(resend_s=RESEND_S, heartbeat_s=1000.0),
        )
        self.loop, self.shard, self.servers = loop, shard, servers
        self.others = OtherServer(loop)
        self.role = ServerRole(config, new_shard(config), loop, None, self._dial)
        self.role.take_notices([Members(1, (), (("shard 0",), ("shard 1",))[:servers])])
        self.workers = [
            self.connects(Hello("client", client=rank + 1, incarnation=1, rank=rank, window=4))
            for rank in range(2)
        ]
        self._last = [0, 0]

    def _dial(self, addresses: Sequence[str], wanted: Callable[[], bool]) -> OtherServer:
        assert addresses == ("shard 0",), "the lead"
        return self.others

    def connects(self, hello: Hello) -> Any:
        peer: Any = Peer(self.loop, hello)
        self.role.opened(peer, hello)
        return peer

    def sends(self, rank: int, message: Any, value: float) -> None:
        """A numbered request of a worker, about these values in its arena."""
        self.workers[rank].arenas[1].view(np.float64)[:] = value
        self._last[rank] += 1
        numbered = structs.replace(message, seq=self._last[rank])
        self.role.frame(self.workers[rank], encode(numbered))

    def define(self, group: int, policy: Sync) -> None:
        cuts = [0] * (self.shard + 1) + [SIZE] * (self.servers - self.shard)
        block = BlockSpec(
            group,
            group,
            f"group {group}",
            "float64",
            rule_spec(Add()),
            (Piece(f"w{group}", (SIZE,)),),
            tuple(cuts),
            consistency=spec(policy),
        )
        self.sends(0, Define(0, block, 1, 1, 0), 0.0)

    def steps(self, rank: int, group: int, clock: int) -> None:
        step = Step(0, group, clock, True, (Gradient(group, 1, 0),), ())
        self.sends(rank, step, 1.0)

    def answered(self, rank: int) -> list[float]:
        """When a worker's requests were answered."""
        for _, reply in self.workers[rank].replies:
            assert isinstance(reply, Done), reply
        return [at for at, _ in self.workers[rank].replies]


@pytest.fixture
def loop() -> VirtualLoop:
    load_kernels(np.dtype("float64"), Add())
    return VirtualLoop(VirtualClock())


def test_deadline_that_comes_before_the_one_that_is_set_is_kept_to_the_moment(
    loop: VirtualLoop,
) -> None:
    """A decided clock leaves the timer of its repeated message, 0.25 s after it was sent."""
    one = Harness(loop, shard=1, servers=2)
    one.define(0, Sync(reduce="sum", timeout_s=0.02))
    lead = one.connects(Hello("server", client=0))
    for rank in range(2):
        one.steps(rank, 0, clock=0)
    loop.clock.run(0.03)
    assert [type(message) for _, message in one.others.sent] == [Vote]
    one.role.frame(lead, encode(LogEntry(1, Commit(0, 0, (1, 2), 1.0))))
    loop.clock.run(0.1)
    one.steps(0, 0, clock=1)
    loop.clock.run(10.0)
    repeats = [pytest.approx(0.12 + RESEND_S * n) for n in range(3)]
    assert [at for at, _ in one.others.sent][1:4] == repeats
    assert {(vote.clock, vote.contributors) for _, vote in one.others.sent[1:]} == {(1, (1,))}


def test_deadlines_of_several_groups_on_one_server_are_each_kept(loop: VirtualLoop) -> None:
    one = Harness(loop, shard=0, servers=1)
    for group, timeout_s in enumerate((3.0, 0.02)):
        one.define(group, Sync(reduce="sum", timeout_s=timeout_s))
        for rank in range(2):
            one.steps(rank, group, clock=0)
    one.steps(0, 0, clock=1)
    loop.clock.run(0.5)
    one.steps(1, 1, clock=1)
    loop.clock.run(10.0)
    assert [one.answered(rank)[-1] for rank in range(2)] == [
        pytest.approx(3.0),
        pytest.approx(0.52),
    ]
