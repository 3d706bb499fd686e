"""How the checkpoints of a run stand, and what it has lost where it went back to one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from paramserve.errors import ParamServeError
from paramserve.messages import CheckpointReport
from paramserve.observe.amounts import in_bytes, trained_only

GROUPS_TOLD = 3
"""Most groups in a line about a rollback."""


@dataclass(frozen=True)
class CheckpointStatus:
    """How the checkpoints of a run stand.

    Attributes:
        path: of the last one; empty: there is none yet.
        clocks: of the last one, by group: steps that each worker has in it.
        age_s: seconds since it was complete.
        bytes: that were written for it.
        pause_s: the longest that a server executed nothing for it.
        seconds: from its beginning until it was complete.
        written: how many this run has written.
        failed: how many could not be written; training went on without them.
        why: the last one that failed did; empty: none has.
        writing: whether one is being written.
    """

    path: str = ""
    clocks: Mapping[str, int] = field(default_factory=dict)
    age_s: float = 0.0
    bytes: int = 0
    pause_s: float = 0.0
    seconds: float = 0.0
    written: int = 0
    failed: int = 0
    why: str = ""
    writing: bool = False

    def told(self) -> str:
        """The last one, and why the last one failed that did, without how old it is."""
        size = f" ({in_bytes(self.bytes)}, pause {self.pause_s * 1000:.0f} ms)"
        text = self.path + size if self.path else "none was written"
        return f"{text}; {self.failed} failed: {self.why}" if self.why else text

    def line(self, *, path: bool = False) -> str:
        """Checkpoint in a few words, with the path of the last one if that is asked for."""
        if not self.path:
            text = "no checkpoint yet"
        else:
            text = f"checkpoint {_age(self.age_s)} old"
            if self.bytes:
                text += f" ({in_bytes(self.bytes)}, pause {self.pause_s * 1000:.0f} ms)"
            text += f" in {self.path}" if path else ""
        return f"{text}, {self.failed} failed: {self.why}" if self.why else text


def checkpoint_status(report: CheckpointReport) -> CheckpointStatus:
    """What the coordinator tells, for people."""
    return CheckpointStatus(
        path=f"{report.folder}/{report.name}" if report.name else "",
        clocks=trained_only(report.clocks),
        age_s=report.age_s,
        bytes=report.nbytes,
        pause_s=report.pause_s,
        seconds=report.seconds,
        written=report.committed,
        failed=report.failed,
        why=report.why,
        writing=report.writes,
    )


class Rollback(NamedTuple):
    """A run went back to a checkpoint, because a server or the coordinator had ended.

    `error` says how that process ended. `path` is the checkpoint's; empty: the run had none yet and
    began anew. `clocks_before` and `clocks` say by group where it was and where it went on;
    `updates_lost` is how many updates lie in between, at least: where it was is as of the servers'
    last heartbeats (`Deadlines.heartbeat_s`). `seconds`: from the end of the process, or from when
    it counted as dead, until a worker ran again.
    """

    error: ParamServeError
    path: str
    clocks_before: Mapping[str, int]
    clocks: Mapping[str, int]
    updates_lost: int
    seconds: float

    def line(self) -> str:
        """Rollback in one sentence, without how long it took."""
        names = sorted(self.clocks_before.keys() | self.clocks.keys())
        back = _listed(
            f"{name!r} from clock {self.clocks_before.get(name, 0)} to {self.clocks.get(name, 0)}"
            for name in names
        )
        where = (
            f"the checkpoint {self.path}" if self.path else "its beginning, without a checkpoint"
        )
        cause, *_ = self.error.failed.splitlines() or [""]
        updates = "1 update is" if self.updates_lost == 1 else f"{self.updates_lost:,} updates are"
        loss = f"at least {updates} lost" if self.updates_lost else "what came since is lost"
        return f"{cause}: the run goes on from {where}{back}; {loss}"


def clocks_in_words(clocks: Mapping[str, int]) -> str:
    """Clock of each group, in brackets; empty: there is none."""
    return _listed(f"{name!r} at clock {clocks[name]}" for name in sorted(clocks))


def _listed(of_groups: Iterable[str]) -> str:
    names = [*of_groups]
    if len(names) > GROUPS_TOLD:
        names[GROUPS_TOLD:] = [f"and {len(names) - GROUPS_TOLD} more"]
    return f" ({', '.join(names)})" if names else ""


def _age(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.0f} h"
