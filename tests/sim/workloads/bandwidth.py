"""Links with a bandwidth in the simulated network: what is sent at the same time shares them.

Each place has one link in each direction. A transfer gets an equal share of its sender's link and
of its receiver's, whichever is less, as TCP's streams do about; small messages so pass large ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from paramserve.virtual import VirtualClock
from paramserve_testing.network import Way

DONE = 1e-6
"""Bytes: what is left of a transfer that is over, as floats have it."""


@dataclass(eq=False)
class _Transfer:
    way: Way
    left: float
    """Bytes."""
    done: Callable[[], None]
    rate: float = 0.0
    """Bytes a second, now."""


class SharedLinks:
    """What is on its way over links with a bandwidth.

    Args:
        bytes_per_s: of a place's link, in each direction.
        payload_scale: each byte of a payload counts as so many, so that small models take as long
            as large ones. Headers count as they are.
    """

    def __init__(
        self,
        clock: VirtualClock,
        bytes_per_s: Callable[[str], float],
        payload_scale: float = 1.0,
    ) -> None:
        self.payload_scale = payload_scale
        self.carried: Counter[Way] = Counter()
        """Bytes so far, with payloads scaled."""
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._transfers: list[_Transfer] = []
        self._since = 0.0
        """When the rates last changed."""
        self._turn = 0
        """Counts changes of the rates: a planned end is of one of them."""

    def carry(
        self, way: Way, header_bytes: int, payload_bytes: int, done: Callable[[], None]
    ) -> None:
        """Send a frame; `done` is called when its last byte is through."""
        nbytes = header_bytes + payload_bytes * self.payload_scale
        self.carried[way] += round(nbytes)
        self._pass()
        self._transfers.append(_Transfer(way, nbytes, done))
        self._share()

    def _pass(self) -> None:
        """Count what has gone through since the rates last changed."""
        passed = self._clock.now - self._since
        self._since = self._clock.now
        for each in self._transfers:
            each.left -= each.rate * passed

    def _share(self) -> None:
        """Give each transfer its rate, and plan the next end."""
        sent = Counter(each.way[0] for each in self._transfers)
        received = Counter(each.way[1] for each in self._transfers)
        up = {place: self._bytes_per_s(place) / count for place, count in sent.items()}
        down = {place: self._bytes_per_s(place) / count for place, count in received.items()}
        for each in self._transfers:
            each.rate = min(up[each.way[0]], down[each.way[1]])
        self._turn += 1
        if self._transfers:
            next_s = min(max(each.left, 0.0) / each.rate for each in self._transfers)
            self._clock.after(next_s, self._end, self._turn)

    def _end(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._pass()
        # Time has a resolution: where it does not go on, the nearest to its end is through.
        enough = max(DONE, min(each.left for each in self._transfers))
        over = [each for each in self._transfers if each.left <= enough]
        self._transfers = [each for each in self._transfers if each.left > enough]
        self._share()
        for each in over:
            each.done()
