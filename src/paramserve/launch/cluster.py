"""`Cluster`: servers without workers, for the key-value API in a script, notebook or test."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from paramserve.client import Client
from paramserve.config import Deadlines, Limits, check_count, check_settings
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async
from paramserve.engine.base import Engine
from paramserve.launch.arguments import SEED_BITS, check_engine
from paramserve.launch.connect import Handle
from paramserve.launch.option_names import by_name
from paramserve.launch.packing import for_servers
from paramserve.launch.plan import Plan
from paramserve.launch.running import handle_of
from paramserve.launch.supervisor import Supervisor


class Cluster:
    """A coordinator and servers that live as long as a `with` block.

    Example:
        with ps.Cluster(servers=2) as cluster:
            client = cluster.client()
            client.define("w", np.zeros(10), rule=ps.Add())
            client.push("w", np.ones(10))

    Args:
        servers: number of server processes.
        workers: ranks that clients will take with `client(rank=)`; Sync steps when all of them
            have stepped.
        consistency: when gradients are applied; `ps.Async()` if None. Its class need not be
            registered.
        engine: what starts the processes, with the deadlines and limits; `ps.Local()` if None.
        name: others find it with `ps.attach(name, engine=...)`; None: only by its handle.
        rules: classes of your own rules, policies and codecs, and functions for `damping=`, that
            the servers may run; see `ps.CustomRule`, `ps.Policy` and `ps.CustomCodec`.
        seed: of workers that join by its handle; a random one if None.
    Raises:
        ValueError, TypeError: a wrong argument, or a policy that cannot work with this many
            workers. Nothing was started.
        NameTaken: a living cluster has this name. Nothing is left of this one.
    """

    @by_name
    def __init__(
        self,
        servers: int = 1,
        *,
        workers: int = 0,
        consistency: Policy | None = None,
        engine: Engine | None = None,
        name: str | None = None,
        rules: Sequence[Callable[..., Any]] = (),
        seed: int | None = None,
    ) -> None:
        check_count("servers", servers)
        check_count("workers", workers, least=0)
        policy = consistency if consistency is not None else Async()
        packed = for_servers(policy, workers, rules=rules)
        backend = check_engine(engine)
        plan = Plan(
            servers=servers,
            workers=0,
            ranks=workers,
            consistency=packed.consistency,
            server_code=packed.code,
            limits=check_settings("limits", backend.limits, Limits),
            deadlines=check_settings("deadlines", backend.deadlines, Deadlines),
        )
        self._seed = seed if seed is not None else secrets.randbits(SEED_BITS)
        self._withdraw: Callable[[], None] | None = None
        self._supervisor = Supervisor(plan, backend)
        self._supervisor.start()
        if name is not None:
            try:
                self._withdraw = backend.publish(name, self.handle().encode())
            except BaseException:
                self.close()
                raise

    def __repr__(self) -> str:
        return f"Cluster({self._supervisor.state}, at={self.address!r})"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The coordinator's, as others reach it; empty while it is not known yet."""
        return next(iter(self._supervisor.addresses), "")

    def handle(self) -> Handle:
        """Handle for clients and workers in any process that it is sent to; waits until the servers
        are up. It may be pickled, and holds the cluster's secret.

        Raises:
            ClientClosed: the cluster was closed.
            ServerGone, CoordinatorGone: one of its processes has ended.
        """
        return handle_of(self._supervisor, self._seed)

    def client(self, rank: int | None = None) -> Client:
        """A new client; waits until the servers are up. It is closed with the cluster.

        Args:
            rank: of a worker; None for a client that no worker waits for.
        Raises:
            ClientClosed: the cluster was closed.
            ServerGone, CoordinatorGone: one of its processes has ended.
        """
        return self._supervisor.connect(rank if rank is not None else -1)

    def close(self) -> None:
        """Close all clients and end all processes. Repeating is safe."""
        if self._withdraw is not None:
            self._withdraw()
        self._supervisor.stop()
        self._supervisor.ended.wait()
