"""A seeded network: streams that delay, lose, repeat and break.

A stream keeps the order of what is sent on it, as a socket does. A frame that it loses is followed
by its end a little later, so that the other side may still see what was sent behind the gap.

A way from one place to another can be cut for a while: what streams carry waits there until it is
restored, as bytes do that a socket sends again.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from random import Random
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from paramserve.messages import Run
from paramserve.transport.framing import located
from paramserve.virtual import VirtualClock

Bytes = npt.NDArray[np.uint8]

Way = tuple[str, str]
"""Way from a place to a place."""

BREAK_S = 0.005
"""A stream that lost a frame breaks within this."""


class Links(Protocol):
    """What frames take time on besides their delay."""

    def carry(
        self, way: Way, header_bytes: int, payload_bytes: int, done: Callable[[], None]
    ) -> None:
        """Send a frame; `done` is called when its last byte is through."""
        ...


@dataclass(frozen=True)
class Faults:
    """How often what goes wrong. Rates are probabilities: the first ones for each frame that is
    sent, those from `kill` on for each request that a worker sends.

    Attributes:
        delay_s: a frame is on its way for 0 to twice this.
        slow: rate of frames that take up to `slow_s` instead.
        cut: the stream breaks; what is on its way in both directions is lost.
        lose: the frame is lost, and the stream breaks within `BREAK_S`.
        duplicate: the frame arrives twice.
        peer_lose, peer_duplicate: the same for streams between shards.
        kill: the worker that sends a request dies right after it.
        interrupt: its program is interrupted there, as by Ctrl-C, and goes on with the next call.
        freeze: it stands still for up to `freeze_s`, and may count as dead when it goes on.
        partition: some way is cut for up to `partition_s`, in one direction or in both: between a
            worker and a shard, a worker and the coordinator, or two shards.
        sluggish: a worker, or its link to one shard, takes up to `factor` times as long for up to
            `sluggish_s`.
        change: a client gives the group another policy: one of `Scenario.others`.
        join: the run is to have one worker more.
        leave: it is to have one worker less; or a worker ends in order.
        stall: a server, or the coordinator, stands still for up to `stall_s`; the coordinator
            sometimes for much longer.
        reset: a server's connection to the coordinator breaks.
    """

    delay_s: float = 0.0005
    slow: float = 0.0
    slow_s: float = 0.02
    cut: float = 0.0
    lose: float = 0.0
    duplicate: float = 0.0
    peer_lose: float = 0.0
    peer_duplicate: float = 0.0
    kill: float = 0.0
    interrupt: float = 0.0
    freeze: float = 0.0
    freeze_s: float = 0.5
    partition: float = 0.0
    partition_s: float = 0.2
    sluggish: float = 0.0
    sluggish_s: float = 0.2
    factor: float = 20.0
    change: float = 0.0
    join: float = 0.0
    leave: float = 0.0
    stall: float = 0.0
    stall_s: float = 0.1
    reset: float = 0.0

    def healed(self) -> Faults:
        """Delays stay, nothing goes wrong any more."""
        return Faults(delay_s=self.delay_s)

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        plain = Faults.__dataclass_fields__
        given = [
            f"{name}={getattr(self, name)!r}"
            for name in plain
            if getattr(self, name) != plain[name].default
        ]
        return f"Faults({', '.join(given)})"

    @classmethod
    def drawn(cls, random: Random) -> Faults:
        """Rates for one run: some faults often, some never."""
        often = (0.0, 0.005, 0.02, 0.08)
        seldom = (0.0, 0.0, 0.004, 0.015)
        return cls(
            slow=random.choice((0.0, 0.02, 0.2)),
            cut=random.choice((0.0, 0.003, 0.02)),
            lose=random.choice((0.0, 0.003, 0.02)),
            duplicate=random.choice(often),
            peer_lose=random.choice((0.0, 0.05, 0.3)),
            peer_duplicate=random.choice((0.0, 0.05, 0.3)),
            kill=random.choice(seldom),
            freeze=random.choice(seldom),
            partition=random.choice((0.0, 0.0, 0.01, 0.04)),
            sluggish=random.choice((0.0, 0.0, 0.01, 0.04)),
            change=random.choice((0.0, 0.0, 0.01, 0.04)),
            join=random.choice(seldom),
            leave=random.choice(seldom),
            interrupt=random.choice(seldom),
            stall=random.choice(seldom),
            reset=random.choice(seldom),
        )


class Frame(NamedTuple):
    """A message as it travels: its header, the bytes behind it, and where these belong."""

    header: bytes
    payload: Bytes | None = None
    runs: tuple[Run, ...] = ()

    @classmethod
    def carrying(cls, header: bytes, runs: Sequence[Run], arenas: Mapping[int, Bytes]) -> Frame:
        """A message with a copy of these runs of arenas."""
        runs = tuple(run for run in runs if run[2])
        if not runs:
            return cls(header)
        views = located(runs, arenas)
        return cls(header, np.concatenate([np.frombuffer(v, np.uint8) for v in views]), runs)

    def place(self, arenas: Mapping[int, Bytes]) -> None:
        """Put the bytes where they belong.

        Raises:
            ProtocolError: that is in no arena.
        """
        start = 0
        for view in located(self.runs, arenas):
            assert self.payload is not None
            view[:] = self.payload[start : start + len(view)].data
            start += len(view)


class End(Protocol):
    """One side of a stream."""

    @property
    def place(self) -> str:
        """Place for ways that are cut or slow: "worker 0", "shard 1", "coordinator"."""
        ...

    def received(self, stream: Stream, frame: Frame) -> None:
        """A frame has come."""
        ...

    def lost(self, stream: Stream) -> None:
        """The stream has ended, closed by the other side or broken by a fault."""
        ...


Rates = Callable[[Faults], tuple[float, float, float]]
"""Rates of a stream's frames that break it, are lost or arrive twice."""


client_rates: Rates = attrgetter("cut", "lose", "duplicate")
"""Rates of a stream between a client and a shard."""


def peer_rates(faults: Faults) -> tuple[float, float, float]:
    """Rates of a stream between two shards."""
    return 0.0, faults.peer_lose, faults.peer_duplicate


NEAR, FAR = 0, 1
"""Sides of a stream: who opened it, and who was called."""


class Network:
    """Everything that is on its way, and a hash over everything that has arrived."""

    def __init__(self, clock: VirtualClock, random: Random, faults: Faults) -> None:
        self.clock = clock
        self.random = random
        self.faults = faults
        self.log: Callable[[str], None] | None = None
        """Is told of every arrival."""
        self.links: Links | None = None
        """What frames take time on besides their delay; None: links carry any number of bytes at
        once."""
        self._cut: dict[Way, float] = {}
        """End of each way's cut."""
        self._held: dict[Way, list[Callable[[], None]]] = {}
        """What goes on when the way is restored."""
        self._slow: dict[Way, tuple[float, float]] = {}
        """Factor, and until when."""
        self._hash = hashlib.blake2b(digest_size=16)
        self._streams = 0

    def open(self, near: End, far: End, name: str, rates: Rates | None = client_rates) -> Stream:
        """A new stream; both may send at once. Without `rates` no fault hits its frames."""
        self._streams += 1
        return Stream(self, self._streams, near, far, name, rates)

    # --- ways ---------------------------------------------------------------------------

    def cut(self, source: str, target: str, seconds: float, *, both: bool = True) -> None:
        """Nothing gets from one place to the other for a time, and back if `both`."""
        self.note(f"{source} {'<->' if both else '->'} {target} is cut for {seconds:.3f} s")
        for way in ((source, target), (target, source))[: 1 + both]:
            until = self.clock.now + seconds
            self._cut[way] = max(until, self._cut.get(way, 0.0))
            self.clock.at(until, self._mend, way)

    def slow(self, source: str, target: str, factor: float, seconds: float) -> None:
        """What goes from one place to the other or back takes `factor` times as long for a time."""
        self.note(f"{source} <-> {target} is slow by {factor:.1f} for {seconds:.3f} s")
        for way in ((source, target), (target, source)):
            self._slow[way] = (factor, self.clock.now + seconds)

    def heal(self) -> None:
        """Nothing goes wrong from now on, and what waited at a cut goes on."""
        self.faults = self.faults.healed()
        self._slow = {}
        for way in list(self._cut):
            self._cut[way] = self.clock.now
            self._mend(way)

    def is_cut(self, way: Way) -> bool:
        """Whether nothing gets along this way now."""
        return way in self._cut

    def hold(self, way: Way, action: Callable[[], None]) -> None:
        """Do something when a way that is cut is restored."""
        self._held.setdefault(way, []).append(action)

    def _mend(self, way: Way) -> None:
        if self._cut.get(way, self.clock.now + 1.0) > self.clock.now:
            return
        del self._cut[way]
        for action in self._held.pop(way, ()):
            action()

    def _factor(self, way: Way) -> float:
        factor, until = self._slow.get(way, (1.0, 0.0))
        return factor if self.clock.now < until else 1.0

    # --- messages -----------------------------------------------------------------------

    def delay_s(self, way: Way | None = None) -> float:
        """How long a frame that is sent now will be on its way."""
        faults, draw = self.faults, self.random.random
        factor = self._factor(way) if self._slow and way is not None else 1.0
        if faults.slow and draw() < faults.slow:
            return draw() * faults.slow_s * factor
        return draw() * 2 * faults.delay_s * factor

    def arrived(self, number: int, name: str, header: bytes) -> None:
        """Count an arrival into the trace."""
        self._hash.update(struct.pack("<dI", self.clock.now, number))
        self._hash.update(header)
        if self.log is not None:
            self.log(f"{self.clock.now:9.6f} {name} {msgspec.msgpack.decode(header)}")

    def note(self, text: str) -> None:
        """Count something that happened to a process into the trace."""
        self.arrived(0, "#", msgspec.msgpack.encode(text))

    def trace(self, final: bytes = b"") -> str:
        """Hash of all arrivals, their times and order, and of `final`."""
        copy = self._hash.copy()
        copy.update(final)
        return copy.hexdigest()


class Stream:
    """A connection between two ends. Each direction keeps its order."""

    def __init__(
        self, network: Network, number: int, near: End, far: End, name: str, rates: Rates | None
    ) -> None:
        self.number = number
        self.name = name
        self.ended = False
        self.broken = False
        """Whether the network has ended it."""
        self.unread = [0, 0]
        """Frames of each side that the other one has not read."""
        self.holds: int | None = None
        """Most of them, or any number: a side waits before it sends more."""
        self.on_room: list[Callable[[], None]] = [_nothing, _nothing]
        """Callbacks by side for when the other one has read a frame of it."""
        self._network = network
        self._ends = (near, far)
        self._ways = ((near.place, far.place), (far.place, near.place))
        self._rates = rates
        self._free_at = [0.0, 0.0]
        self._on_link: tuple[deque[Frame | None], deque[Frame | None]] = (deque(), deque())
        """Frames by side on its link, and what waits behind that; None: the side's end."""
        self._closed = [False, False]

    def send(self, side: int, frame: Frame, *, numbered: bool = True) -> None:
        """Send to the other side; nothing happens on a stream that has ended.

        Args:
            numbered: the other side notices when it is lost; else its loss ends the stream at once,
                so that nothing arrives behind the gap.
        """
        if self.ended or self._closed[side]:
            return
        if self._rates is None:
            self.put(side, frame)
            return
        network = self._network
        draw = network.random.random
        cut, lose, duplicate = self._rates(network.faults)
        fate = draw()
        if fate < cut or (fate < cut + lose and not numbered):
            self.cut()
        elif fate < cut + lose:
            network.clock.after(draw() * BREAK_S, self.cut)
        else:
            self.put(side, frame)
            if draw() < duplicate:
                self.put(side, frame)

    def put(self, side: int, frame: Frame, *, held: bool = False) -> None:
        """Send a frame that no fault hits. `held`: it waited at a cut."""
        self.unread[side] += not held
        network, way = self._network, self._ways[side]
        if network.is_cut(way):
            network.hold(way, partial(self.put, side, frame, held=True))
            return
        if network.links is not None:
            self._queue(side, frame)
        else:
            self._travel(side, frame)

    def _queue(self, side: int, frame: Frame | None) -> None:
        """Send a frame, or the side's end, over its link, behind those that are on it."""
        self._on_link[side].append(frame)
        if len(self._on_link[side]) == 1:
            self._carry(side, frame)

    def _carry(self, side: int, frame: Frame | None) -> None:
        links = self._network.links
        assert links is not None
        header = 0 if frame is None else len(frame.header)
        payload = 0 if frame is None or frame.payload is None else frame.payload.nbytes
        links.carry(self._ways[side], header, payload, partial(self._through, side))

    def _through(self, side: int) -> None:
        """The link has carried a frame: the next one may go."""
        frame = self._on_link[side].popleft()
        if self.ended:
            self._on_link[side].clear()
            return
        self._travel(side, frame)
        if self._on_link[side]:
            self._carry(side, self._on_link[side][0])

    def _travel(self, side: int, frame: Frame | None) -> None:
        """Let a frame, or the side's end, arrive after its delay."""
        network = self._network
        at = max(self._free_at[side], network.clock.now + network.delay_s(self._ways[side]))
        self._free_at[side] = at
        if frame is None:
            network.clock.at(at, self._end, side)
        else:
            network.clock.at(at, self._arrive, side, frame)

    def taken(self, side: int) -> None:
        """The other side has read a frame of this one."""
        self.unread[side] -= 1
        self.on_room[side]()

    def full(self, side: int) -> bool:
        """Whether a side has to wait before it sends more."""
        return self.holds is not None and self.unread[side] >= self.holds

    def _arrive(self, side: int, frame: Frame) -> None:
        if self.ended or self._closed[1 - side]:
            return
        arrow = "->" if side == NEAR else "<-"
        self._network.arrived(2 * self.number + side, f"{self.name} {arrow}", frame.header)
        self._ends[1 - side].received(self, frame)

    def cut(self) -> None:
        """Break it: what is on its way is lost, and each side finds out in its own time."""
        if self.ended:
            return
        self.ended = self.broken = True
        for side in (NEAR, FAR):
            if not self._closed[side]:
                self._network.clock.after(self._network.delay_s(), self._tell_lost, side)

    def close(self, side: int) -> None:
        """One side ends it: what that side has sent still arrives, and then the end."""
        if self.ended or self._closed[side]:
            return
        self._closed[side] = True
        self._finish(side)

    def _finish(self, side: int) -> None:
        network, way = self._network, self._ways[side]
        if network.is_cut(way):
            network.hold(way, partial(self._finish, side))
        elif network.links is not None:
            self._queue(side, None)
        else:
            self._travel(side, None)

    def _end(self, side: int) -> None:
        if not self.ended:
            self.ended = True
            self._tell_lost(1 - side)

    def _tell_lost(self, side: int) -> None:
        if not self._closed[side]:
            self._ends[side].lost(self)


def _nothing() -> None:
    pass
