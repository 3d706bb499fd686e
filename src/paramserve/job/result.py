"""What a run leaves behind, and how to reach it while it lasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paramserve.client import Client
from paramserve.errors import NotAuthenticated, ParamServeError
from paramserve.job.reading import State, as_state_dict
from paramserve.messages import Record
from paramserve.observe.status import Staleness


@dataclass(frozen=True)
class Result:
    """What a run leaves.

    Attributes:
        returns: what the training function returned, by rank.
        metrics: the records of `worker.log`, in the order in which they came in; the oldest are
            missing where workers logged faster than they could be fetched, or a million in all.
        dropped_records: records that the coordinator had to drop before the driver fetched them,
            of all workers together; `Limits.log_records_max` is what it keeps for each.
        staleness: of each rank's pushes.
        failures: of workers without which the run went on, by rank.
        seconds: from the start to the end of the processes.
        seed: the run's; the same one repeats a `Sync` run bit by bit.
        stopped: whether `Job.stop` ended it.
        values: group name to tensor name to array; see `state_dict`.
    """

    returns: Mapping[int, Any]
    metrics: Sequence[Record]
    dropped_records: int
    staleness: Mapping[int, Staleness]
    failures: Mapping[int, ParamServeError]
    seconds: float
    seed: int
    stopped: bool
    values: Mapping[str, State]

    def __repr__(self) -> str:
        groups = {name: len(state) for name, state in self.values.items()}
        return f"Result(seconds={self.seconds:.1f}, tensors={groups}, returns={self.returns!r})"

    def state_dict(self, name: str = "model") -> dict[str, Any]:
        """The final values of one group, as a model loads them.

        Args:
            name: of the group: that of `worker.optimizer`, or "default" for `client.define`.
        Returns:
            Tensors by name if torch is imported, otherwise arrays. They share this result's memory.
        Raises:
            UnknownName: the run had no such group.
        """
        return as_state_dict(self.values, name)


class Handle:
    """How to reach a run's servers: its address, and a way to connect.

    It can be pickled, but it leaves the token behind: elsewhere `connect` raises.
    """

    def __init__(self, address: str, connect: Callable[[], Client] | None = None) -> None:
        self.address = address
        self._connect = connect

    def __repr__(self) -> str:
        return f"Handle({self.address!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle, (self.address,)

    def connect(self) -> Client:
        """A new client that is no worker: it reads and assigns, and holds up nobody."""
        if self._connect is None:
            raise NotAuthenticated(
                f"this handle of {self.address} came from another process, without the token",
                fix="connect in the process that started the run",
            )
        return self._connect()
