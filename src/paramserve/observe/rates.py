"""How fast numbers grow of which only the present state is told, now and then."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

WINDOW_S = 3.0
"""Rates are those of the last seconds: servers and workers report once a second."""

STANDS = 2
"""A counter that has not grown for so many times as long as its last reports took stands still."""
Point = tuple[float, float]
"""When, and how much there was."""


class Rates:
    """Rates of numbers by name, over the last seconds."""

    def __init__(self) -> None:
        self._history: dict[Hashable, deque[Point]] = {}
        self._first: dict[Hashable, Point] = {}

    def of(
        self, name: Hashable, seconds: float, count: float, *, whole: bool = False
    ) -> float | None:
        """Growth of a counter in a second; None: not known yet.

        Args:
            seconds: now; the count is that of the last report, which comes less often.
            whole: since the first time that it was told, up to when it last grew.
        """
        points = self._points(name, seconds, count)
        if points[-1][1] != count:  # a new report
            points.append((seconds, count))
        self._forget(points, seconds)
        if whole:
            return _slope(self._first[name], points[-1])
        gap = points[-1][0] - points[0][0]
        stands = gap > 0 and seconds - points[-1][0] > STANDS * gap
        return _slope(points[0], (seconds, count) if stands else points[-1])

    def share(self, name: Hashable, seconds: float, part: float) -> float | None:
        """Which part of the time it was of late, from 0 to 1; None: not known yet.

        Args:
            seconds: as of the last report.
            part: of these seconds.
        """
        points = self._points(name, seconds, part)
        if points[-1][0] < seconds:
            points.append((seconds, part))
        self._forget(points, seconds)
        slope = _slope(points[0], points[-1])
        return None if slope is None else min(slope, 1.0)

    def _points(self, name: Hashable, at: float, count: float) -> deque[Point]:
        last = self._history[name][-1] if name in self._history else (at, count)
        if count < last[1] or at < last[0]:  # it began anew
            del self._history[name], self._first[name]
        self._first.setdefault(name, (at, count))
        return self._history.setdefault(name, deque([(at, count)]))

    @staticmethod
    def _forget(points: deque[Point], now: float) -> None:
        while len(points) > 2 and points[0][0] < now - WINDOW_S:
            points.popleft()


def _slope(since: Point, until: Point) -> float | None:
    passed = until[0] - since[0]
    return (until[1] - since[1]) / passed if passed > 0 else None
