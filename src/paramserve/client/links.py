"""One client's links to all shards, and the memory that it shares with them.

It makes and breaks off links, and writes single messages to them; when, and what is sent again, is
decided in `exchange`. Arenas are mapped by all servers on this host; a slot is bytes of one.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import structs

from paramserve.config import Credentials, Deadlines, Limits
from paramserve.core.partition import Block
from paramserve.core.session import ClientSession, Sent, SlotPool
from paramserve.errors import (
    ConnectTimeout,
    Overloaded,
    ParamServeError,
    ProtocolError,
    ServerGone,
    rebuild,
)
from paramserve.messages import (
    Assign,
    Define,
    Fetch,
    Hello,
    Joined,
    ServerBeat,
    ShardRequest,
    Step,
    TakeSnapshot,
    Waiting,
    encode,
)
from paramserve.transport.arena import RESERVED_BYTES, Arena
from paramserve.transport.link import Link

logger = logging.getLogger("paramserve")

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

ARENA_GROWTH_BYTES = 64 << 20
"""A new arena is as large as all before it, but no more than this or a quarter of them, unless one
slot needs more: so few arenas hold a large model, and little is allocated for nothing."""
WINDOW = 4
"""Requests of this client that one shard may have unanswered."""


class Connect(Protocol):
    """What reaches a shard: `Link.connect`, or what stands in for it within one process."""

    def __call__(
        self,
        addresses: Sequence[str],
        hello: Hello,
        *,
        credentials: Credentials,
        arenas: Sequence[Arena],
        timeout_s: float,
        limits: Limits,
    ) -> Link: ...


class Slot:
    """Bytes of an arena, taken by this client until given back."""

    __slots__ = ("_array", "arena", "bytes", "offset")

    def __init__(self, arena: int, offset: int, memory: Bytes) -> None:
        self.arena = arena
        self.offset = offset
        self.bytes = memory
        self._array: Array | None = None

    def array(self, block: Block) -> Array:
        """The slot as [block.size] of the block's dtype."""
        array = self._array
        if array is None or array.size != block.size or array.dtype != block.dtype:
            array = self._array = np.frombuffer(self.bytes, block.dtype, block.size)
        return array


class ReachedShard:
    """One shard as this client reaches it."""

    def __init__(self, number: int, addresses: Sequence[str], window: int) -> None:
        self.number = number
        self.addresses = addresses
        self.session = ClientSession(number, window)
        self.link: Link | None = None
        self.fileno = -1
        """The link's, as it was registered: a link that broke has none any more."""
        self.gone: ParamServeError | None = None
        self.told: Waiting | ServerBeat | None = None
        """Last answer to a question that is not numbered."""


class Links:
    """The part of an exchange that holds links and memory; see `client.exchange.Exchange`."""

    def __init__(
        self,
        joined: Joined,
        rank: int,
        credentials: Credentials,
        limits: Limits,
        deadlines: Deadlines,
        connect: Connect,
    ) -> None:
        self.blocks: dict[int, Block] = {}
        """By id: what the parts of a request are measured by."""
        self.shards = [ReachedShard(k, each, WINDOW) for k, each in enumerate(joined.servers)]
        self.io_timeout_s = deadlines.request_s
        """A payload of which a server takes nothing for this long is sent again, on a new
        connection; so that no call waits much longer for it than its own deadline."""
        self._hello = Hello(
            "client", joined.client, joined.incarnation, rank, WINDOW, cluster=joined.cluster
        )
        self._credentials = credentials
        self._limits = limits
        self._deadlines = deadlines
        self._dial = connect
        self._pool = SlotPool(self._slot)
        self._arenas: dict[int, Arena] = {}
        self._lock = threading.RLock()
        self._closed = False
        self._poll = select.poll()
        self._by_fileno: dict[int, ReachedShard] = {}
        self._down: set[int] = set()
        """Shards whose link is broken and not yet made anew."""
        self._gone: ParamServeError | None = None
        """Why the last shard that was given up is gone."""

    # --- slots -------------------------------------------------------------------------------

    def take(self, nbytes: int) -> Slot:
        """A slot of `nbytes`, its contents undefined.

        Raises:
            Overloaded: there is no memory for it, or a server refuses to map more.
        """
        with self._lock:
            slot = self._pool.take(nbytes)
            if slot is None:
                have = sum(arena.nbytes for arena in self._arenas.values())
                needed = nbytes + 2 * RESERVED_BYTES
                growth = min(have, max(ARENA_GROWTH_BYTES, have // 4))
                try:
                    self._add_arena(max(needed, growth))
                except Overloaded:
                    if growth <= needed:
                        raise
                    self._add_arena(needed)
                slot = self._pool.take(nbytes)
                assert slot is not None
            return slot

    def _slot(self, arena: int, offset: int, size: int) -> Slot:
        return Slot(arena, offset, self._arenas[arena].memory[offset : offset + size])

    def give_back(self, slots: Iterable[Slot]) -> None:
        """The caller, their owner, lets go of these slots."""
        with self._lock:
            if not self._closed:
                for slot in slots:
                    self._pool.give_back(slot)

    def _add_arena(self, nbytes: int) -> None:
        arena = Arena.create(nbytes, len(self._arenas) + 1)
        try:
            for shard in self.shards:
                if shard.link is not None and shard.link.shared:
                    self._attach(shard, shard.link, arena)
        except BaseException:
            arena.close()
            raise
        self._arenas[arena.number] = arena
        self._pool.add_arena(arena.number, RESERVED_BYTES, arena.nbytes)

    def _attach(self, shard: ReachedShard, link: Link, arena: Arena) -> None:
        deadline = time.monotonic() + self._deadlines.request_s
        while True:
            try:
                link.attach(arena, timeout_s=self._deadlines.reconnect_s)
            except ConnectTimeout as error:
                if self._hung_up(shard):
                    self._give_up(shard, error)
                elif time.monotonic() < deadline:
                    continue  # It lives, and is busy.
                else:
                    raise
            except ProtocolError as error:
                # The server has ended the link already: the next one brings all arenas along.
                logger.debug("shard %d did not take an arena: %s", shard.number, error)
                self._disconnect(shard)
            return

    def _hung_up(self, shard: ReachedShard) -> bool:
        """Whether the other end of a shard's link is closed."""
        poll = select.poll()  # One of its own: another thread may wait on the common one.
        poll.register(shard.fileno, 0)  # Ends and errors are told in any case.
        return bool(poll.poll(0))

    # --- links -------------------------------------------------------------------------------

    def _connect(self, shard: ReachedShard, timeout_s: float) -> Link:
        shard.link = link = self._dial(
            shard.addresses,
            self._hello,
            credentials=self._credentials,
            arenas=list(self._arenas.values()),
            timeout_s=timeout_s,
            limits=self._limits,
        )
        self._down.discard(shard.number)
        shard.fileno = link.fileno()
        self._by_fileno[shard.fileno] = shard
        self._poll.register(shard.fileno, select.POLLIN)
        return link

    def _disconnect(self, shard: ReachedShard) -> None:
        """Let go of a link; at once when it breaks: its descriptor may be another link's next."""
        link, shard.link = shard.link, None
        if shard.gone is None:
            self._down.add(shard.number)
        if link is not None:
            del self._by_fileno[shard.fileno]
            self._poll.unregister(shard.fileno)
            link.close()

    def _give_up(self, shard: ReachedShard, error: Exception) -> None:
        """A shard is lost, and with it the cluster: nothing that was sent to any shard is waited
        for any more, since the others may wait for this one's part in a synchronous clock."""
        self._disconnect(shard)
        unknown = isinstance(error, OSError) or type(error).__name__ == "ConnectTimeout"
        if unknown or not isinstance(error, ParamServeError):
            error = ServerGone(
                f"server of shard {shard.number} at {shard.addresses[0]} does not answer",
                applied="unknown",
                fix="look why its process ended; its values are lost, start again",
            )
        error = rebuild(type(error).__name__, error.failed, "unknown", error.fix)
        shard.gone = self._gone = error
        self._down.discard(shard.number)
        for each in self.shards:
            each.session.abandon(error)

    # --- bytes -------------------------------------------------------------------------------

    def _transmit(self, shard: ReachedShard, message: ShardRequest) -> None:
        link = shard.link
        if link is None:
            raise ConnectionError("not connected")
        if link.shared:
            link.send(encode(message))
            return
        inline, parts = self._inline(shard.number, message)
        link.io_timeout_s = self.io_timeout_s
        link.send(encode(inline), parts)

    def _inline(self, shard: int, message: ShardRequest) -> tuple[ShardRequest, list[Bytes]]:
        """The same request with its bytes in the frame instead of an arena."""
        if isinstance(message, Step):
            push = tuple(structs.replace(header, arena=0) for header in message.push)
            pull = tuple(structs.replace(place, arena=0) for place in message.pull)
            parts = [self._part(shard, g.block, g.arena, g.offset) for g in message.push]
            return structs.replace(message, push=push, pull=pull), parts
        if isinstance(message, TakeSnapshot):
            pull = tuple(structs.replace(place, arena=0) for place in message.pull)
            return structs.replace(message, pull=pull), []
        if isinstance(message, Define):
            number = message.spec.block
            parts = [self._part(shard, number, message.arena, message.offset)]
            return structs.replace(message, arena=0), parts
        if isinstance(message, Assign):
            parts = [self._part(shard, message.block, message.arena, message.offset)]
            return structs.replace(message, arena=0), parts
        if isinstance(message, Fetch):
            return structs.replace(message, arena=0), []
        return message, []

    def _part(self, shard: int, number: int, arena: int, offset: int) -> Bytes:
        block = self.blocks[number]
        low, high = block.range(shard)
        return self._arenas[arena].memory[offset : offset + (high - low) * block.dtype.itemsize]

    def _destinations(self, shard: int, sent: Sent) -> list[Bytes]:
        message = sent.message
        if isinstance(message, Step | TakeSnapshot):
            return [self._part(shard, p.block, p.arena, p.offset) for p in message.pull]
        assert isinstance(message, Fetch)
        return [self._part(shard, message.block, message.arena, message.offset)]
