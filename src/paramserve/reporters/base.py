"""What a reporter is: it takes what a run reports, once a second, to where people look."""

from __future__ import annotations

import contextlib
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version

from paramserve.messages import Record
from paramserve.observe.history import Steps
from paramserve.observe.metrics import Sample
from paramserve.observe.status import RunStatus

PACKAGES = ("paramserve", "numpy", "torch", "ray")
"""Packages whose versions are shown, where they are installed."""


def versions() -> dict[str, str]:
    """Versions of Python and of `PACKAGES`."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


@dataclass(frozen=True)
class RunInfo:
    """What a run was started with.

    Attributes:
        name: of the training function.
        policy: in the words in which a policy prints.
        seed: of the run.
        versions: of Python and of the packages that it is made of, by name.
        resumed: whether it goes on from a checkpoint, so that what reporters have written before is
            the beginning of its history.
    """

    name: str
    workers: int
    servers: int
    policy: str
    seed: int
    versions: dict[str, str] = field(default_factory=dict)
    resumed: bool = False

    def flat(self) -> dict[str, str | int]:
        """Run information as one level of names."""
        fields = asdict(self)
        versions = fields.pop("versions")
        return fields | {f"version_{name}": each for name, each in versions.items()}

    def settings(self) -> dict[str, str]:
        """Settings as text, without versions: a seed exceeds the numbers of JavaScript."""
        hidden = {"versions"} if self.resumed else {"versions", "resumed"}
        return {name: str(each) for name, each in asdict(self).items() if name not in hidden}


@dataclass(frozen=True)
class Report:
    """One look at a run.

    Attributes:
        time_s: seconds since the epoch.
        status: how the run stands, as `Job.status` tells it.
        samples: the same as metrics; counters never fall, also where servers were started again.
        records: what workers have logged by `worker.log` since the reporter's last report.
        last: no other report will come.
        steps: outcomes of each worker's steps, as `Result.steps`; empty but in the last report
            of a run.
    """

    status: RunStatus
    samples: Sequence[Sample]
    records: Sequence[Record]
    last: bool = False
    time_s: float = field(default_factory=time.time)
    steps: Steps = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Most steps of a group, all workers together: the x-axis of what counts none."""
        return max((group.steps for group in self.status.trained.values()), default=0)


class Reporter(ABC):
    """Base of what `ps.run(..., report_to=[...])` takes; a class of yours needs `report` alone.

    Each reporter is called in a thread of its own in the process that called `ps.run`. One that
    raises is told of once and called no more; training goes on.

    Example:
        from paramserve.reporters import Reporter

        class Printed(Reporter):
            def report(self, report):
                print(report.step, report.status.metrics)

        ps.run(train, report_to=[Printed()])
    """

    def open(self, run: RunInfo) -> None:  # noqa: B027 - a hook, rightly empty
        """Called once, before anything of the run is started: what it raises ends `ps.run`.

        Checks only: what a run before has left is not touched, since this one may still be refused.
        """

    def begin(self) -> None:  # noqa: B027 - a hook, rightly empty
        """Called once, when the run is started: what a run before has left may be replaced."""

    @abstractmethod
    def report(self, report: Report) -> None:
        """Called about once a second, and a last time at the end."""

    def close(self) -> None:  # noqa: B027 - a hook, rightly empty
        """Called once, behind the last report, also where `report` has raised."""
