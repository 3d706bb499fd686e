"""A world for a `Life` without processes, files and clocks: does what is decided, and judges it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from paramserve.config import Deadlines
from paramserve.engine.base import Failure
from paramserve.errors import CheckpointError
from paramserve.launch.entries import Key
from paramserve.launch.life import (
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

    Attributes:
        running: each process that runs, with the number of its launch.
        effects: all that was decided, in order.
        found: paths that the next looks for a checkpoint find; the last one again and again.
        collects: the answer to `Collect` is given at once; else it is due.
    """

    def __init__(
        self,
        *,
        deaf: Sequence[str] = (),
        immortal: Sequence[str] = (),
        found: Sequence[str] = ("",),
        collects_at_once: bool = True,
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
        self._at_once = collects_at_once
        self._launches = 0
        self._due: list[Event] = []
        self._refused: set[str] = set()
        self._checkpoint = self.life.terms.checkpoint
        self._counts: Counter[int] = Counter()
        """By the number of its entry, how often a worker's end was counted."""
        self._entries: dict[int, Any] = {}
        self._replaced: Counter[Key] = Counter()
        self._act(self.life.begin(0.0))

    # --- what happens ---------------------------------------------------------------------------

    def step(self, *events: Event, after_s: float = 0.0) -> None:
        """Let these come together, and then all that follows from them at once."""
        self.now += after_s
        self._act(self.life.step(events, self.now))
        while self._due:
            due, self._due = self._due, []
            self._act(self.life.step(due, self.now))
        self.judge()

    def serve(self) -> None:
        """Let everything that runs be up."""
        self.step(*(Report(key, "ready", msgspec.msgpack.encode(1)) for key in self.running))

    def end(self, *keys: Key, status: int = -9) -> None:
        """Let processes end by themselves, together."""
        events = [ProcessEnd(key, status) for key in keys if self.running.pop(key, None)]
        self.step(*events)

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
                    self._replaced.clear()
                    self.collecting = False
                case End(error):
                    assert len(self.of(End)) == 1, "a second end"
                    assert self.life.outcome in ("failed", "stopped", "finished")
                    assert (self.life.outcome == "failed") <= (error is not None)

    def _launch(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._launches += 1
            if key in self.running:  # one that was replaced while it ran, as where it hangs
                assert key.kind == "worker", f"a second {key} beside the first"
            self.running[key] = self._launches
            self.life.roster.on_launch(key)

    def _end(self, keys: Sequence[Key], spared: Sequence[str]) -> None:
        for key in keys:
            if key.kind not in spared and self.running.pop(key, None):
                self._due.append(ProcessEnd(key, -9))

    def _count(self, entry: Any, replaced: bool) -> None:
        self._entries[id(entry)] = entry  # which also keeps the number from being used again
        self._counts[id(entry)] += 1
        assert self._counts[id(entry)] == 1, f"{entry.key} is counted twice"
        limit = self.life.terms.on_worker_death
        self._replaced[entry.key] += replaced
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
        waits = life.ending or life.state in ("starting", "resuming")
        if waits:
            assert life.wake_at is not None, f"{life.state} waits without a deadline"
        if life.wake_at is not None:
            assert life.wake_at >= self.now, "what is due was not done"
        if life.ending or life.state == "resuming" or life.dismissed:
            return
        dead = [
            entry
            for entry in life.roster.workers()
            if entry.status is not None and entry.returned is None
        ]
        for entry in dead:
            settled = entry.retire_by is not None or self.now >= entry.settled_at
            assert not settled or self._counts[id(entry)] == 1, f"{entry.key} was not counted"
