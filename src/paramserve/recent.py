"""What a process has logged in the last minutes, at all levels, for `paramserve debug`.

It is kept by a filter of the logger "paramserve" and not by a handler: so it sees what is below the
level of the log, and no handler of the program does.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from paramserve.logs import JSONFormatter

KEPT_S: Final = 900.0
LINES_MAX: Final = 2000
TEXT_MAX: Final = 2000
"""Characters of a message or traceback."""
REPORT_BYTES_MAX: Final = 1 << 20
"""Most bytes of the lines of one report; the oldest are left out."""
LOGGERS: Final = ("asyncio", "py.warnings")
"""Loggers of other libraries that log for us; from their own levels on."""


class Recent(logging.Filter):
    """The last lines, bounded by age, number and size.

    Args:
        role: of the process, for lines that name none.
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        self._formatter = JSONFormatter(role)
        self._lines: deque[tuple[float, str]] = deque(maxlen=LINES_MAX)
        """Each with its time. Appending is atomic: a lock could stay taken in a forked child."""
        self.below = logging.NOTSET
        """Lines below this level are kept, and go no further."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a record's line; whether it is to be logged as well."""
        try:
            fields = {
                name: value[:TEXT_MAX] if isinstance(value, str) else value
                for name, value in self._formatter.as_fields(record).items()
            }
            self._lines.append((record.created, json.dumps(fields, default=str)))
        except Exception:  # a wrong call of the logger: its handlers tell of it
            pass
        return record.levelno >= self.below

    def lines(self, now: float) -> tuple[str, ...]:
        """What is kept at this time (`time.time`), the oldest first."""
        room, newest = REPORT_BYTES_MAX, deque[str]()
        for at, line in reversed(list(self._lines)):
            room -= len(line)
            if now - at > KEPT_S or room < 0:
                break
            newest.appendleft(line)
        return tuple(newest)


class _Hold(Recent):
    """`Recent` on the logger "paramserve", whose level it lowers to DEBUG meanwhile."""

    def __init__(self, role: str, logger: logging.Logger) -> None:
        super().__init__(role)
        self._logger, self._before = logger, logger.level
        self.below = logger.getEffectiveLevel()
        logger.addFilter(self)
        logger.setLevel(logging.DEBUG)

    def filter(self, record: logging.LogRecord) -> bool:
        passes = super().filter(record)
        # Who has set another level since then gets it.
        return passes or self._logger.level != logging.DEBUG

    def close(self) -> None:
        """Leave the logger as it was."""
        self._logger.removeFilter(self)
        if self._logger.level == logging.DEBUG:
            self._logger.setLevel(self._before)


_holds: list[_Hold] = []
"""Open holds; the last one is the process's."""


@contextmanager
def recorded(role: str) -> Iterator[None]:
    """Keep what this process logs, until the end of the block."""
    hold = _Hold(role, logging.getLogger("paramserve"))
    others = [logging.getLogger(name) for name in LOGGERS]
    others_recent = Recent(role)
    others_recent._lines = hold._lines
    _holds.append(hold)
    for other in others:
        other.addFilter(others_recent)
    try:
        yield
    finally:
        for other in others:
            other.removeFilter(others_recent)
        _holds.remove(hold)
        hold.close()


def lines(now: float | None = None) -> tuple[str, ...]:
    """What this process has kept, the oldest first; nothing where it is not `recorded`."""
    return _holds[-1].lines(now if now is not None else time.time()) if _holds else ()
