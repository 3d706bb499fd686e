"""What a run consists of: its processes as roles for an engine, and their folder."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import structs

from paramserve import kernel_folder
from paramserve.config import (
    CLUSTER_BYTES,
    CheckpointPlan,
    ConsistencySpec,
    CoordinatorConfig,
    Credentials,
    Deadlines,
    Limits,
    ServerConfig,
)
from paramserve.engine.base import Role
from paramserve.launch.entries import COORDINATOR, Key
from paramserve.launch.roster import OnWorkerDeath, Restart

SOCKET_PATH_BYTES_MAX = 107
"""Most bytes of the address of a Unix socket. Source: unix(7), sun_path."""
SOCKET_NAME_BYTES_MAX = len("/s99999.sock")
KERNELS = "kernels"
"""Folder of compiled kernels, within a run's folder."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True)
class Plan:
    """What to start, and how long each wait may take.

    Attributes:
        workers: worker processes to start.
        ranks: workers that other programs start; for a cluster without worker processes.
        worker_payload: what the worker of a rank is told, given the coordinator's addresses and its
            deadlines; None
            where there are no workers.
        worker_code: the training function with its arguments, pickled.
        server_code: the classes of the registered rules, pickled; empty: none.
        worker_imports: as `Role.imports`, of workers.
        threads_per_worker: for numpy, torch and numba in workers. Servers have one.
        timeout_s: of the whole run; None: no limit.
        cluster: what tells it from every other one.
        environment: that workers' interpreters start with.
        checkpoints: where they are written, and which one it goes on from.
    """

    servers: int
    workers: int
    consistency: ConsistencySpec
    ranks: int = 0
    worker_payload: Callable[[int, tuple[str, ...], Deadlines], bytes] | None = None
    worker_code: bytes = b""
    worker_imports: tuple[str, ...] = ()
    server_code: bytes = b""
    on_worker_death: OnWorkerDeath = "stop"
    threads_per_worker: int = 1
    timeout_s: float | None = None
    cluster: bytes = field(default_factory=lambda: secrets.token_bytes(CLUSTER_BYTES))
    limits: Limits = field(default_factory=Limits)
    deadlines: Deadlines = field(default_factory=Deadlines)
    environment: Mapping[str, str] = field(default_factory=dict)
    checkpoints: CheckpointPlan = field(default_factory=CheckpointPlan)

    def again(self, workers: int, checkpoints: CheckpointPlan) -> Plan:
        """Plan for processes that resume from a checkpoint: another cluster, so that peers of the
        old one are refused."""
        cluster = secrets.token_bytes(CLUSTER_BYTES)
        return replace(self, workers=workers, cluster=cluster, checkpoints=checkpoints)

    @property
    def own_deadlines(self) -> Deadlines:
        """Deadlines of the plan's processes: servers that read a checkpoint first start later."""
        start_s = self.deadlines.start_s + self.checkpoints.restore_s
        return structs.replace(self.deadlines, start_s=start_s)

    @property
    def keys(self) -> list[Key]:
        """All processes, in the order in which they are started."""
        keys = [COORDINATOR, *(Key("server", i) for i in range(self.servers))]
        return keys + [Key("worker", i) for i in range(self.workers)]

    def role(
        self, key: Key, directory: str, addresses: tuple[str, ...], credentials: Credentials
    ) -> Role:
        """One process, for an engine.

        Args:
            directory: for Unix sockets, and removed by each process if the driver dies; empty
                where the processes do not share this machine.
            addresses: the coordinator's; not used for the coordinator itself.
        """
        code = {"coordinator": b"", "server": self.server_code, "worker": self.worker_code}
        threads = self.threads_per_worker if key.kind == "worker" else 1
        return Role(
            name=str(key),
            entry=f"paramserve.{key.kind}:main",
            payload=self._payload(key, directory, addresses),
            secret=credentials.encode(),
            code=code[key.kind],
            environment=dict.fromkeys(THREADS, str(threads)) | _for_kernels(directory),
            directory=directory,
            imports=self.worker_imports if key.kind == "worker" else (),
            label=_label(key),
        )

    def _payload(self, key: Key, directory: str, addresses: tuple[str, ...]) -> bytes:
        """What the entry of a process is told."""
        if key.kind == "worker":
            assert self.worker_payload is not None, "a plan with workers has what they do"
            return self.worker_payload(key.number, addresses, self.own_deadlines)
        common: dict[str, Any] = {
            "servers": self.servers,
            "workers": self.workers + self.ranks,
            "directory": directory,
            "consistency": self.consistency,
            "cluster": self.cluster,
            "limits": self.limits,
            "deadlines": self.own_deadlines,
            "checkpoints": self.checkpoints,
        }
        if key.kind == "coordinator":
            restarts = isinstance(self.on_worker_death, Restart)
            return msgspec.msgpack.encode(CoordinatorConfig(**common, restarts=restarts))
        config = ServerConfig(shard=key.number, coordinator=addresses, **common)
        return msgspec.msgpack.encode(config)


def _label(key: Key) -> str:
    """What a line of this process begins with."""
    return f"[rank {key.number}] " if key.kind == "worker" else f"[{key}] "


def addresses_in(directory: str) -> tuple[str, ...]:
    """Addresses of the coordinator, if it shares this folder."""
    return (f"unix:{directory}/c.sock",)


def _for_kernels(directory: str) -> dict[str, str]:
    """Environment of a run's processes: its own folder where no other can keep kernels."""
    if directory and kernel_folder.choose().folder is None:
        return {kernel_folder.VARIABLE: os.path.join(directory, KERNELS)}
    return {}


def directory_path() -> str:
    """Path of a new folder for sockets that is short enough for them."""
    name = f"paramserve-{secrets.token_urlsafe(6)}"
    base = tempfile.gettempdir()
    too_long = len(os.fsencode(f"{base}/{name}")) > _DIRECTORY_BYTES_MAX
    if too_long or not _travels(base):
        base = "/tmp"
    return os.path.join(base, name)


def _travels(path: str) -> bool:
    """Whether a path can be put into a message; one that the locale cannot decode cannot."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


_DIRECTORY_BYTES_MAX = SOCKET_PATH_BYTES_MAX - SOCKET_NAME_BYTES_MAX
