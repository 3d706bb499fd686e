"""What a run leaves behind: `Result`, made of what its supervisor knows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle
import msgspec

from paramserve.client.labels import are_labels
from paramserve.errors import ParamServeError, WorkerFailed
from paramserve.launch.abbreviation import abbreviated
from paramserve.launch.entries import Entry, worker_failed
from paramserve.launch.reading import State, as_state_dict
from paramserve.launch.supervisor import Supervisor
from paramserve.messages import Record, ServerBeat
from paramserve.observe.checkpoints import CheckpointStatus, Rollback
from paramserve.observe.history import StepRecord, StepsTaken
from paramserve.observe.report import (
    Curves,
    Event,
    RunReport,
    page,
    summaries,
    write,
)
from paramserve.observe.status import (
    GroupStatus,
    Staleness,
    TableStatus,
    by_group,
    by_rank,
    drops_by_rank,
    samples_by_rank,
)
from paramserve.reporters import RunInfo
from paramserve.worker import Resumed


class Restarted(NamedTuple):
    """A worker that died and was restarted.

    `error` says how it had ended. Its successor went on at `clock` of the group that it stepped on
    first (None: it did not get that far, or there was nothing to go on from). `repeated` counts
    steps of which some shards had applied the predecessor's push already, and then got the
    successor's as well (Async only).
    """

    rank: int
    error: ParamServeError
    clock: int | None
    repeated: int

    def __repr__(self) -> str:
        """Representation with the first line of the error: `error` has all of it."""
        first, *_ = self.error.failed.splitlines() or [""]
        kind = type(self.error).__name__
        return (
            f"Restarted(rank={self.rank}, error={kind}({abbreviated(first)}), "
            f"clock={self.clock}, repeated={self.repeated})"
        )


@dataclass(frozen=True)
class Result:
    """What a run returns: values, records, failures and restarts.

    Attributes:
        returns: what the training function returned, by rank.
        metrics: the records of `worker.log`: `time_s` (seconds since the epoch), `rank`, `clock`
            (the rank's steps until then), `values` (numbers by name). They come some of a rank at a
            time: sort them by `time_s` to draw them. The oldest are missing where workers logged
            faster than they could be fetched, or a million in all.
        dropped_records: records that are missing, of all workers together: dropped by a worker
            before they were sent, by the coordinator before the driver fetched them, or here.
            `Limits.log_records_max` and `log_bytes_max` bound what the first two keep. Not counted
            is what a worker that was killed had logged since its last heartbeat
            (`Deadlines.heartbeat_s`): it is lost, and no process knows how much it was.
        staleness: of each rank's pushes that were applied or buffered.
        failures: of workers without which the run went on, by rank.
        restarts: of workers that were started again, in order.
        seconds: from the start to the end of the processes.
        seed: the run's; the same one repeats a `Sync` run bit by bit.
        stopped: whether it was ended before its workers were done: by `Job.stop`, by Ctrl-C in
            `run`, or by an error, which then has this result.
        values: group name to tensor name to array, of bfloat16 the bits in uint16; see
            `state_dict`.
        groups: how each group stood at the end: policy, updates, and of each worker staleness,
            dropped gradients, and with a codec the bytes of gradients, as sent and as they were,
            and the norm of what is left out of them.
        dropped: each rank's gradients that came too late or were too stale, or under
            `ps.LocalSteps` held NaN or Inf, over all groups.
        samples: of loaders with `shards="dynamic"`: each rank's samples that are in the values, as
            the coordinator last knew it.
        table_files: with `ps.Checkpoint(save_tables=)`: each keyed table's file, by its name.
        repeated_samples: of these loaders: samples that some shard has had from two workers,
            because one of them ended.
        steps: outcomes of each worker's steps, by group and rank: a sequence of `clock`,
            `version`, `staleness`, `waited_s` and `dropped`, of at most some 2,000 steps that are
            evenly spaced. Of workers that returned or raised: one that was killed told nothing.
        extra_state: of each group what `get_extra_state` of rank 0's modules gave at the end,
            pickled: `state_dict` has it under its names.
        rollbacks: of each time that the run went back to a checkpoint because a server or the
            coordinator had ended, in order. Records of steps that this undid stay in `metrics`.
        checkpoints: how its checkpoints stood at the end; None: it wrote none.
        run: what it was started with.
    """

    returns: Mapping[int, Any]
    metrics: Sequence[Record]
    dropped_records: int
    staleness: Mapping[int, Staleness]
    failures: Mapping[int, ParamServeError]
    restarts: Sequence[Restarted]
    seconds: float
    seed: int
    stopped: bool
    values: Mapping[str, State]
    groups: Mapping[str, GroupStatus] = field(default_factory=dict)
    dropped: Mapping[int, int] = field(default_factory=dict)
    samples: Mapping[int, int] = field(default_factory=dict)
    repeated_samples: int = 0
    table_files: Mapping[str, str] = field(default_factory=dict)
    extra_state: Mapping[str, bytes] = field(default_factory=dict)
    steps: Mapping[str, Mapping[int, Sequence[StepRecord]]] = field(default_factory=dict)
    rollbacks: Sequence[Rollback] = ()
    checkpoints: CheckpointStatus | None = None
    run: RunInfo | None = None

    def __repr__(self) -> str:
        groups = {name: len(state) for name, state in self.values.items()}
        rows = {name: table.rows for name, table in self.tables.items()}
        text = f"tensors={groups}" + (f", rows={rows}" if rows else "")
        text += f", dropped_records={self.dropped_records}" if self.dropped_records else ""
        text += f", dropped={dict(self.dropped)}" if self.dropped else ""
        text += f", rollbacks={len(self.rollbacks)}" if self.rollbacks else ""
        text += ", stopped=True" if self.stopped else ""
        return (
            f"Result(seconds={self.seconds:.1f}, {text}, returns={abbreviated(dict(self.returns))})"
        )

    @property
    def tables(self) -> dict[str, TableStatus]:
        """How large each keyed table was at the end, and what had come and gone. The rows
        themselves are in `table_files`, if the run was told to write them.

        Labels of tables are not among them, as in `client.tables()`: `groups` has them, as
        `<name> (labels)`."""
        tables = {n: group.table for n, group in self.groups.items() if not are_labels(n)}
        return {name: table for name, table in tables.items() if table is not None}

    def plot(self) -> Any:
        """A figure of matplotlib's with each metric, and each group's staleness, of every worker
        over its steps.

        Example:
            >>> result.plot().savefig("run.png")

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: no metric was logged, and no optimizer has made a step.
        """
        from paramserve.observe.plots import figure_of

        return figure_of(self.metrics, self.steps)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write an HTML page of the run: what it was started with, a curve of each name that
        workers logged, staleness, where the time of a step goes, and what happened to the run.

        The page is one file that needs no network. Each curve has at most some 2,000 points: the
        lowest and the highest of each part of it. `report_to=[ps.HTML(folder)]` writes the same
        while the run goes on, and when what happened to it did.

        Args:
            path: of the file; its folder is made, and a file that is there is replaced.
        Raises:
            OSError: it cannot be written.
        """
        folder = os.path.dirname(os.path.abspath(path))
        os.makedirs(folder, exist_ok=True)
        name = self.run.name if self.run is not None else "run"
        write(path, page({name: self._report()}).encode())

    def _report(self) -> RunReport:
        curves = Curves()
        curves.extend(self.metrics)
        run = self.run
        return RunReport(
            run=run.settings() if run is not None else {"seed": str(self.seed)},
            versions=run.versions if run is not None else {},
            state="stopped" if self.stopped else "finished",
            seconds=self.seconds,
            curves=curves.by_name(),
            steps=summaries(self.steps, self.groups),
            step_s=curves.step_s(),
            events=list(self._events()),
            dropped_records=self.dropped_records,
            left_out=len(curves.left_out),
        )

    def _events(self) -> Iterator[Event]:
        """What happened to the run, without times: they are not recorded."""
        for each in self.restarts:
            text = f"rank {each.rank} was started again: {each.error.failed}"
            yield Event("restart", text, rank=each.rank, clock=each.clock)
        for rank, error in self.failures.items():
            yield Event("death", error.failed, rank=rank)
        for rollback in self.rollbacks:
            yield Event("rollback", rollback.line())
        saved = self.checkpoints
        if saved is not None and (saved.path or saved.why):
            text = f"the last of {saved.written}: {saved.told()}"
            yield Event("checkpoint", text, time_s=max(self.seconds - saved.age_s, 0.0))

    def state_dict(self, name: str = "model") -> dict[str, Any]:
        """The final values of one group, as a model loads them.

        Args:
            name: of the group: that of `worker.optimizer`, or "default" for `client.define`.
        Returns:
            Tensors by name if torch is imported, otherwise arrays. They share this result's memory.
        Raises:
            UnknownName: the run had no such group, or it is a table.
        """
        extra = unpickled(self.extra_state, name)  # first: it may import torch
        return extra | as_state_dict(self.values, name, self.tables)


def result_of(
    supervisor: Supervisor,
    *,
    seed: int,
    returns: Mapping[int, Any],
    values: Mapping[str, State],
    beats: Sequence[ServerBeat],
    table_files: Mapping[str, str],
    run: RunInfo | None,
) -> Result:
    """The result of a run that has ended.

    Args:
        returns: see `returns_of`.
        values: what was read of each group when all workers were done.
        beats: what each server said then.
        table_files: what was written of its tables.
        run: what it was started with.
    """
    status = supervisor.overview.status
    leases = status.leases if status is not None else ()
    return Result(
        returns=returns,
        metrics=list(supervisor.overview.records),
        dropped_records=supervisor.overview.dropped_records,
        staleness=by_rank(beats),
        failures=dict(supervisor.failures),
        restarts=_restarts(supervisor),
        seconds=supervisor.seconds,
        seed=seed,
        stopped=supervisor.ended_early,
        values=values,
        groups=by_group(beats, supervisor.overview.sent),
        dropped=drops_by_rank(beats),
        samples=samples_by_rank(leases),
        repeated_samples=sum(each.repeated for each in leases),
        table_files=table_files,
        extra_state=dict(supervisor.extra_states),
        steps=steps_of(supervisor),
        rollbacks=tuple(supervisor.rollbacks),
        checkpoints=supervisor.checkpoints,
        run=run,
    )


def returns_of(workers: Iterable[Entry]) -> tuple[dict[int, Any], WorkerFailed | None]:
    """What the training function returned, by rank, and what went wrong with the first that cannot
    be unpickled here. It came by the engine's own way, over no socket of ours."""
    returns: dict[int, Any] = {}
    wrong: WorkerFailed | None = None
    for entry in workers:
        if entry.returned is None:
            continue
        try:
            returns[entry.key.number] = cloudpickle.loads(entry.returned)
        except Exception as error:
            if wrong is None:
                wrong = WorkerFailed(
                    f"what {entry.key} returned cannot be unpickled here: {type(error).__name__}: "
                    f"{error}",
                    applied="yes",
                    fix="return plain data, or objects of modules that the driver can import",
                )
    return returns, wrong


def steps_of(supervisor: Supervisor) -> dict[str, dict[int, list[StepRecord]]]:
    """Steps by group and rank, those of a rank's incarnations one after the other."""
    by_group: dict[str, dict[int, list[StepRecord]]] = {}
    for key, kind, body in supervisor.reports:
        if kind == "steps":
            steps = msgspec.msgpack.decode(body, type=StepsTaken)
            by_group.setdefault(steps.group, {}).setdefault(key.number, []).extend(steps.records)
    return by_group


def unpickled(extra_states: Mapping[str, bytes], group: str) -> dict[str, Any]:
    """The extra state of one group's modules. It came by the engine's own way, as what functions
    return, over no socket of ours."""
    state: dict[str, Any] = cloudpickle.loads(extra_states[group]) if group in extra_states else {}
    return state


def _restarts(supervisor: Supervisor) -> list[Restarted]:
    """How each restarted worker had ended and where its successor went on."""
    restarts = []
    for number, entry in enumerate(supervisor.restarts):
        later = [each for each in supervisor.restarts[number + 1 :] if each.key == entry.key]
        # Fewer ranks were started anew where some had been scaled away.
        successor = later[0] if later else supervisor.roster.entries.get(entry.key, entry)
        clock, repeated = None, 0
        # A rank that was scaled away and came again has an entry of its own.
        follows = successor.restarts == entry.restarts + 1
        if follows and successor.resumed is not None:
            resumed = msgspec.msgpack.decode(successor.resumed, type=Resumed)
            clock, repeated = resumed.clock, resumed.repeated
        restarts.append(Restarted(entry.key.number, worker_failed(entry), clock, repeated))
    return restarts
