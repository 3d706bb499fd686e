"""How fast a worker makes its own steps between exchanges, and how fast the fastest one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paramserve.messages import Fastest, TellSpeed

if TYPE_CHECKING:
    from paramserve.client.client import Client

TELL_S = 1.0
"""Seconds without an answer after which the next exchange asks anew. None waits for one: a
coordinator that is away for a moment holds no training up."""
SMOOTHING = 0.3
"""Weight of the newest steps in the mean time of a step: about the last 3 exchanges count."""


class Pace:
    """Measures the own steps of one group, and compares them with the other workers'.

    What the worker waits for, as the answers of servers, is no part of a step.

    Args:
        now: seconds; None: the client's clock.
    Attributes:
        speed: own steps a second; 0: not known yet.
        fastest: of the fastest worker that lives, as the coordinator knew it at the exchange before
            the last one; 0: not known.
        told: this worker's own speed, as that answer knew it.
    """

    def __init__(self, client: Client, group: str, now: Callable[[], float] | None = None) -> None:
        self._connection = client.connection
        self._group = group
        self._now = now if now is not None else client.steps.now
        self._since: tuple[float, float] | None = None
        """When the steps began that are counted, and how long had been waited until then."""
        self._steps = 0
        self._unmeasured = 0
        """Own steps before those."""
        self._post, self._posted_at = 0, 0.0
        """What was posted and is not answered; 0: nothing."""
        self._posted_speed = 0.0
        """The speed in it."""
        self.speed = 0.0
        self.fastest = self.reported_speed = 0.0

    def step(self) -> None:
        """Count an own step. When the first one began is not known: it does not count."""
        if self._since is None:
            self._since, self._unmeasured = (self._now(), self._connection.waited_s), 1
        else:
            self._steps += 1

    def exchanged(self) -> None:
        """An exchange was sent: take the answer to the one before, measure the steps before it, and
        ask for the fastest worker's speed.

        Where the coordinator does not answer, the fastest worker is as fast as it was.
        """
        self._take_answer()
        if self._since is None or not self._steps:
            return
        busy_s = self._now() - self._since[0] - (self._connection.waited_s - self._since[1])
        if busy_s > 0.0:
            new = busy_s / self._steps
            old = 1.0 / self.speed if self.speed else new
            self.speed = 1.0 / (old + SMOOTHING * (new - old))
            self._tell()
        self._since = self._now(), self._connection.waited_s
        self._steps = self._unmeasured = 0

    def _take_answer(self) -> None:
        """Take the coordinator's answer to the last speed that was sent, if it is there: how fast
        the fastest rank is."""
        if not self._post:
            return
        reply = self._connection.control.answer(self._post)
        if reply is not None:
            self._post = 0
        if isinstance(reply, Fastest):  # who counts as dead learns it from the servers
            self.fastest, self.reported_speed = reply.steps_per_s, self._posted_speed

    def _tell(self) -> None:
        if self._post and self._now() - self._posted_at < TELL_S:
            return
        steps = self._unmeasured + self._steps
        message = TellSpeed(0, self._group, self.speed, steps)
        self._post, self._posted_at = self._connection.control.post(message), self._now()
        self._posted_speed = self.speed
