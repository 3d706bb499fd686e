"""The processes of a run, at an engine's fleet: starts them and ends them.

What is to start or to end, `life.py` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from paramserve.config import Credentials
from paramserve.engine.base import Event, Fleet, Process, Role
from paramserve.launch.entries import Key
from paramserve.launch.plan import Plan
from paramserve.launch.roster import Roster


class Processes(Mapping[Process, Key]):
    """The processes that count, and which of the run's each one is. For one thread.

    A process that was replaced is not among them.

    Args:
        fleet: opened and closed by the supervisor.
        roster: knows of each that is started.

    Attributes:
        directory: for Unix sockets; empty where the processes do not share this machine.
        addresses: the coordinator's; empty: not known yet.
    """

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet,
        credentials: Credentials,
        roster: Roster,
    ) -> None:
        self.directory = ""
        self.addresses: tuple[str, ...] = ()
        self._plan = plan
        self._fleet = fleet
        self._credentials = credentials
        self._roster = roster
        self._keys: dict[Process, Key] = {}
        self._processes: dict[Key, Process] = {}

    def __getitem__(self, process: Process) -> Key:
        return self._keys[process]

    def __iter__(self) -> Iterator[Process]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def events(self, timeout_s: float) -> list[tuple[Key, Event]]:
        """What has happened to them since the last call; waits up to `timeout_s` if nothing has."""
        events = [(self._keys.get(each.process), each) for each in self._fleet.events(timeout_s)]
        return [(key, event) for key, event in events if key is not None]

    def make_room(self, keys: Iterable[Key]) -> None:
        """Wait until there is room for these, too. For any thread.

        Raises:
            CannotPlace: there is no room for all of them. None is kept.
            RuntimeError: the fleet is closed.
        """
        self._fleet.make_room([self._role(key) for key in keys])

    def give_back(self, keys: Iterable[Key]) -> None:
        """These will not be launched (again): their room may go to others. For any thread."""
        self._fleet.give_back([str(key) for key in keys])

    def launch(self, keys: Iterable[Key]) -> None:
        """Start these; returns without waiting for them to be up. A process that has one of these
        keys is ended, and forgotten.

        Raises:
            OSError, ParamServeError: one could not be started; those before it were.
        """
        for key in keys:
            self.forget(key)
            process = self._processes[key] = self._fleet.launch(self._role(key))
            self._keys[process] = key
            self._roster.on_launch(key)

    def forget(self, key: Key) -> None:
        """End the process of a key at once, if there is one, and forget it."""
        process = self._processes.pop(key, None)
        if process is not None:
            process.kill()
            del self._keys[process]

    def of(self, keys: Iterable[Key]) -> list[Process]:
        """The processes of these keys, in their order."""
        return [self._processes[key] for key in keys if key in self._processes]

    def _role(self, key: Key) -> Role:
        return self._plan.role(key, self.directory, self.addresses, self._credentials)
