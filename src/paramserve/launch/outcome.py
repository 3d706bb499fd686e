"""What a run that has ended amounts to: its `Result`, made of what its supervisor knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import msgspec

from paramserve.errors import WorkerFailed
from paramserve.launch.endings import worker_failed
from paramserve.launch.entries import Key
from paramserve.launch.reading import State
from paramserve.launch.result import Restarted, Result
from paramserve.launch.supervisor import Supervisor
from paramserve.messages import ServerBeat
from paramserve.observe.status import by_group, by_rank, drops_by_rank, samples_by_rank
from paramserve.worker import ExtraState, Resumed


def result_of(
    supervisor: Supervisor,
    *,
    seed: int,
    values: Mapping[str, State],
    beats: Sequence[ServerBeat],
    table_files: Mapping[str, str],
) -> Result:
    """The result of a run that has ended without an error.

    Args:
        values: what was read of each group when all workers were done.
        beats: what each server said then.
        table_files: what was written of its tables.
    Raises:
        WorkerFailed: what a function returned cannot be unpickled here.
    """
    status = supervisor.overview.status
    leases = status.leases if status is not None else ()
    return Result(
        returns={
            entry.key.number: _unpickle(entry.key, entry.returned)
            for entry in supervisor.roster.workers()
            if entry.returned is not None
        },
        metrics=list(supervisor.overview.records),
        dropped_records=supervisor.overview.dropped_records,
        staleness=by_rank(beats),
        failures=dict(supervisor.failures),
        restarts=_restarts(supervisor),
        seconds=supervisor.seconds,
        seed=seed,
        stopped=supervisor.state == "stopped",
        values=values,
        groups=by_group(beats),
        dropped=drops_by_rank(beats),
        samples=samples_by_rank(leases),
        repeated_samples=sum(each.repeated for each in leases),
        table_files=table_files,
        extra_state=_extra_state(supervisor),
    )


def _extra_state(supervisor: Supervisor) -> dict[str, bytes]:
    """Of each group, as the last worker told it."""
    told = [body for _, kind, body in supervisor.reports if kind == "extra state"]
    found = [msgspec.msgpack.decode(body, type=ExtraState) for body in told]
    return {each.group: each.pickled for each in found}


def _restarts(supervisor: Supervisor) -> list[Restarted]:
    """Of each restart, how the worker had ended and where its successor went on."""
    found = []
    for number, entry in enumerate(supervisor.restarts):
        later = [each for each in supervisor.restarts[number + 1 :] if each.key == entry.key]
        successor = later[0] if later else supervisor.roster.entries[entry.key]
        clock, repeated = None, 0
        # A rank that was scaled away and came again has an entry of its own.
        follows = successor.restarts == entry.restarts + 1
        if follows and successor.resumed is not None:
            resumed = msgspec.msgpack.decode(successor.resumed, type=Resumed)
            clock, repeated = resumed.clock, resumed.repeated
        found.append(Restarted(entry.key.number, worker_failed(entry), clock, repeated))
    return found


def _unpickle(key: Key, returned: bytes) -> Any:
    """What a function returned. It came by the engine's own way, over no socket of ours."""
    try:
        return cloudpickle.loads(returned)
    except Exception as error:
        raise WorkerFailed(
            f"what {key} returned cannot be unpickled here: {type(error).__name__}: {error}",
            applied="yes",
            fix="return plain data, or objects of modules that the driver can import",
        ) from error
