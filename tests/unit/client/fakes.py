"""Stand-ins for what lies below the parts of the client under test."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from paramserve.client.exchange import Slot
from paramserve.config import RuleSpec
from paramserve.core.client_session import Operation
from paramserve.core.partition import Block, cut
from paramserve.messages import (
    BlockSpec,
    Bye,
    Done,
    Hello,
    Piece,
    Refused,
    ShardReply,
    ShardRequest,
    Waiting,
    encode,
)
from paramserve.rules import SGD
from paramserve.rules.registry import spec as rule_spec


def block_of(
    shapes: dict[str, tuple[int, ...]],
    *,
    number: int = 0,
    group: str = "default",
    dtype: str = "float64",
    rule: object = SGD(0.1),
    shards: int = 1,
) -> Block:
    """A block as the coordinator would place it."""
    pieces = tuple(Piece(name, shape) for name, shape in shapes.items())
    size = sum(int(np.prod(shape, dtype=int)) for shape in shapes.values())
    described: RuleSpec | None = None if rule is None else rule_spec(rule)
    cuts = cut(size, np.dtype(dtype).itemsize, [0] * shards)
    return Block(BlockSpec(number, len(group), group, dtype, described, pieces, cuts))


class Memory:
    """An exchange that only gives out slots, and answers nothing by itself."""

    def __init__(self, shards: int = 1) -> None:
        self.shards = list(range(shards))
        self.now = time.monotonic
        self.blocks: dict[int, Block] = {}
        self.taken: list[Slot] = []
        self.sent: list[tuple[list[ShardRequest], Operation]] = []
        self.waiting: list[Waiting] = []
        self.no_room = False
        self.gone: Exception | None = None
        self.interrupted_in = ""
        self._count = 0

    def take(self, nbytes: int) -> Slot:
        self._count += 1
        slot = Slot(1, 64 * self._count, np.full(-(-nbytes // 64) * 64, 0xFF, np.uint8))
        self.taken.append(slot)
        return slot

    def take_each(self, sizes: Sequence[int]) -> list[Slot]:
        slots: list[Slot] = []
        try:
            for nbytes in sizes:
                slots.append(self.take(nbytes))
        except BaseException:
            self.give_back(slots)
            raise
        return slots

    def give_back(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self.taken.remove(slot)

    def let_go(self, slots: Iterable[Slot]) -> None:
        self.give_back(slots)

    def has_room(self, requests: int = 1, *, reads: bool = False) -> bool:
        if self.gone is not None:
            raise self.gone
        return not self.no_room

    def wait_for_room(self, timeout_s: float, requests: int, *, reads: bool = False) -> bool:
        return self.has_room(requests)

    def settle(self, timeout_s: float) -> bool:
        return True

    def full(self, requests: int, *, reads: bool = False) -> str:
        return "shard 0 is full" if self.no_room else ""

    def awaited_group(self) -> int | None:
        return None

    def check_whole(self) -> None:
        assert not self.interrupted_in

    def submit(
        self,
        requests: Sequence[ShardRequest],
        operation: Operation,
        numbered: Callable[[], None] | None = None,
    ) -> None:
        operation.numbered = True
        self.sent.append((list(requests), operation))
        if numbered is not None:
            numbered()

    def submit_together(
        self,
        calls: Sequence[tuple[Sequence[ShardRequest], Operation]],
        numbered: Callable[[], None] | None = None,
    ) -> None:
        for requests, operation in calls:
            self.submit(requests, operation)
        if numbered is not None:
            numbered()

    def wait(self, operation: Operation, timeout_s: float, kind: object = None) -> bool:
        return operation.complete

    def read_until(self, done: Callable[[], bool], deadline: float, kind: object = None) -> bool:
        return done()

    def poll(self, operation: Operation) -> bool:
        return operation.complete

    def inquire(self, group: int, timeout_s: float) -> list[Waiting]:
        return self.waiting

    def answer(self, which: int = 0, **reply: Any) -> None:
        """All shards answer the oldest operation that is not complete."""
        _, operation = self.sent[which]
        for shard in self.shards:
            operation.answered(shard, Done(0, **reply))

    def refuse(self, which: int = 0, kind: str = "ParamServeError") -> None:
        """All shards refuse an operation."""
        _, operation = self.sent[which]
        for shard in self.shards:
            operation.answered(shard, Refused(0, kind, f"no {which}", "no", "nothing"))


class FakeLink:
    """A link to a shard that answers when the test says so."""

    payload_bytes = 0
    more = True
    shared = True

    def __init__(self, address: str) -> None:
        self.address = address
        self.sent: list[Any] = []
        self.replies: deque[bytes] = deque()
        self.broken = self.closed = False
        self.attached: list[int] = []
        self.refuse_arenas_over = 1 << 40
        self._readable, self._writable = os.pipe()

    def fileno(self) -> int:
        return -1 if self.closed else self._readable

    def send(self, header: bytes, payload: Sequence[Any] = ()) -> None:
        if self.broken:
            raise ConnectionResetError("broken")
        self.sent.append(msgspec.msgpack.decode(header))

    def reply(self, message: ShardReply) -> None:
        self.replies.append(encode(message))
        os.write(self._writable, b"x")

    def receive(self, timeout_s: float) -> bytes | None:
        if self.broken:
            raise ConnectionResetError("broken")
        if not self.replies:
            return None
        os.read(self._readable, 1)
        return self.replies.popleft()

    def buffered(self) -> bytes | None:
        return self.receive(0.0)

    def break_off(self) -> None:
        """The other end is gone; shows readable, as a socket does."""
        self.broken = True
        os.write(self._writable, b"x")

    def attach(self, arena: Any, *, timeout_s: float) -> None:
        from paramserve.errors import Overloaded

        if arena.nbytes > self.refuse_arenas_over:
            raise Overloaded("too large", fix="less")
        self.attached.append(arena.nbytes)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self._readable)
            os.close(self._writable)


class Links:
    """Makes fake links: the `connect` of an exchange."""

    def __init__(self) -> None:
        self.made: dict[str, list[FakeLink]] = {}
        self.refuses: dict[str, Exception] = {}

    def __call__(self, addresses: Sequence[str], hello: Hello, **_: Any) -> Any:
        (address,) = addresses
        if address in self.refuses:
            raise self.refuses[address]
        link = FakeLink(address)
        self.made.setdefault(address, []).append(link)
        return link

    def __getitem__(self, shard: int) -> FakeLink:
        """The newest link to a shard."""
        return self.made[f"unix:{shard}"][-1]

    def said(self, shard: int) -> list[int]:
        """Numbers of the requests that a shard's newest link has sent."""
        return [message[1] for message in self[shard].sent if message[0] != encode_tag(Bye)]


def encode_tag(kind: type) -> str:
    return str(msgspec.msgpack.decode(encode(kind()))[0])
