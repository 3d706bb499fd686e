"""Time and memory of a client, for the run's reports."""

from __future__ import annotations

from paramserve.client.exchange import Exchange
from paramserve.client.loop_progress import LoopProgress
from paramserve.machine import resident_bytes
from paramserve.messages import WorkerUsage


class Usage:
    """The time of one client, by the clock of its exchange.

    Args:
        loop: of the worker over its batches.
    Attributes:
        encoded_s: seconds in codecs.
    """

    def __init__(self, exchange: Exchange, loop: LoopProgress) -> None:
        self.encoded_s = 0.0
        self._exchange = exchange
        self._loop = loop
        self._began = exchange.now()

    def report(self) -> WorkerUsage:
        """What there is to tell now. May be called without the client's lock."""
        now, since = self._exchange.now(), self._exchange.waits_since
        waited_s = self._exchange.waited_s
        return WorkerUsage(
            now - self._began,
            waited_s if since is None else waited_s + now - since,
            self.encoded_s,
            resident_bytes(),
            self._loop.done,
        )
