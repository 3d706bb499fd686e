"""A server keeps arrays on a client's arenas as long as the client has them, and no longer."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from paramserve.compiling import load_kernels
from paramserve.config import Deadlines, ServerConfig
from paramserve.consistency.built_in import Async
from paramserve.consistency.registry import spec
from paramserve.messages import (
    BlockSpec,
    Define,
    Done,
    Gradient,
    Hello,
    Piece,
    ReadTarget,
    ShardReply,
    Step,
    decoder,
    encode,
)
from paramserve.rules import Add
from paramserve.rules.registry import spec as rule_spec
from paramserve.server import ServerRole, new_shard
from paramserve.virtual import VirtualClock
from paramserve_testing.loop import VirtualLoop

SIZE = 8
"""Elements of float64."""
NBYTES = 4096
_decode = decoder(ShardReply).decode


class Peer:
    """A connection of a client, with one arena of its own."""

    kind = "unix"
    shared = True

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.arenas: dict[int, Any] = {1: np.zeros(NBYTES, np.uint8)}
        self.replies: list[Any] = []

    def send(self, header: bytes, runs: Any = (), arenas: Any = None) -> None:
        self.replies.append(_decode(header))


class Bench:
    """A server, a client's connection to it, and a block."""

    def __init__(self) -> None:
        loop = VirtualLoop(VirtualClock())
        config = ServerConfig(
            0, 1, 0, (), "", spec(Async()), deadlines=Deadlines(heartbeat_s=1000.0)
        )
        self.role = ServerRole(config, new_shard(config), loop, None, lambda addresses: None)  # type: ignore[arg-type, return-value]  # there is no other server
        self.main = self.connects("client")
        self._last = 0
        pieces = (Piece("w", (SIZE,)),)
        block = BlockSpec(0, 0, "group", "float64", rule_spec(Add()), pieces, (0, SIZE))
        self.sends(Define(1, block, 1, 1, 64))

    def connects(self, role: str) -> Any:
        peer: Any = Peer(Hello(role, client=1, incarnation=1, window=4))
        self.role.opened(peer, peer.hello)
        return peer

    def sends(self, message: Any) -> None:
        self._last += 1
        self.role.frame(self.main, encode(message))
        assert isinstance(self.main.replies[-1], Done), self.main.replies[-1]

    def steps(self) -> list[float]:
        """Push ones from an arena, and pull to another place of it; what is there afterwards."""
        arena = self.main.arenas[1]
        arena[64 : 64 + 8 * SIZE].view(np.float64)[:] = 1.0
        self.sends(
            Step(self._last + 1, 0, 0, False, (Gradient(0, 1, 64),), (ReadTarget(0, 1, 1024),))
        )
        values: list[float] = arena[1024 : 1024 + 8 * SIZE].view(np.float64).tolist()
        return values


@pytest.fixture
def bench() -> Bench:
    load_kernels(np.dtype("float64"), Add())
    return Bench()


def test_step_goes_to_the_arena_that_has_replaced_another(bench: Bench) -> None:
    for count in (1, 2):
        assert bench.steps() == [float(count)] * SIZE
    before = weakref.ref(bench.main.arenas[1])
    bench.connects("attach")
    gc.collect()
    assert before() is None
    assert bench.steps() == [3.0] * SIZE


def test_arenas_go_with_their_connection(bench: Bench) -> None:
    assert bench.steps() == [1.0] * SIZE
    arena = weakref.ref(bench.main.arenas[1])
    bench.role.closed(bench.main)
    del bench.main
    gc.collect()
    assert arena() is None
