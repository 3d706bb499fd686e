"""One client's links to all shards, and the memory that it shares with them.

It makes and breaks off links, and writes single messages to them; when, and what is sent again, is
decided in `exchange`. Arenas are mapped by all servers on this host; a slot is bytes of one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from os import sched_yield
from typing import Any, Protocol
from weakref import ref

import numpy as np
import numpy.typing as npt

from paramserve.client.carried import runs_of
from paramserve.client.decoding import Decoder
from paramserve.config import Credentials, Deadlines, Limits
from paramserve.core.client_session import ClientSession, SlotPool
from paramserve.core.partition import Block
from paramserve.core.polling import SHARED_S, AdaptivePolling
from paramserve.errors import (
    ClientClosed,
    ConnectTimeout,
    Overloaded,
    ParamServeError,
    ProtocolError,
    ServerGone,
    rebuild,
)
from paramserve.messages import (
    Arenas,
    Batch,
    Gradient,
    Hello,
    Joined,
    ReadTarget,
    Run,
    ShardRequest,
    encode,
)
from paramserve.transport import forks
from paramserve.transport.arena import RESERVED_BYTES, Arena, check_arenas
from paramserve.transport.dial import is_unix
from paramserve.transport.framing import header_not_sent
from paramserve.transport.link import EndedByPeer, Link
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
"""Takes after which arenas are given back that were not needed for them."""
TRIM_TRIES = 16
"""Takes more, if just then a small slot was taken in a large arena."""
WINDOW = 4
"""Calls of this client that one shard may have unanswered."""
REQUESTS = 256
"""Requests of these calls together, if the client's limits allow as many: a step of a model with
tables has one for each."""

POLL_SLICE_S = 0.25
"""A waiting thread looks this often whether the client was closed by another."""
KINDS_MAX = 1024
"""Kinds of waits that are told apart; past it they begin anew."""

Allocate = Callable[[int, int], Arena]
"""Makes an arena of a size, with a number."""
Framed = tuple[bytes, Sequence[Run]]
"""A frame to be sent: its header, and the runs of memory that go along."""


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


Pushed = tuple[Block, tuple[int, ...] | None, tuple[float, ...] | None, tuple[Gradient, ...]]
"""What was said last of a gradient in a slot: its block, active pieces and hyper-parameters, and
the header parts that say it, for each shard."""
Pulled = tuple[Block, tuple[ReadTarget, ...]]
"""The block whose values were read into a slot last, and the header parts that said so."""


class SlotMemory(np.ndarray[Any, Any]):
    """The bytes of a slot; see `row_slots.Lent`."""


class Slot:
    """Bytes of an arena, taken by this client until given back.

    Attributes:
        bytes: uint8 [size, a multiple of 8].
        words: the same as int64.
        memory: the same as a `SlotMemory`.
    """

    __slots__ = (
        *("__weakref__", "_array", "_tensors", "arena", "bytes", "memory"),
        *("offset", "own", "pulled", "pushed", "words"),
    )
    own: ref[Slot]

    def __init__(self, arena: int, offset: int, memory: Bytes) -> None:
        self.arena = arena
        self.offset = offset
        self.bytes = memory
        self.words: npt.NDArray[np.int64] = memory.view(np.int64)
        self.memory = memory.view(SlotMemory)
        self.pushed: Pushed | None = None
        self.pulled: Pulled | None = None
        self._array: Array | None = None
        self._tensors: tuple[Block, list[Array]] | None = None

    def tensors(self, block: Block) -> list[Array]:
        """The slot as the block's tensors, each [*shape]; kept for the next call, and not to be
        given out, since a shape can be changed."""
        cached = self._tensors
        if cached is None or cached[0] is not block:
            flat, starts = self.array(block).view(block.shown), block.starts
            tensors = [
                flat[starts[index] : starts[index + 1]].reshape(piece.shape)
                for index, piece in enumerate(block.pieces)
            ]
            cached = self._tensors = block, tensors
        return cached[1]

    def kept_values(self, block: Block) -> Array:
        """The slot as [block.size] of what the servers keep."""
        return np.frombuffer(self.bytes, block.kept, block.size)

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
        self.mirrors = 0
        """The change of the client's arenas that its server was told last, over this link."""
        self.fileno = -1
        """The link's, as it was registered: a link that broke has none any more."""
        self.failure: ParamServeError | None = None
        self.farewell: ParamServeError | None = None
        """Why its server has ended the link, where a send has found that."""
        self.mute_since: float | None = None
        """When it began to listen without answering those that connect again."""


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
        """Blocks by id: what the parts of a request are measured by."""
        self.requests = max(window, min(REQUESTS, limits.outstanding_max))
        """Most requests that one shard may have unanswered."""
        self.shards = [
            ReachedShard(k, each, session(k, window, self.requests))
            for k, each in enumerate(joined.servers)
        ]
        self.count = len(self.shards)
        self.shared = False
        """Whether all servers map this client's memory."""
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
        self.returned: deque[Slot] = deque()
        """Slots to be given back with the next `take`: added to where an array ends, which may be
        anywhere in any thread."""
        self._arenas: dict[int, Arena] = {}
        self.memory: dict[int, Bytes] = {}
        """Bytes of each arena, by number."""
        self._changes = 0
        """How often they have changed."""
        self.decoder = Decoder(self.blocks, self.memory)
        self._place = 0
        """Number of the last call among all that this client has sent."""
        self._takes = 0
        """Takes since arenas were given back."""
        self._most = 0
        """Bytes that were in use at once in the last so many takes."""
        self._lock = threading.RLock()
        self._closed = False
        self._reason: ParamServeError | None = None
        """Why it was closed, if the program did not close it."""
        self._pid = os.getpid()
        self._timing = timing
        self.now = timing.monotonic
        self._poll = timing.poller()
        self._by_fileno: dict[int, ReachedShard] = {}
        self._wake_s = timing.wake_s()
        self._pollings: dict[Hashable, AdaptivePolling] = {}
        """Polling by kind of wait."""
        self._down: set[int] = set()
        """Shards whose link is broken and not yet made anew."""
        self._failure: ParamServeError | None = None
        """Why the first shard that was given up is gone."""
        self._numbers = frozenset(shard.number for shard in self.shards)
        self._shards_being_sent: set[int] = set()
        """Shards whose link a call uses, or is to; found by another call, it was interrupted."""
        self._mutating = ""
        """What of the sessions is being changed; found by another call, that was interrupted."""
        self.interrupted_in = ""
        """Name of what else of the owner is being changed: set and cleared under the owner's lock,
        looked at by `Exchange.check_whole`."""

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process that this one was forked from."""
        return self._closed

    def _ended(self) -> ParamServeError:
        """The error of a call after that."""
        if os.getpid() != self._pid:
            return forks.forked(f"shard {self.shards[0].addresses[0]}", self._pid)
        if self._reason is not None:
            return copy_error(self._reason)
        return ClientClosed("the client was closed", fix="make a new one with cluster.client()")

    # --- slots -------------------------------------------------------------------------------

    def take(self, nbytes: int) -> Slot:
        """A slot of `nbytes`, its contents undefined.

        Raises:
            Overloaded: there is no memory for it, or a server refuses to map more.
            ClientClosed: the client was closed.
        """
        return self.take_each([nbytes])[0]

    def take_each(self, sizes: Sequence[int]) -> list[Slot]:
        """A slot of each of these sizes.

        Raises:
            As `take`. None stays taken.
        """
        slots: list[Slot] = []
        with self._lock:
            if self._closed:  # by another thread: what is lent is of no pool any more
                raise self._ended()
            if self.returned:
                self._take_returned()
            if self._pool.lost_slots:
                places = [each.session.oldest for each in self.shards]
                oldest = min((each for each in places if each is not None), default=self._place + 1)
                self._pool.reclaim(oldest=oldest, last=self._place)
            self._takes += 1
            if self._takes >= TRIM_TAKES:
                self._trim()
            try:
                for nbytes in sizes:
                    slot = self._pool.take(nbytes)
                    slots += [slot if slot is not None else self._grow(nbytes)]
            except Overloaded:  # at once: what refers to the error refers to these
                self.let_go(slots)
                raise
        return slots

    def _take_returned(self) -> None:
        while self.returned:
            self._pool.give_back([self.returned.popleft()])

    def _grow(self, nbytes: int) -> Slot:
        """A slot in a new arena, which takes the place of those that nothing lies in."""
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
        slot = self._pool.take(nbytes)
        assert slot is not None
        return slot

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
        unused = sorted(self._pool.unused(), key=lambda number: -self._arenas[number].nbytes)
        return unused if len(unused) < len(self._arenas) else unused[:-1]

    def _drop_arena(self, number: int) -> None:
        """Give an arena's memory back. Servers map its place until another one has the number."""
        self._pool.drop_arena(number)
        self._changes += 1
        del self.memory[number]
        self._arenas.pop(number).give_up()

    def _slot(self, arena: int, offset: int, size: int) -> Slot:
        return Slot(arena, offset, self._arenas[arena].memory[offset : offset + size])

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Release these slots for their owner, the caller."""
        with self._lock:
            self.let_go(slots)

    def let_go(self, slots: Sequence[Slot]) -> None:
        """Release slots from the thread that reads answers and holds the lock; see `give_back`."""
        if not self._closed:
            self._pool.give_back(slots)

    def _add_arena(self, nbytes: int) -> None:
        """Make an arena and pass it to the servers of this host; where one does not take it, there
        is none."""
        number = next(n for n in itertools.count(1) if n not in self._arenas)
        if not self.shared:
            check_arenas(
                {**{n: a.nbytes for n, a in self._arenas.items()}, number: nbytes}, self._limits
            )
        arena = self._allocate(nbytes, number)
        try:
            for shard in self.shards:
                if shard.link is not None and shard.link.shared:
                    self._attach(shard, shard.link, arena)
        except BaseException:
            arena.close()
            raise
        self._changes += 1
        self.memory[arena.number] = arena.memory
        self._arenas[arena.number] = arena
        self._pool.add_arena(arena.number, RESERVED_BYTES, arena.nbytes)

    def _attach(self, shard: ReachedShard, link: Link, arena: Arena) -> None:
        """Pass an arena to a server, again while it lives and is busy. A link that ends meanwhile
        is closed: the next one passes all arenas."""
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
                # The server has ended the link already: the next one passes all arenas.
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
        shard.mirrors, link.arenas = 0, self.memory
        self._look_shared()
        shard.fileno = link.fileno()
        self._by_fileno[shard.fileno] = shard
        self._poll.register(shard.fileno, select.POLLIN)
        self._down.discard(shard.number)
        if is_unix(link.address) and not self._credentials.token:
            # No other address can be dialled: without it the server is gone, and not unknown.
            shard.addresses = [each for each in shard.addresses if is_unix(each)]
        return link

    def _disconnect(self, shard: ReachedShard) -> None:
        """Release a link; at once when it breaks: its descriptor may be another link's next."""
        if shard.failure is None:
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
            self.shared = False

    def _look_shared(self) -> None:
        links = [shard.link for shard in self.shards]
        self.shared = all(link is not None and link.shared for link in links)

    def _give_up(self, shard: ReachedShard, error: Exception) -> None:
        """Fail all that is unanswered on any shard: this one is lost, and with it the cluster,
        since the others may wait for its part in a synchronous clock."""
        self._disconnect(shard)
        unknown = isinstance(error, OSError) or type(error).__name__ == "ConnectTimeout"
        if unknown or not isinstance(error, ParamServeError):
            error = ServerGone(
                f"server of shard {shard.number} at {_place(shard.addresses)} does not answer",
                applied="unknown",
                fix="look why its process ended; its values are lost, start again",
            )
        error = rebuild(type(error).__name__, error.failed, "unknown", error.fix)
        shard.failure = error
        self._failure = self._failure if self._failure is not None else error
        self._down.discard(shard.number)
        self._mutating = "an answer"
        for each in self.shards:
            each.session.abandon(error)
        self._mutating = ""

    # --- bytes -------------------------------------------------------------------------------

    def _frame(self, shard: ReachedShard, messages: Sequence[ShardRequest]) -> Framed:
        """Requests as one frame for a shard; with the bytes that they speak of, if it does not map
        this memory.

        Raises:
            ProtocolError: the header is over `header_bytes_max`.
        """
        runs: list[Run] = []
        link = shard.link
        if link is not None and not link.shared:
            for each in messages:
                runs += runs_of(shard.number, each, self.blocks, self.memory)
        first, *more = messages
        header = encode(Batch(tuple(messages)) if more else first)
        if len(header) > self._limits.header_bytes_max:
            raise header_not_sent(len(header), self._limits.header_bytes_max)
        return header, runs

    def _transmit(self, shard: ReachedShard, frame: Framed) -> None:
        """Send a frame, and before it the arenas' sizes if the server's mirrors are older. Raises
        `ConnectionError`."""
        link = shard.link
        if link is None:
            raise ConnectionError("not connected")
        try:
            if not link.shared:
                link.io_timeout_s = self.io_timeout_s
                if shard.mirrors != self._changes:
                    sizes = [(number, arena.nbytes) for number, arena in self._arenas.items()]
                    link.send(encode(Arenas(tuple(sizes))))
                    shard.mirrors = self._changes
            link.send(*frame)
        except EndedByPeer as error:
            shard.farewell = error.reason
            raise

    # --- polling ---------------------------------------------------------------------------

    def _ready(self, timeout_s: float, kind: Hashable = None) -> list[ReachedShard]:
        """Shards with something to read; those whose link is down among them.

        Args:
            kind: of the wait: waits of one kind are expected to take equally long.
        """
        if self._down:
            return [self.shards[number] for number in sorted(self._down)]
        try:
            polling = self._pollings[kind]
        except KeyError:
            if len(self._pollings) >= KINDS_MAX:
                self._pollings.clear()
            polling = self._pollings[kind] = AdaptivePolling(
                self._wake_s, self._limits.poll_s_max, tcp=not self.shared
            )
        began = now = self.now()
        until = began + (polling.budget_s if polling.budget_s < timeout_s else timeout_s)
        events: list[tuple[int, int]] = []
        while not events and now < until:
            events = self._poll.poll(0)
            if not events:
                sched_yield()  # a server may wait for this very core
            now = self.now()
        polled, late = bool(events), now > until + SHARED_S
        if not polled:
            slice_s = timeout_s if timeout_s < POLL_SLICE_S else POLL_SLICE_S
            events = self._poll.poll(slice_s * 1000)
        polling.waited(self.now() - began, polled=polled, late=late)
        return [self._by_fileno[fileno] for fileno, _ in events if fileno in self._by_fileno]


def _place(addresses: Sequence[str]) -> str:
    """What a user knows a server by: its `host:port`, if it has one."""
    places = [each.removeprefix("tcp:") for each in addresses if not is_unix(each)]
    return places[0] if places else addresses[0]


def copy_error(error: ParamServeError) -> ParamServeError:
    """A fresh copy of an error that is raised more than once: each has its own traceback."""
    return rebuild(type(error).__name__, error.failed, error.applied, error.fix)
