"""One process of a run as the driver sees it: an actor that is told its role, heard and ended."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from paramserve.engine.base import Ended, Event, Failure, Reported, Role
from paramserve.engine.child import Package
from paramserve.engine.hosting import Host, HostReport, silence_stops
from paramserve.engine.on_ray.control import CONTROL_S, LOOK_S, RETRY_S, bounded, kill_actor
from paramserve.engine.on_ray.room import Place, what_there_is
from paramserve.engine.placing import Needs
from paramserve.errors import CannotPlace, ParamServeError

CONTROL_THREADS = 3
"""One tells the driver, one may still do so over a broken connection, one stops the entry."""
KILLED = -signal.SIGKILL
"""Exit status of a process that did not end by itself, however Ray ended or lost it."""


class Actor(Host):
    """A process of a run."""

    def __init__(self, name: str) -> None:
        import ray

        node = ray.get_runtime_context().get_node_id()
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # ray's
        super().__init__(name, address, node)
        silence_stops()


@functools.cache
def _class(kind: type, groups: tuple[tuple[str, int], ...]) -> Any:
    import ray

    # Nothing is ever repeated by Ray: what was told once must not be told twice.
    options: Any = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": dict(groups)}
    return ray.remote(**options)(kind)


def remote(kind: type, groups: Mapping[str, int]) -> Any:
    """The actor class; each is exported to the cluster once."""
    return _class(kind, tuple(groups.items()))


def await_actor(actor: Any, result: Any, place_s: float, what: str) -> None:
    """Wait for the first result of an actor that has just been made.

    Args:
        what: the actor is, for errors.
    Raises:
        CannotPlace: it was not up after `place_s`. Nothing is left in the cluster.
        ParamServeError: it has died. Nothing is left in the cluster.
    """
    import ray

    try:
        ray.get(result, timeout=place_s)
    except BaseException as error:
        kill_actor(actor)
        if isinstance(error, ray.exceptions.GetTimeoutError):
            raise CannotPlace(
                f"the Ray cluster did not start the {what} within {place_s:g} s. {what_there_is()}",
                fix="look whether its nodes can start processes (`ray status`), add nodes, or "
                "raise place_s where nodes are being added",
            ) from error
        if isinstance(error, ray.exceptions.RayError):
            raise ParamServeError(
                f"the {what} could not be started, or has died: {error}",
                fix="look at Ray's logs of its node for why, and try again",
            ) from error
        raise


class RayProcess:
    """An actor with a role. See `base.Process`.

    One call to it is always under way, and waits there for something to tell; when the process is
    gone, that call fails.

    Attributes:
        pid: on its node; 0: it is not up.
        node: Ray's name of its node; empty: it is not up.
        why: why Ray says that it ended, if it did not end by itself.
    """

    def __init__(
        self,
        name: str,
        needs: Needs,
        place: Place | None,
        place_s: float,
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self.pid = 0
        self.node = ""
        self.why = ""
        self._needs = needs
        self._place = place
        self._placed_by = time.monotonic() + place_s
        self._lock = threading.RLock()
        self._acknowledged = 0
        self._events: list[Reported] = []
        self._killed = False
        self._final: int | None = None
        """The status that it told; it counts when the process is gone."""
        self._status: int | None = None
        self._end_reported = False
        self._actor = _create(name, needs, place, environment)
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
        # The secret is an argument of its own: Ray keeps an argument of more than 100 KB in its
        # object store, which other jobs' processes on the node have mapped.
        package = Package(role.name, role.entry, role.payload, b"", role.code, role.directory)
        own = self._needs.runtime_env.get("env_vars", {})
        environment = {name: v for name, v in role.environment.items() if name not in own}
        path = [os.path.abspath(folder) for folder in sys.path if isinstance(folder, str)]
        encoded = msgspec.msgpack.encode(package)
        self._call("run", "role", encoded, role.secret, environment, path)

    def interrupt(self) -> None:
        if self._status is None and self._final is None:
            self._call("stop")

    def kill(self) -> None:
        if self._status is None:
            self._killed = True
            kill_actor(self._actor)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the exit status; None if it still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.exit_status is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            wait_for_news([self], left_s)
        return self._status

    def take(self) -> list[Event]:
        """What is new of it; its end is told once."""
        self._look()
        with self._lock:
            events: list[Event] = [*self._events]
            self._events.clear()
            if self._status is not None and not self._end_reported:
                self._end_reported = True
                events.append(Ended(self, self._status))
            return events

    def forget(self) -> None:
        """Stop asking Ray."""
        with self._lock:
            self._status = self._status if self._status is not None else KILLED
            self._pending = None

    def _look(self) -> None:
        """Take what has come, without waiting for more."""
        import ray

        with self._lock:
            if self._status is not None:
                return
            if not ray.is_initialized():  # after ray.shutdown the actors are gone
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
                report: HostReport = ray.get(ready[0], timeout=CONTROL_S)
            except ray.exceptions.GetTimeoutError:
                return
            except (ray.exceptions.ActorUnavailableError, ray.exceptions.ObjectLostError):
                self._pending = None
                self._listen_at = time.monotonic() + RETRY_S
            except ray.exceptions.RayError as error:
                self._on_end(error)
            else:
                self._on_report(report)

    def _on_report(self, report: HostReport) -> None:
        self.pid, self.node = report.pid, report.node
        self._events += [Reported(self, kind, body) for kind, body in report.reports]
        self._acknowledged += len(report.reports)
        if report.status is not None and self._final is None:
            self._final = report.status
            kill_actor(self._actor)
        self._listen()

    def _on_end(self, error: Exception) -> None:
        self._pending = None
        self.why = str(error)
        if not self.pid and not self._killed:
            text = f"its process could not be started: {self.why}"
            self._fail(type(error).__name__, text, "look at the logs of Ray on its node")
        self._status = self._final if self._final is not None else KILLED

    def _listen(self) -> None:
        if time.monotonic() < self._listen_at:
            return
        if self._final is not None:
            self._pending = self._call("linger")
        else:
            self._pending = self._call("poll", "control", self._acknowledged if self.pid else -1)

    def _check_place(self) -> None:
        """Give up a process whose node is lost and for which no other node was found."""
        place = self._place
        if self.pid or place is None or self._killed or time.monotonic() < self._placed_by:
            return
        self._placed_by = time.monotonic() + LOOK_S
        state: list[str] = []
        bounded(lambda: state.append(place.state()))
        if state and state[0] != "CREATED":
            self._fail(
                "CannotPlace",
                f"Ray found no node for {self.name}. {what_there_is()}",
                "add nodes, end what else runs there, or raise place_s of ps.OnRay(...) where "
                "nodes are being added",
            )
            self.kill()

    def _fail(self, kind: str, text: str, fix: str) -> None:
        failure = Failure(kind, text, "", text, fix, "no")
        self._events.append(Reported(self, "failed", msgspec.msgpack.encode(failure)))

    def _call(self, method: str, group: str = "control", *args: object) -> Any:
        import ray

        if not ray.is_initialized():  # a call would start another Ray
            return None
        return getattr(self._actor, method).options(concurrency_group=group).remote(*args)


def _create(name: str, needs: Needs, place: Place | None, environment: Mapping[str, str]) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options: dict[str, Any] = {
        "num_cpus": needs.num_cpus,
        "num_gpus": needs.num_gpus,
        "resources": dict(needs.resources),
    }
    if place is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(place.group, place.bundle)
    # Even an empty one keeps Ray from using a process that waits.
    if needs.runtime_env or environment:
        variables = {**environment, **needs.runtime_env.get("env_vars", {})}
        options["runtime_env"] = {**needs.runtime_env, "env_vars": variables}
    actor_class = remote(Actor, {"role": 1, "control": CONTROL_THREADS})
    return actor_class.options(**options).remote(name)


def wait_for_news(processes: Iterable[RayProcess], timeout_s: float) -> None:
    """Wait until one of the processes has something to tell, or for a moment."""
    import ray

    timeout_s = max(0.0, min(timeout_s, LOOK_S))
    pending = [each.pending for each in processes if each.pending is not None]
    if pending and ray.is_initialized():
        ray.wait(pending, timeout=timeout_s)
    else:
        time.sleep(min(timeout_s, RETRY_S))
