"""`External` with an agent for each role: the part of whoever starts the processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from paramserve.config import TLS
from paramserve.engine.base import Event, Process, Role
from paramserve.engine.child import Bootstrap
from paramserve.engine.external import External
from paramserve.engine.external.fleet import ExternalFleet
from paramserve.engine.external.matching import ExternalProcess

TOKEN = "0123456789abcdef" * 4
WAIT_S = 30.0
SETTLE_S = 4.0

SCRIPT = """
import sys
sys.path[:] = {path!r}
from paramserve import agent
from paramserve.config import TLS

class Everything:
    def __contains__(self, entry):
        return True

entries = Everything() if {everything!r} else agent.ENTRIES
sys.exit(agent.run_agent(*{args!r}, {tls!r} and TLS(*{tls!r}), wait_s={wait_s!r}, entries=entries))
"""


def token_in(folder: Path) -> str:
    """A token file."""
    path = folder / "token"
    path.touch(0o600)
    path.write_text(TOKEN)
    return str(path)


def start_agent(
    address: str,
    token_file: str,
    train: str = "",
    rules: Sequence[str] = (),
    tls: TLS | None = None,
    *,
    everything: bool = False,
    stderr: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """What a shell, Slurm or systemd does.

    Args:
        everything: it runs any entry, not only those of paramserve.
    """
    files = None if tls is None else (tls.certificate, tls.key, tls.authority)
    script = SCRIPT.format(
        path=sys.path,
        everything=everything,
        args=(address, token_file, train, tuple(rules)),
        tls=files,
        wait_s=WAIT_S,
    )
    return subprocess.Popen([sys.executable, "-c", script], process_group=0, stderr=stderr)


@contextlib.contextmanager
def agents(
    count: int, address: str, token_file: str, *args: Any, **more: Any
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Agents that are started now, and have ended after the block."""
    started = [start_agent(address, token_file, *args, **more) for _ in range(count)]
    try:
        yield started
        for agent in started:
            agent.wait(WAIT_S)
    finally:
        end(started)


def end(started: list[subprocess.Popen[bytes]]) -> None:
    for agent in started:
        if agent.poll() is None:
            agent.kill()
        agent.wait()
        if agent.stderr is not None:
            agent.stderr.close()


OPEN: set[FleetWithAgents] = set()


def settle() -> None:
    """Wait until the transport's thread, which looks after TCP connections, has seen their end."""
    for thread in threading.enumerate():
        if thread.name == "paramserve-lost-hosts":
            thread.join(SETTLE_S)


class FleetWithAgents:
    """A fleet of `External` that starts an agent for each role."""

    shares_host = ExternalFleet.shares_host
    plain = ExternalFleet.plain

    def __init__(
        self, fleet: ExternalFleet, start: Callable[[str], subprocess.Popen[bytes]], settles: bool
    ) -> None:
        self.fleet = fleet
        self.tls = fleet.tls
        self.room_s = fleet.room_s
        self.launched: list[ExternalProcess] = []
        self.started: list[subprocess.Popen[bytes]] = []
        self._start = start
        self._settles = settles
        self._has_agent: set[str] = set()
        """Names of roles to come whose agents have been started."""
        OPEN.add(self)

    def launch(self, role: Role) -> Process:
        process = self.fleet.launch(role)
        self.launched.append(process)
        if role.name not in self._has_agent:
            self.started.append(self._start(self.fleet.address))
        self._has_agent.discard(role.name)
        return process

    def make_room(self, roles: Sequence[Role]) -> None:
        self._has_agent.update(role.name for role in roles)
        self.started += [self._start(self.fleet.address) for _ in roles]
        self.fleet.make_room(roles)

    def give_back(self, names: Sequence[str]) -> None:
        self.fleet.give_back(names)

    def events(self, timeout_s: float) -> Sequence[Event]:
        return self.fleet.events(timeout_s)

    def close(self) -> None:
        self.fleet.close()
        without_role = len(self.started) > len(self.launched)
        if without_role or any(process.agent is None for process in self.launched):
            for agent in self.started:
                agent.terminate()  # one that comes too late would look for the fleet for a while
        with contextlib.suppress(subprocess.TimeoutExpired):
            for agent in self.started:
                agent.wait(WAIT_S)
        end(self.started)
        OPEN.discard(self)
        if self._settles and not OPEN:
            settle()


@dataclass(frozen=True)
class WithAgents:
    """An `Engine` that passes the suite which is written for those that start processes."""

    token_file: str = ""
    train: str = ""
    rules: tuple[str, ...] = ()
    tls: TLS | None = None
    everything: bool = False
    wait_s: float = WAIT_S
    fleets: list[FleetWithAgents] = field(default_factory=list)

    def __repr__(self) -> str:
        return "External"

    def within(self, folder: Path) -> WithAgents:
        """The same with a token file in a folder."""
        return replace(self, token_file=token_in(folder))

    @property
    def external(self) -> External:
        return External(token_file=self.token_file, tls=self.tls, wait_s=self.wait_s)

    def open(self, roles: Sequence[str] = ()) -> FleetWithAgents:
        def start(address: str) -> subprocess.Popen[bytes]:
            return start_agent(
                address,
                self.token_file,
                self.train,
                self.rules,
                self.tls,
                everything=self.everything,
            )

        fleet = FleetWithAgents(self.external.open(roles), start, self.everything)
        self.fleets.append(fleet)
        return fleet

    def publish(self, name: str, data: bytes) -> Callable[[], None]:
        return self.external.publish(name, data)

    def find(self, name: str) -> bytes | None:
        return self.external.find(name)


def environment() -> dict[str, str]:
    """Of a command in a process of its own, with this one's modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def tell_what_it_has(boot: Bootstrap) -> None:
    """An entry that tells what the agent has put into its `Bootstrap`."""
    function, args, kwargs = boot.load()
    boot.report("load", f"{function.__module__}:{function.__name__} {args} {kwargs}".encode())
    boot.report("host", boot.host.encode())
    boot.report("plain", str(boot.plain).encode())
