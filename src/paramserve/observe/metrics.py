"""A run's numbers as metrics: names, units and labels by the conventions of OpenMetrics.

They are put together from what servers and workers report anyway, once a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from paramserve.observe.status import GroupStatus, RunStatus

Kind = Literal["counter", "gauge"]
Labels = tuple[tuple[str, str], ...]


class Family(NamedTuple):
    """What one metric is. A counter's name is without "_total", which formats append."""

    name: str
    kind: Kind
    help: str
    saved: bool = False
    """Whether a checkpoint has it, so that it comes back where a run goes on from one."""


class Sample(NamedTuple):
    """A metric's number for some labels."""

    family: Family
    labels: Labels
    value: float


def _counter(name: str, help: str, *, saved: bool = False) -> Family:
    return Family(f"paramserve_{name}", "counter", help, saved)


def _gauge(name: str, help: str) -> Family:
    return Family(f"paramserve_{name}", "gauge", help)


SECONDS = _gauge("run_seconds", "Seconds since the start of the run.")
WORKERS = _gauge("workers", "Workers by state.")
STEPS = _counter("steps", "Steps of all workers together.", saved=True)
UPDATES = _counter("updates", "Updates that the servers have applied.", saved=True)
SKIPPED = _counter(
    "skipped", "Clocks or gradients left out because they held NaN or Inf.", saved=True
)
CLOCK = _gauge("clock", "Steps that every live worker has finished.")
BUFFERED = _gauge("buffered", "Gradients that wait until their buffer is full.")
KEPT_BYTES = _gauge("kept_bytes", "Copies of what workers have read, on all servers together.")
PUSHES = _counter("pushes", "Gradients of a worker that were applied or buffered.", saved=True)
STALENESS = _counter(
    "staleness_versions",
    "Sum of the staleness of a worker's pushes: its rate by that of pushes.",
    saved=True,
)
STALEST = _gauge("staleness_max_versions", "The largest staleness of a worker's pushes.")
DROPPED = _counter(
    "dropped", "Gradients of a worker that came too late or were too stale.", saved=True
)
SENT_BYTES = _counter("sent_bytes", "Gradients that a codec has encoded, as they were sent.")
PLAIN = _counter("plain_bytes", "The same gradients, as they were.")
READ = _counter("read_bytes", "Values that a worker has read encoded, as they came.")
READ_PLAIN = _counter("read_plain_bytes", "The same values, as they are.")
RESIDUAL = _gauge("residual_norm", "L2 norm of what a codec has left out of a worker's gradients.")
ROWS = _gauge("table_rows", "Rows of a keyed table.")
TABLE_BYTES = _gauge("table_memory_bytes", "Memory of rows, rule state and index.")
CREATED = _counter("table_created", "Rows that a table was given.")
EVICTED = _counter("table_evicted", "Rows that went again.")
DELETED = _counter("table_deleted", "Rows that Table.delete has removed.")
UNADMITTED = _counter("table_unadmitted", "Gradients dropped because their key had no row yet.")
CHECKPOINT_AGE = _gauge("checkpoint_age_seconds", "Seconds since the last checkpoint was complete.")
CHECKPOINT_BYTES = _gauge("checkpoint_bytes", "Bytes that were written for the last checkpoint.")
CHECKPOINT_PAUSE = _gauge(
    "checkpoint_pause_seconds", "The longest that a server executed nothing for the last one."
)
CHECKPOINTS = _counter("checkpoints", "Checkpoints that the run has written.")
FAILED_CHECKPOINTS = _counter("checkpoints_failed", "Checkpoints that could not be written.")
ROLLBACKS = _counter("rollbacks", "Times that the run went back to a checkpoint.")
WORKER_SECONDS = _counter("worker_seconds", "Seconds since a worker that lives has come.")
WAITED = _counter("worker_waited_seconds", "Of these, those that it waited for servers.")
ENCODED = _counter("worker_encoded_seconds", "Of these, those in codecs of gradients.")
WORKER_MEMORY = _gauge("worker_memory_bytes", "Memory of a worker's process, in RAM.")
LOOPED = _gauge("worker_looped_ratio", "The part of a worker's loop over batches that is done.")
VALUES = _gauge("server_value_bytes", "Parameters that a server holds, rows of tables left out.")
RECEIVED = _counter("server_pushes", "Gradients that a server has applied or buffered.", saved=True)
WAITING = _gauge("server_waiting_requests", "Requests that a server holds until something comes.")
SERVER_MEMORY = _gauge("server_memory_bytes", "Memory of a server's process, in RAM.")
LOGGED = _gauge("logged", "The last value that a worker logged under a name.")
FAMILIES = tuple(each for each in list(globals().values()) if isinstance(each, Family))
"""All of them, in the order in which they are told."""
STATES = ("starting", "running", "returned", "dead", "stopped", "retiring", "retired")
"""States of workers, in the order of the metrics."""


def samples(status: RunStatus) -> Iterator[Sample]:
    """Every metric of a run as it stands."""
    yield Sample(SECONDS, (), status.seconds)
    states = list(status.workers.values())
    for state in STATES:
        yield Sample(WORKERS, (("state", state),), float(states.count(state)))
    for name, group in status.groups.items():
        of_group = (("group", name),)
        yield from _of_group(of_group, group, trained=name in status.trained)
    yield Sample(ROLLBACKS, (), float(len(status.rollbacks)))
    if (saved := status.checkpoints) is not None:
        yield Sample(CHECKPOINTS, (), float(saved.written))
        yield Sample(FAILED_CHECKPOINTS, (), float(saved.failed))
        if saved.path:
            yield Sample(CHECKPOINT_AGE, (), saved.age_s)
            yield Sample(CHECKPOINT_BYTES, (), float(saved.bytes))
            yield Sample(CHECKPOINT_PAUSE, (), saved.pause_s)
    yield from _of_processes(status)
    for name, value in status.metrics.items():
        yield Sample(LOGGED, (("name", name),), value)


def _of_processes(status: RunStatus) -> Iterator[Sample]:
    for rank, load in status.loads.items():
        of_rank = (("rank", str(rank)),)
        yield Sample(WORKER_SECONDS, of_rank, load.seconds)
        yield Sample(WAITED, of_rank, load.waited_s)
        yield Sample(ENCODED, of_rank, load.encoded_s)
        yield Sample(WORKER_MEMORY, of_rank, float(load.memory_bytes))
        yield Sample(LOOPED, of_rank, load.looped)
    for shard, server in status.servers.items():
        of_server = (("server", str(shard)),)
        yield Sample(VALUES, of_server, float(server.value_bytes))
        yield Sample(RECEIVED, of_server, float(server.pushes))
        yield Sample(WAITING, of_server, float(server.waiting))
        yield Sample(SERVER_MEMORY, of_server, float(server.memory_bytes))


def _of_group(of_group: Labels, group: GroupStatus, *, trained: bool) -> Iterator[Sample]:
    if (table := group.table) is not None:
        yield Sample(ROWS, of_group, float(table.rows))
        yield Sample(TABLE_BYTES, of_group, float(table.memory_bytes))
        yield Sample(CREATED, of_group, float(table.created))
        yield Sample(EVICTED, of_group, float(table.evicted))
        yield Sample(DELETED, of_group, float(table.deleted))
        yield Sample(UNADMITTED, of_group, float(table.unadmitted))
    if not trained:
        return
    for family, count in (
        (STEPS, group.steps),
        (UPDATES, group.version),
        (SKIPPED, group.skipped),
        (CLOCK, group.clock),
        (BUFFERED, group.buffered),
        (KEPT_BYTES, group.kept_bytes),
    ):
        yield Sample(family, of_group, float(count))
    for rank, stale in group.staleness_by_rank.items():
        of_rank = (*of_group, ("rank", str(rank)))
        yield Sample(PUSHES, of_rank, float(stale.pushes))
        yield Sample(STALENESS, of_rank, float(round(stale.pushes * stale.mean)))
        yield Sample(STALEST, of_rank, float(stale.max))
    for rank, dropped in group.dropped_by_rank.items():
        yield Sample(DROPPED, (*of_group, ("rank", str(rank))), float(dropped))
    for rank, of_sent in group.sent_by_rank.items():
        of_rank = (*of_group, ("rank", str(rank)))
        yield Sample(SENT_BYTES, of_rank, float(of_sent.sent_bytes))
        yield Sample(PLAIN, of_rank, float(of_sent.plain_bytes))
        yield Sample(READ, of_rank, float(of_sent.read_bytes))
        yield Sample(READ_PLAIN, of_rank, float(of_sent.read_plain_bytes))
        yield Sample(RESIDUAL, of_rank, of_sent.residual_norm)


class Monotonic:
    """Counters that never fall: servers that are started again count from 0, and what they count
    then is added to what there was; what a checkpoint has is counted from there."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, Labels], float] = {}
        self._before: dict[tuple[str, Labels], float] = {}

    def samples(self, status: RunStatus) -> list[Sample]:
        """The samples of a status, which is newer than those before."""
        return [self._raised(each) for each in samples(status)]

    def _raised(self, sample: Sample) -> Sample:
        if sample.family.kind != "counter":
            return sample
        key = sample.family.name, sample.labels
        last = self._last.get(key, 0.0)
        if sample.value < last:
            again = sample.value if sample.family.saved else 0.0
            self._before[key] = self._before.get(key, 0.0) + last - again
        self._last[key] = sample.value
        before: Mapping[tuple[str, Labels], float] = self._before
        return sample._replace(value=sample.value + before[key]) if key in before else sample
