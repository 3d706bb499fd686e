"""Limits, deadlines and the settings that travel to a process when it starts, and checks of them.

Every wait, queue and buffer in the package has its limit here, by name, with its unit last.
"""

from __future__ import annotations

import math
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct


class Limits(Struct, frozen=True):
    """Bounds that no peer can exceed. The defaults fit one machine."""

    header_bytes_max: int = 16 << 20
    """A frame's header, once the peer is known (a `Define` names every tensor of a block)."""
    handshake_bytes_max: int = 4096
    """What an unknown peer may send before it is known."""
    handshake_timeout_s: float = 5.0
    """How long an unknown peer may take to say who it is."""
    handshakes_max: int = 64
    """Unknown peers at one time; past it the oldest of the address that has most is closed."""
    payload_bytes_max: int = 16 << 30
    """A frame's payload over TCP."""
    arena_bytes_max: int = 64 << 30
    """All arenas of one client, as one server maps them, or mirrors those of another host."""
    arenas_max: int = 32
    """Most arenas of one client."""
    outstanding_max: int = 256
    """Requests of one client that one shard may hold unanswered."""
    clients_max: int = 4096
    """Clients of one shard."""
    connections_max: int = 8192
    """Connections of one listener."""
    send_buffer_bytes_max: int = 256 << 20
    """Replies that a peer has not read; past it nothing is read from the peer until it reads."""
    snapshots_max: int = 64
    """Snapshots kept for a reader; past it the oldest is dropped and counted."""
    log_records_max: int = 10_000
    """`worker.log` records kept by the coordinator for each worker, and by a worker until they are
    sent; the oldest go first and are counted."""
    log_bytes_max: int = 64 << 20
    """Bytes of these records, at the coordinator and in each worker."""
    reduce_bytes_max: int = 1 << 20
    """Largest value that `worker.all_reduce` takes, in bytes."""
    token_grace_s: float = 600.0
    """When a server's token file gets another token, peers may come with the one before for this
    long; 0.0: no longer. Connections that stand are not ended."""
    poll_s_max: float = 1e-3
    """How long a wait for an answer or a request polls, before it sleeps, at most; 0.0: it sleeps
    at once. Less where a wake-up costs little on this machine, or the wait is likely to be long."""


MAY_BE_ZERO: Final = frozenset({"poll_s_max", "token_grace_s"})
"""Fields of `Limits` for which 0 turns off what they bound."""


class Deadlines(Struct, frozen=True):
    """How long each wait may take, in seconds."""

    request_s: float = 120.0
    """Push, pull, define and tick, unless the call names its own `timeout_s`."""
    busy_s: float = 1800.0
    """Longest wait of a request, like `request_s`, for workers that live and do not step, as while
    they evaluate: of a push or tick, or an assign, fetch, drain or rest behind one. Likewise of a
    barrier, an all-reduce, a wait for rank 0's define, and one for a table that another worker
    loads (`load_tables`). As long as torch.distributed waits. A server that does not say which
    workers it waits for has `stall_s` more to do so."""
    start_s: float = 60.0
    """Longest time from the launch of the processes until all servers are known."""
    stop_s: float = 1.0
    """Time from the request to stop until the processes that remain are killed."""
    reconnect_s: float = 1.0
    """A broken connection to a server or the coordinator is tried again this long where no process
    listens, and for `stall_s` where there is no answer; then that is gone."""
    resend_s: float = 0.25
    """A shard repeats what the lead shard has not answered."""
    heartbeat_s: float = 1.0
    """Time between two heartbeats of a process; below `stall_s`."""
    stall_s: float = 15.0
    """Longest time without a heartbeat: after it a process counts as dead."""
    lost_s: float = 3.0
    """Longest time without a sign of life from the kernel of another host: after it the host counts
    as lost, and all its processes with it."""
    restart_s: float = 60.0
    """A worker that is being restarted is waited for this long under Sync."""
    retire_s: float = 60.0
    """A worker that a run is to do without has this long to end its function; then it is ended."""
    exit_s: float = 30.0
    """A worker whose function has returned has this long for exit handlers; then it is killed."""


BUFFERS = ".buffers"
"""Ends the names of groups of values that no step trains: buffers, frozen and untrained parameters,
marks of ours."""
LOOSE = ".extra."
"""Begins the names of parameters that an optimizer has and its model has not: no name in a model
does, so that they stay out of state dicts."""
LABELS = " (labels)"
"""Ends the name of a table with the strings of another table's keys, behind that one's name."""


def is_trained(group: str) -> bool:
    """Whether steps train the group of this name."""
    return not group.endswith((BUFFERS, LABELS))


FIRST_OPTIMIZER = ""
"""Names, in `load_state=`, the first optimizer that is adopted, whatever its own name."""
NO_RANK = -1
"""Rank of a client that is not a worker."""
CLUSTER_BYTES = 16
"""Bytes of the random number that tells a cluster from every other one."""


class TLS(Struct, frozen=True):
    """Certificates for every TCP connection of a cluster; each side checks the other's.

    Args:
        certificate: path of this process's certificate chain, PEM, for servers and clients alike.
        key: path of its private key, PEM, without a password.
        authority: path of the certificates that the other side's must be signed by, PEM.
        check_host: whether a server's certificate must name the host or address that was dialled.
    """

    certificate: str
    key: str
    authority: str
    check_host: bool = True


class Credentials(Struct, frozen=True):
    """What opens a cluster's TCP ports. Unix sockets need none: there the user's id is checked."""

    token: bytes = b""
    tls: TLS | None = None

    def __repr__(self) -> str:
        """Representation without the secret: it must be in no log."""
        return f"Credentials(tls={self.tls is not None})"

    def encode(self) -> bytes:
        """Credentials for an engine, which hands them to the processes that it starts."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Credentials:
        """What `encode` gave."""
        return msgspec.msgpack.decode(data, type=cls)


NO_CREDENTIALS = Credentials()


class RuleSpec(Struct, frozen=True):
    """A rule by name: what crosses a process instead of code."""

    name: str
    options: dict[str, float | str | bool] = {}


class CodecSpec(Struct, frozen=True):
    """A codec by name."""

    name: str
    options: dict[str, int | float | str | bool] = {}


class ConsistencySpec(Struct, frozen=True):
    """A consistency policy by name, with what clients need to know that do not have its class."""

    name: str
    options: dict[str, int | float | str | bool | None] = {}
    collects: bool = False
    """Whether gradients wait for their clock's decision."""
    skips: bool = False
    """Whether a gradient with NaN or Inf is skipped, not refused."""
    dense_only: bool = False
    """Whether no table can have it. It follows from the name, and checkpoints of older versions do
    not have it: it makes no two policies differ."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ConsistencySpec):
            return NotImplemented
        mine = self.name, self.options, self.collects, self.skips
        return mine == (other.name, other.options, other.collects, other.skips)


class Resumed(Struct, frozen=True):
    """A checkpoint that a run goes on from, when it does."""

    clocks: dict[str, int]
    """Clock of each group."""
    age_s: float
    nbytes: int
    pause_s: float
    """The longest that a server executed nothing for it."""


class CheckpointPlan(Struct, frozen=True):
    """Where and when a run writes checkpoints, and which one it goes on from."""

    folder: str = ""
    """Where they are written; empty: none are."""
    run: str = ""
    """The name of the run, for others that would write there."""
    claimed: bool = False
    """Whether the driver has left that name there: the coordinator has to find it."""
    seed: int | None = None
    """Seed of the run, which a run resumed from a checkpoint takes over; None: it has none."""
    every_s: float = 0.0
    """Seconds between two; 0: not by time."""
    every_steps: int = 0
    """Clocks of the slowest worker between two; 0: not by clocks."""
    keep: int = 3
    """How many are kept."""
    full_every: int = 8
    """Every so many one, tables are written whole."""
    resume_folder: str = ""
    """Where the one is that the run goes on from; empty: it begins anew."""
    resume: str = ""
    """The name of that one."""
    resumed: Resumed | None = None
    """That one, if it lies where this run writes its own: the last one until there is another."""
    restore_s: float = 0.0
    """How much later than `Deadlines.start_s` the servers may be up: they read it first."""


class CoordinatorConfig(Struct, frozen=True):
    """What the coordinator is told when it starts."""

    servers: int
    workers: int
    directory: str
    """Folder (0700) for Unix sockets; the coordinator listens at `<directory>/c.sock`. Empty: the
    sockets have no place in the file system."""
    consistency: ConsistencySpec
    tcp_bind: str = ""
    """`host:port` to listen on besides the Unix socket; empty: no TCP."""
    advertise: str = ""
    """Host by which others reach `tcp_bind`, where that is another one, as with 0.0.0.0."""
    restarts: bool = False
    """Whether a worker that died will be started again: Sync waits `restart_s` for it."""
    cluster: bytes = b""
    """What tells this cluster from others at the same addresses; `CLUSTER_BYTES` long."""
    limits: Limits = Limits()
    deadlines: Deadlines = Deadlines()
    checkpoints: CheckpointPlan = CheckpointPlan()


class ServerConfig(Struct, frozen=True):
    """What a server is told when it starts."""

    shard: int
    servers: int
    workers: int
    coordinator: tuple[str, ...]
    """Addresses: `unix:<path>` or `tcp:<host>:<port>`."""
    directory: str
    """Folder of the run; see `CoordinatorConfig.directory`."""
    consistency: ConsistencySpec
    tcp_bind: str = ""
    """`host:port` to listen on besides the Unix socket; empty: no TCP."""
    advertise: str = ""
    """Host that peers connect to; see `CoordinatorConfig.advertise`."""
    cluster: bytes = b""
    """Random number of the cluster; see `CoordinatorConfig.cluster`."""
    limits: Limits = Limits()
    deadlines: Deadlines = Deadlines()
    checkpoints: CheckpointPlan = CheckpointPlan()


Settings = TypeVar("Settings", Deadlines, Limits)


def check_count(name: str, value: Any, *, least: int = 1) -> None:
    """Raise `TypeError` for what is no int, `ValueError` for one below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def check_number(name: str, value: Any, *, above: float | None = None, least: float = 0.0) -> None:
    """Raise `TypeError` or `ValueError` unless it is finite, and above `above` or not below
    `least`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {value!r}")
    low = value > above if above is not None else value >= least
    if not (low and value < math.inf):
        what = f"above {above}" if above is not None else f"at least {least}"
        raise ValueError(f"{name} must be {what} and finite, not {value!r}")


def check_setting(name: str, kind: type[Deadlines | Limits], field: str, number: Any) -> None:
    """Raise `TypeError` or `ValueError` for what cannot be this field of `kind`, by `name`."""
    whole = isinstance(getattr(kind(), field), int)
    if isinstance(number, bool) or not isinstance(number, int if whole else (int, float)):
        what = "an int" if whole else "a number"
        raise TypeError(f"{name} must be {what}, not {number!r}")
    zero = field in MAY_BE_ZERO
    if not (0 < number < math.inf or (zero and number == 0)):
        least = "at least 0" if zero else "above 0"
        raise ValueError(f"{name} must be {least} and finite, not {number}")


def check_settings(name: str, value: Settings | None, kind: type[Settings]) -> Settings:
    """The settings, or the defaults for None.

    Raises:
        TypeError: it is of another type, or one of its numbers is.
        ValueError: a number is too small, not finite, or a heartbeat would come too late.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be ps.{kind.__name__}(...), not {value!r}")
    for field in msgspec.structs.fields(kind):
        check_setting(f"{name}: {field.name}", kind, field.name, getattr(value, field.name))
    if isinstance(value, Deadlines) and not value.heartbeat_s < value.stall_s:
        raise ValueError(
            f"{name}: heartbeat_s must be below stall_s, not {value.heartbeat_s} and "
            f"{value.stall_s}: every process would count as dead"
        )
    return value


def check_restart(deadlines: Deadlines) -> None:
    """Check the deadlines of a run that restarts workers.

    Raises:
        ValueError: the others would not wait as long as a restart may take.
    """
    if not deadlines.restart_s < deadlines.request_s:
        raise ValueError(
            f"deadlines: restart_s must be below request_s, not {deadlines.restart_s} and "
            f"{deadlines.request_s}: the others' pushes would time out before the worker is back"
        )


def check_tls(value: Any) -> TLS | None:
    """Certificates, or None. Raises `TypeError` for what is neither."""
    if value is None or isinstance(value, TLS):
        return value
    raise TypeError(
        "tls must be ps.TLS(certificate=..., key=..., authority=...), with the paths of three "
        f"files (docs/security.md#tls: how to make them for tests), not {value!r}"
    )
