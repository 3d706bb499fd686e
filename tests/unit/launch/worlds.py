"""A world for a `Life` without processes, files and clocks: does what is decided, and judges it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from paramserve.config import Deadlines
from paramserve.engine.base import Failure
from paramserve.errors import CheckpointError
from paramserve.launch.entries import Entry, Key
from paramserve.launch.life import (
    Abandon,
    Begin,
    Close,
    Collect,
    Collected,
    Effect,
    End,
    Event,
    Life,
    ProcessEnd,
    Report,
    Select,
    Selection,
    Stop,
    Terms,
)
from paramserve.launch.roster import Exclude, Interrupt, Kill, Launch, Replace, Restart, Retire

DEADLINES = Deadlines(stop_s=2.0, exit_s=30.0, retire_s=60.0)
START_S = 60.0
FIXED = {"servers": 1, "workers": 2, "on_worker_death": "stop"}


def failure(kind: str, text: str = "why") -> bytes:
    return msgspec.msgpack.encode(Failure(kind, text, f"Traceback of {kind}", text, "look", "no"))


class World:
    """Does what a life decides, at once, and holds it to what must be true of any of them.

    Args:
        deaf: kinds of processes that end only when they are killed.
        immortal: these do not end then, either.
        collects_at_once: whether the answer to `Collect` is given at once.
        others: the processes are those of others, who start and end them.

    Attributes:
        running: each process that runs, with the number of its launch.
        effects: all that was decided, in order.
        found: paths that the next looks for a checkpoint find; the last one again and again.
    """

    def __init__(
        self,
        *,
        deaf: Sequence[str] = (),
        immortal: Sequence[str] = (),
        found: Sequence[str] = ("",),
        collects_at_once: bool = True,
        others: bool = False,
        **terms: Any,
    ) -> None:
        settings: dict[str, Any] = {**FIXED, "deadlines": DEADLINES, "start_s": START_S, **terms}
        self.now = 0.0
        self.life = Life(Terms(**settings), 0.0)
        self.running: dict[Key, int] = {}
        self.effects: list[Effect] = []
        self.found = list(found)
        self.collecting = False
        self._deaf, self._immortal = deaf, immortal
        self._at_once, self._others = collects_at_once, others
        self._launches = 0
        self._told = False
        self._due: list[Event] = []
        self._refused: set[str] = set()
        self._checkpoint = self.life.terms.checkpoint
        self._counted: list[Entry] = []
        """Workers whose ends were counted."""
        self._dead: list[Entry] = []
        """Workers of this attempt that have ended and not returned."""
        self._act(self.life.begin(0.0))

    # --- what happens ---------------------------------------------------------------------------

    def step(self, *events: Event, after_s: float = 0.0) -> None:
        """Let these come together, and then all that follows from them at once."""
        self.now += after_s
        self._due += events
        for _ in range(20):
            due, self._due = self._due, []
            for event in due:
                self._note_dead(event)
                self._told |= isinstance(event, Stop | Abandon)
            self._act(self.life.step(due, self.now))
            wake_at = self.life.wake_at
            if not self._due and (wake_at is None or wake_at > self.now or self.life.over):
                break
        else:
            raise AssertionError("what is due was not done")
        self.judge()

    def serve(self) -> None:
        """Let everything that runs be up."""
        keys = [key for key in self.life.roster.entries if key in self.running or self._others]
        self.step(*(Report(key, "ready", msgspec.msgpack.encode(1)) for key in keys))

    def end(self, *keys: Key, status: int = -9, beside: Sequence[Event] = ()) -> None:
        """Let processes end by themselves, together and beside other events."""
        events = [ProcessEnd(key, status) for key in keys if self.running.pop(key, None)]
        self.step(*events, *beside)

    def scale(self, workers: int) -> None:
        """Have another number of workers."""
        self._launch(self.life.roster.scale(workers, self.now))
        self.step()

    def settle(self) -> None:
        """Let time pass until nothing is due any more."""
        for _ in range(200):
            if self.life.over or self.life.wake_at is None:
                return
            assert self.life.wake_at < 1e9
            self.step(after_s=max(self.life.wake_at - self.now, 0.0))
        raise AssertionError("it is due for ever")

    # --- what is done ---------------------------------------------------------------------------

    def of(self, kind: type) -> list[Any]:
        """The effects of this kind."""
        return [each for each in self.effects if isinstance(each, kind)]

    def _act(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            assert not self.of(Close), f"{effect} after the end"
            self.effects.append(effect)
            match effect:
                case Launch(keys):
                    workers = [key for key in keys if key.kind == "worker"]
                    assert not (self.life.dismissed and workers), f"{workers} after all were told"
                    self._launch(keys)
                case Interrupt(keys):
                    self._end(keys, self._deaf)
                case Kill(keys):
                    self._end(keys, self._immortal)
                case Exclude(entry) | Replace(entry) | Retire(entry):
                    self._count(entry, isinstance(effect, Replace))
                case Collect():
                    assert self.life.roster.serving
                    self.collecting = True
                    if self._at_once:
                        self._due.append(Collected())
                case Select(_, damaged):
                    assert not self.running, "one that still runs may write or remove checkpoints"
                    if damaged:
                        self._refused.add(self._checkpoint)
                    path = self.found.pop(0) if len(self.found) > 1 else self.found[0]
                    none = CheckpointError("none can be read", fix="") if path == "none" else None
                    self._due.append(Selection(path, 5.0, none))
                    self._selected = path
                case Begin():
                    assert not self.running, "two attempts at once"
                    assert self._selected not in self._refused, "a refused checkpoint again"
                    self._checkpoint = self._selected
                    self._dead.clear()
                    self.collecting = False
                case End(error):
                    assert len(self.of(End)) == 1, "a second end"
                    assert self.life.outcome in ("failed", "stopped", "finished")
                    assert error is not None or self._may_end(), "an end without a reason"

    def _may_end(self) -> bool:
        """Whether it was told to, or all that it is for is done."""
        workers = self.life.roster.workers()
        over = all(e.returned is not None or e.counted or e.retired for e in workers)
        return self._told or over

    def _launch(self, keys: Sequence[Key]) -> None:
        for key in keys if not self._others else ():
            self._launches += 1
            if key in self.running:  # one that was replaced while it ran, as where it hangs
                assert key.kind == "worker", f"a second {key} beside the first"
            self.running[key] = self._launches
            self.life.roster.on_launch(key)

    def _end(self, keys: Sequence[Key], spared: Sequence[str]) -> None:
        for key in keys:
            if key.kind not in spared and self.running.pop(key, None):
                self._due.append(ProcessEnd(key, -9))

    def _note_dead(self, event: Event) -> None:
        """Keep a worker that ends as it is known now: another one may have its place then."""
        if isinstance(event, ProcessEnd) and event.key.kind == "worker":
            entry = self.life.roster.entries[event.key]
            if entry.returned is None:
                self._dead.append(entry)

    def _count(self, entry: Entry, replaced: bool) -> None:
        assert not any(each is entry for each in self._counted), f"{entry.key} is counted twice"
        self._counted.append(entry)
        limit = self.life.terms.on_worker_death
        if replaced:
            assert isinstance(limit, Restart)
            assert entry.restarts < limit.times, f"{entry.key} is restarted past its limit"

    # --- what must be true ----------------------------------------------------------------------

    def judge(self) -> None:
        """Raise `AssertionError` unless all is right now."""
        life = self.life
        assert life.over == bool(self.of(Close))
        assert life.ending == bool(self.of(End))
        if life.over:
            return
        told = life.ending or (life.stopped and not self.collecting)
        starts = life.state in ("starting", "resuming") and life.terms.start_s < math.inf
        if told or starts:
            assert life.wake_at is not None, f"{life.state} waits without a deadline"
        if life.ending or life.state == "resuming" or life.dismissed:
            return
        for entry in self._dead:
            settled = entry.retire_by is not None or self.now >= entry.settled_at
            counted = any(each is entry for each in self._counted)
            assert counted or not settled, f"the end of {entry.key} was not counted"
