"""What a worker tells its user of a run that goes otherwise than its function looks.

Each of these is said once, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from paramserve.client import Client
from paramserve.errors import warn_user
from paramserve.logs import write_line

TRAINS_ALONE, TRAINED_ALONE = "trains alone", "trained alone"
"""Reports of a worker that has iterated over a loader with gradients on, and stepped on no group:
when it has gone through its batches once, and at its end."""
UNTRAINED = (
    "trained nothing on the servers: it has not called worker.optimizer(...), "
    "client.define(...) or client.table(...), so a worker has trained a copy of its own, if any. "
    "To fix: optimizer = worker.optimizer(model, optimizer) in the training function; a loop that "
    "only evaluates belongs under torch.no_grad()"
)


class Notices:
    """The notices of one worker; the caller knows what the function does.

    Args:
        report: tells the driver; None: there is none.
    """

    def __init__(self, client: Client, report: Callable[[str, bytes], None] | None) -> None:
        self._client = client
        self._report = report
        self._told_alone = self._told_behind = False
        self._looked = False
        """Whether `warn_of_repeated_steps` has."""

    def warn_of_repeated_steps(self, group: str) -> None:
        """Warn where a restarted worker repeats steps of its older incarnation, because nothing has
        asked how many these were.

        Args:
            group: the first one that the worker steps on.
        """
        if self._looked:
            return
        self._looked = True
        client = self._client
        done, steps_made = (
            each.get(group, 0) for each in (client.steps.resumed, client.steps.steps_made)
        )
        if not steps_made or client.steps.clock_read or client.steps.next_mark is not None:
            return
        warn_user(
            f"rank {client.rank} was started again and goes on at clock {done}, but its loop "
            f"begins at its first batch again: all {steps_made} steps that it had made are made "
            "once more, from the values that they led to. To fix: take the batches of "
            "worker.loader(dataset, batch_size=..., epochs=...), which leaves out those that are "
            "done, or begin at worker.clock, as in for step in range(worker.clock, steps)"
        )

    def warn_of_pushes_unlike_workers(self, pushes: int) -> None:
        """Warn of an outer `DelayedNesterov` whose momentum is renewed after another number of
        pushes than there are workers."""
        workers, rank = self._client.connection.workers, self._client.rank
        if rank or self._client.connection.incarnation > 1 or pushes in (1, workers):
            return
        line = (
            f"DelayedNesterov(pushes={pushes}) renews its momentum after {pushes} "
            f"pushes, and the run has {workers} worker{'s' if workers > 1 else ''}: pushes="
            f"{workers} is what its paper takes"
        )
        write_line(line)

    def report_nothing_left(self, group: str) -> None:
        """Report at the end of the function that a restarted or resumed worker has made no step,
        and so has maybe printed nothing.

        Args:
            group: the first one that the worker steps on.
        """
        client, steps = self._client, self._client.steps
        if client.connection.incarnation <= 1 or steps.retiring:
            return
        done = steps.resumed.get(group, 0)
        if done and all(at <= steps.resumed.get(name, 0) for name, at in steps.clocks.items()):
            resumed = client.connection.before > 0
            how = "which goes on from a checkpoint" if resumed else "started again"
            more = ". To train on, give more epochs or steps" if resumed else ""
            line = (
                f"rank {client.rank}, {how}, had nothing left to do: all {done} steps "
                f"were done{more}"
            )
            write_line(line)

    def report_behind_epoch(self, epoch: int) -> None:
        """Say that what follows an epoch in its loop may be missing: a loop over `loader.epochs`
        goes on right behind one whose steps are done."""
        if self._told_behind:
            return
        self._told_behind = True
        rank = self._client.rank
        if rank and self._client.connection.before:
            return  # of a run that goes on, rank 0 says it for all
        line = (
            f"rank {rank} goes on behind epoch {epoch}, whose steps are done: what "
            "follows them in the loop, as an evaluation, is not made up for if it was interrupted"
        )
        write_line(line)

    def report_that_others_have_stopped(self, epoch: int) -> None:
        """Say that a loop over `loader.epochs` ends at its beginning, since all other ranks have
        returned behind the epoch in which this one died."""
        line = (
            f"rank {self._client.rank}, started again behind epoch {epoch}, ends its "
            "loop: all other ranks have returned there"
        )
        write_line(line)

    def warn_of_training_alone(self) -> None:
        """Warn that the function has gone through its batches once, and no server knows of it."""
        if not self._told_alone:
            self._told_alone = True
            self._tell(TRAINS_ALONE, alone_so_far(self._client.rank))

    def warn_of_having_trained_alone(self) -> None:
        """Warn, at the end of the function, if the rank trained alone; see
        `warn_of_training_alone`."""
        if not self._told_alone:
            self._tell(TRAINED_ALONE, f"rank {self._client.rank} {UNTRAINED}")

    def _tell(self, kind: str, words: str) -> None:
        if self._report is not None:
            self._report(kind, b"")  # the driver tells it once for all ranks
        else:
            warn_user(words)


def alone_so_far(rank: int) -> str:
    """What is told of a rank when it begins with its batches once more."""
    return f"rank {rank} has gone through its batches once, and {UNTRAINED}"
