"""The processes of one run: started where room is kept for them, watched and ended together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from paramserve.config import TLS
from paramserve.engine.base import Ended, Event, Role
from paramserve.engine.on_ray.keeper import RoomKeeper
from paramserve.engine.on_ray.process import RayProcess, wait_for_news
from paramserve.engine.on_ray.room import Layout, Place, remove, reserve
from paramserve.engine.placing import NOTHING, Group, kind_of

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

CLOSE_S = 10.0
"""A killed process is gone at once, unless its node hangs."""


class RayFleet:
    """Actors of one run. See `base.Fleet`."""

    shares_host = False

    def __init__(
        self,
        layout: Layout,
        roles: Sequence[str],
        placed: Sequence[tuple[Group, PlacementGroup]],
        keeper: RoomKeeper,
        tls: TLS | None,
        leave: Callable[[], None],
        environment: Mapping[str, str],
    ) -> None:
        self.tls = tls
        self._environment = environment
        self._layout = layout
        self._keeper = keeper
        self._leave = leave
        self._groups: list[PlacementGroup] = []
        self._places: dict[str, Place] = {}
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
        with self._room_lock:
            with self._lock:
                if self._closed:
                    raise RuntimeError("this fleet is closed")
                names = [role.name for role in roles]
                servers = [p for name, p in self._places.items() if kind_of(name) == "server"]
                lacking = [name for name in names if name not in self._places]
            nodes = [place.node() for place in servers] if lacking else []
            groups = self._layout.more(lacking, nodes)
            placed = reserve(
                groups,
                self._layout.place_s,
                set(nodes),
                lambda: self._closed,
                keep=self._keeper.keep,
            )
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
        remove(unused)

    def events(self, timeout_s: float) -> Sequence[Event]:
        """What has happened since the last call; waits up to `timeout_s` if nothing has."""
        deadline = time.monotonic() + timeout_s
        while True:
            running = tuple(self._running)
            events = [event for process in running for event in process.take()]
            ended = {event.process for event in events if isinstance(event, Ended)}
            if ended:
                with self._lock:
                    self._running = [each for each in self._running if each not in ended]
            left_s = deadline - time.monotonic()
            if events or left_s <= 0:
                return events
            wait_for_news(running, left_s)

    def close(self) -> None:
        """Kill what still runs, wait for its end and give back what was reserved."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with self._room_lock:  # a caller of `make_room` sees `_closed` soon
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
            remove(self._groups)
            self._keeper.close()
            self._leave()

    def _create(self, name: str) -> RayProcess:
        kind = kind_of(name)
        # A process with variables of its own is none of those that wait, and starts seconds later.
        environment = self._environment if kind == "worker" else {}
        needs = self._layout.needs.get(kind, NOTHING)
        place, place_s = self._places.get(name), self._layout.place_s
        return RayProcess(name, needs, place, place_s, environment)

    def _add(self, placed: Iterable[tuple[Group, PlacementGroup]]) -> None:
        for group, placement in placed:
            self._groups.append(placement)
            for index, bundle in enumerate(group.bundles):
                self._places.update((role, Place(placement, index)) for role in bundle.roles)
