"""The `OnRay` engine: each process is an actor of a Ray cluster, on whichever node has room.

Ray places, starts, watches and kills. Its methods are used for control only: what a process is
told, what it reports, how it ends. Values travel over our own connections. This is the only
module that imports ray, and it does so when an engine is used first.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import msgspec

from paramserve.config import TLS
from paramserve.engine.base import Ended, Event, Failure, Reported, Role
from paramserve.engine.child import Package
from paramserve.engine.connecting import CONNECTION, check_address, named_cluster
from paramserve.engine.hosting import Heard, Host
from paramserve.engine.names import check_name
from paramserve.engine.placing import (
    LEAST_CPU,
    NOTHING,
    Group,
    Needs,
    Servers,
    Workers,
    arrange,
    arrange_more,
    describe,
    kind_of,
)
from paramserve.errors import CannotPlace, NameTaken, ParamServeError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

__all__ = ["Needs", "OnRay"]

RAY_OLDEST = (2, 49)
"""The first whose placement groups have label selectors for bundles."""
CONTROL_S = 1.0
"""How long a call to Ray's own control service may hold up the one who makes it."""
LOOK_S = 0.25
"""How often a wait looks up: for Ctrl-C, and for ends that another thread has seen."""
RETRY_S = 0.1
"""Between calls to a process that Ray cannot reach and does not count as dead."""
CLOSE_S = 10.0
"""A killed process is gone at once, unless its node hangs."""
NAME_S = 5.0
"""Ray needs moments to notice that the one who had a name is dead."""
CONTROL_THREADS = 3
"""One tells the driver, one may still do so over a broken connection, one stops the entry."""
NODES_SHOWN_MAX = 8
KILLED = -signal.SIGKILL
"""Exit status of a process that did not end by itself, however Ray ended or lost it."""
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

    address: str | None = None
    _: KW_ONLY
    servers: Servers = "pack"
    workers: Workers = "beside"
    coordinator: Needs = NOTHING
    server: Needs = field(default_factory=Needs)
    worker: Needs = field(default_factory=Needs)
    namespace: str = "paramserve"
    place_s: float = 30.0
    tls: TLS | None = None
    init: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, known in (
            ("servers", self.servers, get_args(Servers)),
            ("workers", self.workers, get_args(Workers)),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        for kind, needs in self._needs.items():
            if not isinstance(needs, Needs):
                raise TypeError(f"{kind} must be ps.Needs(...), not {needs!r}")
        if isinstance(self.place_s, bool) or not isinstance(self.place_s, int | float):
            raise TypeError(f"place_s must be a number of seconds, not {self.place_s!r}")
        if not self.place_s > 0:
            raise ValueError(f"place_s must be more than 0, not {self.place_s}")
        if self.address is not None:
            check_address(self.address)
        arrange(["server 0", "worker 0"], self._needs, self.servers, self.workers)

    def __repr__(self) -> str:
        """The settings that are not the defaults."""
        usual = OnRay()
        told = [
            repr(value) if each.name == "address" else f"{each.name}={value!r}"
            for each in fields(self)
            if (value := getattr(self, each.name)) != getattr(usual, each.name)
        ]
        return f"OnRay({', '.join(told)})"

    @property
    def _needs(self) -> dict[str, Needs]:
        return {"coordinator": self.coordinator, "server": self.server, "worker": self.worker}

    def open(self, roles: Sequence[str] = ()) -> RayFleet:
        """Make room for all roles and start their processes, which then wait for `launch`.

        Raises:
            CannotPlace: no room after `place_s`. Nothing is left in the cluster.
            ParamServeError: Ray is not installed, too old, of another version than the cluster, or
                not to be reached, or it uses TLS whose files cannot be read.
        """
        ray = import_ray()
        tls = self._tls_of()
        leave = CONNECTION.enter(ray, self.address, self._init(roles))
        try:
            groups = arrange(roles, self._needs, self.servers, self.workers)
            placed = _place(groups, self.place_s)
        except BaseException:
            leave()
            raise
        return RayFleet(self, roles, placed, tls, leave)

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
            actor = self._take_name(ray, name, data)
        except BaseException:
            leave()
            raise
        return functools.partial(_withdraw, actor, leave)

    def find(self, name: str) -> bytes | None:
        """What a living process has published in this Ray cluster. It never starts a Ray.

        Raises:
            ParamServeError: Ray is not installed, too old, or does not run there.
        """
        ray = import_ray()
        check_name(name)
        leave = CONNECTION.enter(ray, self.address, self.init, start=False)
        try:
            return self._look_up(ray, name)
        finally:
            leave()

    def _take_name(self, ray: ModuleType, name: str, data: bytes) -> Any:
        deadline = time.monotonic() + NAME_S
        made = _remote(Published, {}).options(
            name=f"paramserve:{name}", namespace=self.namespace, num_cpus=0
        )
        while True:
            try:
                actor = made.remote(data)
                break
            except ValueError as error:  # the name is taken
                if self._look_up(ray, name) is not None or time.monotonic() > deadline:
                    raise NameTaken(
                        f"a living cluster in Ray's namespace {self.namespace!r} is named {name!r}",
                        fix=f"choose another name, or join that one with ps.attach({name!r}, "
                        "engine=...)",
                    ) from error
                time.sleep(RETRY_S)
        try:
            ray.get(actor.data.remote(), timeout=self.place_s)
        except BaseException as error:
            _bounded(lambda: ray.kill(actor, no_restart=True))
            if isinstance(error, ray.exceptions.GetTimeoutError):
                raise CannotPlace(
                    f"the Ray cluster did not start the process that keeps the name {name!r} "
                    f"within {self.place_s:g} s. {_what_there_is()}",
                    fix="look whether its nodes can start processes (`ray status`), add nodes, or "
                    "raise place_s where nodes are being added",
                ) from error
            if isinstance(error, ray.exceptions.RayError):
                raise ParamServeError(
                    f"the process that keeps the name {name!r} could not be started, or has died: "
                    f"{error}",
                    fix="look at Ray's logs of its node for why, and publish again",
                ) from error
            raise
        return actor

    def _look_up(self, ray: ModuleType, name: str) -> bytes | None:
        try:
            actor = ray.get_actor(f"paramserve:{name}", namespace=self.namespace)
            data: bytes = ray.get(actor.data.remote(), timeout=NAME_S)
        except (ValueError, ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return None
        return data

    def _tls_of(self) -> TLS | None:
        if self.tls is not None or os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
            return self.tls
        files = [os.environ.get(name, "") for name in TLS_FILES]
        for name, path in zip(TLS_FILES, files, strict=True):
            if not (path and os.access(path, os.R_OK)):
                told = f"names {path}, which cannot be read" if path else "is not set"
                raise ParamServeError(
                    f"Ray runs with TLS (RAY_USE_TLS=1), but {name} {told}",
                    fix="set the three files of Ray's TLS for this process and on every node, or "
                    "give others with ps.OnRay(tls=ps.TLS(...))",
                )
        return TLS(files[0], files[1], files[2])


# --- what runs in an actor -----------------------------------------------------------------------


class Actor(Host):
    """A process of a run."""

    def __init__(self, name: str) -> None:
        import ray

        node = ray.get_runtime_context().get_node_id()
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # ray's
        super().__init__(name, address, node)


class Published:
    """Something that has a name as long as its creator lives."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def data(self) -> bytes:
        return self._data


@functools.cache
def _class(kind: type, groups: tuple[tuple[str, int], ...]) -> Any:
    import ray

    # Nothing is ever repeated by Ray: what was told once must not be told twice.
    options: Any = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": dict(groups)}
    return ray.remote(**options)(kind)


def _remote(kind: type, groups: Mapping[str, int]) -> Any:
    """The actor class; each is exported to the cluster once."""
    return _class(kind, tuple(groups.items()))


# --- one process ---------------------------------------------------------------------------------


class _Place(NamedTuple):
    """A bundle that is kept for a role, whoever plays it."""

    group: PlacementGroup
    bundle: int


class RayProcess:
    """An actor with a role. See `base.Process`.

    One call to it is always under way, and waits there for something to tell; when the process is
    gone, that call fails.

    Attributes:
        pid: on its node; 0: it is not up.
        node: Ray's name of its node; empty: it is not up.
        why: why Ray says that it ended, if it did not end by itself.
    """

    def __init__(self, name: str, needs: Needs, place: _Place | None, place_s: float) -> None:
        self.name = name
        self.pid = 0
        self.node = ""
        self.why = ""
        self._needs = needs
        self._place = place
        self._placed_by = time.monotonic() + place_s
        self._lock = threading.RLock()
        self._taken = 0
        self._events: list[Reported] = []
        self._killed = False
        self._final: int | None = None
        """The status that it told; it counts when the process is gone."""
        self._status: int | None = None
        self._told = False
        self._actor = _create(name, needs, place)
        self._listen_at = 0.0
        self._pending: Any = None
        self._listen()

    @property
    def exit_status(self) -> int | None:
        self._look()
        return self._status

    @property
    def pending(self) -> Any:
        """What to wait for; None: nothing comes now."""
        return self._pending

    def start(self, role: Role) -> None:
        """Let the waiting process play its role."""
        package = Package(
            role.name, role.entry, role.payload, role.secret, role.code, role.directory
        )
        own = self._needs.runtime_env.get("env_vars", {})
        environment = {name: v for name, v in role.environment.items() if name not in own}
        path = [os.path.abspath(folder) for folder in sys.path]
        self._call("run", "role", msgspec.msgpack.encode(package), environment, path)

    def interrupt(self) -> None:
        if self._status is None and self._final is None:
            self._call("stop")

    def kill(self) -> None:
        if self._status is None:
            self._killed = True
            self._kill()

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status, or None if it still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.exit_status is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            _wait([self], left_s)
        return self._status

    def take(self) -> list[Event]:
        """What is new of it; its end is told once."""
        self._look()
        with self._lock:
            found: list[Event] = [*self._events]
            self._events.clear()
            if self._status is not None and not self._told:
                self._told = True
                found.append(Ended(self, self._status))
            return found

    def forget(self) -> None:
        """Ask Ray no more."""
        with self._lock:
            self._status = self._status if self._status is not None else KILLED
            self._pending = None

    def _look(self) -> None:
        """Take what has come, without waiting for more."""
        import ray

        with self._lock:
            if self._status is not None:
                return
            if not ray.is_initialized():  # somebody has called ray.shutdown: the actors are gone
                self.why = "this process has left the Ray cluster"
                self._status = self._final if self._final is not None else KILLED
                return
            if self._pending is None:
                self._listen()
                return
            ready, _ = ray.wait([self._pending], timeout=0)
            if not ready:
                self._check_place()
                return
            try:
                heard: Heard = ray.get(ready[0], timeout=CONTROL_S)
            except ray.exceptions.GetTimeoutError:
                return
            except (ray.exceptions.ActorUnavailableError, ray.exceptions.ObjectLostError):
                self._pending = None
                self._listen_at = time.monotonic() + RETRY_S
            except ray.exceptions.RayError as error:
                self._on_end(error)
            else:
                self._on_heard(heard)

    def _on_heard(self, heard: Heard) -> None:
        self.pid, self.node = heard.pid, heard.node
        self._events += [Reported(self, kind, body) for kind, body in heard.reports]
        self._taken += len(heard.reports)
        if heard.status is not None and self._final is None:
            self._final = heard.status
            self._kill()
        self._listen()

    def _on_end(self, error: Exception) -> None:
        self._pending = None
        self.why = str(error)
        if not self.pid and not self._killed:
            self._fail(type(error).__name__, f"its process could not be started: {self.why}")
        self._status = self._final if self._final is not None else KILLED

    def _listen(self) -> None:
        if time.monotonic() < self._listen_at:
            return
        if self._final is not None:
            self._pending = self._call("linger")
        else:
            self._pending = self._call("hear", "control", self._taken if self.pid else -1)

    def _check_place(self) -> None:
        """Give up a process whose node is lost and for which no other node was found."""
        if self.pid or self._place is None or self._killed or time.monotonic() < self._placed_by:
            return
        self._placed_by = time.monotonic() + LOOK_S
        group = self._place.group
        state: list[str] = []
        _bounded(lambda: state.append(_table(group)["state"]))
        if state and state[0] != "CREATED":
            self._fail(
                "CannotPlace",
                f"Ray found no node for {self.name}. {_what_there_is()}",
                "add nodes, end what else runs there, or raise place_s of ps.OnRay(...) where "
                "nodes are being added",
            )
            self.kill()

    def _fail(self, kind: str, text: str, fix: str = "") -> None:
        failure = Failure(kind, text.partition("\n")[0], text, text, fix)
        self._events.append(Reported(self, "failed", msgspec.msgpack.encode(failure)))

    def _call(self, method: str, group: str = "control", *args: object) -> Any:
        import ray

        if not ray.is_initialized():  # a call would start another Ray
            return None
        return getattr(self._actor, method).options(concurrency_group=group).remote(*args)

    def _kill(self) -> None:
        import ray

        if ray.is_initialized():
            _bounded(lambda: ray.kill(self._actor, no_restart=True))


def _create(name: str, needs: Needs, place: _Place | None) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options: dict[str, Any] = {
        "num_cpus": needs.num_cpus,
        "num_gpus": needs.num_gpus,
        "resources": dict(needs.resources),
    }
    if place is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(place.group, place.bundle)
    if needs.runtime_env:  # even an empty one keeps Ray from using a process that waits
        options["runtime_env"] = dict(needs.runtime_env)
    made = _remote(Actor, {"role": 1, "control": CONTROL_THREADS})
    return made.options(**options).remote(name)


# --- processes together --------------------------------------------------------------------------


class RayFleet:
    """Actors of one run. See `base.Fleet`."""

    shares_host = False
    plain = False
    room_s = 0.0  # `open` has waited for it

    def __init__(
        self,
        engine: OnRay,
        roles: Sequence[str],
        placed: Sequence[tuple[Group, PlacementGroup]],
        tls: TLS | None,
        leave: Callable[[], None],
    ) -> None:
        self.tls = tls
        self._engine = engine
        self._needs = engine._needs
        self._leave = leave
        self._groups: list[PlacementGroup] = []
        self._places: dict[str, _Place] = {}
        self._add(placed)
        self._given_back: set[str] = set()
        """Roles whose place is kept only because it is in one group with others."""
        self._room_lock = threading.Lock()
        """Held while room is made: nothing is closed then."""
        self._lock = threading.Lock()
        self._running: list[RayProcess] = []
        self._closed = False
        self._waiting: dict[str, RayProcess] = {}
        try:
            for role in roles:
                self._waiting[role] = self._create(role)
        except BaseException:
            self.close()
            raise

    def launch(self, role: Role) -> RayProcess:
        """Give the waiting process of this name its role; a new one if that has ended."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this fleet is closed")
            process = self._waiting.pop(role.name, None)
            if process is None:
                process = self._create(role.name)
            process.start(role)
            self._running.append(process)
            return process

    def make_room(self, roles: Sequence[Role]) -> None:
        """Reserve places for further workers; those that have one keep it.

        Raises:
            CannotPlace: no room after `place_s`. Nothing was reserved.
            RuntimeError: the fleet is closed.
        """
        engine = self._engine
        with self._room_lock:
            with self._lock:
                if self._closed:
                    raise RuntimeError("this fleet is closed")
                names = [role.name for role in roles]
                servers = [name for name in self._places if kind_of(name) == "server"]
                lacking = [name for name in names if name not in self._places]
            nodes = [self._node_of(server) for server in servers] if lacking else []
            groups = arrange_more(lacking, self._needs, engine.servers, engine.workers, nodes)
            placed = _place(groups, engine.place_s, set(nodes), lambda: self._closed)
            with self._lock:
                self._given_back.difference_update(names)
                self._add(placed)

    def give_back(self, names: Sequence[str]) -> None:
        """Let Ray have the places of these roles, where they are in no group with others."""
        with self._lock:
            running = {each.name for each in self._running if each.exit_status is None}
            self._given_back.update(
                name for name in names if name in self._places and name not in running
            )
            needed = {p.group for name, p in self._places.items() if name not in self._given_back}
            unused = [group for group in self._groups if group not in needed]
            self._groups = [group for group in self._groups if group in needed]
            self._places = {n: place for n, place in self._places.items() if place.group in needed}
            self._given_back.intersection_update(self._places)
        _remove(unused)

    def events(self, timeout_s: float) -> Sequence[Event]:
        """What has happened since the last call; waits up to `timeout_s` if nothing has."""
        deadline = time.monotonic() + timeout_s
        while True:
            running = tuple(self._running)
            found = [event for process in running for event in process.take()]
            ended = {event.process for event in found if isinstance(event, Ended)}
            if ended:
                with self._lock:
                    self._running = [each for each in self._running if each not in ended]
            left_s = deadline - time.monotonic()
            if found or left_s <= 0:
                return found
            _wait(running, left_s)

    def close(self) -> None:
        """Kill what still runs, wait for its end and give back what was reserved."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with self._room_lock:  # who makes room sees `_closed` soon
            pass
        everyone = [*self._running, *self._waiting.values()]
        try:
            for process in everyone:
                process.kill()
            deadline = time.monotonic() + CLOSE_S
            for process in everyone:
                process.wait(deadline - time.monotonic())
        finally:
            for process in everyone:
                process.forget()
            _remove(self._groups)
            self._leave()

    def _create(self, name: str) -> RayProcess:
        needs = self._needs.get(kind_of(name), NOTHING)
        return RayProcess(name, needs, self._places.get(name), self._engine.place_s)

    def _add(self, placed: Iterable[tuple[Group, PlacementGroup]]) -> None:
        for group, made in placed:
            self._groups.append(made)
            for index, bundle in enumerate(group.bundles):
                self._places.update((role, _Place(made, index)) for role in bundle.roles)

    def _node_of(self, role: str) -> str:
        place = self._places[role]
        node: str = _table(place.group)["bundles_to_node_id"][place.bundle]
        return node


def _wait(processes: Iterable[RayProcess], timeout_s: float) -> None:
    """Until one of them has something to tell, or for a moment."""
    import ray

    timeout_s = max(0.0, min(timeout_s, LOOK_S))
    pending = [each.pending for each in processes if each.pending is not None]
    if pending and ray.is_initialized():
        ray.wait(pending, timeout=timeout_s)
    else:
        time.sleep(min(timeout_s, RETRY_S))


def _bounded(call: Callable[[], object]) -> None:
    """Make a call to Ray's control service, which may hang with its node, and wait a while."""

    def run() -> None:
        with contextlib.suppress(Exception):  # it is gone: that is seen elsewhere
            call()

    thread = threading.Thread(target=run, name="paramserve-ray", daemon=True)
    thread.start()
    thread.join(CONTROL_S)


# --- room in the cluster -------------------------------------------------------------------------


def _place(
    groups: Sequence[Group],
    place_s: float,
    taken: Iterable[str] = (),
    closed: Callable[[], bool] = lambda: False,
) -> list[tuple[Group, PlacementGroup]]:
    """Reserve room for all groups, or for none.

    Args:
        taken: nodes that groups which are to be apart must not be on.
        closed: whether nobody needs it any more.
    Raises:
        CannotPlace: there is none after `place_s`.
        RuntimeError: it was closed meanwhile.
    """
    from ray.util.placement_group import placement_group

    deadline = time.monotonic() + place_s
    placed: list[tuple[Group, PlacementGroup]] = []
    others = set(taken)
    try:
        for group in groups:
            labels = [dict(bundle.labels) for bundle in group.bundles]
            if group.apart and others:
                for each in labels:
                    each["ray.io/node-id"] = f"!in({','.join(sorted(others))})"
            made = placement_group(
                [bundle.amounts or {"CPU": LEAST_CPU} for bundle in group.bundles],
                strategy=group.strategy,
                bundle_label_selector=labels if any(labels) else None,
            )
            placed.append((group, made))
            while not made.wait(LOOK_S):
                if closed():
                    raise RuntimeError("this fleet is closed")
                if time.monotonic() > deadline:
                    raise CannotPlace(
                        f"the Ray cluster did not make room for {describe(groups)} within "
                        f"{place_s:g} s. {_what_there_is()}",
                        fix="ask for less (ps.OnRay(server=ps.Needs(...), ...)), add nodes, end "
                        "what else runs there, or raise place_s where nodes are being added",
                    )
            if not group.apart:
                others |= set(_table(made)["bundles_to_node_id"].values())
    except BaseException:
        _remove(made for _, made in placed)
        raise
    return placed


def _remove(groups: Iterable[PlacementGroup]) -> None:
    import ray
    from ray.util.placement_group import remove_placement_group

    for group in groups if ray.is_initialized() else ():
        _bounded(functools.partial(remove_placement_group, group))


def _table(group: PlacementGroup) -> dict[str, Any]:
    from ray.util.placement_group import placement_group_table

    found: dict[str, Any] = placement_group_table(group)
    return found


def _what_there_is() -> str:
    """The cluster's nodes and what of them is free, in words."""
    ray = import_ray()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    told = []
    for node in nodes[:NODES_SHOWN_MAX]:
        labels = node.get("Labels") or {}
        shown = [f"{n}={v}" for n, v in sorted(labels.items()) if not n.startswith("ray.io/")]
        amounts = _amounts(node["Resources"])
        told.append(f"{node['NodeManagerAddress']} ({', '.join([amounts, *shown])})")
    if len(nodes) > NODES_SHOWN_MAX:
        told.append(f"and {len(nodes) - NODES_SHOWN_MAX} more")
    count = f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
    return f"It has {count}: {', '.join(told)}; free now: {_amounts(ray.available_resources())}"


def _amounts(resources: Mapping[str, float]) -> str:
    shown = {
        name: amount
        for name, amount in sorted(resources.items())
        if "memory" not in name and not name.startswith("node:") and "_group_" not in name
    }
    return " ".join(f"{amount:g} {name}" for name, amount in shown.items()) or "nothing"


# --- the connection to Ray -----------------------------------------------------------------------


def import_ray() -> ModuleType:
    """The module ray.

    Raises:
        ParamServeError: it is not installed, or too old.
    """
    try:
        import ray
    except ImportError as error:
        raise ParamServeError(
            f"ps.OnRay needs Ray, which cannot be imported ({error})",
            fix="pip install 'paramserve[ray]'",
        ) from error
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < RAY_OLDEST:
        oldest = ".".join(map(str, RAY_OLDEST))
        raise ParamServeError(
            f"ps.OnRay needs Ray {oldest} or newer, and this is {ray.__version__}",
            fix="pip install --upgrade 'paramserve[ray]', here and on every node",
        )
    return ray


def _withdraw(actor: Any, leave: Callable[[], None]) -> None:
    import ray

    if ray.is_initialized():
        _bounded(lambda: ray.kill(actor, no_restart=True))
    leave()
