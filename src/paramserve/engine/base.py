"""The contract of an engine: what it is asked to start, and what it tells about it.

An engine does not know what a coordinator, server or worker is. It runs an entry function in a
new process, hands it a payload and a secret that no other process can read, and tells what the
process reports and when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from msgspec import Struct

from paramserve.config import TLS, Deadlines, Limits


@dataclass(frozen=True)
class Role:
    """One process to start.

    Args:
        name: shown in process lists and messages, for instance "worker 1".
        entry: "package.module:function"; the function gets a `child.Bootstrap`.
        payload: what the entry is told. Only the process sees it.
        secret: the cluster's credentials, encoded. Only the process sees it.
        code: what the owner registered to run there (a training function, rules), pickled. It
            reaches the process by a channel that only this user can write to.
        environment: set on top of the fleet's before the entry's module is imported.
        directory: a folder that the process removes if the driver dies; empty: none.
        imports: modules that it will need and that take long to import. An engine that forks
            processes from a prepared one imports them there.
        label: what each line that it prints begins with; empty: nothing. An engine whose system
            shows lines in its own way, as Ray does, leaves that to it.
    """

    name: str
    entry: str
    payload: bytes = field(repr=False)
    secret: bytes = field(repr=False)
    code: bytes = field(default=b"", repr=False)
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str = ""
    imports: tuple[str, ...] = ()
    label: str = ""

    def __post_init__(self) -> None:
        module, colon, function = self.entry.partition(":")
        if not (module and colon and function):
            raise ValueError(f"entry must be 'package.module:function', got {self.entry!r}")


class Failure(Struct, frozen=True, array_like=True):
    """Body of the report "failed": the exception that left the entry."""

    kind: str
    """Name of its class."""
    text: str
    """Message of the exception, with its notes."""
    traceback: str
    """Traceback without the message at its end."""
    failed: str = ""
    fix: str = ""
    applied: str = ""
    """The parts of a `ParamServeError`, from which it can be made again."""


class Process(Protocol):
    """One started process. All methods may be called from any thread."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def exit_status(self) -> int | None:
        """None while it runs; its exit code; minus the signal's number if a signal ended it."""
        ...

    @property
    def why(self) -> str:
        """Why it has ended, where the engine knows more than the status; else empty."""
        ...

    def interrupt(self) -> None:
        """Ask it to end in order. Does nothing if it has ended."""
        ...

    def kill(self) -> None:
        """End it, and the processes that it started, at once. Does nothing if it has ended."""
        ...

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the exit status; None if it still runs after `timeout_s`."""
        ...


class Reported(NamedTuple):
    """The process called `Bootstrap.report`."""

    process: Process
    kind: str
    body: bytes


class Ended(NamedTuple):
    """The process has ended; all that it reported came before this."""

    process: Process
    status: int


Event = Reported | Ended


class Fleet(Protocol):
    """Processes that were started together and end together.

    Attributes:
        shares_host: whether the processes run on this machine, and see the files of this one.
        tls: certificates for the connections between its processes; None: no TLS.
    """

    shares_host: bool
    tls: TLS | None

    def launch(self, role: Role) -> Process:
        """Start a process; returns without waiting for it to be up.

        Raises:
            OSError: the process could not be started.
            ParamServeError: it cannot be started by this engine.
        """
        ...

    def make_room(self, roles: Sequence[Role]) -> None:
        """Wait until there is room for these roles besides those that `open` was told; each will be
        launched, or given back. May be called while other threads use the fleet.

        Raises:
            CannotPlace: there is no room for all of them. None is kept.
            RuntimeError: the fleet is closed.
        """
        ...

    def give_back(self, names: Sequence[str]) -> None:
        """The roles of these names will not be launched (again), until `make_room` names them: what
        is kept for them may go to others. Does nothing for one whose process runs."""
        ...

    def events(self, timeout_s: float) -> Sequence[Event]:
        """What has happened since the last call; waits up to `timeout_s` if nothing has.

        For one thread at a time.
        """
        ...

    def close(self) -> None:
        """Kill what still runs, wait for its end and free every descriptor. May be repeated.

        Not while another thread is in `events`.
        """
        ...


class Engine(Protocol):
    """Settings of an engine; one may serve many runs, also at the same time.

    Attributes:
        reads_refs: whether its workers are connected to the Ray that the driver is connected to, so
            that they can read a `ray.ObjectRef`.
    """

    reads_refs: ClassVar[bool]

    @property
    def threads_per_worker(self) -> int | None:
        """Threads of numpy, torch and numba in each worker; None: what fits their number."""
        ...

    @property
    def deadlines(self) -> Deadlines | None:
        """How long each wait of the processes may take; None: the defaults."""
        ...

    @property
    def limits(self) -> Limits | None:
        """Bounds on memory, messages and connections of the processes; None: the defaults."""
        ...

    def open(self, roles: Sequence[str] = (), environment: Mapping[str, str] = {}) -> Fleet:
        """A new, empty fleet. The caller closes it.

        Args:
            roles: names of those that will be launched, where the engine has to make room for all
                of them at once. A name may be launched again after its process has ended.
            environment: what the interpreters of workers start with, on top of the driver's
                environment; those of other roles may. `Role.environment` may come when an
                interpreter that waits has started long ago.
        Raises:
            CannotPlace: there is no room for them.
            ParamServeError: the engine cannot be reached or used. Nothing was started.
        """
        ...

    def publish(self, name: str, data: bytes) -> Callable[[], None]:
        """Let `find` of other processes return `data` under this name, while this process lives.

        Returns:
            What withdraws it; repeating is safe.
        Raises:
            NameTaken: a living process has published this name.
        """
        ...

    def find(self, name: str) -> bytes | None:
        """What a living process has published under this name; None: nothing."""
        ...
