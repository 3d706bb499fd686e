"""An agent: a process that somebody else starts, and that runs one role of a driver's run.

It connects to a driver with `engine=ps.External(...)`, says which training function and rules it
has, waits for a role, runs it in a child process (as `Local` does, so that the role's environment
is there before its interpreter starts, and so that it can be killed whatever it does), passes on
its reports, and exits with its status. If the driver goes, all ends at once.

What the driver sends is plain data. It may choose among `ENTRIES`, set the numbers in `VARIABLES`,
and have run what this agent was started with: nothing else.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from paramserve.cli_options import split_reference, tls_of, with_tls
from paramserve.config import TLS, Credentials

if TYPE_CHECKING:
    from paramserve.engine.base import Role
    from paramserve.engine.external import Assign, Order
    from paramserve.engine.local import LocalProcess
    from paramserve.transport.link import Link

ENTRIES = (
    "paramserve.coordinator:main",
    "paramserve.server:main",
    "paramserve.worker:main",
)
"""What an agent runs."""
VARIABLES = frozenset(
    {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"}
)
"""What a driver may set in the environment: others could make an interpreter run anything."""
WAIT_S = 60.0
"""How long an agent tries to reach its driver; as long as a role waits for an agent."""
TICK_S = 1.0
HANG_UP_S = 5.0
"""The driver hangs up as soon as it knows how the role ended."""


def run_agent(
    address: str,
    token_file: str | os.PathLike[str],
    train: str = "",
    rules: Sequence[str] = (),
    tls: TLS | None = None,
    *,
    wait_s: float = WAIT_S,
    entries: Container[str] = ENTRIES,
) -> int:
    """Offer this process to the driver at `address`, run one role, return its exit status.

    For the main thread of a process of its own: where the driver's connection ends, the process
    ends with it, at once (`child.EXIT_DRIVER_GONE`). SIGTERM and Ctrl-C end the role in order.

    Args:
        address: `host:port` where the driver listens.
        train: "module:function" of the training function, if this agent may be a worker.
        rules: "module:Class" of each rule that it may serve with.
        tls: this host's certificates; None: no TLS.
        wait_s: how long to try to reach the driver, which need not run yet.
        entries: what may be run.
    Returns:
        The role's exit code; 128 plus the signal's number if a signal ended it, as shells count; 0
        if the run ended without a role for this agent.
    Raises:
        ValueError: an address, a function or a rule that is none. Nothing was sent.
        ConnectTimeout: nobody answered in `wait_s`.
        NotAuthenticated: driver and agent have different tokens or certificates.
        ParamServeError: the token file cannot be used, or the driver refused this agent.
    """
    from paramserve.engine.external import AGENT, Offer
    from paramserve.messages import Hello, encode
    from paramserve.transport.link import Link
    from paramserve.transport.token_file import credentials_of

    for name in (*([train] if train else ()), *rules):
        split_reference(name)
    credentials = credentials_of(token_file, tls)
    link = Link.connect([f"tcp:{address}"], Hello(AGENT), credentials=credentials, timeout_s=wait_s)
    link.send(encode(Offer(os.getpid(), socket.gethostname(), train, tuple(rules))))
    status = _Agent(link, credentials, train, rules, entries).run()
    return status if status >= 0 else 128 - status


class _Agent:
    """A process that has offered itself; see `run_agent`."""

    def __init__(
        self,
        link: Link,
        credentials: Credentials,
        train: str,
        rules: Sequence[str],
        entries: Container[str],
    ) -> None:
        self._link = link
        self._lock = threading.Lock()
        """One thread at a time on the link."""
        self._credentials = credentials
        self._train = train
        self._rules = rules
        self._entries = entries
        self._process: LocalProcess | None = None
        self._stop = False
        self._finished = threading.Event()
        self._hung_up = threading.Event()

    def run(self) -> int:
        """Wait for a role and run it."""
        from paramserve.engine.child import EXIT_DRIVER_GONE, EXIT_FAILED, describe
        from paramserve.engine.external import Finished, Order, Report
        from paramserve.engine.local import Local

        try:
            assign, payload = self._wait_for_role()
        except ConnectionError:
            return EXIT_DRIVER_GONE
        if isinstance(assign, Order):
            self._link.close()
            return 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._interrupt())
        with contextlib.closing(Local().open()) as fleet:
            try:
                self._process = process = fleet.launch(self._role(assign, payload))
            except Exception as error:  # it is told, whatever it is
                threading.Thread(target=self._listen, daemon=True).start()
                failure = describe(error)
                self._send(Report("failed", len(failure)), failure)
                self._send(Finished(EXIT_FAILED))
                status = EXIT_FAILED
            else:
                status = self._watch(fleet, process)
        self._hung_up.wait(HANG_UP_S)
        self._link.close()
        return status

    def _watch(self, fleet: Any, process: LocalProcess) -> int:
        """Pass on what the role tells, until it has ended."""
        from paramserve.engine.base import Reported
        from paramserve.engine.external import Finished, Report, Started

        self._send(Started(process.pid))
        threading.Thread(target=self._listen, name="driver-watch", daemon=True).start()
        if self._stop:
            process.interrupt()
        while True:
            for event in fleet.events(TICK_S):
                if isinstance(event, Reported):
                    self._send(Report(event.kind, len(event.body)), event.body)
                else:
                    self._send(Finished(event.status))
                    return int(event.status)

    def _wait_for_role(self) -> tuple[Assign | Order, bytes]:
        """The role; or an order, which ends the agent: the run is over without it."""
        import numpy as np

        from paramserve.engine.external import Assign, Order
        from paramserve.messages import decoder

        while True:
            header = self._link.receive(TICK_S)
            if header is not None:
                break
        assign: Assign | Order = decoder(Assign | Order).decode(header)
        if isinstance(assign, Order):
            return assign, b""
        payload = np.empty(assign.payload_bytes, np.uint8)
        self._link.read_payload([payload] if assign.payload_bytes else [])
        return assign, payload.tobytes()

    def _role(self, assign: Assign, payload: bytes) -> Role:
        """The child's role. Raises `ParamServeError` for what this agent does not run."""
        import msgspec

        from paramserve.engine.base import Role
        from paramserve.engine.external import can_run, unseal
        from paramserve.engine.placed import Placed
        from paramserve.errors import NotAuthenticated, ParamServeError

        if assign.entry not in self._entries:
            raise NotAuthenticated(
                f"an agent was asked to run {assign.entry!r}, which is no role of paramserve",
                fix="run the same version of paramserve on both sides",
            )
        if not can_run(assign.entry, assign.reference, self._train, self._rules):
            raise ParamServeError(
                f"{assign.name} needs {assign.reference!r}, but this agent was started with "
                f"--train {self._train!r} and --rules {list(self._rules)}",
                fix="start agents with what the run needs",
            )
        for name, value in assign.environment.items():
            if name not in VARIABLES or not value.isdecimal():
                raise NotAuthenticated(
                    f"an agent was asked to set {name}={value!r}; it sets numbers for "
                    f"{', '.join(sorted(VARIABLES))}",
                    fix="run the same version of paramserve on both sides",
                )
        secret = unseal(self._credentials.token, assign.secret)
        if self._credentials.tls is not None:  # the driver's names files of its own host
            secret = msgspec.structs.replace(
                Credentials.decode(secret), tls=self._credentials.tls
            ).encode()
        placed = Placed(assign.entry, payload, _own_host(self._link), assign.reference)
        return Role(
            assign.name,
            "paramserve.engine.placed:main",
            msgspec.msgpack.encode(placed),
            secret,
            environment=assign.environment,
        )

    # --- the driver -------------------------------------------------------------------------------

    def _send(self, message: Any, body: bytes = b"") -> None:
        from paramserve.engine.external import Finished, as_payload
        from paramserve.messages import encode

        if isinstance(message, Finished):
            self._finished.set()
        try:
            with self._lock:
                self._link.send(encode(message), as_payload(body))
        except ConnectionError:
            _driver_gone()

    def _listen(self) -> None:
        """In a thread: obey orders; end the process when the driver is gone."""
        from paramserve.engine.external import Order
        from paramserve.errors import ParamServeError
        from paramserve.messages import decoder

        decode = decoder(Order).decode
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        try:
            while True:
                poll.poll()
                with self._lock:
                    orders = list(iter(lambda: self._link.receive(0), None))
                for order in orders:
                    self._obey(decode(order).what)
        except (ConnectionError, ParamServeError, ValueError):  # gone, closed, or talks nonsense
            self._hung_up.set()
            if not self._finished.is_set():
                _driver_gone()

    def _obey(self, what: str) -> None:
        process = self._process
        if process is None:
            return
        if what == "kill":
            process.kill()
        else:
            process.interrupt()

    def _interrupt(self) -> None:
        """A signal to this process: the role is to end in order."""
        self._stop = True
        if self._process is not None:
            self._process.interrupt()


def _driver_gone() -> NoReturn:
    """End now, whatever the main thread does; the child sees it, and ends likewise."""
    from paramserve.engine.child import EXIT_DRIVER_GONE

    os._exit(EXIT_DRIVER_GONE)


def _own_host(link: Link) -> str:
    """This host's address on the way to the driver."""
    with socket.socket(fileno=os.dup(link.fileno())) as same:
        host: str = same.getsockname()[0]
        return host


@click.command("agent")
@click.argument("address", metavar="HOST:PORT")
@click.option("--token-file", required=True, type=click.Path(), help="See `paramserve token`.")
@click.option("--train", default="", metavar="MODULE:FUNCTION", help="What workers run.")
@click.option("--rules", multiple=True, metavar="MODULE:CLASS", help="A rule of your own.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0, min_open=True),
    default=WAIT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to try to reach the driver.",
)
@with_tls
def agent_command(
    address: str,
    token_file: str,
    train: str,
    rules: tuple[str, ...],
    wait_s: float,
    **options: Any,
) -> None:
    """Be one process of a run with engine=ps.External(...), then exit.

    The driver at HOST:PORT says which: a server, a worker, or the coordinator. Modules are looked
    for in the present folder first. Start one agent for each process, and let what starts them
    start them again for the next run.
    """
    tls = tls_of(options)
    sys.path.insert(0, os.getcwd())
    raise click.exceptions.Exit(run_agent(address, token_file, train, rules, tls, wait_s=wait_s))
