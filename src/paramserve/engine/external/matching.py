"""Decides which agent gets which role, and tells a person what is missing. It sends nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from paramserve.engine.base import Role
from paramserve.engine.external.protocol import Ending, Offer
from paramserve.engine.placed import SERVER
from paramserve.transport.listener import Connection

AGENTS_TOLD_MAX: Final = 8
"""Agents that an error describes."""


def can_run(entry: str, reference: str, train: str, rules: Sequence[str]) -> bool:
    """Whether an agent that was started with `train` and `rules` has what a role refers to."""
    if not reference:
        return True
    if entry == SERVER:
        return set(reference.split(",")) <= set(rules)
    return reference == train


def command_for(address: str, token_file: str, entry: str = "", reference: str = "") -> str:
    """The line that starts an agent for a role."""
    words = ["paramserve", "agent", address, "--token-file", token_file]
    if reference and entry == SERVER:
        for rule in reference.split(","):
            words += ["--rules", rule]
    elif reference:
        words += ["--train", reference]
    return " ".join(words)


class ExternalProcess:
    """A role, with or (not yet) without an agent that runs it. See `base.Process`."""

    why = ""

    def __init__(self, role: Role, order: Callable[[ExternalProcess, Ending], None]) -> None:
        self.name = role.name
        self.role = role
        self.agent: Agent | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._order = order
        self._pid = 0
        self._status: int | None = None
        self._ended = threading.Event()

    def __repr__(self) -> str:
        return f"ExternalProcess({self.name!r}, pid={self._pid}, exit_status={self._status})"

    @property
    def pid(self) -> int:
        """On the agent's host; 0 before it runs."""
        return self._pid

    @property
    def exit_status(self) -> int | None:
        return self._status

    def interrupt(self) -> None:
        self._order(self, "stop")

    def kill(self) -> None:
        self._order(self, "kill")

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status, or None if it still runs after `timeout_s`."""
        self._ended.wait(max(0.0, timeout_s))
        return self._status

    def started(self, pid: int) -> None:
        self._pid = pid

    def ended(self, status: int) -> None:
        self._status = status
        self._ended.set()


@dataclass(eq=False)
class Agent:
    """A connected agent."""

    conn: Connection
    offer: Offer | None = None
    process: ExternalProcess | None = None
    """The role that it was given; it takes no second one."""
    kept_for: str = ""
    """Name of the role that it will be given; empty: any."""

    def fits(self, role: Role) -> bool:
        offer = self.offer
        if offer is None or self.process is not None or self.kept_for not in ("", role.name):
            return False
        return can_run(role.entry, role.reference, offer.train, offer.rules)

    def __str__(self) -> str:
        assert self.offer is not None
        started = [f"--train {self.offer.train}"] if self.offer.train else []
        started += [f"--rules {rule}" for rule in self.offer.rules]
        what = f"started with {' '.join(started)}" if started else "started without --train"
        doing = f"kept for {self.kept_for}" if self.kept_for else "free"
        doing = doing if self.process is None else f"runs {self.process.name}"
        return f"process {self.offer.pid} on {self.offer.host} ({what}; {doing})"


class Agents:
    """All agents that are connected, in the order in which they came."""

    def __init__(self) -> None:
        self._by_connection: dict[Connection, Agent] = {}

    def __iter__(self) -> Iterator[Agent]:
        return iter(tuple(self._by_connection.values()))

    def __getitem__(self, conn: Connection) -> Agent:
        return self._by_connection[conn]

    def add(self, conn: Connection) -> None:
        self._by_connection[conn] = Agent(conn)

    def remove(self, conn: Connection) -> Agent:
        """Forget one that has gone; returns it."""
        return self._by_connection.pop(conn)

    def best_for(self, role: Role) -> Agent | None:
        """Of those that can run it: one that is kept for it, then the one that can do least
        besides."""
        fitting = [agent for agent in self if agent.fits(role)]
        return min(fitting, key=_preference) if fitting else None

    def keep(self, roles: Sequence[Role]) -> bool:
        """Keep an agent for each of these roles, or none."""
        for role in roles:
            agent = self.best_for(role)
            if agent is None:
                self.unkeep([each.name for each in roles])
                return False
            agent.kept_for = role.name
        return True

    def unkeep(self, names: Sequence[str]) -> None:
        """Let agents that wait for these roles take others."""
        for agent in self:
            if agent.process is None and agent.kept_for in names:
                agent.kept_for = ""

    def told(self, address: str) -> str:
        """Such as "1 agent was connected to 10.0.0.1:7000: process 7 on b (...)"."""
        there = [str(agent) for agent in self if agent.offer is not None]
        listed = ", ".join(there[:AGENTS_TOLD_MAX])
        more = f", and {len(there) - AGENTS_TOLD_MAX} more" if len(there) > AGENTS_TOLD_MAX else ""
        agents = "1 agent was" if len(there) == 1 else f"{len(there)} agents were"
        return f"{agents} connected to {address}{': ' if there else ''}{listed}{more}"


def _preference(agent: Agent) -> tuple[bool, int]:
    assert agent.offer is not None
    return not agent.kept_for, bool(agent.offer.train) + len(agent.offer.rules)
