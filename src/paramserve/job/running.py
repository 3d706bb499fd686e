"""`run` and `start`: a training function on workers, its parameters on servers, a result."""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import msgspec

from paramserve.config import Deadlines, Limits
from paramserve.core.consistency import Sync
from paramserve.core.decisions import Policy
from paramserve.core.decisions import number as check_number
from paramserve.core.policies import terms as policy_terms
from paramserve.engine.base import Engine
from paramserve.engine.local import Local
from paramserve.errors import (
    ClientClosed,
    ParamServeError,
    WorkerFailed,
    rebuild,
)
from paramserve.job.packing import for_servers, pack, reference
from paramserve.job.plan import Plan, cores
from paramserve.job.reading import Reader, Snapshot, State, Watching, as_state_dict
from paramserve.job.result import Restarted, Result
from paramserve.job.roster import Key, OnWorkerDeath, Restart, worker_failed
from paramserve.job.supervisor import Supervisor
from paramserve.joining import Handle
from paramserve.messages import ServerBeat
from paramserve.observe.status import (
    RunStatus,
    by_group,
    by_rank,
    drops_by_rank,
    samples_by_rank,
)
from paramserve.settings import check_restart, check_settings
from paramserve.worker import Aliases, Resumed, WorkerConfig

SNAPSHOT_POLL_S = 0.05
END_S = 2.0
"""How much longer than `stop_s` the end of a run may take to be known."""
SEED_BITS = 63


class Job:
    """A run that has been started. All methods may be called from any thread.

    It does not outlive the process that started it: at the interpreter's exit it is stopped.
    """

    def __init__(self, plan: Plan, engine: Engine, seed: int) -> None:
        self._seed = seed
        self._watching: list[Watching] = []
        self._values: dict[str, State] = {}
        self._reader_lock = threading.Lock()
        self._result_lock = threading.Lock()
        self._reader: Reader | None = None
        self._last_beats: list[ServerBeat] = []
        self._result: Result | None = None
        self._supervisor = Supervisor(plan, engine, self._collect, self._forget)

    def __repr__(self) -> str:
        return f"Job({self._supervisor.state}, {self._supervisor.seconds:.1f} s)"

    def wait(self) -> Result:
        """Wait for the end of the run.

        Ctrl-C here stops the run, says in one line how far it got, and goes on as
        `KeyboardInterrupt`.

        Raises:
            WorkerFailed: a training function raised, or its process ended.
            ServerGone, CoordinatorGone: that process ended; the values are lost.
            RunTimeout: `timeout_s` was over.
            ConnectTimeout: the servers did not come up.
        """
        with self._interruptible():
            self._supervisor.ended.wait()
        self._raise_error()
        with self._result_lock:
            if self._result is None:
                self._result = self._make_result()
            return self._result

    def stop(self) -> None:
        """End the run early, as if all workers had returned; returns when it has ended.

        The values of this moment are kept: `wait` gives them. Worker processes get `stop_s` to
        end in order, then they are killed.
        """
        self._supervisor.stop()
        with self._interruptible():
            self._supervisor.ended.wait()

    def scale(self, workers: int) -> None:
        """Have this many workers from now on, while those that stay go on with the training.

        Returns when it is agreed upon and new processes are launched, not when they are up. New
        ranks follow the present ones. Each runs the training function and takes part from its
        first step on; nobody waits for it before (for a rank that comes back: before it has
        connected). Those with the highest ranks retire:
        `worker.retiring` is True, loops over `worker.loader` end, and the function has
        `Deadlines.retire_s` to return; then its process is ended. Neither that nor any other end
        of it is a failure. A rank that comes back starts as a new incarnation when its old process
        has ended. Calls from several threads take place one after the other.

        Args:
            workers: how many, at least 1.
        Raises:
            ValueError, TypeError: no such number, or the policy that the run was started with
                cannot work with so few. Nothing was changed. (A later one, or a group's own, is not
                asked: with a `backup` that is too large, each clock is decided by one worker.)
            CannotPlace: the engine has no room for more, after waiting for it as at the start. The
                run goes on with as many as before.
            Timeout: the coordinator has not answered in `Deadlines.request_s`. Applied: unknown.
            ParamServeError: the run has ended or is about to, or a process could not be started.
                Nothing was changed.
        """
        check_count("workers", workers)
        policy = policy_terms(self._supervisor.plan.consistency).policy
        if policy is not None:
            policy.check(workers)
        self._supervisor.scale(workers)

    def status(self) -> RunStatus:
        """How the run stands, as of the servers' last heartbeat. Never waits."""
        supervisor = self._supervisor
        return RunStatus(
            state=supervisor.state,
            seconds=supervisor.seconds,
            workers=supervisor.roster.worker_states(),
            groups=by_group(self._beats()),
            metrics=dict(supervisor.overview.latest),
        )

    def state_dict(self, name: str = "model") -> dict[str, Any]:
        """A group's present values; after the end, its last ones.

        Returns:
            Tensors by name if torch is imported, otherwise arrays.
        Raises:
            UnknownName: nothing is defined in this group (yet).
        """
        try:
            reader = self._connected()
            state = reader.read(name, self._aliases())
            values = {name: state} if state else dict.fromkeys(reader.blocks(), state)
        except ClientClosed:  # it has ended
            return self.wait().state_dict(name)
        return as_state_dict(values, name)

    def snapshots(
        self, every: int = 10, *, name: str = "model", keep: int = 8
    ) -> Iterator[Snapshot]:
        """Consistent copies of a group's values while it is trained, until the run ends.

        The servers keep one at every `every`-th version, at most `keep` of them; the oldest is
        dropped when they are not taken in time, so a slow reader never slows the training.
        If the run fails, the iteration ends and `wait` says why.
        """
        for option, value in (("every", every), ("keep", keep)):
            check_count(option, value)
        watching = Watching(name, every, keep)
        self._watching.append(watching)
        return self._follow(watching)

    def handle(self) -> Handle:
        """For other clients, here or in any process that it is sent to; waits until the servers
        are up.

        Raises:
            ParamServeError: the run has ended, or ended before it was up.
        """
        return handle_of(self._supervisor, self._seed)

    # --- inside ----------------------------------------------------------------------------------

    def _follow(self, watching: Watching) -> Iterator[Snapshot]:
        supervisor = self._supervisor
        while True:
            over = supervisor.ended.is_set()
            found = self._next_snapshot(watching)
            if found is not None:
                yield found
            elif over:
                return
            else:
                with self._interruptible():
                    supervisor.ended.wait(SNAPSHOT_POLL_S)

    def _next_snapshot(self, watching: Watching) -> Snapshot | None:
        supervisor = self._supervisor
        try:
            with self._interruptible():
                return watching.take(supervisor.connect, self._aliases(), supervisor.seconds)
        except ParamServeError:
            # The servers are gone; the run's own end, which is near, says why.
            supervisor.ended.wait(supervisor.plan.deadlines.stop_s + END_S)
            if not supervisor.ended.is_set():
                raise
            return watching.take_kept()

    def _collect(self) -> None:
        """Read everything before the servers end: called when all workers are done."""
        aliases = self._aliases()
        for watching in self._watching:
            watching.drain(aliases, self._supervisor.seconds)
        reader = self._connected()
        self._values = reader.read_all(aliases)
        self._last_beats = reader.client.reports()

    def _forget(self) -> None:
        """Let go of closed clients and their memory."""
        self._reader = None
        for watching in self._watching:
            watching.forget()

    def _connected(self) -> Reader:
        with self._reader_lock:
            reader = self._reader
            if reader is None:
                reader = self._reader = Reader(self._supervisor.connect())
            return reader

    def _aliases(self) -> dict[str, dict[str, str]]:
        found = {}
        for _, kind, body in tuple(self._supervisor.reports):
            if kind == "aliases":
                aliases = msgspec.msgpack.decode(body, type=Aliases)
                found[aliases.group] = aliases.names
        return found

    def _restarts(self) -> list[Restarted]:
        """Of each restart, how the worker had ended and where its successor went on."""
        supervisor = self._supervisor
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

    def _beats(self) -> list[ServerBeat]:
        """What each server said when all workers were done, or its last heartbeat."""
        return self._last_beats or list(self._supervisor.overview.beats)

    def _raise_error(self) -> None:
        error = self._supervisor.error
        if isinstance(error, ParamServeError):
            raise rebuild(type(error).__name__, error.failed, error.applied, error.fix)
        if error is not None:
            raise error

    def _make_result(self) -> Result:
        supervisor, beats = self._supervisor, self._beats()
        status = supervisor.overview.status
        leases = status.leases if status is not None else ()
        return Result(
            returns={
                entry.key.number: msgspec.msgpack.decode(entry.returned)
                if supervisor.plain
                else _unpickle(entry.key, entry.returned)
                for entry in supervisor.roster.workers()
                if entry.returned is not None
            },
            metrics=list(supervisor.overview.records),
            dropped_records=supervisor.overview.dropped_records,
            staleness=by_rank(beats),
            failures=dict(supervisor.failures),
            restarts=self._restarts(),
            seconds=supervisor.seconds,
            seed=self._seed,
            stopped=supervisor.state == "stopped",
            values=self._values,
            groups=by_group(beats),
            dropped=drops_by_rank(beats),
            samples=samples_by_rank(leases),
            repeated_samples=sum(each.repeated for each in leases),
        )

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """On Ctrl-C end everything, and say in one line how far it got."""
        try:
            yield
        except KeyboardInterrupt:
            told = self.status().progress()
            self._supervisor.abandon()
            print(f"paramserve: interrupted {told}", file=sys.stderr, flush=True)
            raise


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
) -> Job:
    """Start a training function on workers, with its parameters on servers; does not wait.

    The arguments are those of `run`.

    Raises:
        ValueError, TypeError: a wrong argument, or a function that cannot be pickled. Nothing
            was started.
    """
    check_count("workers", workers)
    check_count("servers", servers)
    if threads_per_worker is not None:
        check_count("threads_per_worker", threads_per_worker)
    _check_options(on_worker_death, timeout_s, seed)
    told = for_servers(
        consistency if consistency is not None else Sync(reduce="mean"),
        workers,
        rules=rules,
        policies=policies,
    )
    factors = check_weights(worker_weight, workers)
    chosen = check_engine(engine)
    waits = check_settings("deadlines", deadlines, Deadlines)
    bounds = check_settings("limits", limits, Limits)
    if isinstance(on_worker_death, Restart):
        check_restart(waits)
    run_seed = seed if seed is not None else secrets.randbits(SEED_BITS)
    function = pack(train, args, kwargs if kwargs is not None else {})
    threads = threads_per_worker if threads_per_worker is not None else max(1, cores() // workers)

    def worker_payload(rank: int, coordinator: tuple[str, ...]) -> bytes:
        # A rank that comes later, by `Job.scale`, was given no weight.
        factor = factors[rank] if rank < len(factors) else 1.0
        config = WorkerConfig(rank, coordinator, run_seed, bounds, waits, factor=factor)
        return msgspec.msgpack.encode(config)

    plan = Plan(
        servers=servers,
        workers=workers,
        consistency=told.consistency,
        worker_payload=worker_payload,
        worker_code=function,
        server_code=told.code,
        worker_reference="" if args or kwargs else reference(train),
        server_reference=told.reference,
        on_worker_death=on_worker_death,
        threads_per_worker=threads,
        timeout_s=timeout_s,
        limits=bounds,
        deadlines=waits,
    )
    return Job(plan, chosen, run_seed)


def _check_options(on_worker_death: object, timeout_s: float | None, seed: int | None) -> None:
    if on_worker_death not in ("stop", "continue") and not isinstance(on_worker_death, Restart):
        raise ValueError(
            f'on_worker_death must be "stop", "continue" or ps.Restart(...), not '
            f"{on_worker_death!r}"
        )
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s must be above 0, not {timeout_s!r}")
    if seed is not None and (not isinstance(seed, int) or seed < 0):
        raise ValueError(f"seed must be an int of at least 0, not {seed!r}")


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
) -> Result:
    """Run a training function on workers, with its parameters on servers; returns at the end.

    Example:
        result = ps.run(train, workers=4, servers=2, consistency=ps.Async())

    Args:
        train: called as `train(worker, *args, **kwargs)` in each worker process. It travels by
            cloudpickle: no `__main__` guard is needed, and notebooks work.
        engine: what starts the processes; `ps.Local()` if None.
        consistency: when gradients are applied; `ps.Sync(reduce="mean")` if None. Its class need
            not be registered.
        worker_weight: for each rank, what its gradients are multiplied by, above 0; 1 each if
            None, and for workers that join later.
        seed: for random, numpy and torch on every rank and for the loader's order; a random one
            if None, told in the result.
        threads_per_worker: of numpy, torch and numba; max(1, cores // workers) if None.
        on_worker_death: "stop": the first worker that fails fails the run; "continue": the
            others go on without it; `ps.Restart(times)`: it is started again.
        timeout_s: the whole run's; None: no limit.
        rules: classes of your own rules that the servers may run; see `ps.CustomRule`.
        policies: classes of your own policies, and functions for `damping=`, that the servers may
            run; see `ps.Policy`.
        deadlines: how long each wait may take; `ps.Deadlines()` if None.
        limits: bounds on memory, messages and connections; `ps.Limits()` if None.
    Raises:
        ValueError, TypeError: a wrong argument, a policy that cannot work with this many workers,
            or a function that cannot be pickled. Nothing was started.
        WorkerFailed: a training function raised, or its process ended.
        ServerGone, CoordinatorGone: that process ended; the values are lost.
        RunTimeout: `timeout_s` was over.
    """
    return start(
        train,
        args=args,
        kwargs=kwargs,
        workers=workers,
        servers=servers,
        engine=engine,
        consistency=consistency,
        worker_weight=worker_weight,
        seed=seed,
        threads_per_worker=threads_per_worker,
        on_worker_death=on_worker_death,
        timeout_s=timeout_s,
        rules=rules,
        policies=policies,
        deadlines=deadlines,
        limits=limits,
    ).wait()


def handle_of(supervisor: Supervisor, seed: int) -> Handle:
    """A handle of what a supervisor runs, once its servers are up.

    Raises:
        ParamServeError: it has ended, or ended before it was up.
    """
    supervisor.wait_until_serving()
    return Handle.of(
        supervisor.addresses,
        supervisor.credentials,
        seed=seed,
        limits=supervisor.plan.limits,
        deadlines=supervisor.plan.deadlines,
        connect=supervisor.connect,
    )


def check_count(name: str, value: int, *, least: int = 1) -> None:
    """Raise `TypeError` for what is no int, `ValueError` for one below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def check_weights(weights: Sequence[float] | None, workers: int) -> tuple[float, ...]:
    """A weight for each rank; empty for None.

    Raises:
        ValueError: another number of them, or one that is not finite and above 0.
        TypeError: one is no number.
    """
    if weights is None:
        return ()
    found = tuple(weights)
    if len(found) != workers:
        raise ValueError(f"worker_weight has {len(found)} weights for {workers} workers")
    for rank, weight in enumerate(found):
        check_number(f"worker_weight of rank {rank}", weight, above=0.0)
    return tuple(map(float, found))


def check_engine(engine: Engine | None) -> Engine:
    """The engine, or `Local()` for None. Raises `TypeError` for what is none."""
    if engine is None:
        return Local()
    if isinstance(engine, type) or not hasattr(engine, "open"):
        raise TypeError(f"engine must be an engine (an object, as in ps.Local()), not {engine!r}")
    return engine
