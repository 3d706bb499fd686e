"""Ways into a running cluster: by a handle, by name, by address, from the environment."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, overload

import msgspec
from msgspec import Struct, structs

from paramserve.client import Client, Connection, Table
from paramserve.config import TLS, Credentials, Deadlines, Limits, check_count, check_settings
from paramserve.engine.base import Engine
from paramserve.engine.local import Local
from paramserve.errors import (
    ClientClosed,
    ConnectTimeout,
    CoordinatorGone,
    ParamServeError,
    ServerGone,
    UnknownName,
    warn_user,
)
from paramserve.launch.arguments import check_folder
from paramserve.launch.config_file import settings_in
from paramserve.launch.overview import Overview
from paramserve.launch.reading import SNAPSHOT_POLL_S, Reader, Snapshot, Watching
from paramserve.messages import Record, ServerBeat, Status
from paramserve.observe.checkpoints import checkpoint_status
from paramserve.observe.status import RunStatus, of_cluster
from paramserve.transport.auth import credentials_of
from paramserve.transport.tcp import split_place
from paramserve.worker import Worker

HANDLE_CONNECT_S = 5.0
"""A handle is made of a cluster that is up: a coordinator that is silent for this long is gone."""
STATUS_S = 5.0
"""The same, for an answer of how the cluster stands."""
LOOK_S = 1.0
"""Seconds between two looks whether all workers have ended, while no snapshot comes."""
ADDRESS = "PARAMSERVE_ADDRESS"
TOKEN_FILE = "PARAMSERVE_TOKEN_FILE"
CONFIG_FILE = "PARAMSERVE_CONFIG"
TLS_FILES = ("PARAMSERVE_TLS_CERTIFICATE", "PARAMSERVE_TLS_KEY", "PARAMSERVE_TLS_AUTHORITY")


class _Packed(Struct, frozen=True, array_like=True):
    """A handle as bytes."""

    addresses: tuple[str, ...]
    credentials: Credentials
    seed: int
    limits: Limits
    deadlines: Deadlines
    served: bool = False
    """Whether `paramserve serve` runs the cluster."""


class Handle:
    """How to reach a cluster from any process: its addresses and what opens them.

    It can be pickled, sent to Ray tasks and actors and stored. It holds the cluster's secret: who
    has it may read and write all values. It shows it nowhere.

    What reads by it (`state_dict`, `table`, `snapshots`, ...) takes no rank, no worker waits for
    it, and it may be called from any thread. `close`, or the end of a `with` block, ends the
    connections that this needs.

    Attributes:
        addresses: the coordinator's.
    """

    def __init__(
        self,
        packed: _Packed,
        connect: Callable[[int, int], Client] | None = None,
        require: Callable[[], None] | None = None,
    ) -> None:
        self.addresses = packed.addresses
        self._packed = packed
        self._connect = connect if connect is not None else self._dial
        self._require = require
        self._lock = threading.RLock()
        self._reader: Reader | None = None
        self._overview: Overview | None = None
        self._watching: list[Client] = []
        """Clients of iterators over snapshots."""
        self._closed = 0
        """How often it was."""
        self._since = time.monotonic()

    @classmethod
    def of(
        cls,
        addresses: tuple[str, ...],
        credentials: Credentials,
        *,
        seed: int,
        limits: Limits,
        deadlines: Deadlines,
        connect: Callable[[int, int], Client] | None = None,
        require: Callable[[], None] | None = None,
        served: bool = False,
    ) -> Handle:
        """A handle of a cluster.

        Args:
            seed: of workers that join by it; equal for all.
            connect: how clients of a rank are made in this process.
            require: raises in this process once the cluster has ended.
            served: whether `paramserve serve` runs it.
        """
        packed = _Packed(addresses, credentials, seed, limits, deadlines, served)
        return cls(packed, connect, require)

    def __repr__(self) -> str:
        return f"Handle({self.addresses[0] if self.addresses else 'of nothing'!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle.decode, (self.encode(),)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End what this handle has opened to read by, iterators over snapshots too. It stays
        usable."""
        with self._lock:
            self._closed += 1
            reader, self._reader = self._reader, None
            overview, self._overview = self._overview, None
            watching, self._watching = self._watching, []
        for client in watching:
            client.close()
        if reader is not None:
            reader.client.close()
        if overview is not None:
            overview.close()

    def encode(self) -> bytes:
        """Everything, the secret too, as bytes."""
        return msgspec.msgpack.encode(self._packed)

    @classmethod
    def decode(cls, data: bytes) -> Handle:
        """What `encode` gave."""
        return cls(msgspec.msgpack.decode(data, type=_Packed))

    @overload
    def connect(self, rank: None = None, *, workers: None = None) -> Client: ...
    @overload
    def connect(self, rank: int, *, workers: int | None = None) -> Worker: ...

    def connect(self, rank: int | None = None, *, workers: int | None = None) -> Client | Worker:
        """Join the cluster, from any process that can reach it.

        Args:
            rank: of a worker: the cluster waits for it as for its own; None: a client that reads,
                assigns and, in Async, pushes, and that no worker waits for.
            workers: how many workers there should be; checked against the cluster.
        Returns:
            A `Worker` for a rank, otherwise a `Client`. Both are context managers that leave the
            cluster at the end.
        Raises:
            CoordinatorGone: no answer: the cluster has ended, or cannot be reached from here.
            ClientClosed: it was closed, in this process.
            RankTaken: a living worker has this rank.
            ParamServeError: the cluster is being ended, has no such rank, or has another number of
                workers. Nothing was changed: the rank is still free.
            ValueError: `rank` is none of `workers`.
        """
        if rank is None:
            return self._connect(-1, 0)
        _check_rank(rank, workers)
        return _worker(self._connect(rank, workers or 0), self._packed.seed)

    # --- reading -----------------------------------------------------------------------------

    def state_dict(self, name: str = "model") -> dict[str, Any]:
        """The present values of one group, as `model.load_state_dict` takes them.

        They are those of one moment on all servers, as of `Job.state_dict`.

        Tied tensors are there under all their names. What modules give as extra state
        (`get_extra_state`) is not: the servers do not have it.

        Args:
            name: of the group: that of `worker.optimizer`, or "default" for `client.define`.
        Returns:
            Tensors by name if torch is imported, otherwise arrays.
        Raises:
            UnknownName: nothing is defined in this group (yet), or it is a table. The rest as
                `connect`.
        """
        return self._reading().state_dict(name)

    def table(self, name: str) -> Table:
        """A keyed table, to be read and written from here.

        Raises:
            UnknownName: there is no such table (yet). The rest as `connect`.
        """
        return self._reading().table(name)

    def save_tables(self, folder: str | os.PathLike[str]) -> dict[str, str]:
        """Write every table, with its rule's state, to a file of its own, as
        `ps.Checkpoint(save_tables=)` has it done at the end of a run.

        Returns:
            The files' paths, by table.
        Raises:
            OSError: the folder cannot be made or written to. ParamServeError: a table could not be
                written, or pyarrow is missing. The rest as `connect`.
        """
        return self._reading().save_tables(check_folder(folder))

    def snapshots(
        self, every: int = 10, *, name: str = "model", keep: int = 8
    ) -> Iterator[Snapshot]:
        """Consistent copies of a group's values while it is trained, until all workers have ended,
        the cluster has, or the handle is closed; as `Job.snapshots`.

        Raises:
            UnknownName: all workers have ended, or the cluster has, and it had other groups only.
            ValueError: it is a table: `table` reads it. The rest as `connect`.
        """
        for option, value in (("every", every), ("keep", keep)):
            check_count(option, value)
        watching = Watching(name, every, keep, lambda: time.monotonic() - self._since)
        return self._follow(watching, self._closed)

    def status(self) -> RunStatus:
        """How the cluster stands; `seconds` counts from when its coordinator began.

        Groups are as the servers say now, so not behind what was read from them; where one of them
        is missing or does not answer, as of their last heartbeats (`Deadlines.heartbeat_s`).

        Raises:
            CoordinatorGone: no answer: the cluster has ended, or cannot be reached from here.
            ClientClosed: the run or cluster has ended, in this process.
        """
        with self._lock:
            current = self._status()
            current = structs.replace(current, servers=self._beats(current))
            report = current.checkpoints
            checkpoints = checkpoint_status(report) if report is not None else None
            following = self._following()
            return of_cluster(current, following.latest, checkpoints, following.logged)

    def _status(self) -> Status:
        """What the coordinator says now. Raises as `status`."""
        following = self._following()
        if self._require is None:
            return following.fresh(STATUS_S)
        self._require()
        try:
            return following.fresh(STATUS_S)
        except CoordinatorGone:  # the run may go on from a checkpoint, with another one
            self._require()
            following.begin_anew()
            following.addresses = self.addresses
            return following.fresh(STATUS_S)

    def _beats(self, status: Status) -> tuple[ServerBeat, ...]:
        """What the servers say now, or else what they told the coordinator last."""
        if status.silent_servers or len(status.servers) < max(status.expected_servers, 1):
            return status.servers
        try:
            beats = self._reading().client.connection.reports(STATUS_S)
        except ParamServeError:
            return status.servers
        return tuple(beats) if len(beats) == len(status.servers) else status.servers

    def metrics(self) -> list[Record]:
        """What workers have logged by `worker.log`, as far as the coordinator still has it
        (`Limits.log_records_max`), in the order in which it came in. Raises as `status`."""
        with self._lock:
            self._status()
            return list(self._following().records)

    def _reading(self) -> Reader:
        """What reads by this handle. Raises as `connect`."""
        with self._lock:
            if self._reader is None or self._reader.client.closed:
                self._reader = Reader(self._connect(-1, 0))
            return self._reader

    def _following(self) -> Overview:
        if self._overview is None:
            packed = self._packed
            self._overview = Overview(
                self.addresses,
                packed.credentials,
                packed.limits,
                packed.deadlines,
                served=packed.served,
            )
        return self._overview

    def _follow(self, watching: Watching, closed: int) -> Iterator[Snapshot]:
        """
        Args:
            closed: how often this handle was closed before.
        """
        look_at = 0.0
        over = False
        opened: list[Client] = []

        def connect() -> Client:
            opened.append(self._connect(-1, 0))
            with self._lock:
                self._watching.append(opened[-1])
            return opened[-1]

        try:
            while self._closed == closed:
                try:
                    snapshot = watching.take(connect)
                except (CoordinatorGone, ServerGone, ClientClosed):
                    if not opened:
                        raise
                    _require_group(watching)
                    return
                if self._closed != closed:
                    return
                if snapshot is not None:
                    if over:  # a worker may have come again
                        over, look_at = False, 0.0
                    yield snapshot
                elif over:  # and nothing has come since the last worker left
                    _require_group(watching)
                    return
                elif time.monotonic() >= look_at:
                    over = self._over(closed)
                    look_at = time.monotonic() + LOOK_S
                else:
                    time.sleep(SNAPSHOT_POLL_S)
        finally:
            with self._lock:
                self._watching = [each for each in self._watching if each not in opened]
            for client in opened:
                client.close()

    def _over(self, closed: int) -> bool:
        """Whether all workers have ended, or this handle was closed meanwhile. A cluster that
        is gone is told by the next question for a snapshot."""
        with self._lock, contextlib.suppress(ParamServeError):
            return self._closed != closed or of_cluster(self._status(), {}).state == "finished"
        return False

    def _dial(self, rank: int, workers: int) -> Client:
        """Join the cluster as another client; the error says whether it is gone or not complete
        yet."""
        try:
            connection = Connection.join(
                self.addresses,
                self._packed.credentials,
                rank=rank,
                workers=workers,
                timeout_s=HANDLE_CONNECT_S,
                limits=self._packed.limits,
                deadlines=self._packed.deadlines,
            )
            return Client(connection)
        except ConnectTimeout as error:
            if error.__cause__ is None:  # it answers: servers of it are missing
                error.fix = "start the missing servers, then attach again"
                raise
            raise CoordinatorGone(
                f"the cluster at {', '.join(self.addresses)} does not answer: {error.failed}",
                fix="look whether it runs, at its address, and whether a firewall is in between; a "
                "handle lives as long as its cluster",
            ) from error


def _require_group(watching: Watching) -> None:
    unknown = watching.unknown()
    if unknown is not None:
        raise unknown


def attach(
    name: str,
    *,
    engine: Engine | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls: TLS | None = None,
) -> Handle:
    """Reach a running cluster without being one of its workers: to read it, save it, watch it.

    Example:
        with ps.attach("ps0.example:5555", token_file="token") as cluster:
            model.load_state_dict(cluster.state_dict())

    Args:
        name: of a cluster that another process has started as `ps.Cluster(name=...)`; or the
            address of the first server of `paramserve serve`: `host:port`, or `unix:<path>`.
        engine: of a name: what it was started with: with `ps.Local()` (if None) on this machine by
            this user, with `ps.OnRay("auto")` anywhere on the same Ray cluster.
        token_file: of an address: the cluster's token; needed for `host:port`.
        tls: of an address: certificates; None: no TLS.
    Raises:
        UnknownName: no living cluster has this name there.
        CoordinatorGone: no answer from the address for 5 s. ConnectTimeout: servers of the cluster
            are missing. NotAuthenticated: the token or a certificate does not match.
        ValueError: an argument that does not belong to a name, or to an address.
    """
    if ":" in name:
        return _attach_to(name, engine, credentials_of(token_file, tls))
    if token_file is not None or tls is not None:
        raise ValueError(
            f"token_file and tls are for an address (host:port or unix:<path>), and {name!r} is "
            "the name of a cluster of ps.Cluster(name=...), which needs neither"
        )
    where = engine if engine is not None else Local()
    data = where.find(name)
    if data is None:
        raise UnknownName(
            f"no cluster named {name!r} was found by {where!r}",
            fix="start it with ps.Cluster(name=..., engine=...), give the same engine here, and "
            "keep the process that started it",
        )
    return Handle.decode(data)


def _attach_to(address: str, engine: Engine | None, credentials: Credentials) -> Handle:
    if engine is not None:
        raise ValueError(f"engine is for the name of a cluster, and {address!r} is an address")
    addresses = (full_address(address),)
    handle = Handle.of(
        addresses, credentials, seed=0, limits=Limits(), deadlines=Deadlines(), served=True
    )
    handle._reading()  # an address or a token that is wrong is told here
    return handle


def connect(
    address: str,
    *,
    rank: int | None = None,
    workers: int | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls: TLS | None = None,
    seed: int = 0,
    timeout_s: float | None = None,
    deadlines: Deadlines | None = None,
    limits: Limits | None = None,
) -> Worker:
    """Join a cluster of `paramserve serve` as a worker: from torchrun, Slurm, Kubernetes, anywhere.

    Example:
        with ps.connect("ps0.example:5555", rank=3, workers=8, token_file="token") as worker:
            train(worker)

    Args:
        address: of the first server: `host:port`, or `unix:<path>`.
        rank: 0 to `workers` - 1, each once.
        workers: how many there are; checked against the cluster. None: not checked.
        token_file: the cluster's token; see `paramserve token`. Needed for `host:port`.
        tls: certificates; None: no TLS.
        seed: for the loader's order; the same number on all ranks.
        timeout_s: until the cluster answers and all its servers are there; `deadlines.start_s` if
            None. After 10 s a warning says what is missing.
    Raises:
        ConnectTimeout: no answer from there in time, or servers of the cluster are missing.
        NotAuthenticated: the token or a certificate does not match.
        RankTaken: a living worker has this rank. It is free again when that has left or died.
        ParamServeError: the cluster has no such rank, or another number of workers. Nothing was
            changed: the rank is still free.
        ValueError: a wrong argument.
    """
    if rank is None:
        raise ValueError("a worker needs its rank: ps.connect(address, rank=...)")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ValueError(f"rank must be an int of at least 0, not {rank!r}")
    _check_rank(rank, workers)
    connection = Connection.join(
        full_address(address),
        credentials_of(token_file, tls),
        rank=rank,
        workers=workers or 0,
        timeout_s=timeout_s,
        limits=check_settings("limits", limits, Limits),
        deadlines=check_settings("deadlines", deadlines, Deadlines),
        tells=True,
    )
    client = Client(connection)
    return _worker(client, seed)


def _worker(client: Client, seed: int) -> Worker:
    """The worker of a rank that has joined; warns where the others went on past its older
    incarnation."""
    for group, ended in list(client.steps.overtaken.items())[:1]:  # the others are much the same
        warn_user(
            f"rank {client.rank} comes back after it counted as dead or had left, and the others "
            f"have gone on without it: it had ended at clock {ended} of group {group!r} and goes "
            f"on at {client.steps.clocks[group]}, where the slowest of them is. worker.loader "
            "leaves out its batches of the clocks between. To have a rank that died go on where it "
            "was, under every policy, serve with --restart SECONDS (restart_s=): it is waited for "
            "so long"
        )
    return Worker(client, seed)


def _check_rank(rank: int, workers: int | None) -> None:
    if workers is not None and rank >= workers:
        raise ValueError(f"rank {rank} of {workers} workers: ranks are 0 to {workers - 1}")


def from_environment(environment: Mapping[str, str] | None = None, *, seed: int = 0) -> Worker:
    """Join as the worker that the environment describes.

    It reads RANK and WORLD_SIZE (as torchrun sets them), PARAMSERVE_ADDRESS,
    PARAMSERVE_TOKEN_FILE and, for TLS, PARAMSERVE_TLS_CERTIFICATE, PARAMSERVE_TLS_KEY and
    PARAMSERVE_TLS_AUTHORITY. PARAMSERVE_CONFIG may name the file that servers have as --config: its
    tables [deadlines] and [limits] hold.

    Args:
        environment: instead of this process's.
    Raises:
        ValueError: a variable is missing or no number, or the file has a wrong name or value; and
            as `connect`. OSError: the file cannot be read.
    """
    variables = environment if environment is not None else os.environ
    return connect(**described_by(variables), seed=seed)


def described_by(variables: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `connect` that an environment has.

    Raises:
        ValueError: a variable is missing or no number, or the file of settings is wrong.
        OSError: that cannot be read.
    """
    config = variables.get(CONFIG_FILE)
    files = [variables.get(name, "") for name in TLS_FILES]
    if any(files) and not all(files):
        raise ValueError(f"TLS needs all of {', '.join(TLS_FILES)}")
    return {
        "address": _variable(variables, ADDRESS),
        "rank": _number(variables, "RANK"),
        "workers": _number(variables, "WORLD_SIZE"),
        "token_file": variables.get(TOKEN_FILE) or None,
        "tls": TLS(files[0], files[1], files[2]) if all(files) else None,
        **(settings_in(config) if config else {}),
    }


def _variable(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise ValueError(f"the environment has no {name}: set it, or use ps.connect(...)")
    return value


def _number(environment: Mapping[str, str], name: str) -> int:
    value = _variable(environment, name)
    if not value.isdecimal():
        raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
    return int(value)


def full_address(address: str) -> str:
    """`host:port` as `tcp:host:port`; an address with its scheme as it is.

    Raises:
        ValueError: it is neither.
    """
    if address.startswith(("unix:", "tcp:")):
        return address
    try:
        split_place(address)
    except ValueError:
        raise ValueError(
            f"{address!r} is no address: expected HOST:PORT, such as 127.0.0.1:5555, or "
            "[HOST]:PORT with an IPv6 address"
        ) from None
    return f"tcp:{address}"
