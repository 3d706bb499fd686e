"""The real coordinator and servers in threads of the test's process, for the client's tests.

Nothing is faked: sockets, arenas, handshakes and event loops are those of a run; only the processes
are missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from paramserve.checkpoint.committing import Committer
from paramserve.checkpoint.folder import answer_probe
from paramserve.checkpoint.storage import LocalFolder
from paramserve.client import Client, Connection, timeouts
from paramserve.compiling import load_kernels
from paramserve.config import (
    NO_CREDENTIALS,
    CheckpointPlan,
    CoordinatorConfig,
    Credentials,
    Deadlines,
    Limits,
    ServerConfig,
)
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async
from paramserve.consistency.registry import Registered, registered
from paramserve.consistency.registry import spec as policy_spec
from paramserve.coordinator import CoordinatorRole, open_checkpoints
from paramserve.core.coordination import Coordination
from paramserve.messages import (
    AskCheckpoint,
    Checkpointed,
    Hello,
    Join,
    Joined,
    MarkDead,
    Ok,
    Register,
    Scale,
)
from paramserve.rules import SGD, Adam, Add
from paramserve.server import ServerRole, process_role
from paramserve.transport.arena import Arena
from paramserve.transport.control import ControlLink
from paramserve.transport.dial import dial
from paramserve.transport.link import Link
from paramserve.transport.listener import Listener, listen, listen_unix

KINDS = ("unix", "tcp")
WAIT_S = 10.0
DEADLINES = Deadlines(
    request_s=10.0, start_s=10.0, reconnect_s=0.2, resend_s=0.02, heartbeat_s=0.05, stall_s=10.0
)


class LoopThread:
    """An event loop that runs in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.errors: list[dict[str, Any]] = []
        """What was raised out of a callback, and what asyncio complains of."""
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, start: Callable[[], Any]) -> Any:
        """Await what `start` makes, on the loop."""
        return asyncio.run_coroutine_threadsafe(start(), self.loop).result(WAIT_S)

    def call(self, do: Callable[[], Any]) -> Any:
        """Call a function on the loop; its result."""

        async def once() -> Any:
            return do()

        return self.run(once)

    def close(self) -> None:
        async def settle() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.loop.shutdown_default_executor()

        self.run(settle)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


class Server:
    """One running server."""

    def __init__(self, role: ServerRole, listeners: list[Any], control: ControlLink) -> None:
        self.role = role
        self.listeners = listeners
        self.control = control
        self.stopped = False

    def stop(self) -> None:
        """Stop as if its process had died. To be called on the loop of the servers."""
        if not self.stopped:
            self.stopped = True
            self.role.close()
            for listener in self.listeners:
                listener.close()
            self.control.close()


class RoleCluster:
    """A coordinator and servers.

    Attributes:
        kind: how clients reach the servers.
        address: the coordinator's.
        connects: how often clients have connected to a server.
        closed_at_end: what a test has opened besides.
    """

    def __init__(
        self,
        kind: str = "unix",
        *,
        servers: int = 1,
        workers: int = 0,
        policy: Policy | None = None,
        limits: Limits | None = None,
        deadlines: Deadlines = DEADLINES,
        restarts: bool = False,
        registers: Sequence[Any] = (),
        checkpoints: CheckpointPlan | None = None,
    ) -> None:
        self.kind = kind
        self.ways = kind
        """What the addresses that clients may dial begin with; empty: all of them."""
        self._restarts = restarts
        self._registered: Registered = registered(registers)
        self.token = secrets.token_bytes(32)
        self.credentials = Credentials(self.token)
        self.limits = limits if limits is not None else Limits()
        self.deadlines = deadlines
        self.connects = 0
        self.plan = checkpoints if checkpoints is not None else CheckpointPlan()
        self._committer: Committer | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="ps-")
        self.directory = self._folder.name
        self._policy = policy_spec(policy if policy is not None else Async())
        self._count, self._workers = servers, workers
        self._clients: list[Client] = []
        self.closed_at_end: list[Any] = []
        self.coordinating, self.serving = LoopThread(), LoopThread()
        self._coordinator = self.coordinating.run(self._coordinate)
        self.address = self._coordinator.address
        self.servers = [self._start(shard) for shard in range(servers)]

    async def _coordinate(self) -> Listener:
        config = CoordinatorConfig(
            self._count,
            self._workers,
            self.directory,
            self._policy,
            restarts=self._restarts,
            limits=self.limits,
            deadlines=self.deadlines,
            checkpoints=self.plan,
        )
        path = os.path.join(self.directory, "c.sock")
        self._committer, record = open_checkpoints(config)
        self.coordination = Coordination(config, record)
        work = self._committer.do if self._committer is not None else None
        role = CoordinatorRole(self.coordination, self.coordinating.loop, work=work)
        return await listen_unix(path, role, self.limits)

    def config(self, shard: int, tcp_bind: str = "") -> ServerConfig:
        return ServerConfig(
            shard,
            self._count,
            self._workers,
            (self.address,),
            self.directory,
            self._policy,
            tcp_bind=tcp_bind,
            limits=self.limits,
            deadlines=self.deadlines,
            checkpoints=self.plan,
        )

    def _start(self, shard: int) -> Server:
        config = self.config(shard, "127.0.0.1:0" if self.kind == "tcp" else "")
        control = self._control("register")

        async def start() -> tuple[ServerRole, list[Any]]:
            role = process_role(config, self.credentials, control, self._registered)
            bind = config.tcp_bind
            place = (self.directory, f"s{shard}", bind, self.credentials)
            return role, await listen(*place, role, self.limits)

        role, listeners = self.serving.run(start)
        addresses = tuple(each.address for each in listeners[: 2 if self.kind == "tcp" else 1])
        if self.plan.folder:
            answer_probe(LocalFolder(self.plan.folder), "", shard)
        control.call(Register(0, shard, os.getpid(), addresses), Ok, timeout_s=WAIT_S)
        self.on_server(lambda: role.take_notices(control.read_notices()))
        return Server(role, listeners, control)

    def on_server(self, do: Callable[[], Any]) -> Any:
        """Call a function on the loop of the servers."""
        return self.serving.call(do)

    # --- clients -----------------------------------------------------------------------------

    def client(
        self,
        rank: int = -1,
        *,
        limits: Limits | None = None,
        deadlines: Deadlines | None = None,
    ) -> Client:
        """A new client, which reaches the servers in the cluster's way only."""
        limits = limits if limits is not None else Limits()
        control = self._control("join", limits)
        try:
            client = Client(
                Connection(
                    control,
                    control.call(Join(0, rank, os.getpid()), Joined, timeout_s=WAIT_S),
                    rank=rank,
                    credentials=self.credentials,
                    limits=limits,
                    deadlines=deadlines if deadlines is not None else self.deadlines,
                    connect=self._connect,
                )
            )
        except BaseException:
            control.close()
            raise
        self._clients.append(client)
        return client

    def _connect(
        self,
        addresses: Sequence[str],
        hello: Hello,
        *,
        credentials: Credentials,
        arenas: Sequence[Arena],
        timeout_s: float,
        limits: Limits,
    ) -> Any:
        self.connects += 1
        return Link.connect(
            [each for each in addresses if each.startswith(self.ways)],
            hello,
            credentials=credentials,
            arenas=arenas,
            timeout_s=timeout_s,
            limits=limits,
        )

    def held(self, rank: int) -> int:
        """Shards with this rank's gradients of the first group's present clock."""
        groups = [server.role.shard.groups[0].state for server in self.servers]
        return sum(rank in group.collect.pending for group in groups)

    # --- faults ------------------------------------------------------------------------------

    def cut(self, client: Client, shard: int = 0) -> None:
        """End the server's side of a client's connection, if there is one now."""
        role = self.servers[shard].role

        def end() -> None:
            conn = role._clients.get(client.connection.id)
            if conn is not None:
                conn.close()

        self.on_server(end)

    def stop(self, shard: int = 0) -> None:
        """End a server as if its process had died: sockets close, and it listens no more."""
        self.on_server(self.servers[shard].stop)

    def mark_dead(self, rank: int) -> None:
        """Tell the coordinator, as the driver does, that a worker's process has ended."""
        self._as_driver(MarkDead(0, "worker", rank), Ok)
        wait_until(lambda: all(rank not in s.role.shard.sessions.live() for s in self.servers))

    def checkpoint(self) -> Checkpointed:
        """Have a checkpoint written, as a driver asks for it."""
        return self._as_driver(AskCheckpoint(0, WAIT_S), Checkpointed)

    def scale(self, workers: int) -> None:
        """Change the number of workers, as `Job.scale` tells the coordinator."""
        self._as_driver(Scale(0, workers), Ok)

    def _as_driver(self, message: Any, answer: type[Any]) -> Any:
        control = self._control("driver")
        try:
            return control.call(message, answer, timeout_s=WAIT_S)
        finally:
            control.close()

    def _control(self, role: str, limits: Limits | None = None) -> ControlLink:
        return ControlLink.connect(
            [self.address],
            Hello(role),
            credentials=NO_CREDENTIALS,
            limits=limits if limits is not None else self.limits,
            timeout_s=WAIT_S,
        )

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """The servers' loop stands still meanwhile, as under SIGSTOP: a failed wait soon ceases to
        ask them who is missing."""
        asleep, wake = threading.Event(), threading.Event()

        def sleep() -> None:
            asleep.set()
            wake.wait(WAIT_S)

        self.serving.loop.call_soon_threadsafe(sleep)
        asleep.wait(WAIT_S)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(timeouts, "INQUIRE_S", 0.05)
                yield
        finally:
            wake.set()

    def peer(self, shard: int = 0) -> socket.socket:
        """A socket to a server whose uid or token was accepted, and whose hello is to come."""
        (address, *_) = (
            each.address
            for each in self.servers[shard].listeners
            if each.address.startswith(self.kind)
        )
        sock = dial(address, self.credentials, time.monotonic() + WAIT_S)
        sock.settimeout(WAIT_S)
        return sock

    def close(self) -> None:
        """End everything; nothing may have been raised out of an event loop."""
        for each in (*self._clients, *self.closed_at_end):
            each.close()
        for shard in range(len(self.servers)):
            self.stop(shard)
        self.coordinating.call(self._coordinator.close)
        if self._committer is not None:
            self._committer.close()
        self.serving.close()
        self.coordinating.close()
        self._folder.cleanup()
        raised = [*self.coordinating.errors, *self.serving.errors]
        assert not raised, f"raised out of an event loop: {raised!r}"


@contextlib.contextmanager
def clusters() -> Iterator[Callable[..., RoleCluster]]:
    """Gives a function that makes clusters, and closes them at the end."""
    load_all_kernels()
    with contextlib.ExitStack() as closing:

        def make(*args: Any, **kwargs: Any) -> RoleCluster:
            cluster = RoleCluster(*args, **kwargs)
            closing.callback(cluster.close)
            return cluster

        yield make


def load_all_kernels() -> None:
    """Before any test: a first compile takes longer than a test may."""
    for dtype in ("float32", "float64"):
        for rule in (None, Add(), SGD(0.1), SGD(0.1, momentum=0.9), Adam()):
            load_kernels(np.dtype(dtype), rule)


def in_threads(*tasks: Callable[[], None]) -> None:
    """Run all at once; raise what one of them raised."""
    failures: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if failures:
        raise failures[0]


def taken(client: Client) -> int:
    """Slots of shared memory that are in use."""
    return len(client.connection.exchange._pool.in_use_by)


def wait_until(condition: Callable[[], bool]) -> None:
    """For what no reply tells: memberships, counters, threads."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)
