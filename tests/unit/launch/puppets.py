"""An engine whose processes are puppets, and a run of two workers for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paramserve.config import Deadlines, Limits, RuleSpec
from paramserve.engine.base import Ended, Engine, Event, Process, Reported, Role
from paramserve.errors import CannotPlace
from paramserve.launch.plan import Plan
from paramserve.launch.supervisor import Supervisor

PLAN = Plan(
    servers=1,
    workers=2,
    consistency=RuleSpec("Async"),
    worker_payload=lambda rank, addresses, deadlines: f"{rank} at {addresses}".encode(),
    worker_code=b"the function",
    threads_per_worker=3,
)


class Puppet:
    """A process that ends when it is told to."""

    pid = 0
    why = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self.exit_status: int | None = None
        self.asked: list[str] = []
        self.deaf = False

    def interrupt(self) -> None:
        self.asked.append("interrupt")
        if not self.deaf:
            self.end(143)

    def kill(self) -> None:
        self.asked.append("kill")
        self.end(-9)

    def end(self, status: int) -> None:
        if self.exit_status is None:
            self.exit_status = status

    def wait(self, timeout_s: float) -> int | None:
        return self.exit_status


class Puppets:
    """An engine and its fleet: runs nothing; fails where it is told to."""

    tls = None
    reads_refs = False
    threads_per_worker: int | None = None
    deadlines: Deadlines | None = None
    limits: Limits | None = None

    def __init__(
        self, fails_at: str = "", close_fails: bool = False, shares_host: bool = True
    ) -> None:
        self.shares_host = shares_host
        self.fails_at = fails_at
        self.close_fails = close_fails
        self.roles: list[Role] = []
        self.processes: dict[str, Puppet] = {}
        self.told: set[Process] = set()
        self.closed = threading.Event()
        self.reports: deque[Event] = deque()
        self.room = 99
        self.kept: list[str] = []
        """Names for which room was made and not given back."""

    def open(self, roles: Sequence[str] = (), environment: Mapping[str, str] = {}) -> Puppets:
        self.opened_for = list(roles)
        return self

    def launch(self, role: Role) -> Process:
        if role.name == self.fails_at:
            raise OSError("no more processes")
        self.roles.append(role)
        self.processes[role.name] = Puppet(role.name)
        return self.processes[role.name]

    def make_room(self, roles: Sequence[Role]) -> None:
        if len(roles) > self.room:
            raise CannotPlace("the machine is full", fix="wait")
        self.kept += [role.name for role in roles]

    def give_back(self, names: Sequence[str]) -> None:
        self.kept = [name for name in self.kept if name not in names]

    def report(self, name: str, kind: str, body: bytes = b"") -> None:
        self.reports.append(Reported(self.processes[name], kind, body))

    def serve(self, *workers: str) -> None:
        """Let coordinator and servers be up, and these workers."""
        for name in self.processes:
            if not name.startswith("worker") or name in workers:
                self.report(name, "ready", msgspec.msgpack.encode(1))

    def events(self, timeout_s: float) -> Sequence[Event]:
        found: list[Event] = []
        while self.reports:
            found.append(self.reports.popleft())
        for process in list(self.processes.values()):
            if process.exit_status is not None and process not in self.told:
                self.told.add(process)
                found.append(Ended(process, process.exit_status))
        if not found:
            threading.Event().wait(min(timeout_s, 0.001))
        return found

    def close(self) -> None:
        self.closed.set()
        if self.close_fails:
            raise LookupError("close")


def started(plan: Plan, engine: Engine, **options: Any) -> Supervisor:
    """A supervisor that has launched everything."""
    supervisor = Supervisor(plan, engine, **options)
    supervisor.start()
    return supervisor
