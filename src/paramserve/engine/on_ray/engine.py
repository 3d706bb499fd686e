"""The settings of `OnRay`, checked, and what an engine does with them. See `base.Engine`."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar, get_args

from paramserve.config import (
    TLS,
    Deadlines,
    Limits,
    check_count,
    check_number,
    check_settings,
    check_tls,
)
from paramserve.engine.names import check_name
from paramserve.engine.on_ray import naming
from paramserve.engine.on_ray.control import CONNECTION, check_address, import_ray, named_cluster
from paramserve.engine.on_ray.fleet import RayFleet
from paramserve.engine.on_ray.keeper import RoomKeeper
from paramserve.engine.on_ray.room import Layout, check_totals, reserve
from paramserve.engine.placing import NOTHING, Needs, Servers, Workers, kind_of
from paramserve.errors import ParamServeError

TLS_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")


@dataclass(frozen=True, repr=False)
class OnRay:
    """Start processes as actors of a Ray cluster (`pip install 'paramserve[ray]'`).

    The actors live as long as this driver. If the engine had to connect to Ray itself, the last
    run, cluster or name that needed it disconnects again; to keep Ray, call `ray.init` first.

    Args:
        address: "auto" or "host:port": attach to a running cluster. None: the one that this
            process is connected to, else the one that Ray's variable RAY_ADDRESS names, else a
            new one on this machine.
        servers: "pack": on as few nodes as possible; "spread": each on a node of its own, strictly.
        workers: "beside": near the servers. With packed servers, nodes are filled one after the
            other; with spread ones, worker r is on the node of server r modulo their number,
            strictly. "apart": on nodes without servers, strictly. "anywhere": evenly over the
            nodes, as far as they have room.
        coordinator: what it needs. It is with server 0 unless it asks for more than cores.
        server: what each server needs.
        worker: what each worker needs.
        threads_per_worker: of numpy, torch and numba; max(1, cores of this machine // workers) if
            None.
        deadlines: how long each wait may take; `ps.Deadlines()` if None.
        limits: bounds on memory, messages and connections; `ps.Limits()` if None.
        namespace: of Ray, for the names of clusters.
        place_s: how long the cluster may take to make room, also for a restart after a lost node.
        tls: certificates for the connections between processes, in files that every node has at
            the same place. None: those of Ray where RAY_USE_TLS=1, else no TLS.
        init: further arguments of `ray.init`, where the engine has to call it. A Ray that it starts
            has room for what a run begins with: for workers that `Job.scale` adds, say more with
            `init={"num_cpus": ...}`.
    Raises:
        TypeError, ValueError: a setting that means nothing.
    """

    reads_refs: ClassVar[bool] = True
    address: str | None = None
    _: KW_ONLY
    servers: Servers = "pack"
    workers: Workers = "beside"
    coordinator: Needs = NOTHING
    server: Needs = field(default_factory=Needs)
    worker: Needs = field(default_factory=Needs)
    threads_per_worker: int | None = None
    deadlines: Deadlines | None = None
    limits: Limits | None = None
    namespace: str = "paramserve"
    place_s: float = 30.0
    tls: TLS | None = None
    init: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("servers", self.servers, get_args(Servers)),
            ("workers", self.workers, get_args(Workers)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        for kind, needs in self._needs.items():
            if not isinstance(needs, Needs):
                raise TypeError(f"{kind} must be ps.Needs(...), not {needs!r}")
        if self.threads_per_worker is not None:
            check_count("threads_per_worker", self.threads_per_worker)
        check_settings("deadlines", self.deadlines, Deadlines)
        check_settings("limits", self.limits, Limits)
        check_number("place_s", self.place_s, above=0)
        check_tls(self.tls)
        if self.address is not None:
            check_address(self.address)
        self._layout.groups(["server 0", "worker 0"])

    def __repr__(self) -> str:
        """The settings that are not the defaults."""
        usual = OnRay()
        options = [
            repr(value) if each.name == "address" else f"{each.name}={value!r}"
            for each in fields(self)
            if (value := getattr(self, each.name)) != getattr(usual, each.name)
        ]
        return f"OnRay({', '.join(options)})"

    @property
    def _needs(self) -> dict[str, Needs]:
        return {"coordinator": self.coordinator, "server": self.server, "worker": self.worker}

    @property
    def _layout(self) -> Layout:
        return Layout(self._needs, self.servers, self.workers, self.place_s)

    def open(self, roles: Sequence[str] = (), environment: Mapping[str, str] = {}) -> RayFleet:
        """Make room for all roles and start their processes, which then wait for `launch`.

        Raises:
            CannotPlace: no room after `place_s`, or at once where this process has started a Ray
                that has less than is needed. Nothing is left in the cluster.
            ParamServeError: Ray is not installed, too old, of another version than the cluster, or
                not to be reached, or it uses TLS whose files cannot be read.
        """
        ray = import_ray()
        tls = self._tls_of()
        keeper = None
        leave = CONNECTION.enter(ray, self.address, self._init(roles))
        try:
            check_totals(roles, self._needs, self.place_s)
            keeper = RoomKeeper.of_this_process(self.namespace, self.place_s)
            placed = reserve(self._layout.groups(roles), self.place_s, keep=keeper.keep)
        except BaseException:
            if keeper is not None:
                keeper.close()
            leave()
            raise
        return RayFleet(self._layout, roles, placed, keeper, tls, leave, environment)

    def _init(self, roles: Sequence[str]) -> Mapping[str, Any]:
        """Arguments for `ray.init`. A Ray that is started for these roles alone counts as many
        CPUs as they need: on a small machine they share its cores, as under `Local`."""
        if named_cluster(self.address) is not None:
            return self.init
        needed = sum(self._needs.get(kind_of(role), NOTHING).num_cpus for role in roles)
        return {"num_cpus": max(os.cpu_count() or 1, math.ceil(needed)), **self.init}

    def publish(self, name: str, data: bytes) -> Callable[[], None]:
        """Publish for every process of the Ray cluster; see `base.Engine`."""
        ray = import_ray()
        check_name(name)
        leave = CONNECTION.enter(ray, self.address, self.init)
        try:
            actor = naming.publish(name, data, self.namespace, self.place_s)
        except BaseException:
            leave()
            raise
        return functools.partial(naming.withdraw, actor, leave)

    def find(self, name: str) -> bytes | None:
        """What a living process has published in this Ray cluster. It never starts a Ray.

        Raises:
            ParamServeError: Ray is not installed, too old, or does not run there.
        """
        ray = import_ray()
        check_name(name)
        leave = CONNECTION.enter(ray, self.address, self.init, start=False)
        try:
            return naming.find(name, self.namespace)
        finally:
            leave()

    def _tls_of(self) -> TLS | None:
        if self.tls is not None or os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
            return self.tls
        files = [os.environ.get(name, "") for name in TLS_FILES]
        for name, path in zip(TLS_FILES, files, strict=True):
            if not (path and os.access(path, os.R_OK)):
                problem = f"names {path}, which cannot be read" if path else "is not set"
                raise ParamServeError(
                    f"Ray runs with TLS (RAY_USE_TLS=1), but {name} {problem}",
                    fix="set the three files of Ray's TLS for this process and on every node, or "
                    "give others with ps.OnRay(tls=ps.TLS(...))",
                )
        return TLS(files[0], files[1], files[2])
