"""What is known of each process of a run, as far as the driver was told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from paramserve.engine.base import Failure

Kind = Literal["coordinator", "server", "worker"]

CAUSE_S = 0.5
"""How long after a process that complains of another one's end that end may still show."""
COMPLAINTS = frozenset({"ServerGone", "CoordinatorGone", "ClientClosed", "ConnectTimeout"})
"""Errors that tell of another process's end."""


class Key(NamedTuple):
    """Which process: what it is, and which one of them."""

    kind: Kind
    number: int

    def __str__(self) -> str:
        return self.kind if self.kind == "coordinator" else f"{self.kind} {self.number}"


COORDINATOR = Key("coordinator", 0)


@dataclass
class Entry:
    """What is known of one process."""

    key: Key
    ready: bool = False
    returned: bytes | None = None
    failure: Failure | None = None
    status: int | None = None
    why: str = ""
    """Why it has ended, where the engine knows more than the status."""
    fell_at: float | None = None
    """When its failure or unexpected end was seen."""
    silent: bool = False
    """It ran when it was counted as dead."""
    counted: bool = False
    """It is dead, and that has been decided upon."""
    stopped: bool = False
    """It is a worker that was told to end, because the run ends before it is done."""
    incarnation: int = 0
    """Of a worker, as the cluster counts; 0 before it is ready."""
    restarts: int = 0
    """How often it was started anew."""
    resumed: bytes | None = None
    """Where it went on, as it reported; None: it has not, or was the first of its rank."""
    retire_by: float | None = None
    """The run is to do without it: however it ends, from now on that is no failure, and it is ended
    when it still runs then. None: it is wanted."""
    kill_at: float | None = None
    """It was asked to end, because it did not do so by `retire_by`."""

    @property
    def retired(self) -> bool:
        """Whether the run does without it and it has ended, or as good as that."""
        return self.retire_by is not None and (self.returned is not None or self.status is not None)

    @property
    def state(self) -> str:
        """In one word."""
        if self.retire_by is not None:
            return "retired" if self.retired else "retiring"
        if self.returned is not None:
            return "returned"
        if self.stopped:
            return "stopped"
        if self.fell_at is not None:
            return "dead"
        return "running" if self.ready else "starting"

    @property
    def complains(self) -> bool:
        """Whether it fell because another process is gone.

        It says so, or it is a server that ended in order though nobody asked it to: that is what
        one does when the coordinator is gone.
        """
        if self.failure is not None:
            return self.failure.kind in COMPLAINTS
        return self.key.kind == "server" and self.status == 0

    @property
    def settled_at(self) -> float:
        """From when on its own fall counts as the cause."""
        assert self.fell_at is not None
        return self.fell_at + (CAUSE_S if self.complains else 0.0)
