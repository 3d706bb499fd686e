"""The processes of a run, at an engine's fleet: starts them and ends them, as was decided.

What is to start or to end, `roster.py` decides. When to look, and when all this is over, is left to
`supervisor.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from paramserve.config import Credentials
from paramserve.engine.base import Event, Fleet, Process, Role
from paramserve.launch.entries import Entry, Key
from paramserve.launch.overview import Overview
from paramserve.launch.plan import Plan
from paramserve.launch.roster import Decision, Roster


class Processes(Mapping[Process, Key]):
    """The processes that count, and which of the run's each one is. For one thread.

    A process that was replaced is not among them.

    Args:
        fleet: opened and closed by the supervisor.
        overview: by which the coordinator hears of workers that have ended.

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
        overview: Overview,
    ) -> None:
        self.directory = ""
        self.addresses: tuple[str, ...] = ()
        self._plan = plan
        self._fleet = fleet
        self._credentials = credentials
        self._roster = roster
        self._overview = overview
        self._keys: dict[Process, Key] = {}

    def __getitem__(self, process: Process) -> Key:
        return self._keys[process]

    def __iter__(self) -> Iterator[Process]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def workers(self) -> list[Process]:
        return [process for process, key in self._keys.items() if key.kind == "worker"]

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
        """Start these; returns without waiting for them to be up.

        Raises:
            OSError, ParamServeError: one could not be started; those before it were.
        """
        for key in keys:
            self._keys[self._fleet.launch(self._role(key))] = key

    def kill(self, keys: Iterable[Key]) -> None:
        """End the processes of workers at once, and forget them."""
        targets = set(keys)
        for process in [each for each, key in self._keys.items() if key in targets]:
            process.kill()
            del self._keys[process]

    def kill_all(self) -> None:
        """End all of them at once; their ends are told."""
        for process in self._keys:
            process.kill()

    def carry_out(self, decision: Decision) -> None:
        """Restart dead workers, end those that do not retire in time, start ranks whose processes
        have ended; the coordinator is told of each end.

        Raises:
            OSError, ParamServeError: a process could not be started. The rest was not done.
        """
        for entry in decision.restart:
            self._restart(entry)
        for process, key in self._keys.items():
            if key in decision.interrupt:
                process.interrupt()
            elif key in decision.kill:
                process.kill()
                incarnation = self._roster.entries[key].incarnation
                self._overview.mark_dead(key.number, incarnation=incarnation)
        for entry in decision.retirees:  # most have left, killed ones have not
            self._overview.mark_dead(entry.key.number, incarnation=entry.incarnation)
            if entry.key.number >= self._roster.target:
                self.give_back([entry.key])
        self.kill(decision.launch)
        self.launch(decision.launch)

    def _restart(self, entry: Entry) -> None:
        """Start a worker that has died again; nothing of the old process counts any more."""
        number, incarnation = entry.key.number, entry.incarnation
        self._overview.mark_dead(number, final=False, incarnation=incarnation)
        self.kill([entry.key])
        self.launch([entry.key])

    def _role(self, key: Key) -> Role:
        return self._plan.role(key, self.directory, self.addresses, self._credentials)
