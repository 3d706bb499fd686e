"""One client's links to all shards, and the memory that it shares with them.

It makes and breaks off links, and writes single messages to them; when, and what is sent again, is
decided in `exchange`. Arenas are mapped by all servers on this host; a slot is bytes of one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paramserve.client.payloads import Outgoing, Payloads
from paramserve.config import Credentials, Deadlines, Limits
from paramserve.core.client_session import ClientSession, SlotPool
from paramserve.core.partition import Block
from paramserve.errors import (
    ConnectTimeout,
    Overloaded,
    ParamServeError,
    ProtocolError,
    ServerGone,
    rebuild,
)
from paramserve.messages import (
    Batch,
    Hello,
    Joined,
    ShardRequest,
    encode,
)
from paramserve.transport.arena import RESERVED_BYTES, Arena
from paramserve.transport.dial import is_unix
from paramserve.transport.framing import header_not_sent
from paramserve.transport.link import Link
from paramserve.transport.timing import Timing

logger = logging.getLogger("paramserve")

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

ARENA_GROWTH_BYTES = 64 << 20
"""A new arena is as large as all before it, but no more than this or a quarter of them, unless one
slot needs more: so few arenas hold a large model, and little is allocated for nothing. All together
have at most half as much again as is in use at once. What slots of other sizes leave unusable
between them comes on top, since no slot moves: less than another half in all but a few orders."""
FIRST_ARENA_BYTES = 1 << 20
TRIM_TAKES = 1024
"""After so many slots taken, arenas are given back that were not needed for them."""
TRIM_TRIES = 16
"""So often more, at the next takes, if just then a small slot was taken in a large arena."""
WINDOW = 4
"""Calls of this client that one shard may have unanswered."""
REQUESTS = 256
"""Requests of these calls together, if the client's limits allow as many: a step of a model with
tables has one for each."""

POLL_SLICE_S = 0.25
"""A waiting thread looks this often whether the client was closed by another."""
QUICK_S = 100e-6
"""An answer sooner than this is quick: the servers are at it."""
SPIN_S = 60e-6
"""How long a wait looks before it sleeps, after a quick one. A wake-up costs 20 to 60 us on a
virtual machine; a worker that computes in between never has quick answers twice."""
QUICK_TCP_S = 300e-6
SPIN_TCP_S = 200e-6
"""The same where a server is reached over TCP: there a small step takes longer."""


Allocate = Callable[[int, int], Arena]
"""Makes an arena of a size, with a number."""
Framed = tuple[bytes, list[Bytes]]
"""A frame to be sent: its header, and the parts of its payload."""


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

    def __init__(self, number: int, addresses: Sequence[str], session: ClientSession) -> None:
        self.number = number
        self.addresses = addresses
        self.session = session
        self.link: Link | None = None
        self.fileno = -1
        """The link's, as it was registered: a link that broke has none any more."""
        self.gone: ParamServeError | None = None
        self.mute_since: float | None = None
        """Since when it listens, and does not answer those who connect again."""


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
        timing: Timing,
        window: int,
        session: type[ClientSession],
        allocate: Allocate,
    ) -> None:
        self.blocks: dict[int, Block] = {}
        """By id: what the parts of a request are measured by."""
        self.requests = max(window, min(REQUESTS, limits.outstanding_max))
        """That one shard may have unanswered."""
        self.shards = [
            ReachedShard(k, each, session(k, window, self.requests))
            for k, each in enumerate(joined.servers)
        ]
        self.io_timeout_s = deadlines.request_s
        """A payload of which a server takes nothing for this long is sent again, on a new
        connection; so that no call waits much longer for it than its own deadline."""
        self._hello = Hello(
            "client",
            joined.client,
            joined.incarnation,
            rank,
            window,
            cluster=joined.cluster,
            requests=self.requests,
        )
        self._credentials = credentials
        self._limits = limits
        self._deadlines = deadlines
        self._dial = connect
        self._allocate = allocate
        self._pool = SlotPool(self._slot)
        self._returned: deque[Slot] = deque()
        """Slots to be given back with the next `take`."""
        self._arenas: dict[int, Arena] = {}
        self._takes = 0
        """Slots taken since arenas were given back."""
        self._most = 0
        """Bytes that were in use at once in the last so many takes."""
        self.payloads = Payloads(self.blocks, self._arenas)
        self._lock = threading.RLock()
        self._closed = False
        self._timing = timing
        self.now = timing.monotonic
        self._poll = timing.poller()
        self._by_fileno: dict[int, ReachedShard] = {}
        self._quick_s, self._spin_s = (QUICK_S, SPIN_S) if timing.spins else (0.0, 0.0)
        self._quick = False
        """Whether the last answers came quickly, so that the next ones may be worth a spin."""
        self._down: set[int] = set()
        """Shards whose link is broken and not yet made anew."""
        self._gone: ParamServeError | None = None
        """Why the last shard that was given up is gone."""
        self._mid_call: set[int] = set()
        """Shards whose link a call uses, or is about to use, under the lock. Found by another call,
        it was interrupted there."""
        self._torn = ""
        """What of the sessions is being changed, under the lock. Found by another call, it was
        interrupted there."""
        self.unfinished = ""
        """The same for what the owner knows besides, under the owner's lock: set and cleared
        there, looked at by `Exchange.check_whole`."""

    # --- slots -------------------------------------------------------------------------------

    def take(self, nbytes: int) -> Slot:
        """A slot of `nbytes`, its contents undefined.

        Raises:
            Overloaded: there is no memory for it, or a server refuses to map more.
        """
        with self._lock:
            while self._returned:
                self._pool.give_back(self._returned.popleft())
            self._takes += 1
            if self._takes >= TRIM_TAKES:
                self._trim()
            slot = self._pool.take(nbytes)
            if slot is None:
                self._grow(nbytes)
                slot = self._pool.take(nbytes)
                assert slot is not None
            return slot

    def _grow(self, nbytes: int) -> None:
        """Add an arena with room for a slot; it takes the place of those that nothing lies in."""
        for number in self._unused():
            self._drop_arena(number)
        have = sum(arena.nbytes for arena in self._arenas.values())
        needed = nbytes + 2 * RESERVED_BYTES
        most = max(self._most, self._pool.peak, self._pool.in_use + nbytes)
        growth = min(have, max(ARENA_GROWTH_BYTES, have // 4), most + most // 2 - have)
        try:
            self._add_arena(max(needed, growth, FIRST_ARENA_BYTES))
        except Overloaded:
            if growth <= needed:
                raise
            self._add_arena(needed)

    def _trim(self) -> None:
        """Give back arenas if there is more than twice what was in use at once since the last
        time."""
        if self._takes == TRIM_TAKES:
            self._most, self._pool.peak = self._pool.peak, self._pool.in_use
        most = max(self._most, self._pool.peak)
        have = sum(arena.nbytes for arena in self._arenas.values())
        for number in self._unused() if have > 2 * most + FIRST_ARENA_BYTES else ():
            nbytes = self._arenas[number].nbytes
            if have - nbytes >= most or nbytes > 2 * most + FIRST_ARENA_BYTES:
                have -= nbytes
                self._drop_arena(number)
        if have <= 2 * most + FIRST_ARENA_BYTES or self._takes >= TRIM_TAKES + TRIM_TRIES:
            self._takes = 0

    def _unused(self) -> list[int]:
        """Arenas that nothing lies in, the largest first; but the smallest of all stays, since a
        server that is connected to without an arena shares no memory."""
        found = sorted(self._pool.unused(), key=lambda number: -self._arenas[number].nbytes)
        return found if len(found) < len(self._arenas) else found[:-1]

    def _drop_arena(self, number: int) -> None:
        """Give an arena's memory back. Servers map its place until another one has the number."""
        self._pool.drop_arena(number)
        self._arenas.pop(number).give_up()

    def _slot(self, arena: int, offset: int, size: int) -> Slot:
        return Slot(arena, offset, self._arenas[arena].memory[offset : offset + size])

    def give_back(self, slots: Iterable[Slot]) -> None:
        """The caller, their owner, lets go of these slots."""
        with self._lock:
            if not self._closed:
                for slot in slots:
                    self._pool.give_back(slot)

    def give_back_later(self, slot: Slot) -> None:
        """As `give_back`, with the next `take`: for where an array ends, which may be anywhere in
        any thread."""
        self._returned.append(slot)

    @property
    def shared(self) -> bool:
        """Whether all servers map this client's memory."""
        return all(shard.link is not None and shard.link.shared for shard in self.shards)

    def _add_arena(self, nbytes: int) -> None:
        number = next(n for n in itertools.count(1) if n not in self._arenas)
        arena = self._allocate(nbytes, number)
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
        deadline = self.now() + self._deadlines.request_s
        while True:
            try:
                link.attach(arena, timeout_s=self._deadlines.reconnect_s)
            except ConnectTimeout as error:
                if self._hung_up(shard):
                    self._give_up(shard, error)
                elif self.now() < deadline:
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
        poll = self._timing.poller()  # One of its own: another thread may wait on the common one.
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
        shard.fileno = link.fileno()
        self._by_fileno[shard.fileno] = shard
        self._poll.register(shard.fileno, select.POLLIN)
        self._down.discard(shard.number)
        if is_unix(link.address) and not self._credentials.token:
            # No other address can be dialled: without it the server is gone, and not unknown.
            shard.addresses = [each for each in shard.addresses if is_unix(each)]
        return link

    def _disconnect(self, shard: ReachedShard) -> None:
        """Let go of a link; at once when it breaks: its descriptor may be another link's next."""
        if shard.gone is None:
            self._down.add(shard.number)
        link = shard.link
        if link is not None:
            if shard.fileno >= 0:
                with contextlib.suppress(KeyError):  # An earlier try was interrupted.
                    self._poll.unregister(shard.fileno)
                self._by_fileno.pop(shard.fileno, None)
                shard.fileno = -1
            link.close()
            shard.link = None

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
        self._torn = "an answer"
        for each in self.shards:
            each.session.abandon(error)
        self._torn = ""

    # --- bytes -------------------------------------------------------------------------------

    def _frame(self, shard: ReachedShard, messages: Sequence[ShardRequest]) -> Framed:
        """Requests as one frame for a shard; with the bytes that they speak of, if it does not map
        this memory.

        Raises:
            ProtocolError: the header is over `header_bytes_max`.
        """
        parts: list[Bytes] = []
        link = shard.link
        if link is not None and not link.shared:
            payload = Outgoing()
            messages = [self.payloads.inline(shard.number, each, payload) for each in messages]
            parts = payload.parts
        header = encode(messages[0] if len(messages) == 1 else Batch(tuple(messages)))
        if len(header) > self._limits.header_bytes_max:
            raise header_not_sent(len(header), self._limits.header_bytes_max)
        return header, parts

    def _transmit(self, shard: ReachedShard, frame: Framed) -> None:
        link = shard.link
        if link is None:
            raise ConnectionError("not connected")
        if not link.shared:
            link.io_timeout_s = self.io_timeout_s
        link.send(*frame)

    # --- polling ---------------------------------------------------------------------------

    def _ready(self, timeout_s: float) -> list[ReachedShard]:
        """Shards with something to read; those whose link is down among them."""
        if self._down:
            return [self.shards[number] for number in sorted(self._down)]
        found = self._poll.poll(0) or self._spin() if self._quick else []
        if not found:
            began = self.now()
            found = self._poll.poll(min(timeout_s, POLL_SLICE_S) * 1000)
            self._quick = self.now() - began < self._quick_s
        return [self._by_fileno[fileno] for fileno, _ in found if fileno in self._by_fileno]

    def _spin(self) -> list[tuple[int, int]]:
        """Look for answers without going to sleep: waking up takes longer than a small step."""
        until = self.now() + self._spin_s
        while self.now() < until:
            if found := self._poll.poll(0):
                return found
        self._quick = False
        return []
