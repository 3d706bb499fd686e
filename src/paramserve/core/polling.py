"""How long a wait polls before it sleeps: as long as that is cheaper than waking up.

A process that sleeps is woken in 20 to 300 us, by machine; a small step takes less. Where both
sides of a connection sleep, each answer costs two wake-ups, and where both poll, none. So a wait
polls while it is expected to end within two wake-ups and a small step: a side that polls for so
long catches one that sleeps, and then both poll. A wait that takes longer sleeps at once.

Both sides may be on one core: a system wakes a process there rather than on a core that it has to
wake, too. So who polls gives up the core each time. That takes longer where another process has
waited for it, and who has seen this often goes to another core.

Source: that a wait of unknown length should poll about as long as blocking costs is from Karlin,
Manasse, McGeoch, Owicki: Competitive randomized algorithms for nonuniform problems, SODA 1990. That
a running estimate decides whether to poll at all is as in Linux's haltpoll governor.
"""

from __future__ import annotations

SMALL_STEP_S = 100e-6
"""What a small step takes while neither side sleeps."""
SMALL_STEP_TCP_S = 250e-6
"""Seconds of a small step over TCP while neither side sleeps."""
PROBE_EVERY = 32
"""Waits that sleep at once, per one that polls all the same: no state is final."""
CROWDED, CROWDED_MAX = 32, 4096
"""Waits that sleep at once after one that gave up its core and got it back late: a process that
sleeps gets a core sooner. Twice as many after each further one."""
NEWEST_SHARE = 0.125
"""Weight of the newest wait in the estimate."""
LONG_WAIT = 4.0
"""A wait counts as at most so many limits: a single long one is soon forgotten."""
SHARED_S = 10e-6
"""Giving up the core takes below 1 us, unless another process has waited for it."""
LEAVE_AFTER, LEAVE_AFTER_MAX = 4, 1 << 14
"""Waits with another process on this core, more than without one, after which it is left; twice as
many after each time, as the other cores may be taken, too, until none was there in so many."""


class AdaptivePolling:
    """Decides for waits of one kind whether they poll, from how long the last ones took.

    Args:
        wake_s: what a wake-up costs here; 0.0: nothing, as in a simulation.
        most_s: `Limits.poll_s_max`.
        tcp: whether what is waited for comes over TCP.
    Attributes:
        limit_s: how long one wait polls at most; 0.0: never.
        budget_s: how long the next one polls.
        leaves: whether to go to another core now.
    """

    def __init__(self, wake_s: float, most_s: float, *, tcp: bool = False) -> None:
        small_step_s = SMALL_STEP_TCP_S if tcp else SMALL_STEP_S
        self.limit_s = min(2.0 * wake_s + small_step_s, most_s) if wake_s > 0.0 else 0.0
        self.budget_s = self.limit_s
        self._wake_s = wake_s
        self._expected_s = 0.0
        self._slept = 0
        """Waits that have slept at once since one has polled."""
        self._asleep = 0
        """Waits that are still to sleep at once, since the cores were taken."""
        self._crowded = CROWDED
        self.leaves = False
        self._shared = 0
        """Waits in which another process ran on this core, less those without one."""
        self._leave_after = LEAVE_AFTER

    def waited(
        self, seconds: float, *, polled: bool, shared: bool = False, late: bool = False
    ) -> None:
        """A wait has ended after so long.

        Args:
            polled: it ended while it polled. One that ended sooner than expected is believed at
                once: its partner has ceased to sleep, too. One that slept would have ended a
                wake-up sooner.
            shared: another process ran on this core while it polled.
            late: one ran there until past the time for which this wait was to poll.
        """
        if not polled:
            seconds -= self._wake_s
        longest_s = LONG_WAIT * self.limit_s
        if polled and seconds < self._expected_s:
            self._expected_s = seconds
        else:
            seconds = seconds if seconds < longest_s else longest_s
            self._expected_s += NEWEST_SHARE * (seconds - self._expected_s)
        self.budget_s = self.limit_s
        if self._expected_s >= self.limit_s:
            self._slept = (self._slept + 1) % PROBE_EVERY
            if self._slept:
                self.budget_s = 0.0
        if self._asleep:
            self._asleep -= 1
            self.budget_s = 0.0
        self.leaves = False
        if late:
            self._asleep, self.budget_s = self._crowded - 1, 0.0
            self._crowded = min(2 * self._crowded, CROWDED_MAX)
        elif polled:
            if self._crowded > CROWDED:
                self._crowded -= 1
            self._shared += 1 if shared else -1
            if self._shared >= self._leave_after:
                self.leaves, self._shared = True, 0
                self._leave_after = min(2 * self._leave_after, LEAVE_AFTER_MAX)
            elif self._shared <= -LEAVE_AFTER:
                self._shared, self._leave_after = 0, LEAVE_AFTER
