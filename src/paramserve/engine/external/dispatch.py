"""Hands roles to agents, follows what these tell of them, and gives up what nobody takes.

All of it runs in the thread of one event loop; `fleet` passes on what other threads ask for.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from paramserve.config import Credentials, Limits
from paramserve.engine.base import Ended, Event, Reported, Role
from paramserve.engine.child import EXIT_FAILED, EXIT_TERMINATED, describe
from paramserve.engine.external.matching import (
    AGENTS_TOLD_MAX,
    Agent,
    Agents,
    ExternalProcess,
    command_for,
)
from paramserve.engine.external.protocol import (
    AGENT,
    Assign,
    Ending,
    Offer,
    Order,
    Report,
    Started,
    as_payload,
    decode_agent,
)
from paramserve.engine.external.sealing import seal
from paramserve.errors import CannotPlace, ProtocolError
from paramserve.messages import Hello, encode
from paramserve.transport.framing import ByteArray
from paramserve.transport.listener import Connection, Listener, listen_tcp

logger = logging.getLogger("paramserve")

KILL_S: Final = 5.0
"""An agent that has not said for this long that its role was killed is cut off, and so ends."""
REMIND_S: Final = 1.0
"""After this long without enough agents the log says how to start one."""


@dataclass(eq=False)
class Request:
    """Roles for which agents are to be kept, and who waits for that."""

    roles: list[Role]
    done: Future[None]

    def refuse(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Events:
    """What has happened, from the loop's thread to the one that asks."""

    def __init__(self) -> None:
        self._found: deque[Event] = deque()
        self._news = threading.Condition()

    def tell(self, event: Event) -> None:
        with self._news:
            self._found.append(event)
            self._news.notify_all()

    def end(self, process: ExternalProcess, status: int) -> None:
        """Let the process have ended, and tell it in the same moment."""
        with self._news:
            process.ended(status)
            self._found.append(Ended(process, status))
            self._news.notify_all()

    def take(self, timeout_s: float) -> Sequence[Event]:
        """What is new; waits up to `timeout_s` if nothing is."""
        with self._news:
            self._news.wait_for(lambda: self._found, timeout_s)
            found = tuple(self._found)
            self._found.clear()
        return found


class Dispatcher:
    """The listener's `transport.Handler`, and whoever gives it roles to hand out.

    Args:
        token_file: where agents find the token, for messages.
        wait_s: how long a role waits for an agent.
        roles: how many processes the run has, for messages; 0: nobody knows.

    Attributes:
        address: `host:port` where agents connect.
        running: what was launched and has not ended. Others add to it, before `enqueue`.
        events: what has happened.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        credentials: Credentials,
        token_file: str,
        wait_s: float,
        roles: int,
    ) -> None:
        self.address = ""
        self.running: set[ExternalProcess] = set()
        self.events = Events()
        self._loop = loop
        self._credentials = credentials
        self._token_file = token_file
        self._wait_s = wait_s
        self._roles = roles
        self._agents = Agents()
        self._waiting: list[ExternalProcess] = []
        self._requests: list[Request] = []
        self._reminded = False
        self._listener: Listener | None = None

    async def listen(self, bind: str) -> None:
        """Await agents. Raises `ParamServeError`: the port is taken."""
        host, _, port = bind.rpartition(":")
        self._listener, self.address = await listen_tcp(
            host.strip("[]"), int(port), self._credentials, self, Limits()
        )

    async def hang_up(self) -> None:
        """End all agents, and tell those who wait for one that none comes."""
        for agent in self._agents:
            if agent.process is None:
                agent.conn.send(encode(Order("stop")))
        if self._listener is not None:
            self._listener.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the handler is told of closed connections in the loop's next turn
        for process in tuple(self.running):
            self._end(process, -signal.SIGKILL)
        for request in self._requests:
            request.refuse(RuntimeError("this fleet is closed"))

    def enqueue(self, process: ExternalProcess) -> None:
        """Find an agent for what was launched, for as long as `wait_s`."""
        self._waiting.append(process)
        process.timer = self._loop.call_later(self._wait_s, self._give_up, process)
        if not self._reminded:
            self._reminded = True
            self._loop.call_later(REMIND_S, self._remind)
        self._match()

    def free(self, names: Sequence[str]) -> None:
        """Let agents that wait for these roles take others."""
        self._agents.unkeep(names)
        self._match()

    def request(self, request: Request) -> None:
        """Keep agents for roles to come, all or none, as soon as there are enough."""
        self._requests.append(request)
        self._loop.call_later(self._wait_s, self._give_up_request, request)
        self._loop.call_later(REMIND_S, self._remind_of, request)
        self._match()

    def drop(self, request: Request) -> None:
        """Nobody waits for it any more: keep no agents for it."""
        if request in self._requests:
            self._requests.remove(request)
        else:
            self.free([role.name for role in request.roles])

    def order(self, process: ExternalProcess, what: Ending) -> None:
        """Have a process ended. Does nothing if it has ended."""
        if process.exit_status is not None:
            return
        if process.agent is None:
            self._waiting.remove(process)
            self._end(process, EXIT_TERMINATED if what == "stop" else -signal.SIGKILL)
            return
        process.agent.conn.send(encode(Order(what)))
        if what == "kill":
            self._loop.call_later(KILL_S, process.agent.conn.close)

    def _match(self) -> None:
        """Give each waiting role, in order, to an agent; keep agents for those that will come."""
        for process in tuple(self._waiting):
            agent = self._agents.best_for(process.role)
            if agent is not None:
                self._assign(process, agent)
        for request in tuple(self._requests):
            if self._agents.keep(request.roles):
                self._requests.remove(request)
                self._roles += len(request.roles)
                request.done.set_result(None)

    def _assign(self, process: ExternalProcess, agent: Agent) -> None:
        self._waiting.remove(process)
        assert process.timer is not None
        process.timer.cancel()
        process.agent, agent.process = agent, process
        role = process.role
        sealed = seal(self._credentials.token, role.secret)
        assign = Assign(
            role.name,
            role.entry,
            role.reference,
            sealed,
            dict(role.environment),
            len(role.payload),
        )
        agent.conn.send(encode(assign), as_payload(role.payload))

    def _end(self, process: ExternalProcess, status: int) -> None:
        if process.exit_status is not None:
            return
        if process.timer is not None:
            process.timer.cancel()
        self.running.discard(process)
        self.events.end(process, status)

    # --- what nobody takes ------------------------------------------------------------------------

    def _remind(self) -> None:
        if self._waiting:
            role = self._waiting[-1].role
            logger.warning(
                "%d of %d processes wait for agents; start each with: %s",
                len(self._waiting),
                max(self._roles, len(self.running)),
                self._command(role),
            )

    def _remind_of(self, request: Request) -> None:
        if request in self._requests:
            role = request.roles[0]
            logger.warning(
                "%d more processes need free agents; start each with: %s",
                len(request.roles),
                self._command(role),
            )

    def _give_up_request(self, request: Request) -> None:
        if request in self._requests:
            self._requests.remove(request)
            request.refuse(self._too_few_for(request.roles))

    def _give_up(self, process: ExternalProcess) -> None:
        self._waiting.remove(process)
        self.events.tell(Reported(process, "failed", describe(self._nobody_for(process.role))))
        self._end(process, EXIT_FAILED)

    def _nobody_for(self, role: Role) -> CannotPlace:
        return self._no_agents(f"no agent took {role.name}", "It needs", role)

    def _too_few_for(self, roles: Sequence[Role]) -> CannotPlace:
        names = ", ".join(role.name for role in roles[:AGENTS_TOLD_MAX])
        more = f" and {len(roles) - AGENTS_TOLD_MAX} more" if len(roles) > AGENTS_TOLD_MAX else ""
        told = f"there were not enough free agents for {names}{more}"
        return self._no_agents(told, "Each needs", roles[0])

    def _command(self, role: Role) -> str:
        return command_for(self.address, self._token_file, role.entry, role.reference)

    def _no_agents(self, failed: str, needs: str, role: Role) -> CannotPlace:
        needed = f" {needs} {role.reference}." if role.reference else ""
        count = f" The run has {self._roles} processes." if self._roles else ""
        return CannotPlace(
            f"{failed} in {self._wait_s:g} s.{needed}{count} {self._agents.told(self.address)}",
            fix=f"start an agent for each process: {self._command(role)}",
        )

    # --- what the transport tells -----------------------------------------------------------------

    def opened(self, conn: Connection, hello: Hello) -> None:
        if hello.role != AGENT:
            raise ProtocolError(
                f"a peer came as {hello.role!r} to a driver that waits for agents",
                fix="connect to the cluster's own address; agents come here: paramserve agent",
            )
        self._agents.add(conn)

    def frame(self, conn: Connection, header: bytes, payload: ByteArray | None) -> None:
        agent = self._agents[conn]
        message = decode_agent(header)
        if isinstance(message, Offer):
            if agent.offer is not None:
                raise ProtocolError("an agent offered itself twice", fix="run the same version")
            agent.offer = message
            self._match()
            return
        process = agent.process
        if process is None:
            raise ProtocolError("an agent without a role told of one", fix="run the same version")
        if process.exit_status is not None:
            return
        if isinstance(message, Started):
            process.started(message.pid)
        elif isinstance(message, Report):
            body = b"" if payload is None else payload[: message.body_bytes].tobytes()
            self.events.tell(Reported(process, message.kind, body))
        else:
            self._end(process, message.status)
            conn.close()

    def closed(self, conn: Connection) -> None:
        agent = self._agents.remove(conn)
        if agent.process is not None:  # how it ended nobody can tell any more
            self._end(agent.process, -signal.SIGKILL)
