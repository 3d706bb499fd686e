"""One start of a run's processes, and the clients of it in this process.

The fate of the processes is decided in `life.py`, and done by `supervisor.py`, which owns it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from paramserve.client import Client, Connection
from paramserve.config import NO_RANK, Credentials
from paramserve.engine.base import Fleet
from paramserve.errors import ConnectTimeout, ParamServeError
from paramserve.launch.overview import Overview
from paramserve.launch.plan import Plan, addresses_in
from paramserve.launch.processes import Processes
from paramserve.launch.reading import State
from paramserve.launch.roster import Roster
from paramserve.launch.scaling import Scaling
from paramserve.launch.waiting import Latch
from paramserve.messages import ServerBeat


@dataclass
class Readout:
    """What was read of the servers before they ended.

    Attributes:
        values: by group; None: they were not read.
        beats: what each server said then.
        table_files: by table, where its rows were written to.
    """

    values: dict[str, State] | None = None
    beats: list[ServerBeat] = field(default_factory=list)
    table_files: dict[str, str] = field(default_factory=dict)


class Attempt:
    """A coordinator, its servers and workers, from their start on.

    Args:
        fleet: where they are started.
        roster: of these processes.
        overview: of the run; here the line to this coordinator.
        why_fixed: says why the number of workers can no longer be changed; empty: it can.

    Attributes:
        served: set once coordinator and servers are up, and when nothing is to wait for that.
        clients: of this process; those that the program has closed go when the next one comes.
        readout: of its servers.
        collecting: the thread that reads them at the end; None: none does yet.
        collect_error: what ended that one.
    """

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet,
        roster: Roster,
        credentials: Credentials,
        overview: Overview,
        why_fixed: Callable[[], str],
    ) -> None:
        self.plan = plan
        self.served = Latch()
        self.roster = roster
        self.processes = Processes(plan, fleet, credentials, roster)
        self.scaling = Scaling(
            self.processes, roster, overview, plan.deadlines.request_s, why_fixed
        )
        self.clients: list[Client] = []
        self.readout = Readout()
        self.collecting: threading.Thread | None = None
        self.collect_error: BaseException | None = None
        self._clients_lock = threading.Lock()
        self._closed_for: BaseException | None = None
        self._overview = overview
        self._credentials = credentials

    # --- for the thread that watches ------------------------------------------------------------

    def use_directory(self, directory: str) -> None:
        """Have the processes, which share this machine, make their sockets there."""
        self.processes.directory = directory
        self.use_addresses(addresses_in(directory))

    def use_addresses(self, addresses: tuple[str, ...]) -> None:
        """The coordinator listens there, or will."""
        self.processes.addresses = self._overview.addresses = addresses

    def close_clients(self, why: BaseException) -> None:
        """Close all clients of this process, and end what connects one; there will be no others."""
        with self._clients_lock:
            self._closed_for = why
            clients, self.clients = self.clients, []
        reason = why if isinstance(why, ParamServeError) else None
        for client in clients:
            with contextlib.suppress(ParamServeError, ConnectionError):
                client.close(reason)

    # --- for any thread --------------------------------------------------------------------------

    def wait_until_serving(self) -> None:
        """Wait for `served`. Raises `ConnectTimeout`: it is not set in time."""
        deadlines, roster = self.plan.own_deadlines, self.roster
        while not self.served.wait(max(roster.start_by - time.monotonic(), 0.0) + deadlines.stop_s):
            if time.monotonic() < roster.start_by:  # it was put off: the coordinator came late
                continue
            raise ConnectTimeout(
                f"coordinator and servers were not up {deadlines.start_s:g} s after their start",
                fix="look at their output, or raise it with deadlines=ps.Deadlines(start_s=...) of "
                "the engine",
            )

    def connect(
        self, rank: int = NO_RANK, workers: int = 0, start_s: float | None = None
    ) -> Client:
        """A new client of processes that are up. Args and raises as `Supervisor.connect`, and the
        reason of `close_clients`."""
        deadlines = self.plan.own_deadlines
        if start_s is not None:
            deadlines = replace(deadlines, start_s=start_s)
        self._require_open()
        try:
            connection = Connection.join(
                self.processes.addresses,
                self._credentials,
                rank=rank,
                workers=workers,
                limits=self.plan.limits,
                deadlines=deadlines,
                may_retry=lambda: self._closed_for is None,
            )
        except ParamServeError:
            self._require_open()
            raise
        client = Client(connection)
        with self._clients_lock:
            why = self._closed_for
            if why is None:
                self.clients = [each for each in self.clients if not each.closed]
                self.clients.append(client)
                return client
        client.close()
        raise why

    def _require_open(self) -> None:
        """Raise why all clients were closed, if they were."""
        if self._closed_for is not None:
            raise self._closed_for
