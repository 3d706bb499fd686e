"""A seeded network: streams that delay, lose, repeat and break, and messages between shards.

A stream keeps the order of what is sent on it, as a socket does. A frame that it loses is followed
by its end a little later, so that the other side may still see what was sent behind the gap. What
shards tell each other may come late, twice, in any order or never.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from paramserve.testing.clock import VirtualClock

Bytes = npt.NDArray[np.uint8]

BREAK_S = 0.005
"""A stream that lost a frame breaks within this."""


@dataclass(frozen=True)
class Faults:
    """How often what goes wrong. Rates are probabilities for each frame that is sent.

    Attributes:
        delay_s: a frame is on its way for 0 to twice this.
        slow: rate of frames that take up to `slow_s` instead.
        cut: the stream breaks; what is on its way in both directions is lost.
        lose: the frame is lost, and the stream breaks within `BREAK_S`.
        duplicate: the frame arrives twice.
        peer_lose, peer_duplicate: the same for messages between shards.
        kill: the worker that sends a request dies right after it.
        freeze: it stands still for up to `freeze_s`, and may count as dead when it goes on.
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
    freeze: float = 0.0
    freeze_s: float = 0.5

    def healed(self) -> Faults:
        """Delays stay, nothing is lost any more."""
        return Faults(delay_s=self.delay_s)

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
        )


class Frame(NamedTuple):
    """A message as it travels: its header, and the bytes behind it."""

    header: bytes
    payload: Bytes | None = None


class End(Protocol):
    """One side of a stream."""

    def received(self, stream: Stream, frame: Frame) -> None:
        """A frame has come."""
        ...

    def lost(self, stream: Stream) -> None:
        """The stream has ended, by the other side's wish or by a fault."""
        ...


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
        self._hash = hashlib.blake2b(digest_size=16)
        self._streams = 0

    def open(self, near: End, far: End, name: str, *, faulty: bool = True) -> Stream:
        """A new stream; both may send at once."""
        self._streams += 1
        return Stream(self, self._streams, near, far, name, faulty)

    def tell(self, name: str, header: bytes, deliver: Callable[[bytes], None]) -> None:
        """Send a message to another shard: no order, no promise."""
        faults, draw = self.faults, self.random.random
        times = 0 if draw() < faults.peer_lose else 1 + (draw() < faults.peer_duplicate)
        for _ in range(times):
            self.clock.after(self.delay_s(), self._told, name, header, deliver)

    def _told(self, name: str, header: bytes, deliver: Callable[[bytes], None]) -> None:
        self.arrived(0, name, header)
        deliver(header)

    def delay_s(self) -> float:
        """How long a frame that is sent now will be on its way."""
        faults, draw = self.faults, self.random.random
        if faults.slow and draw() < faults.slow:
            return draw() * faults.slow_s
        return draw() * 2 * faults.delay_s

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
        self, network: Network, number: int, near: End, far: End, name: str, faulty: bool
    ) -> None:
        self.number = number
        self.name = name
        self.ended = False
        self._network = network
        self._ends = (near, far)
        self._faulty = faulty
        self._free_at = [0.0, 0.0]
        self._closed = [False, False]

    def send(self, side: int, frame: Frame) -> None:
        """Send to the other side; nothing happens on a stream that has ended."""
        if self.ended or self._closed[side]:
            return
        if not self._faulty:
            self._put(side, frame)
            return
        network = self._network
        faults, draw = network.faults, network.random.random
        fate = draw()
        if fate < faults.cut:
            self.cut()
        elif fate < faults.cut + faults.lose:
            network.clock.after(draw() * BREAK_S, self.cut)
        else:
            self._put(side, frame)
            if draw() < faults.duplicate:
                payload = None if frame.payload is None else frame.payload.copy()
                self._put(side, Frame(frame.header, payload))

    def _put(self, side: int, frame: Frame) -> None:
        network = self._network
        at = max(self._free_at[side], network.clock.now + network.delay_s())
        self._free_at[side] = at
        network.clock.at(at, self._arrive, side, frame)

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
        self.ended = True
        for side in (NEAR, FAR):
            if not self._closed[side]:
                self._network.clock.after(self._network.delay_s(), self._tell_lost, side)

    def close(self, side: int) -> None:
        """One side ends it: what that side has sent still arrives, and then the end."""
        if self.ended or self._closed[side]:
            return
        self._closed[side] = True
        at = max(self._free_at[side], self._network.clock.now + self._network.delay_s())
        self._network.clock.at(at, self._end, side)

    def _end(self, side: int) -> None:
        if not self.ended:
            self.ended = True
            self._tell_lost(1 - side)

    def _tell_lost(self, side: int) -> None:
        if not self._closed[side]:
            self._ends[side].lost(self)
