"""When a peer that was not reached is tried again, and when it is given up: one rule for all who
connect again.

It decides and does nothing: the driver connects, sleeps and gives the time.
"""

from __future__ import annotations

from math import inf


class Redial:
    """The attempts to reach one peer.

    Args:
        deadline: no attempt begins at or after it, on the driver's clock.
        pause: seconds between an attempt that has failed and the next one.
        attempt: the most that an attempt may take, in seconds.
        hurry: the same until `wait_longer`; None: as `attempt`.
    """

    def __init__(
        self, deadline: float, pause: float, attempt: float = inf, hurry: float | None = None
    ) -> None:
        self.deadline = deadline
        self._pause = pause
        self._attempt = attempt
        self._limit = hurry if hurry is not None else attempt

    def limit_s(self, now: float) -> float:
        """How long an attempt that begins now may take; at least as long as a pause."""
        return min(max(self.deadline - now, self._pause), self._limit)

    def next_at(self, now: float) -> float | None:
        """When to try again after an attempt that failed now; None: the peer is given up."""
        at = now + self._pause
        return at if at < self.deadline else None

    def wait_longer(self) -> None:
        """The peer exists, and was too slow for an attempt in a hurry."""
        self._limit = self._attempt
