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

from paramserve.config import Deadlines, Limits, check_count, check_restart, check_settings
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Sync
from paramserve.engine.base import Engine
from paramserve.errors import ParamServeError
from paramserve.launch.arguments import (
    SEED_BITS,
    check_engine,
    check_folder,
    check_options,
    check_weights,
)
from paramserve.launch.packing import for_servers, imports, pack
from paramserve.launch.plan import Plan, cores
from paramserve.launch.result import Result
from paramserve.launch.roster import OnWorkerDeath, Restart
from paramserve.launch.running import Job
from paramserve.launch.warm_start import GivenState, GivenTables, find_tables, pack_state
from paramserve.observe.progress import wanted, watch
from paramserve.worker import WorkerConfig


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
    worker_weight: Sequence[float] | None
    seed: int | None
    threads_per_worker: int | None
    on_worker_death: OnWorkerDeath
    timeout_s: float | None
    rules: Sequence[type[Any]]
    policies: Sequence[Any]
    deadlines: Deadlines | None
    limits: Limits | None
    save_tables: str | os.PathLike[str] | None
    load_tables: GivenTables | None
    load_state: GivenState | None
    show_rank: bool


def start(
    train: Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    workers: int = 1,
    servers: int = 1,
    engine: Engine | None = None,
    consistency: Policy | None = None,
    worker_weight: Sequence[float] | None = None,
    seed: int | None = None,
    threads_per_worker: int | None = None,
    on_worker_death: OnWorkerDeath = "stop",
    timeout_s: float | None = None,
    rules: Sequence[type[Any]] = (),
    policies: Sequence[Any] = (),
    deadlines: Deadlines | None = None,
    limits: Limits | None = None,
    save_tables: str | os.PathLike[str] | None = None,
    load_tables: GivenTables | None = None,
    load_state: GivenState | None = None,
    show_rank: bool = True,
) -> Job:
    """Start a training function on workers, with its parameters on servers; does not wait.

    The arguments are those of `run`, but for `progress`: `paramserve.observe.watch` shows it.

    Raises:
        ValueError, TypeError: a wrong argument, or a function that cannot be pickled. Nothing
            was started.
    """
    return _start(_Arguments(**locals()))


def run(
    train: Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    workers: int = 1,
    servers: int = 1,
    engine: Engine | None = None,
    consistency: Policy | None = None,
    worker_weight: Sequence[float] | None = None,
    seed: int | None = None,
    threads_per_worker: int | None = None,
    on_worker_death: OnWorkerDeath = "stop",
    timeout_s: float | None = None,
    rules: Sequence[type[Any]] = (),
    policies: Sequence[Any] = (),
    deadlines: Deadlines | None = None,
    limits: Limits | None = None,
    save_tables: str | os.PathLike[str] | None = None,
    load_tables: GivenTables | None = None,
    load_state: GivenState | None = None,
    show_rank: bool = True,
    progress: bool | None = None,
) -> Result:
    """Run a training function on workers, with its parameters on servers; returns at the end.

    Example:
        result = ps.run(train, workers=4, servers=2, consistency=ps.Async())

    Args:
        train: called as `train(worker, *args, **kwargs)` in each worker process. It travels by
            cloudpickle: no `__main__` guard is needed, and notebooks work.
        args, kwargs: for `train`; of a `ray.ObjectRef` among them its value arrives.
        workers, servers: how many processes of each.
        engine: what starts the processes; `ps.Local()` if None.
        consistency: when gradients are applied; `ps.Sync(reduce="mean")` if None. Its class need
            not be registered.
        worker_weight: for each rank, what its gradients are multiplied by, above 0; 1 each if
            None, and for workers that join later. `Sync` divides the weighted sum by the weights.
        seed: of random, numpy, torch, the loader's order and Python's `hash` in workers; None: a
            random one, in the result.
        threads_per_worker: of numpy, torch and numba; max(1, cores // workers) if None.
        on_worker_death: "stop": the first worker that fails fails the run; "continue": the
            others go on without it; `ps.Restart(times)`: it is started again.
        timeout_s: the whole run's; None: no limit.
        rules: your own rules' classes that the servers may run; see `ps.CustomRule`.
        policies: your own policies' classes, and functions for `damping=`; see `ps.Policy`.
        deadlines: how long each wait may take; `ps.Deadlines()` if None.
        limits: bounds on memory, messages and connections; `ps.Limits()` if None.
        save_tables: folder for the keyed tables at the end or at `Job.stop`, as `<name>.parquet`
            with state, for `table.from_parquet`; None: rows end with the servers.
        load_tables: rows that keyed tables begin with: the folder of an earlier `save_tables`, or a
            dict of such files by table. They are there before any worker gets the table; with the
            rule's state, if the file has that of the same rule. The workers' machines must see the
            files. While one loads, the others wait up to `Deadlines.busy_s`.
        load_state: what the models of `worker.optimizer` start from instead of their own values: a
            state dict, the path of one that `torch.save` wrote, or a `Result`. It is for the first
            optimizer; a result, or a dict of state dicts, goes by the optimizers' names. Keys and
            shapes must be the model's. Every rank loads it, frozen
            parameters and buffers included.
        show_rank: whether each line that a worker prints begins with its rank, as in "[rank 0] ";
            lines are whole in any case. On Ray, Ray puts its own mark there.
        progress: whether a line on standard error says how far the run is, rewritten each second;
            None: on a terminal and in a notebook. True elsewhere: a new line each second.
    Raises:
        ValueError, TypeError: a wrong argument, a policy that cannot work with this many workers,
            or a function that cannot be pickled. Nothing was started.
        OSError, ParamServeError: `save_tables` cannot be written to, a file of `load_tables` or
            `load_state` cannot be read, or pyarrow is missing.
        WorkerFailed: a training function raised, or its process ended.
        ServerGone, CoordinatorGone: that process ended; the values are lost.
        RunTimeout: `timeout_s` was over.
        KeyboardInterrupt: Ctrl-C. The run is stopped as by `Job.stop`; the exception's attribute
            `result` is the `Result` of what was done. A second Ctrl-C ends everything at once, and
            there is none. Any other exception that comes meanwhile stops the run as well.
    """
    given = dict(locals())
    del given["progress"]
    if progress not in (None, True, False):
        raise TypeError(f"progress must be True, False or None, not {progress!r}")
    shows = wanted(progress)
    job = _start(_Arguments(**given))
    try:
        with job, watch(job) if shows else contextlib.nullcontext():
            return job.wait()
    except KeyboardInterrupt as interrupt:
        job.stop()  # it may have come before the block was entered
        with contextlib.suppress(ParamServeError):  # nothing could be kept
            interrupt.result = job.wait()  # type: ignore[attr-defined]  # ours
        raise
    finally:
        job.stop()


def _start(given: _Arguments) -> Job:
    """Check everything in the order in which errors are told, then start."""
    workers = given.workers
    check_count("workers", workers)
    check_count("servers", given.servers)
    if given.threads_per_worker is not None:
        check_count("threads_per_worker", given.threads_per_worker)
    check_options(given.on_worker_death, given.timeout_s, given.seed)
    told = for_servers(
        given.consistency if given.consistency is not None else Sync(reduce="mean"),
        workers,
        rules=given.rules,
        policies=given.policies,
    )
    factors = check_weights(given.worker_weight, workers, given.consistency)
    engine = check_engine(given.engine)
    deadlines = check_settings("deadlines", given.deadlines, Deadlines)
    limits = check_settings("limits", given.limits, Limits)
    if isinstance(given.on_worker_death, Restart):
        check_restart(deadlines)
    seed = given.seed if given.seed is not None else secrets.randbits(SEED_BITS)
    state = pack_state(given.load_state)
    tables = find_tables(given.load_tables)
    kwargs = given.kwargs if given.kwargs is not None else {}
    threads = given.threads_per_worker
    plan = Plan(
        servers=given.servers,
        workers=workers,
        consistency=told.consistency,
        worker_payload=_worker_payload(seed, factors, limits, deadlines, state, tables),
        worker_code=pack(given.train, given.args, kwargs),
        worker_imports=imports(given.train),
        server_code=told.code,
        on_worker_death=given.on_worker_death,
        threads_per_worker=threads if threads is not None else max(1, cores() // workers),
        timeout_s=given.timeout_s,
        show_rank=given.show_rank,
        limits=limits,
        deadlines=deadlines,
        environment={"PYTHONHASHSEED": _hash_seed(seed)},
    )
    return Job(plan, engine, seed, check_folder(given.save_tables), tuple(tables))


def _hash_seed(seed: int) -> str:
    """The driver's own where it was given one, as other child processes have it."""
    own = os.environ.get("PYTHONHASHSEED", "random")
    return own if own not in ("", "random") else str(seed & 0xFFFFFFFF)


def _worker_payload(
    seed: int,
    factors: Sequence[float],
    limits: Limits,
    deadlines: Deadlines,
    state: bytes,
    tables: dict[str, str],
) -> Callable[[int, tuple[str, ...]], bytes]:
    """What tells a worker of a rank its configuration, given where the coordinator listens."""

    def payload(rank: int, coordinator: tuple[str, ...]) -> bytes:
        # A rank that comes later, by `Job.scale`, was given no weight.
        factor = factors[rank] if rank < len(factors) else 1.0
        config = WorkerConfig(rank, coordinator, seed, limits, deadlines, factor, state, tables)
        return msgspec.msgpack.encode(config)

    return payload
