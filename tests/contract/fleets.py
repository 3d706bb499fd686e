"""Waiting for what a fleet tells, for the suites over engines."""

from __future__ import annotations

from paramserve.engine.base import Ended, Event, Fleet

WAIT_S = 20.0


def until_ended(fleet: Fleet, count: int = 1) -> list[Event]:
    """All events until `count` processes have ended."""
    seen: list[Event] = []
    while sum(isinstance(event, Ended) for event in seen) < count:
        found = fleet.events(WAIT_S)
        assert found, f"nothing happened after {seen}"
        seen += found
    return seen
