"""`run` and `start`: check what they are given, make a plan of it and start a `Job`.

What a run consists of is said in `plan.py`; how it goes on once it is started, in `running.py`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import structs

from paramserve.config import (
    NO_RANK,
    CheckpointPlan,
    Deadlines,
    Limits,
    check_count,
    check_restart,
    check_settings,
)
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Sync
from paramserve.engine.base import Engine
from paramserve.errors import ParamServeError
from paramserve.launch.arguments import (
    SEED_BITS,
    check_arguments,
    check_engine,
    check_folder,
    check_options,
)
from paramserve.launch.checkpoints import (
    Checkpoint,
    Path,
    as_checkpoint,
    recovery_of,
)
from paramserve.launch.option_names import by_name
from paramserve.launch.packing import for_servers, imports, pack
from paramserve.launch.plan import Plan
from paramserve.launch.result import Result
from paramserve.launch.roster import OnWorkerDeath, Restart
from paramserve.launch.running import Job
from paramserve.launch.signals import interrupt_by_ends
from paramserve.launch.warm_start import find_tables, pack_state
from paramserve.logs import write_line
from paramserve.machine import cores
from paramserve.observe.view import Show, checked, watch
from paramserve.reporters import Feed, RunInfo, versions
from paramserve.worker import WorkerConfig

RESULT_NOTE = (
    "the run was stopped; what it had done is in this exception's attribute `result` "
    "(interactively: sys.last_value.result)"
)
NOTHING_KEPT = (
    "the run was stopped, and none of its processes is left; the attribute `result` of this "
    "exception is None: no servers were up, or they could not be read"
)

RUN_BITS = 32
"""Bits of the number that tells notes of a run from those of the run before."""


@dataclass(frozen=True)
class _Arguments:
    """What `run` and `start` are given."""

    train: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    workers: int
    servers: int
    engine: Engine | None
    consistency: Policy | None
    seed: int | None
    on_worker_death: OnWorkerDeath
    timeout_s: float | None
    rules: Sequence[Callable[..., Any]]
    checkpoint: Checkpoint | Path | None
    resume: bool | Path
    report_to: Sequence[Any]


@by_name
def start(
    train: Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    workers: int = 1,
    servers: int = 1,
    engine: Engine | None = None,
    consistency: Policy | None = None,
    seed: int | None = None,
    on_worker_death: OnWorkerDeath = "stop",
    timeout_s: float | None = None,
    rules: Sequence[Callable[..., Any]] = (),
    checkpoint: Checkpoint | Path | None = None,
    resume: bool | Path = False,
    report_to: Sequence[Any] = (),
) -> Job:
    """Start a training function on workers, with its parameters on servers; does not wait.

    The arguments are those of `run`, but for `show`: `paramserve.observe.watch` shows it.

    Raises:
        ValueError, TypeError: a wrong argument, or a function that cannot be pickled. Nothing
            was started.
    """
    job = _job(_Arguments(**locals()))
    job.launch()
    return job


@by_name
def run(
    train: Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    workers: int = 1,
    servers: int = 1,
    engine: Engine | None = None,
    consistency: Policy | None = None,
    seed: int | None = None,
    on_worker_death: OnWorkerDeath = "stop",
    timeout_s: float | None = None,
    rules: Sequence[Callable[..., Any]] = (),
    checkpoint: Checkpoint | Path | None = None,
    resume: bool | Path = False,
    report_to: Sequence[Any] = (),
    show: Show | None = None,
) -> Result:
    """Run a training function on workers, with its parameters on servers; returns at the end.

    What ends a run early keeps what it has done: an error of the run, and the `KeyboardInterrupt`
    of a Ctrl-C, have the attribute `result`, a `Result` with the values of that moment, the metrics
    and the files of `Checkpoint(save_tables=)`. It is None where the servers could not be read: the
    run had not started, one of them has ended, or a second Ctrl-C ended everything at once.

    Example:
        result = ps.run(train, workers=4, servers=2, consistency=ps.Async())

    Args:
        train: called as `train(worker, *args, **kwargs)` in each worker process. It travels by
            cloudpickle: no `__main__` guard is needed, and notebooks work.
        args, kwargs: for `train`; of a `ray.ObjectRef` among them its value arrives. One inside a
            list, a dict or a closure stays a ref, for workers of `ps.OnRay()` only.
        workers, servers: how many processes of each.
        engine: what starts the processes, with the deadlines, the limits and the workers' number
            of threads; `ps.Local()` if None.
        consistency: when gradients are applied; `ps.Sync(reduce="mean")` if None. Its class need
            not be registered.
        seed: of random, numpy, torch, the loader's order and Python's `hash` in workers; None: a
            random one, in the result.
        on_worker_death: "stop": the first worker that fails fails the run; "continue": the
            others go on without it; `ps.Restart(times)`: it is started again.
        timeout_s: the whole run's; None: no limit.
        rules: classes of your own rules, policies and codecs, and functions for `damping=`, that
            the servers may run; see `ps.CustomRule`, `ps.Policy` and `ps.CustomCodec`.
        checkpoint: what the run saves and what it starts from, `ps.Checkpoint(...)`: where and how
            often it writes checkpoints, values for its models, rows for its tables. The path of a
            folder, or its URL, as "s3://bucket/a", means checkpoints there. None: it writes none
            and starts anew. The folder is this run's alone. The last checkpoint is of the end of
            the run, where that is in order, or of `Job.stop`. When a server ends, the run goes on
            from the newest.
        resume: True: go on from the newest checkpoint in that folder, if there is one. A path: go
            on from the checkpoint of this path, or from the newest in this folder; there has to be
            one. Those that are damaged are left out. The values, and each rank's place, are the
            checkpoint's; so is the seed.
        report_to: reporters, which get what workers log and the run's metrics, once a second:
            `ps.TensorBoard("runs/a")`, `ps.Prometheus(port=9464)`, `ps.WandB(...)`,
            `ps.MLflow(...)`, `ps.CSV(path)`, `ps.HTML("runs/a")`, `ps.RayMetrics()`, or your own,
            see `paramserve.reporters.Reporter`.
        show: how far the run is, on standard error and each second: "table", with a row for each
            worker and server; "line"; or "none". Elsewhere than on a terminal and in a notebook the
            first two are a new line each second. None: a table on a terminal and in a notebook, and
            elsewhere nothing. See `observe.watch`.
    Raises:
        ValueError, TypeError: a wrong argument, a policy that cannot work with this many workers,
            or a function that cannot be pickled. Nothing was started.
        OSError, ParamServeError: `save_tables` of the checkpoint cannot be written to, a file of
            its `load_tables` or `load_state` cannot be read, or pyarrow is missing.
        CheckpointError: the folder of checkpoints cannot be used, belongs to another run, or has
            something else in it; or the checkpoint to go on from is not there, damaged, or of
            another model. Nothing was loaded.
        WorkerFailed: a training function raised, or its process ended.
        ServerGone, CoordinatorGone: that process ended and there was no checkpoint to go on from;
            the values are lost.
        RunTimeout: `timeout_s` was over.
        KeyboardInterrupt: Ctrl-C, or SIGTERM or SIGHUP (a lost terminal), where the program has no
            handler of its own for it and does not ignore it.
            The run is stopped as by `Job.stop`, which also writes its last checkpoint. Any other
            exception that comes meanwhile stops it as well.
    """
    arguments = dict(locals())
    job: Job | None = None
    with contextlib.ExitStack() as stack:
        try:
            del arguments["show"]
            shows = checked(show)
            interrupt_by_ends(stack)
            job = _job(_Arguments(**arguments))
            job.launch()
            with job, watch(job, show=shows):
                return job.wait()
        except KeyboardInterrupt as interrupt:
            _keep(job, interrupt)
            raise
        finally:
            if job is not None:
                job.stop()


def _keep(job: Job | None, interrupt: KeyboardInterrupt) -> None:
    """End a job, and give its result to the interrupt that it ends for; None: there is none yet.
    A second interrupt that comes meanwhile goes on, and has none."""
    result: Result | None = None
    try:
        if job is not None:
            job.stop()  # the interrupt may have come before the block was entered
            result = job.wait()
            saved = result.checkpoints
            if saved is not None and saved.path and not saved.why:
                write_line(f"the run goes on from {saved.path} with resume=True, as it is now")
    except ParamServeError as error:
        result = error.result
    except KeyboardInterrupt as second:
        interrupt = second
        raise
    finally:
        interrupt.result = result  # type: ignore[attr-defined]  # ours
        if not interrupt.args:
            interrupt.args = (RESULT_NOTE if result is not None else NOTHING_KEPT,)


def _job(options: _Arguments) -> Job:
    """Check everything in the order in which errors are told; what is to be launched."""
    workers = options.workers
    args, kwargs = check_arguments(options.args, options.kwargs)
    check_count("workers", workers)
    check_count("servers", options.servers)
    check_options(options.on_worker_death, options.timeout_s, options.seed)
    packed = for_servers(
        options.consistency if options.consistency is not None else Sync(reduce="mean"),
        workers,
        rules=options.rules,
    )
    engine = check_engine(options.engine)
    deadlines = check_settings("deadlines", engine.deadlines, Deadlines)
    limits = check_settings("limits", engine.limits, Limits)
    if isinstance(options.on_worker_death, Restart):
        check_restart(deadlines)
    checkpoint = as_checkpoint(options.checkpoint)
    state = pack_state(checkpoint.load_state) if checkpoint is not None else b""
    tables = find_tables(checkpoint.load_tables) if checkpoint is not None else {}
    code = pack(options.train, args, kwargs, on_ray=engine.reads_refs)
    tables_folder = check_folder(checkpoint.save_tables) if checkpoint is not None else ""
    _, _, name = getattr(options.train, "__qualname__", "run").rpartition(".")
    recovery = recovery_of(name, checkpoint, options.resume)
    seed = recovery.seed(options.seed) if recovery is not None else options.seed
    seed = seed if seed is not None else secrets.randbits(SEED_BITS)
    threads = engine.threads_per_worker
    plan = Plan(
        servers=options.servers,
        workers=workers,
        consistency=packed.consistency,
        worker_payload=_worker_payload(
            WorkerConfig(
                NO_RANK,
                (),
                seed,
                limits,
                state=state,
                tables=tables,
                run=secrets.randbits(RUN_BITS) if recovery is not None else 0,
            )
        ),
        worker_code=code,
        worker_imports=imports(options.train),
        server_code=packed.code,
        on_worker_death=options.on_worker_death,
        threads_per_worker=threads if threads is not None else max(1, cores() // workers),
        timeout_s=options.timeout_s,
        limits=limits,
        deadlines=deadlines,
        environment={"PYTHONHASHSEED": _hash_seed(seed)},
        checkpoints=recovery.plan(seed) if recovery is not None else CheckpointPlan(),
    )
    policy = repr(options.consistency) if options.consistency is not None else "Sync(reduce='mean')"
    feed = Feed(options.report_to, write_line)
    resumed = recovery is not None and recovery.resume_point is not None
    run = RunInfo(name, workers, options.servers, policy, seed, versions(), resumed)
    feed.open(run)
    return Job(plan, engine, seed, tables_folder, tuple(tables), recovery, feed, run)


def _hash_seed(seed: int) -> str:
    """The driver's own where it was given one, as other child processes have it."""
    own = os.environ.get("PYTHONHASHSEED", "random")
    return own if own not in ("", "random") else str(seed & 0xFFFFFFFF)


def _worker_payload(
    common: WorkerConfig,
) -> Callable[[int, tuple[str, ...], Deadlines], bytes]:
    """What tells a worker of a rank its configuration, given where the coordinator listens.

    Args:
        common: what is the same for all ranks.
    """

    def payload(rank: int, coordinator: tuple[str, ...], deadlines: Deadlines) -> bytes:
        config = structs.replace(common, rank=rank, coordinator=coordinator, deadlines=deadlines)
        return msgspec.msgpack.encode(config)

    return payload
