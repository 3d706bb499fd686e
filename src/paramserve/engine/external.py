"""The `External` engine: somebody else started the processes, and they offer themselves.

An agent (`paramserve agent HOST:PORT`, started by Slurm, systemd, Kubernetes, a shell) connects to
the driver, proves the token, says what it can run, and waits. The fleet hands each role to a free
agent that can run it. An agent serves one role and ends with it.

No code travels and nothing that came from the socket is unpickled, on either side. What a role is
told is plain data; training functions and rules are those that the agent was started with.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import os
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from msgspec import Struct

from paramserve.config import TLS, Credentials, Limits
from paramserve.engine.base import Ended, Event, Reported, Role
from paramserve.engine.child import EXIT_FAILED, EXIT_TERMINATED, describe
from paramserve.engine.placed import SERVER
from paramserve.errors import CannotPlace, NotAuthenticated, ParamServeError, ProtocolError
from paramserve.messages import Hello, decoder, encode
from paramserve.transport.framing import ByteArray
from paramserve.transport.listener import Connection, Listener, listen_tcp
from paramserve.transport.tcp import warn_if_open
from paramserve.transport.token_file import credentials_of

logger = logging.getLogger("paramserve")

AGENT: Final = "agent"
"""`Hello.role` of an agent."""
CLOSE_S: Final = 10.0
"""A killed process is gone at once, unless its host is."""
KILL_S: Final = 5.0
"""An agent that has not said for this long that its role was killed is cut off, and so ends."""
REMIND_S: Final = 1.0
"""After this long without enough agents the log says how to start one."""
AGENTS_TOLD_MAX: Final = 8
"""Agents that an error describes."""
PORT_MAX: Final = 65535

_SALT_BYTES: Final = 16
_BLOCK_BYTES: Final = 32


# --- what agent and fleet tell each other -------------------------------------------------------


class Offer(Struct, frozen=True, array_like=True, tag="offer"):
    """First frame of an agent: what it can run."""

    pid: int
    host: str
    """Its host's name, for messages."""
    train: str
    """The training function that it was started with, as "module:function"; empty: none."""
    rules: tuple[str, ...]
    """The rules that it was started with, each as "module:Class"."""


class Assign(Struct, frozen=True, array_like=True, tag="assign"):
    """The agent's role. The frame's payload is what the role is told."""

    name: str
    entry: str
    reference: str
    secret: bytes
    """Sealed; see `seal`."""
    environment: dict[str, str]
    payload_bytes: int


class Order(Struct, frozen=True, array_like=True, tag="order"):
    """End the role: in order, or at once. An agent without one ends in order."""

    what: Literal["stop", "kill"]


class Started(Struct, frozen=True, array_like=True, tag="started"):
    """The role's process runs."""

    pid: int


class Report(Struct, frozen=True, array_like=True, tag="report"):
    """The role called `Bootstrap.report`. The frame's payload is the body."""

    kind: str
    body_bytes: int


class Finished(Struct, frozen=True, array_like=True, tag="finished"):
    """The role's process has ended; the agent waits until the fleet hangs up, and ends too."""

    status: int


_decode_agent = decoder(Offer | Started | Report | Finished).decode


def as_payload(data: bytes) -> tuple[ByteArray, ...]:
    """Bytes as the payload of a frame; none for no bytes."""
    return (np.frombuffer(data, np.uint8),) if data else ()


def seal(token: bytes, data: bytes) -> bytes:
    """Hide the cluster's credentials from whoever reads along where there is no TLS.

    They are all that is hidden: the rest of what crosses the connection holds no secret. The
    keys come from the token and a fresh salt; HMAC-SHA256 over a counter is the key stream, and
    HMAC-SHA256 over salt and text the tag.
    """
    salt = secrets.token_bytes(_SALT_BYTES)
    text = _mixed(token, salt, data)
    return salt + _tag(token, salt, text) + text


def unseal(token: bytes, sealed: bytes) -> bytes:
    """What was sealed. Raises `NotAuthenticated` if it was with another token, or was changed."""
    salt = sealed[:_SALT_BYTES]
    tag = sealed[_SALT_BYTES : _SALT_BYTES + _BLOCK_BYTES]
    text = sealed[_SALT_BYTES + _BLOCK_BYTES :]
    if not hmac.compare_digest(tag, _tag(token, salt, text)):
        raise NotAuthenticated(
            "the credentials of a role were not sealed with this agent's token",
            fix="give driver and agents the same token file",
        )
    return _mixed(token, salt, text)


def _mixed(token: bytes, salt: bytes, data: bytes) -> bytes:
    key = hmac.digest(token, b"external: stream" + salt, "sha256")
    blocks = range(math.ceil(len(data) / _BLOCK_BYTES))
    stream = b"".join(hmac.digest(key, block.to_bytes(8, "little"), "sha256") for block in blocks)
    return bytes(one ^ other for one, other in zip(data, stream, strict=False))


def _tag(token: bytes, salt: bytes, text: bytes) -> bytes:
    key = hmac.digest(token, b"external: tag" + salt, "sha256")
    return hmac.digest(key, salt + text, "sha256")


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


# --- the engine ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class External:
    """Run in processes that somebody else has started with `paramserve agent`.

    Each process of a run takes one agent, which ends with it: `workers + servers + 1` are needed,
    and one more for each restart and each worker that `Job.scale` adds. What starts them (Slurm,
    systemd, a loop in a shell) may start them again for the next run, and before the driver: they
    wait for it.

    The training function is not sent. It has to be a function of a module that the agents can
    import, without `args` and `kwargs`, and agents name it: `--train module:function`. Rules
    likewise: `--rules module:Class`. What the function returns comes back as plain data: None,
    numbers, text, bytes, and lists and dicts of these.

    Example:
        ps.run(training.train, workers=2, engine=ps.External("10.0.0.1:7000", token_file="token"))

    Args:
        bind: `host:port` where agents connect; port 0 takes any free one, which the log tells. All
            processes reach each other by the addresses from which they reach this one, so name
            the address of a network that they share, not 127.0.0.1 if one is on another host.
        token_file: the token, the same on all hosts; see `paramserve token`.
        tls: certificates for all connections of the run on this host; agents name their own files.
            None: no TLS; then whoever can read the network reads gradients and values, not the
            token.
        wait_s: how long a process may wait for an agent.
    """

    bind: str = "127.0.0.1:0"
    token_file: str | os.PathLike[str] | None = None
    tls: TLS | None = None
    wait_s: float = 60.0

    def __post_init__(self) -> None:
        host, _, port = self.bind.rpartition(":") if isinstance(self.bind, str) else ("", "", "")
        if not host or not port.isdecimal() or int(port) > PORT_MAX:
            raise ValueError(f"bind must be 'HOST:PORT', not {self.bind!r}")
        if self.token_file is None:
            raise ValueError(
                "External needs token_file=...: agents prove that they may join; make one with: "
                "paramserve token FILE"
            )
        if not isinstance(self.token_file, str | os.PathLike):
            raise TypeError(f"token_file must be a path, not {self.token_file!r}")
        if self.tls is not None and not isinstance(self.tls, TLS):
            raise TypeError(f"tls must be ps.TLS(...), not {self.tls!r}")
        if isinstance(self.wait_s, bool) or not isinstance(self.wait_s, int | float):
            raise TypeError(f"wait_s must be a number, not {self.wait_s!r}")
        if not 0 < self.wait_s < math.inf:
            raise ValueError(f"wait_s must be above 0 and finite, not {self.wait_s}")

    def open(self, roles: Sequence[str] = ()) -> ExternalFleet:
        """Listen for agents. The caller closes the fleet.

        Raises:
            ParamServeError: the token file cannot be used, or the port is taken.
        """
        return ExternalFleet(self, credentials_of(self.token_file, self.tls), len(roles))

    def publish(self, name: str, data: bytes) -> Callable[[], None]:
        """Refused: the hosts of agents share no place for names. Raises `ParamServeError`."""
        raise ParamServeError(
            f"the name {name!r} was not published: with ps.External() there is no place for names "
            "that all hosts can see",
            fix="give others cluster.handle(), or run `paramserve serve` and give them its address",
        )

    def find(self, name: str) -> bytes | None:
        """Refused, as `publish`: an answer would be a guess. Raises `ParamServeError`."""
        raise ParamServeError(
            f"the name {name!r} was not looked up: ps.External() has no place for names",
            fix="use a cluster's handle, or ps.connect(address, ...) for `paramserve serve`",
        )


class ExternalProcess:
    """A role, with or (not yet) without an agent that runs it. See `base.Process`."""

    why = ""

    def __init__(self, fleet: ExternalFleet, role: Role) -> None:
        self.name = role.name
        self.role = role
        self.agent: _Agent | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._fleet = fleet
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
        self._fleet.order(self, "stop")

    def kill(self) -> None:
        self._fleet.order(self, "kill")

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
class _Agent:
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


@dataclass(eq=False)
class _Request:
    """Roles for which agents are to be kept, and who waits for that."""

    roles: list[Role]
    done: Future[None]


class ExternalFleet:
    """Roles in the processes of others. See `base.Fleet`.

    Also the listener's `transport.Handler`: its methods, and all that changes a process, run in
    one thread with the event loop, which ends with the fleet.

    Attributes:
        address: `host:port` where agents connect.
    """

    shares_host = False
    plain = True

    def __init__(self, engine: External, credentials: Credentials, roles: int) -> None:
        """Listen. Raises `ParamServeError`: the port is taken. Nothing is left."""
        self.tls = credentials.tls
        self.room_s = engine.wait_s
        self.address = ""
        self._engine = engine
        self._credentials = credentials
        self._roles = roles
        self._agents: dict[Connection, _Agent] = {}
        self._waiting: list[ExternalProcess] = []
        self._running: set[ExternalProcess] = set()
        self._requests: list[_Request] = []
        self._reminded = False
        self._events: deque[Event] = deque()
        self._news = threading.Condition()
        self._lock = threading.Lock()
        self._closed = False
        self._listener: Listener | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="paramserve-agents", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        except BaseException:
            self.close()
            raise
        warn_if_open(engine.bind, self.tls)
        logger.info("agents are awaited: %s", command_for(self.address, self._token_file))

    # --- for any thread ---------------------------------------------------------------------------

    def launch(self, role: Role) -> ExternalProcess:
        """Hand a role to an agent, now or as soon as there is one; returns at once.

        If none takes it in `wait_s`, the process has failed.

        Raises:
            ParamServeError: it would have to be sent code.
        """
        if role.code and not role.reference:
            raise ParamServeError(
                f"{role.name} cannot run on ps.External(): what it is to run has no name that an "
                "agent could import, and code is not sent",
                fix="use a function (a class of rules) on the top level of a module that agents "
                "can import, not of the script itself, without args= and kwargs=, and start agents "
                "with --train module:function (--rules module:Class)",
            )
        process = ExternalProcess(self, role)
        with self._lock:
            if self._closed:
                raise RuntimeError("this fleet is closed")
            self._running.add(process)
            self._loop.call_soon_threadsafe(self._enqueue, process)
        return process

    def make_room(self, roles: Sequence[Role]) -> None:
        """Wait up to `wait_s` for a free agent for each role, and keep them for these.

        Raises:
            CannotPlace: there are not enough. None is kept.
            RuntimeError: the fleet is closed.
        """
        if not roles:
            return
        request = _Request(list(roles), Future())
        with self._lock:
            if self._closed:
                raise RuntimeError("this fleet is closed")
            self._loop.call_soon_threadsafe(self._request, request)
        try:
            request.done.result()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._drop, request)
            raise

    def give_back(self, names: Sequence[str]) -> None:
        """Let agents that wait for these roles take others."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._free, tuple(names))

    def order(self, process: ExternalProcess, what: Literal["stop", "kill"]) -> None:
        """Have a process ended. Does nothing if it has ended, or the fleet is closed."""
        if process.exit_status is None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._order, process, what)

    def events(self, timeout_s: float) -> Sequence[Event]:
        """What has happened since the last call; waits up to `timeout_s` if nothing has."""
        with self._news:
            self._news.wait_for(lambda: self._events, timeout_s)
            found = tuple(self._events)
            self._events.clear()
        return found

    def close(self) -> None:
        """Kill what still runs, wait for its end and hang up on all agents. May be repeated."""
        with self._lock:
            self._closed = True
            running = tuple(self._running)
        for process in running:
            process.kill()
        deadline = time.monotonic() + CLOSE_S
        for process in running:
            process.wait(deadline - time.monotonic())
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._hang_up())
        self._loop.close()

    async def _listen(self) -> None:
        host, _, port = self._engine.bind.rpartition(":")
        self._listener, self.address = await listen_tcp(
            host.strip("[]"), int(port), self._credentials, self, Limits()
        )

    async def _hang_up(self) -> None:
        for agent in tuple(self._agents.values()):
            if agent.process is None:
                agent.conn.send(encode(Order("stop")))
        if self._listener is not None:
            self._listener.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the handler is told of closed connections in the loop's next turn
        for process in tuple(self._running):
            self._end(process, -signal.SIGKILL)
        for request in self._requests:
            _refuse(request, RuntimeError("this fleet is closed"))

    @property
    def _token_file(self) -> str:
        return os.fspath(self._engine.token_file or "")

    def _tell(self, event: Event) -> None:
        with self._news:
            self._events.append(event)
            self._news.notify_all()

    def _end(self, process: ExternalProcess, status: int) -> None:
        if process.exit_status is not None:
            return
        if process.timer is not None:
            process.timer.cancel()
        self._running.discard(process)
        with self._news:
            process.ended(status)
            self._events.append(Ended(process, status))
            self._news.notify_all()

    # --- roles ------------------------------------------------------------------------------------

    def _enqueue(self, process: ExternalProcess) -> None:
        self._waiting.append(process)
        process.timer = self._loop.call_later(self._engine.wait_s, self._give_up, process)
        if not self._reminded:
            self._reminded = True
            self._loop.call_later(REMIND_S, self._remind)
        self._match()

    def _match(self) -> None:
        """Give each waiting role, in order, to an agent; keep agents for those that will come."""
        for process in tuple(self._waiting):
            fitting = [agent for agent in self._agents.values() if agent.fits(process.role)]
            if fitting:
                self._assign(process, min(fitting, key=_preference))
        for request in tuple(self._requests):
            if self._keep(request.roles):
                self._requests.remove(request)
                self._roles += len(request.roles)
                request.done.set_result(None)

    def _keep(self, roles: Sequence[Role]) -> bool:
        """Keep an agent for each of these roles, or none."""
        for role in roles:
            fitting = [agent for agent in self._agents.values() if agent.fits(role)]
            if not fitting:
                self._unkeep([each.name for each in roles])
                return False
            agent = min(fitting, key=_preference)
            agent.kept_for = role.name
        return True

    def _unkeep(self, names: Sequence[str]) -> None:
        for agent in self._agents.values():
            if agent.process is None and agent.kept_for in names:
                agent.kept_for = ""

    def _free(self, names: Sequence[str]) -> None:
        self._unkeep(names)
        self._match()

    def _request(self, request: _Request) -> None:
        self._requests.append(request)
        self._loop.call_later(self._engine.wait_s, self._give_up_request, request)
        self._loop.call_later(REMIND_S, self._remind_of, request)
        self._match()

    def _remind_of(self, request: _Request) -> None:
        if request in self._requests:
            role = request.roles[0]
            logger.warning(
                "%d more processes need free agents; start each with: %s",
                len(request.roles),
                command_for(self.address, self._token_file, role.entry, role.reference),
            )

    def _give_up_request(self, request: _Request) -> None:
        if request in self._requests:
            self._requests.remove(request)
            _refuse(request, self._too_few_for(request.roles))

    def _drop(self, request: _Request) -> None:
        """Nobody waits for it any more."""
        if request in self._requests:
            self._requests.remove(request)
        else:
            self._free([role.name for role in request.roles])

    def _assign(self, process: ExternalProcess, agent: _Agent) -> None:
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

    def _order(self, process: ExternalProcess, what: Literal["stop", "kill"]) -> None:
        if process.exit_status is not None:
            return
        if process.agent is None:
            self._waiting.remove(process)
            self._end(process, EXIT_TERMINATED if what == "stop" else -signal.SIGKILL)
            return
        process.agent.conn.send(encode(Order(what)))
        if what == "kill":
            self._loop.call_later(KILL_S, process.agent.conn.close)

    def _give_up(self, process: ExternalProcess) -> None:
        self._waiting.remove(process)
        self._tell(Reported(process, "failed", describe(self._nobody_for(process.role))))
        self._end(process, EXIT_FAILED)

    def _nobody_for(self, role: Role) -> CannotPlace:
        return self._no_agents(f"no agent took {role.name}", "It needs", role)

    def _too_few_for(self, roles: Sequence[Role]) -> CannotPlace:
        names = ", ".join(role.name for role in roles[:AGENTS_TOLD_MAX])
        more = f" and {len(roles) - AGENTS_TOLD_MAX} more" if len(roles) > AGENTS_TOLD_MAX else ""
        told = f"there were not enough free agents for {names}{more}"
        return self._no_agents(told, "Each needs", roles[0])

    def _no_agents(self, failed: str, needs: str, role: Role) -> CannotPlace:
        there = [str(agent) for agent in self._agents.values() if agent.offer is not None]
        listed = ", ".join(there[:AGENTS_TOLD_MAX])
        more = f", and {len(there) - AGENTS_TOLD_MAX} more" if len(there) > AGENTS_TOLD_MAX else ""
        needed = f" {needs} {role.reference}." if role.reference else ""
        count = f" The run has {self._roles} processes." if self._roles else ""
        agents = "1 agent was" if len(there) == 1 else f"{len(there)} agents were"
        command = command_for(self.address, self._token_file, role.entry, role.reference)
        return CannotPlace(
            f"{failed} in {self._engine.wait_s:g} s.{needed}{count} {agents} "
            f"connected to {self.address}{': ' if there else ''}{listed}{more}",
            fix=f"start an agent for each process: {command}",
        )

    def _remind(self) -> None:
        if self._waiting:
            role = self._waiting[-1].role
            logger.warning(
                "%d of %d processes wait for agents; start each with: %s",
                len(self._waiting),
                max(self._roles, len(self._running)),
                command_for(self.address, self._token_file, role.entry, role.reference),
            )

    # --- what the transport tells -----------------------------------------------------------------

    def opened(self, conn: Connection, hello: Hello) -> None:
        if hello.role != AGENT:
            raise ProtocolError(
                f"a peer came as {hello.role!r} to a driver that waits for agents",
                fix="connect to the cluster's own address; agents come here: paramserve agent",
            )
        self._agents[conn] = _Agent(conn)

    def frame(self, conn: Connection, header: bytes, payload: ByteArray | None) -> None:
        agent = self._agents[conn]
        message = _decode_agent(header)
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
            self._tell(Reported(process, message.kind, body))
        else:
            self._end(process, message.status)
            conn.close()

    def closed(self, conn: Connection) -> None:
        agent = self._agents.pop(conn)
        if agent.process is not None:  # how it ended nobody can tell any more
            self._end(agent.process, -signal.SIGKILL)


def _refuse(request: _Request, error: Exception) -> None:
    if not request.done.done():
        request.done.set_exception(error)


def _preference(agent: _Agent) -> tuple[bool, int]:
    """Which of several agents that can run a role gets it: one that is kept for it, then the one
    that can do least besides."""
    return not agent.kept_for, _abilities(agent)


def _abilities(agent: _Agent) -> int:
    assert agent.offer is not None
    return bool(agent.offer.train) + len(agent.offer.rules)
